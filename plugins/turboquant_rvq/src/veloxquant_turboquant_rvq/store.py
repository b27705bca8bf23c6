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

    Args:
        config: Options; ``sinks`` and ``recent`` are the method's own and play no part here.
        blocked: Pack the codes of keys channel by channel where that serves, which is fastest on the CPU when all
            rows are read; otherwise row by row, which is best for reading chosen rows, and on a GPU.
    """

    lossless = False

    config: TurboQuantRVQConfig
    blocked: bool = False
    # What takes no codes: scales [B, Hkv, rows, 1] bf16, and values that stay as they came.
    _rows: GrowingArrays = attrs.field(factory=GrowingArrays, init=False)
    _keys: RowCodes | BlockCodes | None = attrs.field(default=None, init=False)
    _values: RowCodes | None = attrs.field(default=None, init=False)
    # Names of the dtypes of what came in; an mx.Dtype cannot be copied.
    _dtypes: tuple[str, str] = attrs.field(default=("float32", "float32"), init=False)

    @property
    def count(self) -> int:
        """Rows held per KV head."""
        return self._rows.count

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Quantize and store new rows behind those held."""
        if self._keys is None:
            self._begin(keys.shape[3], values.shape[3], _name(keys), _name(values))
        key_codes, key_scales = self._key_codes.quantizer.encode(keys)
        self._key_codes.append(key_codes)
        if self._values is None:
            self._rows.append({"key_scales": key_scales, "values": values})
            return
        value_codes, value_scales = self._values.quantizer.encode(values)
        self._values.append(value_codes)
        self._rows.append({"key_scales": key_scales, "value_scales": value_scales})

    def _begin(self, key_dim: int, value_dim: int, key_dtype: str, value_dtype: str) -> None:
        config = self.config
        book = quantizer("keys", config.codebook, config.bits, key_dim, config.seed)
        self._keys = BlockCodes(book) if self.blocked and serves(book) else RowCodes(book)
        if config.value_bits is not None:
            self._values = RowCodes(quantizer("values", config.codebook, config.value_bits, value_dim, config.seed))
        self._dtypes = (key_dtype, value_dtype)

    @property
    def _key_codes(self) -> RowCodes | BlockCodes:
        if self._keys is None:
            raise UnsupportedShapeError("no rows are held yet; append some first")
        return self._keys

    def quantizers(self) -> list[Quantizer]:
        """Quantizers in use, which all stores of the same dimensions share."""
        return [codes.quantizer for codes in (self._keys, self._values) if codes is not None]

    def keys_values(self) -> tuple[mx.array, mx.array]:
        """All rows in the input dtype, rebuilt lazily."""
        codes = self._key_codes
        keys = codes.quantizer.decode(codes.codes(), self._rows.live("key_scales"))
        if self._values is None:
            return _within(keys, self._dtypes[0]), self._rows.live("values")
        values = self._values.quantizer.decode(self._values.codes(), self._rows.live("value_scales"))
        return _within(keys, self._dtypes[0]), _within(values, self._dtypes[1])

    def values_as_they_came(self) -> mx.array:
        """Values ``[B, Hkv, rows, Dv]``, as a view of their buffer; only where they are not quantized."""
        return self._rows.live("values")

    def stored(self) -> Stored | None:
        """The buffers as kernels read them, or None where the codes of keys are packed channel by channel."""
        if not isinstance(self._keys, RowCodes):
            return None
        keys = (self.count, self._keys.quantizer, self._keys.words, self._rows.whole("key_scales"))
        if self._values is None:
            return Stored(*keys, self._rows.whole("values"))
        return Stored(*keys, self._values.words, self._values.quantizer, self._rows.whole("value_scales"))

    def gather(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """The rows ``index``; no other row is rebuilt."""
        return self.select(index).keys_values()

    def select(self, index: mx.array) -> TurboQuantRows:
        """The rows ``index``, packed as they are."""
        chosen = TurboQuantRows(self.config)
        chosen._rows = self._rows.select(index)
        chosen._keys = self._key_codes.select(index)
        chosen._values = None if self._values is None else self._values.select(index)
        chosen._dtypes = self._dtypes
        return chosen

    def scores(self, queries: mx.array) -> mx.array:
        """Products of queries and keys ``[B, Hq, L, rows]`` in fp32: the queries are rotated, and no key is."""
        codes = self._key_codes
        batch, heads, length, _ = queries.shape
        kv_heads = self._rows.whole("key_scales").shape[1]
        rotated = codes.quantizer.rotation.apply(grouped(queries, kv_heads))
        return self._scaled_products(codes, rotated).reshape(batch, heads, length, self.count)

    def _scaled_products(self, codes: RowCodes | BlockCodes, rotated: mx.array) -> mx.array:
        if isinstance(codes, RowCodes) and cuda.serves(codes.quantizer, codes.words.shape[3], rotated.shape[2]):
            scales = self._rows.whole("key_scales")
            return cuda.row_scores(rotated, codes.words, scales, codes.quantizer, self.count)
        return codes.product(rotated) * self._rows.live("key_scales").swapaxes(-1, -2).astype(mx.float32)

    def mix(self, weights: mx.array) -> mx.array:
        """Sums of values ``[B, Hq, L, Dv]`` in fp32; packed ones are rotated back once, after the sum."""
        batch, heads, length, rows = weights.shape
        kv_heads = self._rows.whole("key_scales").shape[1]
        stacked = grouped(weights, kv_heads).astype(mx.float32)
        if self._values is None:
            mixed = weighted(stacked, self._rows.live("values")[:, :, :rows])
        else:
            scales = self._rows.live("value_scales")[:, :, :rows].swapaxes(-1, -2).astype(mx.float32)
            mixed = self._values.quantizer.rotation.undo(self._values.mix(stacked * scales))
        return mixed.reshape(batch, heads, length, mixed.shape[3])

    def keep(self, index: mx.array) -> None:
        """Drop all rows but ``index``; codes are kept as they are."""
        chosen = self.select(index)
        if isinstance(self._keys, BlockCodes):
            blocks = BlockCodes(self._keys.quantizer)
            blocks.append(cast(RowCodes, chosen._keys).codes())
            chosen._keys = blocks
        self._rows, self._keys, self._values = chosen._rows, chosen._keys, chosen._values

    def drop_last(self, count: int) -> None:
        """Forget the last rows; without any left the store is as new."""
        self._rows.drop_last(count)
        if self.count == 0:
            self._keys = self._values = None
            return
        self._key_codes.drop_last(count)
        if self._values is not None:
            self._values.drop_last(count)

    def buffers(self) -> list[mx.array]:
        """Every array held, spare rows included."""
        codes = [array for held in (self._keys, self._values) if held is not None for array in held.buffers()]
        return [*codes, *self._rows.buffers()]

    def arrays(self) -> dict[str, mx.array]:
        """Packed live rows, and an empty row of each kind that tells dimension and dtype."""
        if self._keys is None:
            return {}
        named = {f"key_{name}": array for name, array in self._keys.arrays().items()}
        if self._values is not None:
            named |= {f"value_{name}": array for name, array in self._values.arrays().items()}
        for part, codes, dtype in zip(("key", "value"), (self._keys, self._values), self._dtypes, strict=True):
            if codes is not None:
                named[f"{part}_like"] = mx.zeros((codes.quantizer.dim,), dtype=getattr(mx, dtype))
        return {**named, **self._rows.arrays()}

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Fill an empty store with what ``arrays`` gave, in whichever layout."""
        if not arrays:
            return
        values = arrays.get("values", arrays.get("value_like"))
        assert values is not None  # one of the two is always there
        self._begin(arrays["key_like"].shape[-1], values.shape[-1], _name(arrays["key_like"]), _name(values))
        found = {name: arrays[f"key_{name}"] for name in ("blocks", "codes") if f"key_{name}" in arrays}
        if "blocks" in found and isinstance(self._keys, RowCodes):
            blocks = BlockCodes(self._keys.quantizer)
            blocks.load(found)
            self._keys.append(blocks.codes())
        elif "blocks" not in found and isinstance(self._keys, BlockCodes):
            rows = RowCodes(self._keys.quantizer)
            rows.load(found)
            self._keys.append(rows.codes())
        else:
            self._key_codes.load(found)
        if self._values is not None:
            self._values.load({"codes": arrays["value_codes"]})
        self._rows.load({name: arrays[name] for name in ("key_scales", "value_scales", "values") if name in arrays})

    def account(self) -> ByteCount:
        """Bytes of codes and scales, spare capacity included, and details of the keys."""
        if self._keys is None:
            return ByteCount(details={"compressed_key_bytes": 0, "dense_key_bytes": 0, "assigned_bits": 0.0})
        keys = self._keys.nbytes + self._rows.nbytes("key_scales")
        values = self._rows.nbytes("values") + self._rows.nbytes("value_scales")
        batch, heads = self._rows.whole("key_scales").shape[:2]
        coordinates = batch * heads * self.count * self._keys.quantizer.dim
        return ByteCount(
            keys=keys,
            values=values + (0 if self._values is None else self._values.nbytes),
            static=sum(quantizer.nbytes for quantizer in self.quantizers()),
            rows=self.count,
            details={
                "compressed_key_bytes": keys,
                "dense_key_bytes": coordinates * getattr(mx, self._dtypes[0]).size,
                "assigned_bits": round(8 * keys / coordinates, 3),
            },
        )


def _within(rows: mx.array, dtype: str) -> mx.array:
    """Cast; what was rounded beyond the largest number of fp16 becomes that number."""
    if dtype == "float16":
        rows = mx.clip(rows, -65504.0, 65504.0)
    return rows.astype(getattr(mx, dtype))


def _name(array: mx.array) -> str:
    return str(array.dtype).rpartition(".")[2]
