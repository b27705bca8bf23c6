"""Learning codebooks from a model and a text: reading, then one layer after another."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant import LayerSpec
from veloxquant import UnsupportedModelError
from veloxquant import VeloxQuantError
from veloxquant.build import layer_specs
from veloxquant_a2ats.codebook_file import Header
from veloxquant_a2ats.codebook_file import LayerShape
from veloxquant_a2ats.fitting import Plan
from veloxquant_a2ats.fitting import fit_layer
from veloxquant_a2ats.recorder import LayerData
from veloxquant_a2ats.recorder import collect
from veloxquant_a2ats.rotation import check_rope

__all__ = ["calibrate_model", "cut_text"]

_HELD_OUT = 8
"""One stretch of so many is held out."""

_COMPARED = 8
"""Layers, spread over the model, in which an ordinary codebook is learned too, to compare."""


def cut_text(tokens: Sequence[int], plan: Plan) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Cut stretches out of a text, spread evenly over it.

    Args:
        tokens: The text.
        plan: How long the stretches are, and how many tokens they have in all.

    Returns:
        Stretches to learn from, and stretches to measure on.

    Raises:
        VeloxQuantError: The text is too short.
    """
    stretch = min(plan.stretch, len(tokens) // 2)
    if stretch < 32:
        raise VeloxQuantError(f"the text has only {len(tokens)} tokens; calibrate with a longer one (--text)")
    count = max(2, min(plan.tokens, len(tokens)) // stretch)
    room = (len(tokens) - stretch) / (count - 1)
    pieces = [tokens[round(place * room) : round(place * room) + stretch] for place in range(count)]
    held = [piece for place, piece in enumerate(pieces) if place % _HELD_OUT == 1]
    return [piece for place, piece in enumerate(pieces) if place % _HELD_OUT != 1], held


def calibrate_model(
    model: Any,
    tokens: Sequence[int],
    plan: Plan,
    *,
    on_stage: Callable[[str, int], None],
    on_progress: Callable[[int], None],
) -> tuple[Header, dict[int, dict[str, mx.array]]]:
    """Learn the codebooks of a model.

    Args:
        model: An mlx-lm model.
        tokens: The text.
        plan: What to learn.
        on_stage: Called when a stage begins, with its name and its number of steps.
        on_progress: Called with steps done.

    Returns:
        Header and arrays of a codebook file.

    Raises:
        UnsupportedModelError: The model cannot be served.
        VeloxQuantError: The text is too short.
    """
    specs = layer_specs(model, layers=None, routed=True)
    for spec in specs:
        _check(spec, plan)
    learn, held = cut_text(tokens, plan)

    def read(name: str, texts: list[Sequence[int]]) -> Callable[[int], LayerData]:
        on_stage(name, sum(len(text) for text in texts))
        with_values = plan.mode == "compress"
        return collect(
            model,
            texts,
            specs,
            far_position=plan.far_position,
            with_values=with_values,
            on_progress=on_progress,
        )

    measured, learned = read("reading held-out text", held), read("reading text", learn)
    on_stage("learning centroids", len(specs))
    arrays, shapes, errors = {}, {}, []
    every = -(-len(specs) // _COMPARED)
    for place, spec in enumerate(specs):
        data, held_data = learned(spec.index), measured(spec.index)
        compared = place % every == 0
        arrays[spec.index], found = fit_layer(data, held_data, plan, spec.index, compared=compared)
        if compared:
            errors.append(found)
        shapes[spec.index] = _shape(spec, data)
        on_progress(1)
    header = Header(
        mode=plan.mode,
        layer_count=specs[0].layer_count or len(specs),
        layers=shapes,
        sub_dim=plan.sub_dim if plan.mode == "compress" else next(iter(shapes.values())).head_dim,
        centroids=next(iter(arrays.values()))["keys"].shape[2],
        bits=plan.bits,
        far_position=plan.far_position,
        beta=plan.beta,
        seed=plan.seed,
        tokens=sum(len(text) for text in learn),
        held_out=sum(len(text) for text in held),
        errors={name: float(np.mean([one[name] for one in errors])) for name in errors[0]},
    )
    return header, arrays


def _check(spec: LayerSpec, plan: Plan) -> None:
    if spec.shard_count > 1:
        raise UnsupportedModelError(
            "a2ats learns the codebook of a whole model, and this one is sharded; calibrate in one process, and every "
            "process of the sharded model takes its own heads from the file"
        )
    if spec.rope is None:
        raise UnsupportedModelError(
            f"a2ats must undo the model's rotary embedding, and that of layer {spec.index} cannot be described"
        )
    check_rope(spec.rope, spec.head_dim)
    if plan.mode == "compress" and spec.head_dim is not None and spec.head_dim % plan.sub_dim:
        raise VeloxQuantError(
            f"--sub-dim {plan.sub_dim} does not divide the {spec.head_dim} channels of a key in layer {spec.index}"
        )


def _shape(spec: LayerSpec, data: LayerData) -> LayerShape:
    assert spec.rope is not None
    heads, _, dim = data.keys.shape
    value_dim = dim if data.values is None else data.values.shape[2]
    return LayerShape(query_heads=data.query_heads, kv_heads=heads, head_dim=dim, value_dim=value_dim, rope=spec.rope)
