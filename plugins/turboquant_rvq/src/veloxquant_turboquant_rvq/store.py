"""Packed rows of one layer, for this method and for others that keep their rows in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import UnsupportedShapeError
from veloxquant.buffers import GrowingArrays
from veloxquant.rows import grouped
from veloxquant.rows import weighted
from veloxquant_turboquant_rvq import cuda
from veloxquant_turboquant_rvq.blocks import BlockCodes
from veloxquant_turboquant_rvq.blocks import serves
from veloxquant_turboquant_rvq.codes import RowCodes
from veloxquant_turboquant_rvq.config import TurboQuantRVQConfig
from veloxquant_turboquant_rvq.cuda import Stored
from veloxquant_turboquant_rvq.quantizer import Quantizer
from veloxquant_turboquant_rvq.quantizer import quantizer

__all__ = ["TurboQuantRows"]


@attrs.define(eq=False)
class TurboQuantRows:
    """Every row packed: codes of rotated keys, one scale a row, values likewise or as they came.

    The newest rows may wait for their codes (``take``, ``code``), which are the same whenever they are made. Until then
    only their number is known here, and their values where those stay as they came.

    Args:
        config: Options; ``sinks`` and ``recent`` are the method's own and play no part here.
        blocked: Pack the codes of keys channel by channel where that serves, which is fastest on the CPU when all
            rows are read; otherwise row by row, which is best for reading chosen rows, and on a GPU.
    """

    lossless = False

    config: TurboQuantRVQConfig
    blocked: bool = False
    # Scales of the codes [B, Hkv, rows, 1] bf16.
    _scales: GrowingArrays = attrs.field(factory=GrowingArrays, init=False)
    # Values that stay as they came.
    _plain: GrowingArrays = attrs.field(factory=GrowingArrays, init=False)
    # Newest rows without codes.
    waiting: int = attrs.field(default=0, init=False)
    _keys: RowCodes | BlockCodes | None = attrs.field(default=None, init=False)
    _values: RowCodes | None = attrs.field(default=None, init=False)
    # Names of the dtypes of what came in; an mx.Dtype cannot be copied.
    _dtypes: tuple[str, str] = attrs.field(default=("float32", "float32"), init=False)
    # Sequences and KV heads.
    _heads: tuple[int, int] = attrs.field(default=(0, 0), init=False)

    @property
    def count(self) -> int:
        """Rows held per KV head, those that wait included."""
        return self._scales.count + self.waiting

    @property
    def coded(self) -> int:
        """Rows that have codes: the first ones."""
        return self._scales.count

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Quantize and store new rows behind those held, none of which may wait."""
        self.take(keys, values)
        self.code(keys, values)

    def take(self, keys: mx.array, values: mx.array) -> None:
        """Count new rows, and store what needs no codes; the codes come later."""
        if self._keys is None:
            self._begin(keys.shape[:2], keys.shape[3], values.shape[3], _name(keys), _name(values))
        if self._values is None:
            self._plain.append({"values": values})
        self.waiting += keys.shape[2]

    def code(self, keys: mx.array, values: mx.array | None) -> None:
        """Quantize the first of the rows that wait; values are needed where they are quantized."""
        self.waiting -= keys.shape[2]
        key_codes, key_scales = self._key_codes.quantizer.encode(keys)
        self._key_codes.append(key_codes)
        scales = {"key_scales": key_scales}
        if self._values is not None:
            assert values is not None
            value_codes, scales["value_scales"] = self._values.quantizer.encode(values)
            self._values.append(value_codes)
        self._scales.append(scales)

    def uncode(self, count: int) -> None:
        """Forget the codes of the last ``count`` rows that have some; these rows then wait."""
        self._scales.drop_last(count)
        self._key_codes.drop_last(count)
        if self._values is not None:
            self._values.drop_last(count)
        self.waiting += count

    def _begin(self, heads: tuple[int, ...], key_dim: int, value_dim: int, key_dtype: str, value_dtype: str) -> None:
        config = self.config
        book = quantizer("keys", config.codebook, config.bits, key_dim, config.seed)
        self._keys = BlockCodes(book) if self.blocked and serves(book) else RowCodes(book)
        if config.value_bits is not None:
            self._values = RowCodes(quantizer("values", config.codebook, config.value_bits, value_dim, config.seed))
        self._dtypes, self._heads = (key_dtype, value_dtype), (heads[0], heads[1])

    @property
    def _key_codes(self) -> RowCodes | BlockCodes:
        if self._keys is None:
            raise UnsupportedShapeError("no rows are held yet; append some first")
        return self._keys

    def quantizers(self) -> list[Quantizer]:
        """Quantizers in use, which all stores of the same dimensions share."""
        return [codes.quantizer for codes in (self._keys, self._values) if codes is not None]

    def keys_values(self) -> tuple[mx.array, mx.array]:
        """All rows that have codes in the input dtype, rebuilt lazily; values that stay as they came are all there."""
        codes = self._key_codes
        keys = codes.quantizer.decode(codes.codes(), self._scales.live("key_scales"))
        if self._values is None:
            return _within(keys, self._dtypes[0]), self._plain.live("values")
        values = self._values.quantizer.decode(self._values.codes(), self._scales.live("value_scales"))
        return _within(keys, self._dtypes[0]), _within(values, self._dtypes[1])

    def values_as_they_came(self) -> mx.array:
        """Values ``[B, Hkv, rows, Dv]``, as a view of their buffer; only where they are not quantized."""
        return self._plain.live("values")

    def stored(self) -> Stored | None:
        """The buffers as kernels read them, or None where they do not: codes channel by channel, or some that wait."""
        if not isinstance(self._keys, RowCodes) or self.waiting:
            return None
        keys = (self.count, self._keys.quantizer, self._keys.words, self._scales.whole("key_scales"))
        if self._values is None:
            return Stored(*keys, self._plain.whole("values"))
        return Stored(*keys, self._values.words, self._values.quantizer, self._scales.whole("value_scales"))

    def gather(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """The rows ``index``; no other row is rebuilt."""
        return self.select(index).keys_values()

    def select(self, index: mx.array) -> TurboQuantRows:
        """The rows ``index``, packed as they are."""
        chosen = TurboQuantRows(self.config)
        chosen._scales, chosen._plain = self._scales.select(index), self._plain.select(index)
        chosen._keys = self._key_codes.select(index)
        chosen._values = None if self._values is None else self._values.select(index)
        chosen._dtypes, chosen._heads = self._dtypes, self._heads
        return chosen

    def scores(self, queries: mx.array) -> mx.array:
        """Products of queries and keys ``[B, Hq, L, coded]`` in fp32: the queries are rotated, and no key is."""
        batch, heads, length, _ = queries.shape
        products = self.products(self.rotated(grouped(queries, self._heads[1])))
        return products.reshape(batch, heads, length, self.coded)

    def rotated(self, queries: mx.array) -> mx.array:
        """Rotate vectors ``[..., Dk]`` as keys are; the result is fp32."""
        return self._key_codes.quantizer.rotation.apply(queries)

    def products(self, rotated: mx.array) -> mx.array:
        """Products of rotated queries ``[B, Hkv, M, Dk]`` fp32 and keys: ``[B, Hkv, M, coded]`` fp32."""
        codes = self._key_codes
        if isinstance(codes, RowCodes) and cuda.serves(codes.quantizer, codes.words.shape[3], rotated.shape[2]):
            scales = self._scales.whole("key_scales")
            return cuda.row_scores(rotated, codes.words, scales, codes.quantizer, self.coded)
        return codes.product(rotated) * self._scales.live("key_scales").swapaxes(-1, -2).astype(mx.float32)

    def mix(self, weights: mx.array) -> mx.array:
        """Sums of values ``[B, Hq, L, Dv]`` in fp32; packed ones are rotated back once, after the sum."""
        batch, heads, length, rows = weights.shape
        stacked = grouped(weights, self._heads[1]).astype(mx.float32)
        if self._values is None:
            mixed = weighted(stacked, self._plain.live("values")[:, :, :rows])
        else:
            scales = self._scales.live("value_scales")[:, :, :rows].swapaxes(-1, -2).astype(mx.float32)
            mixed = self._values.quantizer.rotation.undo(self._values.mix(stacked * scales))
        return mixed.reshape(batch, heads, length, mixed.shape[3])

    def keep(self, index: mx.array) -> None:
        """Drop all rows but ``index``; codes are kept as they are."""
        chosen = self.select(index)
        if isinstance(self._keys, BlockCodes):
            blocks = BlockCodes(self._keys.quantizer)
            blocks.append(cast(RowCodes, chosen._keys).codes())
            chosen._keys = blocks
        self._scales, self._plain = chosen._scales, chosen._plain
        self._keys, self._values = chosen._keys, chosen._values

    def drop_last(self, count: int) -> None:
        """Forget the last rows; without any left the store is as new."""
        if self._values is None:
            self._plain.drop_last(count)
        if count > self.waiting:
            self.uncode(count - self.waiting)
        self.waiting -= count
        if self.count == 0:
            self._keys = self._values = None

    def buffers(self) -> list[mx.array]:
        """Every array held, spare rows included."""
        codes = [array for held in (self._keys, self._values) if held is not None for array in held.buffers()]
        return [*codes, *self._scales.buffers(), *self._plain.buffers()]

    def arrays(self) -> dict[str, mx.array]:
        """Packed live rows, and a row of zeros of each kind that tells heads, dimension and dtype."""
        if self._keys is None:
            return {}
        named = {f"key_{name}": array for name, array in self._keys.arrays().items()}
        if self._values is not None:
            named |= {f"value_{name}": array for name, array in self._values.arrays().items()}
        for part, codes, dtype in zip(("key", "value"), (self._keys, self._values), self._dtypes, strict=True):
            if codes is not None:
                named[f"{part}_like"] = mx.zeros((*self._heads, codes.quantizer.dim), dtype=getattr(mx, dtype))
        return {**named, **self._scales.arrays(), **self._plain.arrays()}

    def load(self, arrays: Mapping[str, mx.array], waiting: int = 0) -> None:
        """Fill an empty store with what ``arrays`` gave, in whichever layout, and with rows that wait."""
        if not arrays:
            return
        values = arrays.get("values", arrays.get("value_like"))
        assert values is not None  # one of the two is always there
        like = arrays["key_like"]
        self._begin(like.shape[:2], like.shape[-1], values.shape[-1], _name(like), _name(values))
        found = {name: arrays[f"key_{name}"] for name in ("blocks", "codes") if f"key_{name}" in arrays}
        self.waiting = waiting
        if "blocks" in found and isinstance(self._keys, RowCodes):
            blocks = BlockCodes(self._keys.quantizer)
            blocks.load(found)
            self._keys.append(blocks.codes())
        elif "codes" in found and "blocks" not in found and isinstance(self._keys, BlockCodes):
            rows = RowCodes(self._keys.quantizer)
            rows.load(found)
            self._keys.append(rows.codes())
        else:
            self._key_codes.load(found)
        if self._values is not None and "value_codes" in arrays:
            self._values.load({"codes": arrays["value_codes"]})
        self._scales.load({name: arrays[name] for name in ("key_scales", "value_scales") if name in arrays})
        self._plain.load({name: arrays[name] for name in ("values",) if name in arrays})

    def account(self) -> ByteCount:
        """Bytes of codes and scales, spare capacity included, and details of the keys."""
        if self._keys is None:
            return ByteCount(details={"compressed_key_bytes": 0, "dense_key_bytes": 0, "assigned_bits": 0.0})
        keys = self._keys.nbytes + self._scales.nbytes("key_scales")
        values = self._plain.nbytes("values") + self._scales.nbytes("value_scales")
        coordinates = self._heads[0] * self._heads[1] * self._keys.quantizer.dim
        return ByteCount(
            keys=keys,
            values=values + (0 if self._values is None else self._values.nbytes),
            static=sum(quantizer.nbytes for quantizer in self.quantizers()),
            rows=self.count,
            details={
                "compressed_key_bytes": keys,
                "dense_key_bytes": coordinates * self.count * getattr(mx, self._dtypes[0]).size,
                "assigned_bits": round(8 * keys / (coordinates * self.coded), 3) if self.coded else 0.0,
            },
        )


def _within(rows: mx.array, dtype: str) -> mx.array:
    """Cast; what was rounded beyond the largest number of fp16 becomes that number."""
    if dtype == "float16":
        rows = mx.clip(rows, -65504.0, 65504.0)
    return rows.astype(getattr(mx, dtype))


def _name(array: mx.array) -> str:
    return str(array.dtype).rpartition(".")[2]
