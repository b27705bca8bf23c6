"""What retrieve mode holds of one layer: all rows in a store, and one code a key to rank them by."""

from __future__ import annotations

import math

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import PositionedRows
from veloxquant import Snapshot
from veloxquant import attend_rows
from veloxquant import attend_selected
from veloxquant.buffers import GrowingArrays
from veloxquant_a2ats.config import A2ATSConfig
from veloxquant_a2ats.layer import Layer
from veloxquant_a2ats.report import retrieve_details
from veloxquant_a2ats.retrieval import centroid_shares
from veloxquant_a2ats.retrieval import choose_rows
from veloxquant_a2ats.retrieval import count_codes
from veloxquant_a2ats.retrieval import union_of_heads
from veloxquant_a2ats.rotation import derotate
from veloxquant_a2ats.rotation import far_query_rope

__all__ = ["RetrieveState"]


@attrs.define(eq=False)
class RetrieveState:
    """Rows in a store, their codes, and how often each code occurs among the rows that may be chosen.

    Args:
        config: Options of the method.
        layer: The layer served.
        model: Rotation and codebook of the layer.
        rows: Rows held.
    """

    config: A2ATSConfig
    layer: LayerSpec
    model: Layer
    rows: PositionedRows
    # [B, Hkv, rows, 1].
    codes: GrowingArrays = attrs.field(factory=GrowingArrays)
    # [B, Hkv, K] fp32, over rows that are neither sinks nor in the window; None while there are none.
    counts: mx.array | None = None
    # Prompt tokens attend to every row. Of the last call only, so it is no part of a snapshot.
    in_prompt: bool = True
    # Rows read by the last call, for the report.
    attended: int = 0
    # Bytes of the key and of the value of one token in all heads, as they came.
    row_bytes: tuple[int, int] = (0, 0)
    # From a step to its attention: its own row as it came, where the store loses something.
    fresh: tuple[mx.array, mx.array] | None = None

    @classmethod
    def empty(cls, config: A2ATSConfig, layer: LayerSpec) -> RetrieveState:
        """A state that has seen nothing."""
        return cls(config, layer, Layer.of(config, layer), PositionedRows(layer.make_rows()))

    @property
    def count(self) -> int:
        """Rows held: one for every token seen."""
        return self.rows.count

    def append(self, keys: mx.array, values: mx.array, *, in_prompt: bool) -> tuple[mx.array, mx.array]:
        """Store new rows; returns the rows held before and the new ones."""
        codebook = self.model.prepare(keys, values)
        before = self._choosable(self.count)
        codes, _ = codebook.encode_keys(derotate(keys, self.model.rope, self.count))
        self.codes.append({"keys": codes})
        result = self.rows.append(keys, values)
        self.row_bytes = keys.nbytes // keys.shape[2], values.nbytes // values.shape[2]
        self.in_prompt = in_prompt
        alone = keys.shape[2] == 1 and not in_prompt
        self.fresh = (keys, values) if alone and not self.rows.store.lossless else None
        self._count_new(before)
        return result

    def _choosable(self, count: int) -> int:
        """End of the rows that are neither sinks nor in the window of the newest of ``count`` rows."""
        return max(min(self.config.sinks, count), count - self.config.window)

    def _count_new(self, before: int) -> None:
        """Take account of the rows that the window has left since the choosable ones ended at ``before``."""
        start = max(before, min(self.config.sinks, self.count))
        stop = self._choosable(self.count)
        if start < stop:
            new = self._counted(start, stop)
            self.counts = new if self.counts is None else self.counts + new

    def _counted(self, start: int, stop: int) -> mx.array:
        codebook = self.model.codebook
        assert codebook is not None
        return count_codes(self.codes.live("keys")[:, :, start:stop, 0], codebook.keys.shape[2])

    def attend(
        self,
        queries: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend over the rows that one decoded token chooses, or leave a block, or a prompt, to the core."""
        fresh, self.fresh = self.fresh, None
        count = self.count
        first, last = min(self.config.sinks, count), self._choosable(count)
        chosen = math.ceil(self.config.retrieval_fraction * count)
        self.attended = count
        if self.in_prompt or queries.shape[2] > 1 or chosen >= last - first or isinstance(mask, mx.array):
            return None
        index, doubled = self._chosen(queries, scale, chosen, first, last)
        self.attended = index.shape[2]
        once = None if doubled is None else ~mx.repeat(doubled, queries.shape[1] // index.shape[1], axis=1)[:, :, None]
        if fresh is not None:
            # The step's own row, the last one chosen, counts as it came.
            return attend_rows(self.rows.store.select(index), queries, fresh, scale, once, sinks)
        return attend_selected(self.rows.store, index, queries, scale, once, sinks)

    def _chosen(
        self, queries: mx.array, scale: float, chosen: int, first: int, last: int
    ) -> tuple[mx.array, mx.array | None]:
        """Rows to attend ``[B, Hkv, n]``, ascending, and which of them stand there twice."""
        codebook = self.model.codebook
        assert codebook is not None
        assert self.counts is not None
        batch, heads, _, dim = queries.shape
        plain = derotate(queries, self.model.rope, self.count - 1)
        far = far_query_rope(plain, self.model.rope, self.config.far_position)
        kv_heads = codebook.keys.shape[0]
        shares = centroid_shares(
            far.reshape(batch, kv_heads, heads // kv_heads, dim), codebook.keys[:, 0], self.counts, scale
        )
        codes = self.codes.live("keys")[:, :, first:last, 0]
        doubled = None
        if self.config.per_head:
            middle, doubled = union_of_heads(shares, codes, chosen)
        else:
            middle = choose_rows(shares.sum(axis=2, keepdims=True), codes, chosen)[:, :, 0]
        ends = [
            mx.broadcast_to(mx.arange(start, stop, dtype=mx.int32), (batch, kv_heads, stop - start))
            for start, stop in ((0, first), (last, self.count))
        ]
        if doubled is not None:
            doubled = mx.pad(doubled, [(0, 0), (0, 0), (first, self.count - last)])
        return mx.concatenate([ends[0], middle + first, ends[1]], axis=2), doubled

    def trim(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        before, end = self._choosable(self.count), self.count - count
        after = self._choosable(end)
        if after <= min(self.config.sinks, end):
            self.counts = None
        elif self.counts is not None and after < before:
            self.counts = self.counts - self._counted(after, before)
        self.codes.drop_last(count)
        self.rows.rewind(end)
        self.attended, self.fresh = min(self.attended, end), None

    def account(self) -> ByteCount:
        """Bytes of rows, codes, counts and codebook."""
        return retrieve_details(self)

    def arrays(self) -> list[mx.array]:
        """Every array held, but rows as they came, which each step reads."""
        counts = [] if self.counts is None else [self.counts]
        return [*self.codes.buffers(), *counts, *self.rows.unread()]

    def snapshot(self) -> Snapshot:
        """Everything; how often codes occur follows from them."""
        arrays = dict(self.rows.arrays())
        if self.count:
            arrays["codes"] = self.codes.live("keys")
        names = dict(zip(("key_bytes", "value_bytes"), self.row_bytes, strict=True))
        return Snapshot(arrays, {**self.rows.values(), **names})

    @classmethod
    def restored(cls, config: A2ATSConfig, layer: LayerSpec, snapshot: Snapshot) -> RetrieveState:
        """A state equal to the one that ``snapshot`` was taken of."""
        state = cls.empty(config, layer)
        arrays, values = dict(snapshot.arrays), snapshot.values
        codes = arrays.pop("codes", None)
        state.row_bytes = int(values["key_bytes"] or 0), int(values["value_bytes"] or 0)
        state.rows.load(arrays, start=int(values["start"] or 0), ragged=bool(values["ragged"]))
        if codes is not None:
            state.codes.load({"keys": codes})
            keys, newest = state.rows.store.gather(mx.zeros((*codes.shape[:2], 1), dtype=mx.int32))
            state.model.prepare(keys, newest)
            state._count_new(0)
        return state
