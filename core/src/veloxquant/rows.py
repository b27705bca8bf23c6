"""What holds the rows, apart from what chooses among them.

``RowStore`` is the protocol; ``DenseRows`` keeps rows as they came; a codec offers its own store through the hook
``veloxquant_rows``. ``PositionedRows`` adds to any store which token each row belongs to, which is what evictors
need in order to evict and to rewind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from typing import runtime_checkable

import attrs
import mlx.core as mx

from veloxquant.errors import UnsupportedShapeError
from veloxquant.types import ByteCount

__all__ = ["DenseRows", "PositionedRows", "RowStore", "flat_index", "grouped"]


@runtime_checkable
class RowStore(Protocol):
    """Rows of keys and values of one layer, in the order in which they came.

    Shapes: keys ``[B, Hkv, S, Dk]``, values ``[B, Hkv, S, Dv]``, queries ``[B, Hq, L, Dk]``, weights
    ``[B, Hq, L, rows]``, indices ``[B, Hkv, k]`` int32 and ascending along the last axis.
    """

    lossless: bool
    """True when what ``keys_values`` gives back is bit for bit what was appended."""

    @property
    def count(self) -> int:
        """Rows held per KV head."""

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Store new rows behind those held."""

    def keys_values(self) -> tuple[mx.array, mx.array]:
        """All rows in the input dtype, rebuilt lazily; at least one row must be held."""

    def gather(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """The rows ``index`` in the input dtype; no other row is rebuilt."""

    def scores(self, queries: mx.array) -> mx.array:
        """Products of queries and keys ``[B, Hq, L, rows]`` in fp32, unscaled and unmasked."""

    def mix(self, weights: mx.array) -> mx.array:
        """Sums of values weighted by fp32 ``weights``: ``[B, Hq, L, Dv]`` in fp32."""

    def keep(self, index: mx.array) -> None:
        """Drop all rows but ``index`` for good."""

    def drop_last(self, count: int) -> None:
        """Forget the last ``count`` rows of every head."""

    def arrays(self) -> dict[str, mx.array]:
        """Live rows as named arrays, from which ``load`` rebuilds an equal store; empty when no row is held."""

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Fill an empty store with what ``arrays`` gave."""

    def account(self) -> ByteCount:
        """Bytes of the arrays held, spare capacity included."""


def grouped(queries: mx.array, kv_heads: int) -> mx.array:
    """Reshape ``[B, Hq, L, D]`` to ``[B, Hkv, G * L, D]``, so that one product serves a group of heads."""
    batch, heads, length, dim = queries.shape
    return queries.reshape(batch, kv_heads, heads // kv_heads * length, dim)


def flat_index(index: mx.array, rows: int) -> mx.array:
    """Turn ``[B, Hkv, k]`` row numbers into row numbers of the ``[B * Hkv * rows, D]`` view."""
    batch, heads, _ = index.shape
    first = mx.arange(batch * heads, dtype=mx.int32).reshape(batch, heads, 1) * rows
    return (index.astype(mx.int32) + first).reshape(-1)


def _take_rows(rows: mx.array, index: mx.array) -> mx.array:
    batch, heads, count, dim = rows.shape
    flat = mx.take(rows.reshape(-1, dim), flat_index(index, count), axis=0)
    return flat.reshape(batch, heads, index.shape[2], dim)


def _step(capacity: int) -> int:
    """Rows to grow by: an eighth, in multiples of 16, so that a small budget has little slack."""
    return min(256, max(16, capacity // 8 // 16 * 16))


@attrs.define(eq=False)
class DenseRows:
    """Rows as they came, in buffers that grow by an eighth (16 to 256 rows)."""

    lossless = True

    _keys: mx.array | None = None
    _values: mx.array | None = None
    _count: int = 0
    # Capacity right after the last exact fit. Capacity follows from it and the count alone, so that rows that were
    # appended and dropped again leave no trace in it.
    _base: int = 0

    @property
    def count(self) -> int:
        """Rows held per KV head."""
        return self._count

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Store new rows behind those held."""
        end = self._count + keys.shape[2]
        self._keys = self._written(self._keys, keys, end)
        self._values = self._written(self._values, values, end)
        self._count = end

    def _written(self, buffer: mx.array | None, rows: mx.array, end: int) -> mx.array:
        capacity = 0 if buffer is None else buffer.shape[2]
        if buffer is None or capacity < end:
            grown = self._capacity(capacity, end)
            batch, heads, _, dim = rows.shape
            spare = mx.zeros((batch, heads, grown - self._count, dim), dtype=rows.dtype)
            buffer = spare if buffer is None else mx.concatenate([buffer[..., : self._count, :], spare], axis=2)
        buffer[..., self._count : end, :] = rows
        return buffer

    @staticmethod
    def _capacity(capacity: int, needed: int) -> int:
        while capacity < needed:
            capacity += _step(capacity)
        return capacity

    def keys_values(self) -> tuple[mx.array, mx.array]:
        """All rows, as views of the buffers."""
        keys, values = self._buffers()
        # Always a view, also of a full buffer: the buffer object itself is written to after a drop_last.
        return keys[..., : self._count, :], values[..., : self._count, :]

    def _buffers(self) -> tuple[mx.array, mx.array]:
        if self._keys is None or self._values is None:
            raise UnsupportedShapeError("no rows are held yet; append some first")
        return self._keys, self._values

    def gather(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """The rows ``index``, read through one take over whole rows."""
        keys, values = self._buffers()
        return _take_rows(keys, index), _take_rows(values, index)

    def scores(self, queries: mx.array) -> mx.array:
        """Products of queries and keys ``[B, Hq, L, rows]`` in fp32."""
        keys, _ = self.keys_values()
        batch, heads, length, _ = queries.shape
        stacked = grouped(queries, keys.shape[1]).astype(mx.float32)
        product = stacked @ keys.astype(mx.float32).swapaxes(-1, -2)
        return product.reshape(batch, heads, length, self._count)

    def mix(self, weights: mx.array) -> mx.array:
        """Sums of values weighted by ``weights``, ``[B, Hq, L, Dv]`` in fp32."""
        _, values = self.keys_values()
        batch, heads, length, _ = weights.shape
        product = grouped(weights, values.shape[1]).astype(mx.float32) @ values.astype(mx.float32)
        return product.reshape(batch, heads, length, values.shape[3])

    def keep(self, index: mx.array) -> None:
        """Drop all rows but ``index``; the buffers then fit exactly."""
        self._keys, self._values = self.gather(index)
        self._count = self._base = index.shape[2]

    def drop_last(self, count: int) -> None:
        """Forget the last ``count`` rows; capacity falls to what it would be without them."""
        self._count -= count
        if self._count == 0:
            self._keys = self._values = None
            self._base = 0
            return
        self._base = min(self._base, self._count)
        capacity = self._capacity(self._base, self._count)
        keys, values = self._buffers()
        if capacity < keys.shape[2]:
            # A copy: a view would hold the whole buffer.
            self._keys = mx.contiguous(keys[..., :capacity, :])
            self._values = mx.contiguous(values[..., :capacity, :])

    def arrays(self) -> dict[str, mx.array]:
        """Live rows under ``keys`` and ``values``."""
        if self._count == 0:
            return {}
        keys, values = self.keys_values()
        return {"keys": keys, "values": values}

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Fill an empty store with what ``arrays`` gave."""
        if arrays:
            self._keys, self._values = mx.array(arrays["keys"]), mx.array(arrays["values"])
            self._count = self._base = self._keys.shape[2]

    def account(self) -> ByteCount:
        """Bytes of both buffers."""
        if self._keys is None or self._values is None:
            return ByteCount()
        return ByteCount(keys=self._keys.nbytes, values=self._values.nbytes)


@attrs.define(eq=False)
class PositionedRows:
    """A row store together with the token position of every row.

    Rows that survived an eviction carry their positions in an array; the rows behind them follow one another and
    need none. After a deep rewind some heads may hold fewer live rows than others: the rest is marked and masked.

    Args:
        store: Where the rows are.
    """

    store: RowStore
    # [B, Hkv, m] int32: positions of the first m rows; -1 marks a row that was rewound in this head only.
    _kept: mx.array | None = None
    # Position of row m.
    _start: int = 0
    _ragged: bool = False

    @property
    def count(self) -> int:
        """Rows held per KV head, masked ones included."""
        return self.store.count

    @property
    def evicted(self) -> bool:
        """True once rows were dropped for good."""
        return self._kept is not None

    @property
    def end(self) -> int:
        """Position of the next row: the number of tokens seen."""
        return self._start + self.count - self._kept_count

    @property
    def _kept_count(self) -> int:
        return 0 if self._kept is None else self._kept.shape[2]

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows.

        Args:
            keys: New keys ``[B, Hkv, S, Dk]``.
            values: New values ``[B, Hkv, S, Dv]``.

        Returns:
            The rows held before, followed by the new rows exactly as they came.
        """
        if self.store.lossless:
            self.store.append(keys, values)
            return self.store.keys_values()
        if self.count == 0:
            self.store.append(keys, values)
            return keys, values
        old_keys, old_values = self.store.keys_values()
        self.store.append(keys, values)
        return mx.concatenate([old_keys, keys], axis=2), mx.concatenate([old_values, values], axis=2)

    def positions(self) -> mx.array:
        """Token position of every row: ``[B, Hkv, rows]`` int32, or ``[1, 1, rows]`` before any eviction."""
        tail = mx.arange(self._start, self.end, dtype=mx.int32).reshape(1, 1, -1)
        if self._kept is None:
            return tail
        return mx.concatenate([self._kept, mx.broadcast_to(tail, (*self._kept.shape[:2], tail.shape[2]))], axis=2)

    def valid(self) -> mx.array | None:
        """Which rows are live: ``[B, Hkv, rows]`` bool, or None when all are."""
        return self.positions() >= 0 if self._ragged else None

    def keep(self, index: mx.array) -> None:
        """Drop all rows but ``index`` for good.

        Args:
            index: Rows to keep ``[B, Hkv, k]`` int32, ascending.
        """
        positions = self.positions()
        kept = mx.take_along_axis(mx.broadcast_to(positions, (*index.shape[:2], positions.shape[2])), index, axis=2)
        self._start, self._kept = self.end, kept
        self.store.keep(index)

    def rewind(self, length: int) -> None:
        """Forget every token at or beyond position ``length``; what was evicted before stays gone.

        Args:
            length: Tokens to remember, at most ``end``.
        """
        if length >= self._start:
            self.store.drop_last(self.end - length)
        elif self._kept is None:
            self.store.drop_last(self.count)
            self._start = length
        else:
            self._rewind_into_kept(self._kept, length)

    def _rewind_into_kept(self, kept: mx.array, length: int) -> None:
        alive = (kept >= 0) & (kept < length)
        live_end = mx.where(alive, mx.arange(1, kept.shape[2] + 1), 0).max().item()
        rows = int(live_end)  # type: ignore[arg-type]
        self.store.drop_last(self.count - rows)
        self._start = length
        self._kept = mx.where(alive, kept, -1)[..., :rows] if rows else None
        self._ragged = rows > 0 and not bool(alive[..., :rows].all().item())

    def arrays(self) -> dict[str, mx.array]:
        """The store's arrays and the positions of kept rows."""
        arrays = self.store.arrays()
        return arrays if self._kept is None else {**arrays, "positions": self._kept}

    def values(self) -> dict[str, int | bool]:
        """The plain values that go with ``arrays``."""
        return {"start": self._start, "ragged": self._ragged}

    def load(self, arrays: Mapping[str, mx.array], start: int, ragged: bool) -> None:
        """Fill an empty instance with what ``arrays`` and ``values`` gave."""
        positions = arrays.get("positions")
        self._kept = None if positions is None else mx.array(positions)
        self._start, self._ragged = start, ragged
        self.store.load({name: array for name, array in arrays.items() if name != "positions"})

    def account(self) -> ByteCount:
        """The store's bytes, with the positions as auxiliary bytes."""
        count = self.store.account()
        extra = 0 if self._kept is None else self._kept.nbytes
        return attrs.evolve(count, auxiliary=count.auxiliary + extra, rows=self.count)
