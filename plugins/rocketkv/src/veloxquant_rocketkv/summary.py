"""The bounds of the keys in each page as they are, kept while rows come and go."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import mlx.core as mx

from veloxquant_rocketkv.sparse import score_reader

__all__ = ["PageSummary", "capacity_for"]


def capacity_for(capacity: int, needed: int) -> int:
    """Pages to hold room for: a sixteenth more at a time, 8 to 128."""
    while capacity < needed:
        capacity += min(128, max(8, capacity // 128 * 8))
    return capacity


@attrs.define(eq=False)
class PageSummary:
    """Bounds of the first pages of a layer; only complete pages are summarised."""

    pages: int = 0
    """Pages summarised."""
    # [B, Hkv, planes * D, capacity], see ``sparse``.
    bounds: mx.array | None = None
    # Capacity right after the last exact fit: with the count it determines the capacity, so that pages that were added
    # and dropped again leave no trace in it.
    _base: int = 0

    def extend(self, new: mx.array) -> None:
        """Add the bounds of the next pages ``[B, Hkv, planes * D, n]``."""
        end = self.pages + new.shape[3]
        if self.bounds is None and self._base == 0:
            self._base = end
            self.bounds = mx.contiguous(new)
        else:
            self.bounds = self._grown(new, end)
            self.bounds[..., self.pages : end] = new
        self.pages = end

    def _grown(self, new: mx.array, end: int) -> mx.array:
        buffer = self.bounds
        assert buffer is not None
        if buffer.shape[3] >= end:
            return buffer
        spare = mx.zeros((*new.shape[:3], capacity_for(self._base, end) - self.pages), new.dtype)
        return mx.concatenate([buffer[..., : self.pages], spare], axis=3)

    def truncate(self, pages: int) -> None:
        """Forget all pages but the first ones."""
        if pages >= self.pages:
            return
        dropped, self.pages = self.pages, pages
        if pages == 0:
            self.clear()
            return
        if self.bounds is not None:
            # Spare columns are scored too, and what is not finite could not be told apart from the rest.
            self.bounds[..., pages:dropped] = 0
        self._base = min(self._base, pages)
        capacity = capacity_for(self._base, pages)
        if self.bounds is not None and capacity < self.bounds.shape[3]:
            # A copy: a view would hold the whole buffer.
            self.bounds = mx.contiguous(self.bounds[..., :capacity])

    def clear(self) -> None:
        """Forget everything."""
        self.pages, self.bounds, self._base = 0, None, 0

    def scores(self, queries: mx.array, channels: mx.array, scale: float) -> Callable[[slice], mx.array]:
        """What gives approximate logits ``[B, Hkv, G, capacity]`` of the heads of a slice, see ``page_scores``.

        Those behind the pages mean nothing.
        """
        assert self.bounds is not None
        return score_reader(queries, self.bounds, channels, scale)

    @property
    def width(self) -> int:
        """Pages that there is room for."""
        return 0 if self.bounds is None else self.bounds.shape[3]

    def bytes_read(self, channels: int) -> int:
        """Bytes that scoring by so many channels reads."""
        return 0 if self.bounds is None else self.bounds.nbytes // self.bounds.shape[2] * channels

    def live(self) -> mx.array | None:
        """The bounds of the pages summarised, without spare capacity; None when there are none."""
        return None if self.bounds is None else self.bounds[..., : self.pages]

    def arrays(self) -> dict[str, mx.array]:
        """What ``load`` needs, without spare capacity."""
        live = self.live()
        return {} if live is None else {"bounds": live}

    def held(self) -> list[mx.array]:
        """The array itself, spare capacity included; empty when there is none."""
        return [] if self.bounds is None else [self.bounds]

    def load(self, arrays: dict[str, mx.array]) -> None:
        """Take what ``arrays`` gave out of a snapshot."""
        self.clear()
        bounds = arrays.pop("bounds", None)
        if bounds is not None:
            self.bounds = mx.array(bounds)
            self.pages = self._base = bounds.shape[3]

    def outgrown(self, pages: int) -> bool:
        """Whether the summary must be made anew to hold so many pages; never."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes held, spare capacity included."""
        return sum(array.nbytes for array in self.held())
