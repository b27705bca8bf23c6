"""What holds the rows, apart from what chooses among them.

``RowStore`` is the protocol; ``DenseRows`` keeps rows as they came; a codec offers its own store through the hook
``veloxquant_rows``.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from typing import Protocol
from typing import runtime_checkable

import attrs
import mlx.core as mx

from veloxquant.buffers import GrowingArrays
from veloxquant.types import ByteCount

__all__ = ["DenseRows", "RowStore", "grouped", "products", "weighted"]


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

    def select(self, index: mx.array) -> RowStore:
        """The rows ``index`` in the stored form, as a store of their own; no row is rebuilt.

        Its ``scores`` and ``mix`` attend to the chosen rows alone.
        """

    def scores(self, queries: mx.array) -> mx.array:
        """Products of queries and keys ``[B, Hq, L, rows]`` in fp32, unscaled and unmasked."""

    def mix(self, weights: mx.array) -> mx.array:
        """Sums of values weighted by fp32 ``weights``: ``[B, Hq, L, Dv]`` in fp32.

        Weights ``[B, Hq, L, n]`` of fewer than all rows are those of the first n.
        """

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


def products(queries: mx.array, keys: mx.array) -> mx.array:
    """Products of queries ``[B, Hq, L, Dk]`` and keys ``[B, Hkv, n, Dk]``: ``[B, Hq, L, n]`` in fp32."""
    batch, heads, length, _ = queries.shape
    stacked = grouped(queries, keys.shape[1]).astype(mx.float32)
    product = stacked @ keys.astype(mx.float32).swapaxes(-1, -2)
    return product.reshape(batch, heads, length, keys.shape[2])


def weighted(weights: mx.array, values: mx.array) -> mx.array:
    """Sums of values with fp32 weights.

    On a GPU half-precision values are not cast, which would cost more than the product: the weights are rounded to
    their dtype instead, as fused attention kernels do, and sums are fp32 inside.

    Args:
        weights: ``[B, Hkv, M, n]`` fp32.
        values: ``[B, Hkv, n, Dv]``.

    Returns:
        ``[B, Hkv, M, Dv]`` fp32.
    """
    if mx.default_device().type == mx.DeviceType.gpu:
        return (weights.astype(values.dtype) @ values).astype(mx.float32)
    return weights @ values.astype(mx.float32)


@attrs.define(eq=False)
class DenseRows:
    """Rows as they came, in buffers that grow by a sixteenth (16 to 256 rows)."""

    lossless = True

    _rows: GrowingArrays = attrs.field(factory=GrowingArrays)

    @property
    def count(self) -> int:
        """Rows held per KV head."""
        return self._rows.count

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Store new rows behind those held."""
        self._rows.append({"keys": keys, "values": values})

    def keys_values(self) -> tuple[mx.array, mx.array]:
        """All rows, as views of the buffers."""
        return self._rows.live("keys"), self._rows.live("values")

    def gather(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """The rows ``index``, read through one take over whole rows."""
        rows = self._rows.gather_all(index)
        return rows["keys"], rows["values"]

    def reader(self, index: mx.array) -> tuple[Callable[[slice], tuple[mx.array, mx.array]], int]:
        """What gathers the rows ``index`` of the heads of a slice, and the bytes that all heads have."""
        read, size = self._rows.reader(index)

        def gather(heads: slice) -> tuple[mx.array, mx.array]:
            rows = read(heads)
            return rows["keys"], rows["values"]

        return gather, size

    def select(self, index: mx.array) -> DenseRows:
        """The rows ``index`` as a store of their own."""
        return DenseRows(self._rows.select(index))

    def scores(self, queries: mx.array) -> mx.array:
        """Products of queries and keys ``[B, Hq, L, rows]`` in fp32."""
        return products(queries, self._rows.live("keys"))

    def mix(self, weights: mx.array) -> mx.array:
        """Sums of values weighted by ``weights``, ``[B, Hq, L, Dv]`` in fp32."""
        values = self._rows.live("values")[:, :, : weights.shape[3]]
        batch, heads, length, _ = weights.shape
        product = weighted(grouped(weights, values.shape[1]).astype(mx.float32), values)
        return product.reshape(batch, heads, length, values.shape[3])

    def keep(self, index: mx.array) -> None:
        """Drop all rows but ``index``; the buffers then fit exactly."""
        self._rows.keep(index)

    def drop_last(self, count: int) -> None:
        """Forget the last ``count`` rows; capacity falls to what it would be without them."""
        self._rows.drop_last(count)

    def arrays(self) -> dict[str, mx.array]:
        """Live rows under ``keys`` and ``values``."""
        return self._rows.arrays()

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Fill an empty store with what ``arrays`` gave."""
        if arrays:
            self._rows.load({name: arrays[name] for name in ("keys", "values")})

    def account(self) -> ByteCount:
        """Bytes of both buffers."""
        return ByteCount(keys=self._rows.nbytes("keys"), values=self._rows.nbytes("values"))
