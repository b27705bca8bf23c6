"""Learning codebooks from a text: where keys and values lie, and which directions of keys the queries look at."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Literal
from typing import cast

import attrs
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from veloxquant import LayerSpec
from veloxquant import UnsupportedModelError
from veloxquant import VeloxQuantError
from veloxquant.build import layer_specs
from veloxquant_a2ats.codebook import QUANTILES
from veloxquant_a2ats.codebook import Codebook
from veloxquant_a2ats.codebook import compress_codebook
from veloxquant_a2ats.codebook import metric_blocks
from veloxquant_a2ats.codebook import retrieve_codebook
from veloxquant_a2ats.codebook_file import Header
from veloxquant_a2ats.codebook_file import LayerShape
from veloxquant_a2ats.kmeans import centroid_count
from veloxquant_a2ats.kmeans import kmeans
from veloxquant_a2ats.recorder import LayerData
from veloxquant_a2ats.recorder import collect
from veloxquant_a2ats.rotation import check_rope
from veloxquant_a2ats.scoring import rebuild_keys

__all__ = ["Plan", "calibrate_model", "cut_text", "fit_layer"]

_HELD_OUT = 8
"""One stretch of so many is held out."""


@attrs.frozen(kw_only=True)
class Plan:
    """What to learn, and how.

    Args:
        mode: The mode to learn for.
        sub_dim: Channels of a sub-vector in compress mode.
        bits: Bits of a code.
        beta: Weight of the queries in the metric of compress mode.
        fraction: Share of keys coded query-aware, for the errors that are measured.
        far_position: Distance of far tokens.
        stretch: Tokens read in one piece.
        tokens: Tokens to read in all.
        iterations: Lloyd iterations.
        seed: Seed of everything random.
    """

    mode: Literal["compress", "retrieve"] = "compress"
    sub_dim: int = 8
    bits: int = 8
    beta: float = 0.5
    fraction: float = 0.2
    far_position: int = 2048
    stretch: int = 1024
    tokens: int = 16384
    iterations: int = 20
    seed: int = 0


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
    for spec in specs:
        data = learned(spec.index)
        arrays[spec.index], found = fit_layer(data, measured(spec.index), plan, spec.index)
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


def fit_layer(data: LayerData, held: LayerData, plan: Plan, index: int) -> tuple[dict[str, mx.array], dict[str, float]]:
    """Learn the codebook of one layer, and measure it.

    Args:
        data: What the layer saw of the text to learn from.
        held: What it saw of the text to measure on.
        plan: What to learn.
        index: Index of the layer, for the seed.

    Returns:
        Arrays for ``compress_codebook`` or ``retrieve_codebook``, and mean squared errors of held-out logits:
        ``plain`` of an ordinary codebook of the same size, ``query_aware`` of this one.
    """
    fit = _fit_compress if plan.mode == "compress" else _fit_retrieve
    return fit(data, held, plan, plan.seed + 1000 * index)


def _moment(data: LayerData) -> npt.NDArray[np.float64]:
    """H in units of the RMS of its entries, a little away from singular."""
    rms = np.sqrt((data.moment**2).mean(axis=(1, 2), keepdims=True))
    moment: npt.NDArray[np.float64] = data.moment / np.maximum(rms, 1e-30) + 1e-6 * np.eye(data.moment.shape[1])
    return moment


def _spread(rows: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean of rows ``[H, N, D]`` and their largest distance from it, by channel ``[H, D]``."""
    center = rows.mean(axis=1, dtype=np.float64).astype(np.float32)
    return center, np.abs(rows - center[:, None]).max(axis=1)


def _learn(
    rows: npt.NDArray[np.float32],
    factors: npt.NDArray[Any] | None,
    width: int,
    plan: Plan,
    seed: int,
) -> mx.array:
    """Centroids ``[H, M, K, width]`` of the sub-vectors of rows ``[H, N, D]``.

    Args:
        rows: The rows.
        factors: Cholesky factors of the metrics ``[H, M, width, width]``, or None for the plain distance.
        width: Channels of a sub-vector.
        plan: How.
        seed: Seed.
    """
    heads, count, dim = rows.shape
    parts = dim // width
    wanted = centroid_count(count, 2**plan.bits)
    found = np.empty((heads, parts, wanted, width), dtype=np.float32)
    for head in range(heads):
        for part in range(parts):
            points = rows[head, :, part * width : (part + 1) * width].astype(np.float64)
            center = points.mean(axis=0)
            points -= center
            # In the space of k L the metric is the plain distance.
            factor = None if factors is None else factors[head, part]
            turned = points if factor is None else points @ factor
            means, _ = kmeans(
                turned.astype(np.float32), wanted, seed=seed + head * parts + part, iterations=plan.iterations
            )
            back = means.astype(np.float64)
            if factor is not None:
                back = np.linalg.solve(factor.T, back.T).T
            found[head, part] = back + center
    return mx.array(found)


def _fit_compress(
    data: LayerData, held: LayerData, plan: Plan, seed: int
) -> tuple[dict[str, mx.array], dict[str, float]]:
    assert data.values is not None
    moment = _moment(data)
    center, reach = _spread(data.keys)
    value_center, value_reach = _spread(data.values)
    blocks = np.array(metric_blocks(mx.array(moment.astype(np.float32)), plan.sub_dim, plan.beta), dtype=np.float64)
    arrays = {
        "keys": _learn(data.keys, np.linalg.cholesky(blocks), plan.sub_dim, plan, seed),
        "values": _learn(data.values, None, plan.sub_dim, plan, seed + 500),
        "key_center": mx.array(center),
        "key_reach": mx.array(reach),
        "value_center": mx.array(value_center),
        "value_reach": mx.array(value_reach),
        "moment": mx.array(moment.astype(np.float32)),
        "factor": mx.array(np.linalg.cholesky(moment).astype(np.float32)),
        "energies": mx.zeros((center.shape[0], QUANTILES)),
    }
    energy = compress_codebook(arrays, beta=plan.beta, fraction=1.0, aware=True).energy
    assert energy is not None
    energies = np.array(energy.of(mx.array(data.keys)[None]))[0, :, :, 0]
    arrays["energies"] = mx.array(np.quantile(energies, np.linspace(0, 1, QUANTILES), axis=1).T.astype(np.float32))
    plain = {**arrays, "keys": _learn(data.keys, None, plan.sub_dim, plan, seed)}
    errors = {
        "plain": _error(compress_codebook(plain, beta=plan.beta, fraction=0.0, aware=False), held),
        "query_aware": _error(compress_codebook(arrays, beta=plan.beta, fraction=plan.fraction, aware=True), held),
    }
    return arrays, errors


def _fit_retrieve(
    data: LayerData, held: LayerData, plan: Plan, seed: int
) -> tuple[dict[str, mx.array], dict[str, float]]:
    moment = _moment(data)
    center, reach = _spread(data.keys)
    dim = data.keys.shape[2]
    arrays = {
        "keys": _learn(data.keys, np.linalg.cholesky(moment)[:, None], dim, plan, seed),
        "key_center": mx.array(center),
        "key_reach": mx.array(reach),
        "moment": mx.array(moment.astype(np.float32)),
    }
    plain = {**arrays, "keys": _learn(data.keys, None, dim, plan, seed)}
    errors = {
        "plain": _error(retrieve_codebook(plain, aware=False), held),
        "query_aware": _error(retrieve_codebook(arrays, aware=True), held),
    }
    return arrays, errors


def _error(codebook: Codebook, held: LayerData) -> float:
    """Mean of (q.k - q.c)^2 over held-out queries and keys, logits scaled: e H e^T with the held-out queries' H."""
    keys = mx.array(held.keys)[None]
    codes, _ = codebook.encode_keys(keys)
    wrong = (keys - rebuild_keys(codebook.keys, codes))[0] * held.scale
    moment = mx.array(held.moment.astype(np.float32))
    return cast(float, ((wrong @ moment) * wrong).sum(axis=-1).mean().item())
