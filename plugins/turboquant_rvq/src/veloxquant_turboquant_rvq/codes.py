"""Codes of vectors, packed row by row, and the products that read them as they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import attrs
import mlx.core as mx
import numpy as np

from veloxquant.buffers import GrowingArrays
from veloxquant.devices import on_cuda
from veloxquant_turboquant_rvq.packing import pack
from veloxquant_turboquant_rvq.packing import unpack
from veloxquant_turboquant_rvq.packing import words
from veloxquant_turboquant_rvq.quantizer import Quantizer

__all__ = ["RowCodes", "affine", "filled", "pack_rows", "products_serve", "unpack_rows"]

# Widths of mlx's affine kernels and the group sizes that they take.
_WIDTHS = (2, 3, 4, 6, 8)
_GROUPS = (128, 64, 32)
# Numbers of an array that is worth keeping.
_SMALL = 2048


def pack_rows(codes: mx.array, quantizer: Quantizer) -> mx.array:
    """Pack codes ``[..., dim]`` row by row: each stream padded to whole words, stage 1 before stage 2."""
    bits = quantizer.width // quantizer.streams
    if quantizer.streams == 1:
        return pack(codes, bits)
    return mx.concatenate([pack(codes >> bits, bits), pack(codes & (2**bits - 1), bits)], axis=-1)


def unpack_rows(packed: mx.array, quantizer: Quantizer) -> mx.array:
    """Undo ``pack_rows``: codes ``[..., dim]`` uint8."""
    bits = quantizer.width // quantizer.streams
    if quantizer.streams == 1:
        return unpack(packed, bits, quantizer.dim).astype(mx.uint8)
    per_stream = words(quantizer.dim, bits)
    first = unpack(packed[..., :per_stream], bits, quantizer.dim)
    second = unpack(packed[..., per_stream:], bits, quantizer.dim)
    return ((first << bits) | second).astype(mx.uint8)


def products_serve() -> bool:
    """Whether ``mx.quantized_matmul`` may multiply vectors with codes here.

    Not on CUDA: mlx 0.32 gives wrong numbers there for codes of 4 and 8 bits that share one scale a row, and has no
    products with codes of 1 bit.
    """
    return not on_cuda()


def affine(quantizer: Quantizer, shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """Scales and biases that turn the codes of a uniform grid into its levels, one of each per group."""
    assert quantizer.step is not None  # only such codes are stored in mlx's affine layout
    return filled(shape, quantizer.step), filled(shape, -(2**quantizer.width - 1) / 2 * quantizer.step)


def filled(shape: tuple[int, ...], value: float) -> mx.array:
    """An array of one fp32 number; a small one is made once, for every layer and step asks for the same."""
    if math.prod(shape) <= _SMALL:
        return _small(shape, value)
    return mx.full(shape, value, dtype=mx.float32)


@functools.lru_cache(maxsize=128)
def _small(shape: tuple[int, ...], value: float) -> mx.array:
    # From numpy: nothing is left to compute, whichever thread asks first.
    return mx.array(np.full(shape, value, dtype=np.float32))


@attrs.define(eq=False)
class RowCodes:
    """Codes that are packed row by row, so that rows are gathered by whole words.

    A uniform grid's rows are in mlx's own affine layout, and products with them are ``mx.quantized_matmul`` where its
    groups divide the dimension and ``products_serve``; elsewhere the codes are expanded to levels, still rotated and
    unscaled, for a moment.

    Args:
        quantizer: What made the codes.
    """

    quantizer: Quantizer
    _rows: GrowingArrays = attrs.field(factory=GrowingArrays)

    @property
    def count(self) -> int:
        """Rows held per KV head."""
        return self._rows.count

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, spare capacity included."""
        return self._rows.nbytes("codes")

    @property
    def words(self) -> mx.array:
        """The buffer ``[B, H, >= count, words]``, spare rows included."""
        return self._rows.whole("codes")

    def append(self, codes: mx.array) -> None:
        """Store codes ``[B, H, S, dim]``."""
        self._rows.append({"codes": pack_rows(codes, self.quantizer)})

    def codes(self) -> mx.array:
        """All codes ``[B, H, rows, dim]`` uint8."""
        return unpack_rows(self._rows.live("codes"), self.quantizer)

    def product(self, rows: mx.array) -> mx.array:
        """Products of rotated vectors with the levels of every row.

        Args:
            rows: ``[B, H, M, dim]`` fp32.

        Returns:
            ``[B, H, M, count]`` fp32.
        """
        group = self._group() if products_serve() else None
        if group is None:
            return rows @ self._expanded().swapaxes(-1, -2)
        return self._native(rows, group, transpose=True)[..., : self.count]

    def mix(self, weights: mx.array) -> mx.array:
        """Sums of levels with a weight for each of the first n rows.

        Args:
            weights: ``[B, H, M, n]`` fp32, n <= count.

        Returns:
            ``[B, H, M, dim]`` fp32, rotated.
        """
        group = self._group()
        if group is None:
            return weights @ self._expanded()[:, :, : weights.shape[3]]
        spare = self._rows.whole("codes").shape[2] - weights.shape[3]
        return self._native(mx.pad(weights, [(0, 0), (0, 0), (0, 0), (0, spare)]), group, transpose=False)

    def _expanded(self) -> mx.array:
        """Levels of all codes ``[B, H, rows, dim]``."""
        quads = self.quantizer.quads
        if quads is None:
            return self.quantizer.points(self.codes())
        packed = self._rows.live("codes")
        return quads[packed.view(mx.uint16)].reshape(*packed.shape[:3], -1)[..., : self.quantizer.dim]

    def _group(self) -> int | None:
        """Channels that share a scale in mlx's layout; None where its kernels do not serve."""
        if self.quantizer.step is None or self.quantizer.width not in _WIDTHS:
            return None
        return next((group for group in _GROUPS if self.quantizer.dim % group == 0), None)

    def _native(self, rows: mx.array, group: int, *, transpose: bool) -> mx.array:
        packed = self._rows.whole("codes")
        scales, biases = affine(self.quantizer, (*packed.shape[:3], self.quantizer.dim // group))
        return mx.quantized_matmul(
            rows, packed, scales, biases, transpose=transpose, group_size=group, bits=self.quantizer.width
        )

    def select(self, index: mx.array) -> RowCodes:
        """The rows ``index`` ``[B, H, k]``, packed as they are."""
        return RowCodes(self.quantizer, self._rows.select(index))

    def drop_last(self, count: int) -> None:
        """Forget the last rows."""
        self._rows.drop_last(count)

    def buffers(self) -> list[mx.array]:
        """The buffer, if there is one."""
        return self._rows.buffers()

    def arrays(self) -> dict[str, mx.array]:
        """Live rows."""
        return self._rows.arrays()

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Take over what ``arrays`` gave."""
        self._rows.load(arrays)
