"""Which token each row belongs to: what evictors need in order to evict and to rewind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import attrs
import mlx.core as mx

from veloxquant.rows import RowStore
from veloxquant.types import ByteCount

__all__ = ["PositionedRows"]


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
        tail = _following(self._start, self.end).reshape(1, 1, -1)
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
        rows = cast(int, mx.where(alive, mx.arange(1, kept.shape[2] + 1), 0).max().item())
        self.store.drop_last(self.count - rows)
        self._start = length
        self._kept = mx.contiguous(mx.where(alive, kept, -1)[..., :rows]) if rows else None
        self._ragged = rows > 0 and not bool(alive[..., :rows].all().item())

    def unread(self) -> list[mx.array]:
        """Arrays of the store that a step changes unread, see ``veloxquant_unread``: new rows are read as they came."""
        return [] if self.store.lossless else list(self.store.arrays().values())

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


def _following(start: int, end: int) -> mx.array:
    # Never an empty range: on CUDA it has no memory behind it, and whoever reads it ends the process.
    return mx.arange(start, end, dtype=mx.int32) if end > start else mx.zeros((0,), dtype=mx.int32)
