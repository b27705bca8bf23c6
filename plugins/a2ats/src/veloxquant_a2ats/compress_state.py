"""What compress mode holds of one layer: codes of all rows, and a few rows as they came."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import Snapshot
from veloxquant.buffers import GrowingArrays
from veloxquant_a2ats.compress_attention import CodedRows
from veloxquant_a2ats.compress_attention import attend_coded
from veloxquant_a2ats.config import A2ATSConfig
from veloxquant_a2ats.layer import Layer
from veloxquant_a2ats.report import compress_details
from veloxquant_a2ats.ring import RESERVE
from veloxquant_a2ats.ring import Ring
from veloxquant_a2ats.rotation import derotate
from veloxquant_a2ats.rotation import rotate
from veloxquant_a2ats.scoring import rebuild_keys
from veloxquant_a2ats.scoring import rebuild_values

__all__ = ["CODED_AT_ONCE", "CompressState"]

CODED_AT_ONCE = 16
"""Rows that get their codes together."""

Pair = tuple[mx.array, mx.array]


@attrs.define(eq=False)
class CompressState:
    """Codes of all rows, and the first rows and the newest as they came.

    Up to 15 of the newest rows, none but such as are in the window of every query to come, wait for their codes: coding
    one row takes as long as coding 16. How many do follows from the tokens seen, so that rewinds leave no trace.

    Args:
        config: Options of the method.
        layer: The layer served.
        model: Rotation and codebook of the layer.
        ring: The newest rows.
    """

    config: A2ATSConfig
    layer: LayerSpec
    model: Layer
    ring: Ring
    # Keys [B, Hkv * M, rows, 1], so that a sub-vector's codes lie side by side; values [B, Hkv, rows, Mv].
    codes: GrowingArrays = attrs.field(factory=GrowingArrays)
    # The first rows, as they came.
    sinks: Pair | None = None
    # Keys coded query-aware, by head [B, Hkv] int32.
    aware: mx.array | None = None
    # From a call with several rows to its attention: where the rows begin that its first query sees as they came, and
    # these rows. The ring holds them no more when the call is long.
    block: tuple[int, Pair] | None = None

    @classmethod
    def empty(cls, config: A2ATSConfig, layer: LayerSpec) -> CompressState:
        """A state that has seen nothing."""
        return cls(config, layer, Layer.of(config, layer), Ring(config.window + RESERVE))

    @property
    def count(self) -> int:
        """Rows held: one for every token seen."""
        return self.ring.end

    @property
    def coded(self) -> int:
        """Rows that have codes: the first ones."""
        return self.codes.count

    def _due(self, count: int) -> int:
        """Rows of ``count`` that have codes."""
        return count - count % min(CODED_AT_ONCE, self.config.window)

    def append(self, keys: mx.array, values: mx.array, *, in_prompt: bool) -> Pair:
        """Store new rows.

        Args:
            keys: ``[B, Hkv, S, Dk]``.
            values: ``[B, Hkv, S, Dv]``.
            in_prompt: Whether a prompt is open, which makes no difference here.

        Returns:
            All rows: those held before, far ones as the last of the new tokens sees them, then the new ones.
        """
        self._code(keys, values)
        self._append_sinks(keys, values)
        before, rows = self.count, keys.shape[2]
        # Where the rows begin that some new query sees as they came; the ring may be about to lose them.
        start = min(before, self.near_start(before))
        near = _joined(self.ring.rows(start, before), (keys, values)) if start < before else (keys, values)
        self.ring.append(keys, values)
        if self.layer.routed and rows > 1 and before:
            self.block = start, near
        return near if start == 0 else self._held(start, before + rows - 1, near)

    def store(self, keys: mx.array, values: mx.array) -> None:
        """Store one row, as ``append`` does, without preparing any that are read."""
        self._code(keys, values)
        self._append_sinks(keys, values)
        self.ring.append(keys, values)

    def _code(self, keys: mx.array, values: mx.array) -> None:
        """Make the codes that are due when new rows come, before the ring has them."""
        self.model.prepare(keys, values)
        start, before = self.coded, self.count
        due = self._due(before + keys.shape[2])
        if due <= start:
            return
        new = (keys[:, :, : max(0, due - before)], values[:, :, : max(0, due - before)])
        if start < before:
            older = self.ring.rows(start, min(before, due))
            if due <= before:
                self._encode(older, start)
                return
            if due - start <= CODED_AT_ONCE:
                new, before = _joined(older, new), start
            else:
                # A prompt is not copied for the sake of a few rows.
                self._encode(older, start)
        self._encode(new, before)

    def _encode(self, rows: Pair, position: int) -> None:
        """Code the rows that come next, the first of which stands at ``position``."""
        codebook = self.model.codebook
        assert codebook is not None
        keys, values = rows
        key_codes, aware = codebook.encode_keys(derotate(keys, self.model.rope, position))
        self.codes.append({"keys": key_codes, "values": codebook.encode_values(values)})
        self._count_aware(aware, keys, 1)

    def _count_aware(self, aware: mx.array | bool, keys: mx.array, sign: int) -> None:
        batch, heads, rows, _ = keys.shape
        new = mx.full((batch, heads), rows * aware) if isinstance(aware, bool) else aware.sum(axis=(2, 3))
        change = new.astype(mx.int32) * sign
        self.aware = change if self.aware is None else self.aware + change

    def _append_sinks(self, keys: mx.array, values: mx.array) -> None:
        room = self.config.sinks - (0 if self.sinks is None else self.sinks[0].shape[2])
        if room <= 0:
            return
        # Copies, so that a long block is not held for the sake of its beginning.
        first = mx.contiguous(keys[:, :, :room]), mx.contiguous(values[:, :, :room])
        self.sinks = first if self.sinks is None else _joined(self.sinks, first)

    def near_start(self, query: int) -> int:
        """First position that a query at a position sees as it came, sinks apart."""
        return max(query + 1 - self.config.window, min(query + 1, self.config.sinks))

    def _held(self, start: int, query: int, near: Pair) -> Pair:
        """All rows as the query at a position sees them: those before ``start``, then ``near``."""
        sinks = min(self.config.sinks, start)
        parts = [near]
        if sinks < start:
            # At the constant distance: as if they stood at position i - b.
            found = self._rebuilt(sinks, start, lambda plain: self._at_distance(plain, query))
            parts.insert(0, (found[0].astype(near[0].dtype), found[1].astype(near[1].dtype)))
        if sinks and self.sinks is not None:
            parts.insert(0, (self.sinks[0][:, :, :sinks], self.sinks[1][:, :, :sinks]))
        return _joined(*parts)

    def _rebuilt(self, start: int, stop: int, place: Callable[[mx.array], mx.array]) -> Pair:
        codebook = self.model.codebook
        assert codebook is not None
        plain = rebuild_keys(codebook.keys, self.codes.live("keys")[:, :, start:stop])
        return place(plain), rebuild_values(codebook.value_centroids, self.codes.live("values")[:, :, start:stop])

    def _at_distance(self, plain: mx.array, query: int) -> mx.array:
        # The same position for every row.
        flat = plain.reshape(-1, 1, 1, plain.shape[-1])
        return rotate(flat, self.model.rope, query - self.config.far_position).reshape(plain.shape)

    def first_rows(self, end: int) -> Pair | None:
        """The first rows as they came, at most the sinks, none of them at or beyond row ``end``; None for none."""
        count = 0 if self.sinks is None else min(self.sinks[0].shape[2], end)
        if count == 0 or self.sinks is None:
            return None
        if count == self.sinks[0].shape[2]:
            return self.sinks
        return self.sinks[0][:, :, :count], self.sinks[1][:, :, :count]

    def codes_of(self, start: int, stop: int) -> Pair:
        """Codes of keys ``[B, Hkv * M, n, 1]`` and of values ``[B, Hkv, n, Mv]`` of the rows ``start`` to ``stop``."""
        return self.codes.whole("keys")[:, :, start:stop], self.codes.whole("values")[:, :, start:stop]

    def attend(
        self, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
    ) -> mx.array | None:
        """Attend with the queries of the rows appended last, or leave it to the core where every row is exact."""
        block, self.block = self.block, None
        end, length = self.count, queries.shape[2]
        codebook = self.model.codebook
        if end == length or codebook is None or self.near_start(end - 1) <= min(end, self.config.sinks):
            return None
        start, exact = block or (self.near_start(end - 1), None)
        rows = CodedRows(
            codebook=codebook,
            rope=self.model.rope,
            window=self.config.window,
            far_position=self.config.far_position,
            end=end,
            key_codes=self.codes.live("keys"),
            value_codes=self.codes.live("values"),
            sinks=self.sinks,
            exact_start=start,
            exact=exact or self.ring.rows(start, end),
        )
        return attend_coded(queries, rows, scale, mask, sinks)

    def trim(self, count: int) -> None:
        """Forget the last ``count`` tokens.

        Up to ``RESERVE`` of them leave no trace. After more, rows of the window are gone and are rebuilt from their
        codes.
        """
        end = self.count - count
        self.block = None
        # Of rows that are not there as they came the codes must stay.
        self._uncode(max(self._due(end), min(self.ring.start, end)))
        self.ring.rewind(end)
        if self.sinks is not None and end < self.sinks[0].shape[2]:
            self.sinks = mx.contiguous(self.sinks[0][:, :, :end]), mx.contiguous(self.sinks[1][:, :, :end])
        start = max(0, end - self.config.window)
        if start < self.ring.start:
            self._refill(start, self.ring.start)

    def _uncode(self, end: int) -> None:
        """Forget the codes from row ``end`` on."""
        codebook = self.model.codebook
        assert codebook is not None
        if end >= self.coded:
            return
        # Their keys are counted back, from the rows that the ring still has and from codes before them.
        kept = min(max(end, self.ring.start), self.coded)
        if end < kept:
            plain, _ = self._rebuilt(end, kept, lambda keys: keys)
            self._count_aware(codebook.aware(plain), plain, -1)
        if kept < self.coded:
            keys, _ = self.ring.rows(kept, self.coded)
            self._count_aware(codebook.aware(derotate(keys, self.model.rope, kept)), keys, -1)
        self.codes.drop_last(self.coded - end)
        if not self.coded:
            self.aware = None

    def _refill(self, start: int, stop: int) -> None:
        held = self.ring.dtypes
        found = self._rebuilt(start, stop, lambda plain: rotate(plain, self.model.rope, start))
        keys, values = found[0].astype(held[0]), found[1].astype(held[1])
        if self.sinks is not None and start < self.sinks[0].shape[2]:
            exact = min(stop, self.sinks[0].shape[2]) - start
            keys, values = _joined(
                (self.sinks[0][:, :, start : start + exact], self.sinks[1][:, :, start : start + exact]),
                (keys[:, :, exact:], values[:, :, exact:]),
            )
        self.ring.fill(start, keys, values)

    def far_query_rope(self, queries: mx.array) -> mx.array:
        """Rotate queries without position ``[B, Hq, S, D]`` at the distance of far tokens."""
        from veloxquant_a2ats.rotation import far_query_rope

        return far_query_rope(queries, self.model.rope, self.config.far_position)

    def account(self) -> ByteCount:
        """Bytes of codes, of rows as they came, and of the codebook."""
        return compress_details(self)

    def arrays(self) -> list[mx.array]:
        """Every array held, but those between a call and its attention."""
        counts = [] if self.aware is None else [self.aware]
        return [*self.codes.buffers(), *self.ring.arrays(), *(self.sinks or ()), *counts]

    def snapshot(self) -> Snapshot:
        """Everything but the rows that only serve to make rewinds exact."""
        arrays = dict(self.codes.arrays())
        if self.count:
            start = max(0, self.count - self.config.window)
            arrays["near_keys"], arrays["near_values"] = self.ring.rows(start, self.count)
        if self.aware is not None:
            arrays["aware"] = self.aware
        if self.sinks is not None:
            arrays["sink_keys"], arrays["sink_values"] = self.sinks
        if self.block is not None:
            arrays["block_keys"], arrays["block_values"] = self.block[1]
        values = {"count": self.count, "block_start": None if self.block is None else self.block[0]}
        return Snapshot(arrays, values)

    @classmethod
    def restored(cls, config: A2ATSConfig, layer: LayerSpec, snapshot: Snapshot) -> CompressState:
        """A state equal to the one that ``snapshot`` was taken of."""
        state = cls.empty(config, layer)
        arrays = snapshot.arrays
        if "near_keys" not in arrays:
            return state
        near = arrays["near_keys"], arrays["near_values"]
        state.model.prepare(*near)
        state.ring.load(int(snapshot.values["count"] or 0) - near[0].shape[2], *near)
        if "keys" in arrays:
            state.codes.load({name: arrays[name] for name in ("keys", "values")})
            state.aware = mx.array(arrays["aware"])
        if "sink_keys" in arrays:
            state.sinks = mx.array(arrays["sink_keys"]), mx.array(arrays["sink_values"])
        start = snapshot.values["block_start"]
        if start is not None:
            state.block = int(start), (mx.array(arrays["block_keys"]), mx.array(arrays["block_values"]))
        return state


def _joined(*pairs: Pair) -> Pair:
    """Keys and values behind one another."""
    return mx.concatenate([keys for keys, _ in pairs], axis=2), mx.concatenate([values for _, values in pairs], axis=2)
