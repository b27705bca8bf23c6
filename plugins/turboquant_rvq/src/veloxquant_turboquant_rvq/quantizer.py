"""From vectors to codes and back: a rotation, one code a coordinate, one scale a vector."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import attrs
import mlx.core as mx
import numpy as np

from veloxquant_turboquant_rvq.codebooks import Codebook
from veloxquant_turboquant_rvq.codebooks import Kind
from veloxquant_turboquant_rvq.codebooks import key_codebook
from veloxquant_turboquant_rvq.codebooks import value_codebook
from veloxquant_turboquant_rvq.rotation import Rotation
from veloxquant_turboquant_rvq.rotation import rotation

__all__ = ["Quantizer", "bit_weights", "quantizer"]


@attrs.frozen(eq=False)
class Quantizer:
    """Encoder and decoder for vectors of one dimension.

    Args:
        book: The codebook.
        width: Bits of a code.
        streams: How many streams a code is stored as, each of ``width / streams`` bits.
        rotation: Rotation of the vectors.
        levels: Level of every code ``[2^width]`` fp32, for coordinates of unit variance.
        quads: Levels of four codes of 4 bits at once ``[2^16, 4]`` fp32, where such codes are looked up, else None.
    """

    book: Codebook
    width: int
    streams: int
    rotation: Rotation
    levels: mx.array
    quads: mx.array | None
    _first: tuple[mx.array, mx.array]
    _second: tuple[mx.array, mx.array] | None
    _compiled: Callable[[mx.array], tuple[mx.array, mx.array]] = attrs.field(init=False)

    @_compiled.default
    def _fused(self) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
        return mx.compile(self._encode)

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return self.rotation.dim

    @property
    def step(self) -> float | None:
        """Distance of the levels of a uniform grid, else None."""
        return self.book.step

    @property
    def nbytes(self) -> int:
        """Bytes of the shared arrays."""
        tables = (self.levels, self.quads, *self._first, *(self._second or ()))
        return self.rotation.nbytes + int(sum(table.nbytes for table in tables if table is not None))

    def __deepcopy__(self, memo: object) -> Quantizer:
        return self

    def encode(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Quantize vectors.

        The scale is the one that leaves the least error for the codes chosen; it takes the place of the norm.

        Args:
            rows: ``[..., dim]``, any float dtype. Not-a-number in a vector stays in that vector.

        Returns:
            Codes ``[..., dim]`` uint8 and scales ``[..., 1]`` bf16, in which no norm overflows.
        """
        # On a GPU every small operation is a launch, and fused they are a third as many; compiling for the CPU would
        # need a compiler on the user's machine.
        return self._compiled(rows) if mx.default_device().type == mx.DeviceType.gpu else self._encode(rows)

    def _encode(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        rows = rows.astype(mx.float32)
        # Divided by the largest coordinate first: squares neither overflow nor vanish.
        largest = mx.abs(rows).max(axis=-1, keepdims=True)
        rotated = self.rotation.apply(rows / mx.where(largest == 0, 1.0, largest))
        norm = mx.linalg.norm(rotated, axis=-1, keepdims=True)
        codes = self._nearest(rotated * (self.dim**0.5 / mx.where(norm == 0, 1.0, norm)))
        chosen = self.points(codes)
        fit = (rotated * chosen).sum(axis=-1, keepdims=True) / chosen.square().sum(axis=-1, keepdims=True)
        return codes, (largest * fit).astype(mx.bfloat16)

    def points(self, codes: mx.array) -> mx.array:
        """Levels of codes, any shape, fp32: the rotated vector but for its scale."""
        if self.step is not None:
            middle: float = (2**self.width - 1) / 2
            return (codes.astype(mx.float32) - middle) * self.step
        return self.levels[codes]

    def decode(self, codes: mx.array, scales: mx.array) -> mx.array:
        """Rebuild vectors ``[..., dim]`` in fp32."""
        # Scaled last: sums over the coordinates of a vector near the end of fp32 would overflow.
        return self.rotation.undo(self.points(codes)) * scales.astype(mx.float32)

    def _nearest(self, coordinates: mx.array) -> mx.array:
        # What is not a number gets some code; the scale of its vector says so. Infinity is beyond all thresholds.
        coordinates = mx.where(mx.isnan(coordinates), 0.0, coordinates)
        if self.step is not None:
            place = mx.floor(coordinates / self.step) + 2 ** (self.width - 1)
            return mx.clip(place, 0, 2**self.width - 1).astype(mx.uint8)
        levels, thresholds = self._first
        index = _cell(coordinates, thresholds)
        if self._second is None:
            return index
        level = levels[index]
        negative = (level < 0) if self.book.folded else None
        rest = coordinates - level
        second = _cell(rest if negative is None else mx.where(negative, -rest, rest), self._second[1])
        if negative is not None:
            second = mx.where(negative, len(self._second[0]) - 1 - second, second)
        return ((index << (self.width // 2)) | second).astype(mx.uint8)


@functools.lru_cache(maxsize=256)
def quantizer(part: Literal["keys", "values"], kind: Kind, bits: int, dim: int, seed: int) -> Quantizer:
    """The quantizer for keys or values, shared by all who ask for it.

    Args:
        part: Keys have two stages of ``bits`` bits, values one.
        kind: The codebook.
        bits: Bits of a stage.
        dim: Dimension of the vectors.
        seed: Seed of the rotation.
    """
    keys = part == "keys"
    book = (key_codebook if keys else value_codebook)(kind, bits, dim)
    return Quantizer(
        book=book,
        width=2 * bits if keys else bits,
        # Only the named method has two streams; folded stages are looked up together.
        streams=2 if keys and kind == "laplace" else 1,
        rotation=rotation(dim, seed, part),
        levels=mx.array(book.levels.astype(np.float32)),
        quads=_quads(book) if book.folded and len(book.levels) == 16 else None,
        first=_table(book.first),
        second=None if book.second is None else _table(book.second),
    )


@functools.lru_cache(maxsize=256)
def bit_weights(book: Codebook) -> tuple[float, ...] | None:
    """Weights w with which every level is the sum of w[i] * (2 * bit i - 1) over the bits of its code.

    A symmetric table of two levels or four always has them, and so has a sum of two such tables.

    Returns:
        One weight a bit, lowest first, or None where there are none.
    """
    levels = book.levels
    width = int(np.log2(len(levels)))
    signs = 2.0 * ((np.arange(len(levels))[:, None] >> np.arange(width)) & 1) - 1
    weights = signs.T @ levels / len(levels)
    if np.abs(signs @ weights - levels).max() > 1e-9:
        return None
    return tuple(float(weight) for weight in weights)


def _quads(book: Codebook) -> mx.array:
    codes = (np.arange(2**16)[:, None] >> np.array([0, 4, 8, 12])) & 15
    return mx.array(book.levels[codes].astype(np.float32))


def _table(levels: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[mx.array, mx.array]:
    return mx.array(levels.astype(np.float32)), mx.array(((levels[:-1] + levels[1:]) / 2).astype(np.float32))


def _cell(values: mx.array, thresholds: mx.array) -> mx.array:
    """Index of the cell between ascending thresholds."""
    index = mx.zeros(values.shape, dtype=mx.uint8)
    # One comparison a threshold, at most 15, and no axis of that length.
    for place in range(thresholds.shape[0]):
        index = index + (values > thresholds[place]).astype(mx.uint8)
    return index
