"""The ends of a layer's rows as they came, held beside a store that loses something.

All queries look at the first rows and at the newest ones; what those lose is lost in every output.
"""

from __future__ import annotations

import attrs
import mlx.core as mx

__all__ = ["SPARE", "ExactEnds", "Pair", "placed"]

Pair = tuple[mx.array, mx.array]
"""Keys and values of consecutive rows ``[B, Hkv, n, D]``."""

SPARE = 16
"""Rows held beyond the newest ones that are attended to as they came, so that rewinds of as many tokens are exact."""


@attrs.define(eq=False)
class ExactEnds:
    """Copies of the first and of the newest rows; empty where the store loses nothing.

    Args:
        sinks: First rows to hold.
        recent: Newest rows that are attended to as they came.
    """

    sinks: int
    recent: int
    # At most ``sinks`` rows, and at most ``recent + SPARE``.
    first: Pair | None = None
    newest: Pair | None = None
    # Between a call and its attention: the rows before it that its first token attends to as they came, and its own.
    fresh: Pair | None = None

    def append(self, new: Pair, stored: Pair, whole: bool) -> Pair:
        """Follow rows that were stored.

        Args:
            new: The new rows.
            stored: All rows as the store gives them back, the new ones last.
            whole: Whether no row was ever dropped, so that the first rows are the first tokens.

        Returns:
            All rows, those of them that are held as they came in the place of what was stored.
        """
        count, size = _count(stored), _count(new)
        # With a token's own row the recent ones.
        fresh = _joined(_last(self.newest, self.recent - 1), new)
        found = placed(stored, self.leading(count - _count(fresh)), fresh)
        if whole and count - size < self.sinks:
            self.first = _copied(_part(found, 0, self.sinks))
        if self.recent:
            newest = _last(_joined(self.newest, new), self.recent + SPARE)
            self.newest = None if newest is None else _copied(newest)
        self.fresh = fresh
        return found

    def leading(self, end: int) -> Pair | None:
        """The first rows as they came, none of them at or beyond row ``end``."""
        return None if self.first is None or end <= 0 else _part(self.first, 0, end)

    def of_token(self, place: int) -> Pair | None:
        """The newest rows up to one token of the last call, counted from its end: -1 is the newest."""
        if self.fresh is None:
            return None
        return _last(_part(self.fresh, 0, _count(self.fresh) + place + 1), max(self.recent, 1))

    def keep_newest(self, count: int) -> None:
        """Older rows were dropped head by head: only the last ``count`` rows still are the last of the store."""
        newest = _last(self.newest, count)
        self.newest = None if newest is None else _copied(newest)

    def rewind(self, forgotten: int, left: int) -> None:
        """Forget the last tokens.

        Args:
            forgotten: Tokens to forget.
            left: Tokens to remember.
        """
        self.fresh = None
        if self.first is not None and left < _count(self.first):
            self.first = _copied(_part(self.first, 0, left)) if left else None
        if self.newest is not None:
            rest = _count(self.newest) - forgotten
            self.newest = _copied(_part(self.newest, 0, rest)) if rest > 0 else None

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        pairs = (self.first, self.newest, self.fresh)
        return sum(array.nbytes for pair in pairs if pair is not None for array in pair)

    def arrays(self) -> dict[str, mx.array]:
        """What ``load`` needs."""
        named = {"first": self.first, "newest": self.newest}
        found: dict[str, mx.array] = {}
        for name, pair in named.items():
            if pair is not None:
                found[f"{name}_keys"], found[f"{name}_values"] = pair
        return found

    def load(self, arrays: dict[str, mx.array]) -> None:
        """Take what ``arrays`` gave out of a snapshot."""
        pairs = ((arrays.pop(f"{name}_keys", None), arrays.pop(f"{name}_values", None)) for name in ("first", "newest"))
        self.first, self.newest = (None if one is None or two is None else (one, two) for one, two in pairs)


def placed(rows: Pair, first: Pair | None, last: Pair) -> Pair:
    """Put the first and the last rows as they came in the place of what was stored."""
    start = 0 if first is None else _count(first)
    return _joined(_joined(first, _part(rows, start, _count(rows) - _count(last))), last)


def _count(rows: Pair) -> int:
    return int(rows[0].shape[2])


def _part(rows: Pair, start: int, end: int) -> Pair:
    keys, values = rows
    return keys[:, :, start:end], values[:, :, start:end]


def _last(rows: Pair | None, count: int) -> Pair | None:
    if rows is None or count <= 0:
        return None
    return _part(rows, max(0, _count(rows) - count), _count(rows))


def _copied(rows: Pair) -> Pair:
    """Arrays of their own: a view would hold all that it was taken of."""
    return mx.contiguous(rows[0]), mx.contiguous(rows[1])


def _joined(first: Pair | None, second: Pair) -> Pair:
    if first is None or _count(first) == 0:
        return second
    return mx.concatenate([first[0], second[0]], axis=2), mx.concatenate([first[1], second[1]], axis=2)
