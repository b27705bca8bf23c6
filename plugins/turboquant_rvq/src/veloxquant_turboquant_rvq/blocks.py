"""Codes packed channel by channel in blocks of rows: the layout whose products are fast on the CPU.

``mx.quantized_matmul`` reads weights either along the sum (``transpose=True``) or across it. On the CPU back end the
second is more than twice as fast, faster than the dense product in fp32, and it needs the codes of one channel
side by side. It also takes any dimension, for its groups lie along the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import mlx.core as mx

from veloxquant_turboquant_rvq.codes import RowCodes
from veloxquant_turboquant_rvq.codes import affine
from veloxquant_turboquant_rvq.codes import filled
from veloxquant_turboquant_rvq.codes import products_serve
from veloxquant_turboquant_rvq.packing import pack
from veloxquant_turboquant_rvq.packing import unpack
from veloxquant_turboquant_rvq.quantizer import Quantizer
from veloxquant_turboquant_rvq.quantizer import bit_weights

__all__ = ["BLOCK", "BlockCodes", "serves"]

BLOCK = 128
"""Rows of a block, one group of mlx's affine layout."""


def serves(quantizer: Quantizer) -> bool:
    """Whether products with blocks of this quantizer's codes need no expansion of the codes."""
    return quantizer.step is not None or bit_weights(quantizer.book) is not None


@attrs.define(eq=False)
class BlockCodes:
    """Full blocks packed along the rows, and the rows behind them packed as in ``RowCodes``.

    A uniform grid's codes are one stream, ``[B, H, blocks, dim, words]``. Codes of two stages are stored as planes of
    single bits, ``[B, H, blocks, width * dim, words]``, lowest bit first: a level is a weighted sum of those bits, so a
    product with the levels is one with the planes.

    Args:
        quantizer: What made the codes.
    """

    quantizer: Quantizer
    _blocks: mx.array | None = None
    _tail: RowCodes = attrs.field(init=False)

    @_tail.default
    def _empty(self) -> RowCodes:
        return RowCodes(self.quantizer)

    @property
    def count(self) -> int:
        """Rows held per KV head."""
        return self._full * BLOCK + self._tail.count

    @property
    def _full(self) -> int:
        return 0 if self._blocks is None else self._blocks.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of blocks and rows, spare capacity included."""
        return self._tail.nbytes + (0 if self._blocks is None else self._blocks.nbytes)

    def append(self, codes: mx.array) -> None:
        """Store codes ``[B, H, S, dim]``."""
        waiting = self._tail.count
        if waiting + codes.shape[2] < BLOCK:
            self._tail.append(codes)
            return
        if waiting:
            codes = mx.concatenate([self._tail.codes(), codes], axis=2)
        full = codes.shape[2] // BLOCK
        new = self._packed(codes[:, :, : full * BLOCK])
        self._blocks = new if self._blocks is None else mx.concatenate([self._blocks, new], axis=2)
        self._fill_tail(codes[:, :, full * BLOCK :])

    def _fill_tail(self, codes: mx.array) -> None:
        # Anew, so that its capacity follows from the number of rows alone.
        self._tail = RowCodes(self.quantizer)
        if codes.shape[2]:
            self._tail.append(codes)

    def _packed(self, codes: mx.array) -> mx.array:
        batch, heads, rows, dim = codes.shape
        columns = codes.reshape(batch, heads, rows // BLOCK, BLOCK, dim).swapaxes(-1, -2)
        if self.quantizer.step is not None:
            return pack(columns, self.quantizer.width)
        planes = [pack((columns >> place) & 1, 1) for place in range(self.quantizer.width)]
        return mx.concatenate(planes, axis=-2)

    def _unpacked(self, blocks: mx.array) -> mx.array:
        batch, heads, count = blocks.shape[:3]
        width, dim = self.quantizer.width, self.quantizer.dim
        if self.quantizer.step is not None:
            columns = unpack(blocks, width, BLOCK)
        else:
            bits = unpack(blocks, 1, BLOCK).reshape(batch, heads, count, width, dim, BLOCK)
            columns = (bits << mx.arange(width, dtype=mx.uint32)[:, None, None]).sum(axis=3)
        return columns.swapaxes(-1, -2).reshape(batch, heads, count * BLOCK, dim).astype(mx.uint8)

    def codes(self) -> mx.array:
        """All codes ``[B, H, rows, dim]`` uint8."""
        if self._blocks is None:
            return self._tail.codes()
        blocks = self._unpacked(self._blocks)
        return mx.concatenate([blocks, self._tail.codes()], axis=2) if self._tail.count else blocks

    def product(self, rows: mx.array) -> mx.array:
        """As ``RowCodes.product``."""
        if not products_serve():
            return rows @ self.quantizer.points(self.codes()).swapaxes(-1, -2)
        parts = [] if self._blocks is None else [self._block_product(rows, self._blocks)]
        if self._tail.count:
            parts.append(self._tail.product(rows))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _block_product(self, rows: mx.array, blocks: mx.array) -> mx.array:
        rows = rows[:, :, None]
        if self.quantizer.step is not None:
            scales, biases = affine(self.quantizer, (*blocks.shape[:4], 1))
            products = _quantized(rows, blocks, scales, biases, self.quantizer.width)
        else:
            products = self._plane_product(rows, blocks)
        batch, heads, count, length, _ = products.shape
        return products.swapaxes(2, 3).reshape(batch, heads, length, count * BLOCK)

    def _plane_product(self, rows: mx.array, blocks: mx.array) -> mx.array:
        weights = bit_weights(self.quantizer.book)
        assert weights is not None  # ``serves`` said so
        rows = mx.concatenate([rows * weight for weight in weights], axis=-1)
        shape = (*blocks.shape[:4], 1)
        # A set bit counts 1 and a clear one -1.
        return _quantized(rows, blocks, filled(shape, 2.0), filled(shape, -1.0), 1)

    def select(self, index: mx.array) -> RowCodes:
        """The rows ``index`` ``[B, H, k]``, packed row by row; all rows are unpacked for a moment."""
        chosen = RowCodes(self.quantizer)
        chosen.append(mx.take_along_axis(self.codes(), index[..., None], axis=2))
        return chosen

    def drop_last(self, count: int) -> None:
        """Forget the last rows; a block that is cut becomes rows again."""
        if count <= self._tail.count:
            self._tail.drop_last(count)
            return
        full, rest = divmod(self.count - count, BLOCK)
        assert self._blocks is not None  # there are more rows than the tail has
        cut = self._blocks[:, :, full : full + 1]
        # A copy: a view would hold all blocks.
        self._blocks = mx.contiguous(self._blocks[:, :, :full]) if full else None
        self._fill_tail(self._unpacked(cut)[:, :, :rest])

    def buffers(self) -> list[mx.array]:
        """Blocks, and the buffer of the rows behind them."""
        rows = self._tail.buffers()
        return rows if self._blocks is None else [self._blocks, *rows]

    def arrays(self) -> dict[str, mx.array]:
        """Blocks, and live rows behind them."""
        arrays = self._tail.arrays()
        return arrays if self._blocks is None else {**arrays, "blocks": self._blocks}

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Take over what ``arrays`` gave."""
        self._blocks = arrays.get("blocks")
        if "codes" in arrays:
            tail = RowCodes(self.quantizer)
            tail.load({"codes": arrays["codes"]})
            self._fill_tail(tail.codes())


def _quantized(rows: mx.array, blocks: mx.array, scales: mx.array, biases: mx.array, width: int) -> mx.array:
    return mx.quantized_matmul(rows, blocks, scales, biases, transpose=False, group_size=BLOCK, bits=width)
