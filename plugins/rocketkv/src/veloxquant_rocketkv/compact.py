"""The bounds of the keys in each page in 4 bits a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import attrs
import mlx.core as mx

from veloxquant_rocketkv.sparse import channel_reader
from veloxquant_rocketkv.sparse import read_plan
from veloxquant_rocketkv.summary import capacity_for

__all__ = ["CompactSummary"]

_LEVELS = 15


@attrs.define(eq=False)
class CompactSummary:
    """Bounds in 16 levels between the least and the greatest bound of a channel; two pages to a byte.

    Minima are rounded down and maxima up, so that they stay bounds. The levels of a channel are set by the first pages
    and last until there are twice as many; a bound beyond them counts as the nearest level. One level a channel is
    what makes reading cheap: its step goes into the query, and its offset changes all pages alike.
    """

    pages: int = 0
    """Pages summarised, an even number."""
    # [B, Hkv, 2 * D, capacity / 2] uint8: the even page of a pair in the low half of the byte.
    _codes: mx.array | None = None
    # Offset and step of every channel [B, Hkv, 2, D] fp32, and the number of pages that set them.
    _levels: mx.array | None = None
    _set_by: int = 0
    _base: int = 0

    def extend(self, new: mx.array) -> None:
        """Add the bounds of the next pages ``[B, Hkv, 2 * D, n]``, n even."""
        end = self.pages + new.shape[3]
        new = new.astype(mx.float32)
        if self._levels is None:
            self._set_levels(new)
        codes = self._coded(new)
        if self._codes is None:
            self._base, self._codes = end, mx.contiguous(codes)
        else:
            capacity = self._codes.shape[3] * 2
            if capacity < end:
                room = capacity_for(self._base, end) // 2 - self.pages // 2
                spare = mx.zeros((*codes.shape[:3], room), mx.uint8)
                self._codes = mx.concatenate([self._codes[..., : self.pages // 2], spare], axis=3)
            self._codes[..., self.pages // 2 : end // 2] = codes
        self.pages = end

    def _set_levels(self, bounds: mx.array) -> None:
        dim = bounds.shape[2] // 2
        low, high = bounds[:, :, :dim].min(axis=3), bounds[:, :, dim:].max(axis=3)
        self._levels = mx.stack([low, mx.maximum((high - low) / _LEVELS, 1e-20)], axis=2)
        self._set_by = bounds.shape[3]

    def _coded(self, bounds: mx.array) -> mx.array:
        batch, heads, planes, pages = bounds.shape
        assert self._levels is not None
        low, step = self._levels[:, :, 0, :, None], self._levels[:, :, 1, :, None]
        dim = planes // 2
        parts = [mx.floor((bounds[:, :, :dim] - low) / step), mx.ceil((bounds[:, :, dim:] - low) / step)]
        codes = mx.clip(mx.concatenate(parts, axis=2), 0, _LEVELS).astype(mx.uint8)
        paired = codes.reshape(batch, heads, planes, pages // 2, 2)
        return paired[..., 0] | (paired[..., 1] << 4)

    def scores(self, queries: mx.array, channels: mx.array, scale: float) -> Callable[[slice], mx.array]:
        """What gives approximate logits ``[B, Hkv, G, capacity]`` of a slice of heads, all of a head off by a number.

        What lies behind the pages means nothing.

        Args:
            queries: ``[B, Hkv, G, D]`` fp32.
            channels: ``[B, Hkv, k1]`` int32.
            scale: Factor on the logits.
        """
        assert self._codes is not None
        assert self._levels is not None
        weighted, planes = read_plan(queries, channels, scale, self._codes.shape[2])
        weighted = weighted * mx.take_along_axis(self._levels[:, :, 1], channels, axis=2)[:, :, None]
        assert planes is not None
        read = channel_reader(self._codes, planes)

        def scores(heads: slice) -> mx.array:
            codes, own = read(heads), weighted[:, heads]
            # A byte is the even page plus 16 times the odd one.
            both, odd = own @ codes.astype(mx.float32), own @ (codes >> 4).astype(mx.float32)
            paired = mx.stack([both - 16 * odd, odd], axis=4)
            return paired.reshape(*both.shape[:3], 2 * both.shape[3])

        return scores

    @property
    def width(self) -> int:
        """Pages that there is room for."""
        return 0 if self._codes is None else 2 * self._codes.shape[3]

    def bytes_read(self, channels: int) -> int:
        """Bytes that scoring by so many channels reads and unpacks."""
        return 0 if self._codes is None else 4 * self._codes.nbytes // self._codes.shape[2] * channels

    def outgrown(self, pages: int) -> bool:
        """Whether there are so many more pages than set the levels that these must be set anew."""
        return self._levels is not None and pages >= 2 * self._set_by

    def truncate(self, pages: int) -> None:
        """Forget all pages but the first ones, an even number; below those that set the levels, all of them."""
        if pages >= self.pages:
            return
        if pages < self._set_by:
            self.clear()
            return
        self.pages = pages
        self._base = min(self._base, pages)
        capacity = capacity_for(self._base, pages)
        if self._codes is not None and capacity < self._codes.shape[3] * 2:
            self._codes = mx.contiguous(self._codes[..., : capacity // 2])

    def clear(self) -> None:
        """Forget everything."""
        self.pages, self._codes, self._levels, self._set_by, self._base = 0, None, None, 0, 0

    def arrays(self) -> dict[str, mx.array]:
        """What ``load`` needs, without spare capacity."""
        if self._codes is None or self._levels is None:
            return {}
        count = mx.array(self._set_by, mx.int32)
        return {"codes": self._codes[..., : self.pages // 2], "levels": self._levels, "levels_set_by": count}

    def held(self) -> list[mx.array]:
        """The arrays themselves, spare capacity included; empty when there are none."""
        return [array for array in (self._codes, self._levels) if array is not None]

    def load(self, arrays: dict[str, mx.array]) -> None:
        """Take what ``arrays`` gave out of a snapshot."""
        self.clear()
        codes, levels, count = (arrays.pop(name, None) for name in ("codes", "levels", "levels_set_by"))
        if codes is not None and levels is not None and count is not None:
            self._codes, self._levels = mx.array(codes), mx.array(levels)
            self._set_by = cast(int, count.item())
            self.pages = self._base = 2 * codes.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes held, spare capacity included."""
        return sum(array.nbytes for array in self.held())
