"""Collecting what a model's layers see of a text: keys and values as they are stored, and how queries look at keys."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant.attention import attention
from veloxquant.attention import route
from veloxquant.attention import unroute
from veloxquant.build import native_caches
from veloxquant_a2ats.rotation import derotate
from veloxquant_a2ats.rotation import far_query_rope

__all__ = ["LayerData", "collect"]

BATCH = 4
"""Stretches of text read at a time."""


@attrs.define(eq=False)
class LayerData:
    """What one layer saw.

    Args:
        keys: Keys without position ``[Hkv, N, D]``.
        values: ``[Hkv, N, Dv]``, or None when not asked for.
        moment: Mean of q~ q~^T over the queries of a KV head's group, rotated to the far distance ``[Hkv, D, D]``.
        query_heads: Number of query heads.
        scale: Factor on the logits.
    """

    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32] | None
    moment: npt.NDArray[np.float64]
    query_heads: int
    scale: float


class _Recorder:
    """A cache that holds nothing beyond a call and remembers what passes through; every call is a new text."""

    def __init__(self, rope: Rope, far_position: int, with_values: bool) -> None:
        self.rope, self.far_position, self.with_values = rope, far_position, with_values
        self.offset = 0
        self.pending: list[mx.array] = []
        self.keys: list[npt.NDArray[np.float16]] = []
        self.values: list[npt.NDArray[np.float16]] = []
        self.moment: npt.NDArray[np.float64] | None = None
        self.queries = self.query_heads = 0
        self.scale = 1.0

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str:  # noqa: N803
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.pending = [derotate(keys, self.rope, 0), *([values] if self.with_values else [])]
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        batch, heads, _, dim = queries.shape
        far = far_query_rope(derotate(queries, self.rope, 0), self.rope, self.far_position)
        # [Hkv, all queries of the group, D]
        stacked = far.reshape(batch, keys.shape[1], -1, dim).swapaxes(0, 1).reshape(keys.shape[1], -1, dim)
        self.pending.append(stacked.swapaxes(1, 2) @ stacked)
        self.queries += stacked.shape[1]
        self.query_heads, self.scale = heads, scale
        return attention(queries, keys, values, scale, mask, sinks)

    def settle(self) -> None:
        """Take over what the last call brought, in fp16 to save memory."""
        *rows, moment = self.pending
        for array, held in zip(rows, (self.keys, self.values), strict=False):
            flat = mx.clip(array.swapaxes(0, 1), -65504, 65504).astype(mx.float16)
            held.append(np.array(flat.reshape(flat.shape[0], -1, flat.shape[3])))
        new = np.array(moment, dtype=np.float64)
        self.moment = new if self.moment is None else self.moment + new
        self.pending = []

    def data(self) -> LayerData:
        assert self.moment is not None
        keys, values = self.keys, self.values
        self.keys, self.values = [], []
        return LayerData(
            keys=np.concatenate(keys, axis=1).astype(np.float32),
            values=np.concatenate(values, axis=1).astype(np.float32) if values else None,
            moment=self.moment / self.queries,
            query_heads=self.query_heads,
            scale=self.scale,
        )


def collect(
    model: Any,
    texts: Sequence[Sequence[int]],
    specs: Sequence[LayerSpec],
    *,
    far_position: int,
    with_values: bool,
    on_progress: Callable[[int], None],
) -> Callable[[int], LayerData]:
    """Run a model over stretches of text, each for itself.

    Args:
        model: An mlx-lm model.
        texts: Tokens, all stretches of one length.
        specs: The layers to look at, with their rotation.
        far_position: Where queries are rotated to.
        with_values: Also keep values.
        on_progress: Called with the number of tokens read, again and again.

    Returns:
        A function that gives the data of a layer by its index, once: what it gave is let go of.
    """
    caches = native_caches(model)
    recorders = {}
    for spec in specs:
        assert spec.rope is not None
        caches[spec.index] = recorders[spec.index] = _Recorder(spec.rope, far_position, with_values)
    route(model)
    try:
        for batch in _batches(texts):
            model(mx.array(batch), cache=_fresh(model, caches, recorders))
            # Only what the layers saw is computed, not the predictions.
            mx.eval([recorder.pending for recorder in recorders.values()])
            for recorder in recorders.values():
                recorder.settle()
            on_progress(sum(len(text) for text in batch))
    finally:
        unroute(model)
    return lambda index: recorders.pop(index).data()


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    for start in range(0, len(texts), BATCH):
        yield [list(text) for text in texts[start : start + BATCH]]


def _fresh(model: Any, caches: list[Any], recorders: dict[int, _Recorder]) -> list[Any]:
    """Recorders, and new caches of the model's own in the other layers."""
    if len(recorders) == len(caches):
        return caches
    own = native_caches(model)
    return [recorders.get(index, cache) for index, cache in enumerate(own)]
