"""Choosing the rows of one decode step among those held, and what has to be held for that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import cast

import attrs
import mlx.core as mx
import numpy as np

from veloxquant import PositionedRows
from veloxquant.halves import by_halves
from veloxquant.types import Scalar
from veloxquant_rocketkv.compact import CompactSummary
from veloxquant_rocketkv.config import RocketKVConfig
from veloxquant_rocketkv.sparse import BITS
from veloxquant_rocketkv.sparse import choose_channels
from veloxquant_rocketkv.sparse import page_bounds
from veloxquant_rocketkv.sparse import rank
from veloxquant_rocketkv.sparse import rank_roughly
from veloxquant_rocketkv.sparse import row_scores
from veloxquant_rocketkv.sparse import top
from veloxquant_rocketkv.summary import PageSummary

__all__ = ["Selector"]


@attrs.define(eq=False)
class Selector:
    """Ranks pages of the rows that stage 1 left; the newest rows, and a page not yet complete, need no ranking.

    Rows are counted in the order in which they are read: those of the filtered set of a turn, then those stored since.
    Without a filtered set that is the order of the store.

    Args:
        config: Options of the method.
        rows: The rows held.
    """

    config: RocketKVConfig
    rows: PositionedRows
    summary: PageSummary | CompactSummary = attrs.field(init=False)
    # [B, Hkv, T] int32: the rows of the store that this turn reads, of the first ``_turn`` ones (multi_turn).
    _filtered: mx.array | None = None
    _turn: int = 0
    # B, Hkv, rows of a page and channels read of it: known from the first keys on.
    _batch: int = 0
    _heads: int = 0
    _page_size: int = 1
    _channels: int = 0

    def __attrs_post_init__(self) -> None:
        self.summary = PageSummary() if self.config.summary_bits is None else CompactSummary()

    def learn(self, shape: Sequence[int]) -> None:
        """Learn the shape of the keys ``[B, Hkv, S, D]``."""
        self._batch, self._heads = shape[:2]
        self._page_size, self._channels = self.config.pages_and_channels(shape[3])

    # ----------------------------------------------------------------- rows

    @property
    def filtered_rows(self) -> int:
        """Rows that are read or could be, per KV head."""
        return self.rows.count - self._skipped

    @property
    def _skipped(self) -> int:
        return 0 if self._filtered is None else self._turn - self._filtered.shape[2]

    def _stored(self, index: mx.array) -> mx.array:
        """Turn rows of the filtered set ``[B, Hkv, k]`` into rows of the store."""
        filtered = self._filtered
        if filtered is None:
            return index
        first = mx.take_along_axis(filtered, mx.minimum(index, filtered.shape[2] - 1), axis=2)
        return mx.where(index < filtered.shape[2], first, index + self._skipped)

    def filter(self, index: mx.array) -> None:
        """Read only the rows ``index`` ``[B, Hkv, T]`` of those held, and all rows stored from now on."""
        self._filtered, self._turn = index, self.rows.count

    # -------------------------------------------------------------- summary

    def _pages(self, rows: int, keep_recent: int) -> int:
        """Pages to choose among when the first ``rows`` rows are there."""
        pages = max(0, rows - keep_recent) // self._page_size
        # Two pages share a byte of a compact summary.
        return pages if self.config.summary_bits is None else pages // 2 * 2

    def _wanted(self, rows: int, seen: int, keep_recent: int) -> int | None:
        """Pages to choose when ``rows`` rows of ``seen`` tokens are there; None to attend to all rows."""
        if rows <= self.config.all_read_up_to:
            return None
        pages = self._pages(rows, keep_recent)
        others = rows - pages * self._page_size
        wanted = max(1, -(-(self.config.rows_to_read(seen) - others) // self._page_size))
        return wanted if wanted < pages else None

    def summarise(self) -> None:
        """Summarise all pages, if some of them would not be attended to."""
        rows, newest = self.filtered_rows, self.config.newest_rows
        if self.config.ranking == "pages" and self._wanted(rows, self.rows.end, newest) is not None:
            self._extend(self._pages(rows, newest))

    def _extend(self, pages: int) -> None:
        if self.summary.outgrown(pages):
            self.summary.clear()
        start, stop = self.summary.pages * self._page_size, pages * self._page_size
        if start >= stop:
            return
        valid = self.rows.valid()
        if self._filtered is None and self.rows.store.lossless:
            keys = self.rows.store.keys_values()[0][:, :, start:stop]
            alive = None if valid is None else valid[:, :, start:stop]
        else:
            index = self._range(start, stop)
            keys, _ = self.rows.store.gather(index)
            alive = None if valid is None else mx.take_along_axis(valid, index, axis=2)
        self.summary.extend(page_bounds(keys, self._page_size, alive))

    def _range(self, start: int, stop: int) -> mx.array:
        """Rows of the store for the rows ``start`` to ``stop`` of the filtered set, in every head."""
        index = mx.arange(start, stop, dtype=mx.int32)
        return self._stored(mx.broadcast_to(index, (self._batch, self._heads, stop - start)))

    def _alive_pages(self, pages: int, width: int) -> mx.array | None:
        """Which of ``width`` columns are one of the first pages and have a live row; None when all are and have."""
        valid = self.rows.valid()
        if valid is None:
            return None if pages == width else (_offsets(width) < pages)[None, None]
        paged = valid[:, :, : pages * self._page_size]
        alive = paged.reshape(self._batch, self._heads, pages, self._page_size).any(axis=3)
        return mx.pad(alive, [(0, 0), (0, 0), (0, width - pages)])

    # --------------------------------------------------------------- choice

    @property
    def sink_pages(self) -> int:
        """Pages of the first ``sinks`` rows, which are always read where the store loses something."""
        return -(-self.config.sinks // self._page_size)

    def reads_sinks(self, chosen: int) -> bool:
        """Whether the first ``sinks`` of so many chosen rows are the first rows held."""
        return chosen >= self.sink_pages * self._page_size + self.config.newest_rows

    @property
    def chooses_all(self) -> bool:
        """Whether the newest token attends to every row held; those before it then do too."""
        return self._filtered is None and self._wanted(self.rows.count, self.rows.end, self.config.newest_rows) is None

    @property
    def rows_read(self) -> int:
        """Rows that the newest token attends to, per KV head."""
        rows, seen, keep_recent = self.filtered_rows, self.rows.end, self.config.newest_rows
        wanted = self._wanted(rows, seen, keep_recent)
        if wanted is None:
            return rows
        return rows - (self._pages(rows, keep_recent) - wanted) * self._page_size

    def choose(
        self, queries: mx.array, scale: float, count: int | None = None, keep_recent: int | None = None
    ) -> mx.array | None:
        """The rows that one query attends to.

        Args:
            queries: The queries of one token ``[B, Hq, 1, D]``.
            scale: Factor on the logits.
            count: Rows of the store that the query sees; by default all.
            keep_recent: Newest rows that are attended in any case; by default those of the options.

        Returns:
            Rows of the store ``[B, Hkv, k]`` int32, ascending; None for all.
        """
        count = self.rows.count if count is None else count
        keep_recent = self.config.newest_rows if keep_recent is None else keep_recent
        rows, seen = count - self._skipped, self.rows.end - (self.rows.count - count)
        wanted = self._wanted(rows, seen, keep_recent)
        if wanted is None:
            return None if self._filtered is None else self._range(0, rows)
        pages = self._pages(rows, keep_recent)
        best = self._rows_of(self._best(queries, scale, pages, wanted))
        start = pages * self._page_size
        others = mx.broadcast_to(mx.arange(start, rows, dtype=mx.int32), (self._batch, self._heads, rows - start))
        return self._stored(mx.concatenate([best, others], axis=2))

    def choose_alike(self, group: mx.array, keep_recent: int) -> mx.array | None:
        """As ``choose``, with the same queries ``[G, D]`` in every KV head and the usual scale."""
        size, dim = group.shape
        queries = mx.broadcast_to(group, (self._batch, self._heads, size, dim)).reshape(self._batch, -1, 1, dim)
        return self.choose(queries, dim**-0.5, keep_recent=keep_recent)

    def _best(self, queries: mx.array, scale: float, pages: int, wanted: int) -> mx.array:
        """The best ``wanted`` of the first ``pages`` pages ``[B, Hkv, wanted]`` int32, ascending."""
        # All columns are ranked, spare capacity too: a slice of an array is several times slower to go through.
        if self.config.ranking == "rows":
            logits = row_scores(self.rows.store.scores(queries), self._heads, scale)
            return self._top(rank, logits, self._alive_pages(pages, logits.shape[3]), pages, wanted)
        self._extend(pages)
        grouped = queries.astype(mx.float32).reshape(self._batch, self._heads, -1, queries.shape[3])
        channels = choose_channels(grouped, self._channels)
        exact = self._page_size == 1
        scores = self.summary.scores(grouped, channels, scale if exact else scale * BITS)
        alive = self._alive_pages(pages, self.summary.width)

        def best(heads: slice) -> mx.array:
            own = alive if alive is None or alive.shape[1] == 1 else alive[:, heads]
            return self._top(rank if exact else rank_roughly, scores(heads), own, pages, wanted)

        return by_halves(best, self._heads, self.summary.bytes_read(self._channels))

    def _top(
        self, ranks: Callable[..., mx.array], logits: mx.array, alive: mx.array | None, pages: int, wanted: int
    ) -> mx.array:
        width = logits.shape[3]
        weights = ranks(logits, alive)
        if self.rows.valid() is not None and pages < width:
            # A head may have fewer live pages than are chosen; dead ones, which are masked, then come before what lies
            # behind the pages, where there are the newest rows and none at all.
            weights = mx.where(_offsets(width) < pages, weights, -mx.inf)
        if not self.rows.store.lossless and self.sink_pages <= wanted:
            sure = mx.full((*weights.shape[:2], self.sink_pages), mx.inf)
            weights = mx.concatenate([sure, weights[..., self.sink_pages :]], axis=2)
        return top(weights, wanted)

    def _rows_of(self, pages: mx.array) -> mx.array:
        size = self._page_size
        if size == 1:
            return pages
        rows = pages[..., None] * size + _offsets(size)
        return rows.reshape(self._batch, self._heads, pages.shape[2] * size)

    # ------------------------------------------------- rewinds, copies, bytes

    def clear(self) -> None:
        """Forget what was chosen and summarised."""
        self.summary.clear()
        self._filtered, self._turn = None, 0

    def rewind(self, before: mx.array | None) -> None:
        """Follow rows that were rewound: keep the pages that were not touched, summarise the others anew.

        Args:
            before: Which rows were live before ``[B, Hkv, rows]`` bool, or None for all.
        """
        if not self.rows.count or (self._filtered is not None and self.rows.count < self._turn):
            # Into the history that a turn had filtered: until the next turn all of it is read again.
            self.clear()
        rows, newest = self.filtered_rows, self.config.newest_rows
        if self._wanted(rows, self.rows.end, newest) is None:
            self.summary.clear()
            return
        pages = self._pages(rows, newest)
        self.summary.truncate(min(pages, _unchanged(before, self.rows.valid()) // self._page_size))
        self.summarise()

    def arrays(self) -> dict[str, mx.array]:
        """The summary and the filtered set, as far as there are any."""
        arrays = self.summary.arrays()
        return arrays if self._filtered is None else {**arrays, "filtered": self._filtered}

    def held(self) -> list[mx.array]:
        """The arrays of the summary themselves, spare capacity included."""
        return self.summary.held()

    def values(self) -> dict[str, int]:
        """The plain values that go with ``arrays``."""
        return {"turn": self._turn}

    def load(self, arrays: dict[str, mx.array], values: Mapping[str, Scalar]) -> None:
        """Take what ``arrays`` and ``values`` gave out of a snapshot."""
        self.summary.load(arrays)
        filtered = arrays.pop("filtered", None)
        self._filtered = None if filtered is None else mx.array(filtered)
        self._turn = int(values["turn"] or 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the summary and the filtered set."""
        return self.summary.nbytes + (0 if self._filtered is None else self._filtered.nbytes)

    def details(self) -> dict[str, Scalar]:
        """Page size and channels, once keys are known."""
        known = self._channels > 0
        return {
            "page_size": self._page_size if known else self.config.page_size,
            "head_topk1": self._channels if known else self.config.head_topk1,
        }


@functools.lru_cache(maxsize=64)
def _offsets(size: int) -> mx.array:
    """0, 1, ... as an array."""
    return mx.array(np.arange(size, dtype=np.int32))


def _unchanged(before: mx.array | None, after: mx.array | None) -> int:
    """The number of first rows that are as live as they were, in every head."""
    if after is None:
        return 2**31 - 1
    rows = after.shape[2]
    changed = ~after if before is None else after != before[:, :, :rows]
    return cast(int, mx.where(changed, mx.arange(rows), rows).min().item())
