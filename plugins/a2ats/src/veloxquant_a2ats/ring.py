"""The newest rows as they came, in a ring: a new row takes the place of the oldest."""

from __future__ import annotations

import attrs
import mlx.core as mx

__all__ = ["RESERVE", "Ring"]

RESERVE = 64
"""Rows held beyond the window, so that as many tokens can be trimmed away and the window is still exact."""


@attrs.define(eq=False)
class Ring:
    """Keys and values of the last ``size`` positions; the row of position p stands at p modulo ``size``.

    Capacity follows from the tokens seen alone, so that rows written and trimmed away leave no trace in it.

    Args:
        size: Rows held at most.
    """

    size: int
    end: int = 0
    """Position of the next row."""
    start: int = 0
    """First position whose row is there."""
    _keys: mx.array | None = None
    _values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Write new rows ``[B, H, S, D]``, of which only the last ``size`` count."""
        end = self.end + keys.shape[2]
        first = max(self.end, end - self.size)
        self._keys = self._written(self._keys, keys, first, end)
        self._values = self._written(self._values, values, first, end)
        self.end, self.start = end, max(self.start, end - self.size)

    def _written(self, buffer: mx.array | None, rows: mx.array, first: int, end: int) -> mx.array:
        buffer = self._grown(buffer, rows, end)
        count, slot = end - first, first % self.size
        if count < rows.shape[2]:
            rows = rows[:, :, -count:]
        ahead = min(count, self.size - slot)
        if ahead == count:
            buffer[:, :, slot : slot + count] = rows
            return buffer
        buffer[:, :, slot:] = rows[:, :, :ahead]
        buffer[:, :, : count - ahead] = rows[:, :, ahead:]
        return buffer

    def _grown(self, buffer: mx.array | None, rows: mx.array, end: int) -> mx.array:
        held = 0 if buffer is None else buffer.shape[2]
        capacity = self._capacity(end, held)
        if buffer is not None and held == capacity:
            return buffer
        batch, heads, _, dim = rows.shape
        spare = mx.zeros((batch, heads, capacity - held, dim), dtype=rows.dtype)
        return spare if buffer is None else mx.concatenate([buffer, spare], axis=2)

    def _capacity(self, end: int, capacity: int = 0) -> int:
        """Rows of the buffers after ``end`` tokens: an eighth to spare while the ring is not full."""
        while capacity < min(end, self.size):
            capacity += min(256, max(16, capacity // 8 // 16 * 16))
        return min(capacity, self.size)

    def rows(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Rows of positions ``start`` to ``stop``, in order; they must be there, and at least one."""
        parts = self.parts(start, stop)
        if len(parts) == 1:
            return parts[0]
        return mx.concatenate([keys for keys, _ in parts], axis=2), mx.concatenate([rows for _, rows in parts], axis=2)

    def parts(self, start: int, stop: int) -> list[tuple[mx.array, mx.array]]:
        """As ``rows``, in one piece or two, neither of them a copy."""
        assert self._keys is not None
        assert self._values is not None
        slot = start % self.size
        # Always views, also of full buffers: the buffers themselves are written to later.
        spans = [(slot, min(slot + stop - start, self.size)), (0, slot + stop - start - self.size)]
        return [(self._keys[:, :, a:b], self._values[:, :, a:b]) for a, b in spans if a < b]

    def rewind(self, end: int) -> None:
        """Forget the rows at and beyond position ``end``, at least 1."""
        self.end, self.start = end, min(self.start, end)
        capacity = self._capacity(end)
        if self._keys is not None and self._values is not None and capacity < self._keys.shape[2]:
            # A copy: a view would hold the whole buffer. Only a ring that never went round can be this short, or one
            # whose rows are written anew after this.
            self._keys = mx.contiguous(self._keys[:, :, :capacity])
            self._values = mx.contiguous(self._values[:, :, :capacity])

    def fill(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Put rows before those that are there: positions ``start`` to ``self.start``."""
        assert self._keys is not None
        assert self._values is not None
        stop = start + keys.shape[2]
        self._keys = self._written(self._keys, keys, start, stop)
        self._values = self._written(self._values, values, start, stop)
        self.start = start

    def load(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Fill an empty ring with the rows from position ``start`` on."""
        self.end = self.start = start
        self.append(keys, values)

    @property
    def dtypes(self) -> tuple[mx.Dtype, mx.Dtype]:
        """Dtypes of keys and values; rows must be held."""
        assert self._keys is not None
        assert self._values is not None
        return self._keys.dtype, self._values.dtype

    def arrays(self) -> tuple[mx.array, ...]:
        """The buffers."""
        return () if self._keys is None or self._values is None else (self._keys, self._values)
