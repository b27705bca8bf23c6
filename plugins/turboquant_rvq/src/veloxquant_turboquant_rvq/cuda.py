"""Attention on packed rows in two CUDA kernels: one over all rows in parts, one that puts the parts together.

On a GPU the scores of all rows, their softmax and every small operation around them cost more than the rows
themselves. Here each row is read once, straight into the registers of the tensor cores, and nothing of the size of
the rows is written. The partial softmax over parts of the rows is that of flash decoding (Dao et al. 2023).

Scores are good to fp32 although the tensor cores take fp16: the levels of a uniform grid, less its step, are halves
of small integers and exact there, and a query is the sum of two such numbers, which gives 22 bits. Weights are split
in two likewise.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import attrs
import mlx.core as mx

from veloxquant_turboquant_rvq.cuda_source import HEADER
from veloxquant_turboquant_rvq.cuda_source import PARTS
from veloxquant_turboquant_rvq.cuda_source import SCORES
from veloxquant_turboquant_rvq.cuda_source import WHOLE
from veloxquant_turboquant_rvq.exact import ExactRows
from veloxquant_turboquant_rvq.quantizer import Quantizer

__all__ = ["Stored", "attend", "available", "row_scores", "serves"]

_WARPS = 4
_ROWS = 16
"""Rows that a warp reads at once."""
_QUERIES = 8
"""Most queries of a KV head: with their second halves they fill a tile of the tensor cores."""
_BLOCKS = 396
"""Blocks that run at once: three on each of the multiprocessors of an H100 or H200."""
_WAYS = 4
"""Threads that share the parts of one channel."""
_MOST_EXACT = 512
"""Most rows as they came: one block of a head reads them all."""

_THREADS = 128
_SHARED_BYTES = 48 * 1024

_DIMS = (64, 128)
_HALF = (mx.bfloat16, mx.float16)


@attrs.frozen(eq=False)
class Stored:
    """Packed rows as they lie in their buffers, spare ones behind.

    Args:
        count: Rows held per KV head.
        keys: Quantizer of the keys.
        words: Codes of the keys ``[B, Hkv, >= count, words]``, each row as ``pack_rows`` gave it.
        key_scales: ``[B, Hkv, >= count, 1]``.
        values: Values as they came ``[B, Hkv, >= count, Dv]``, or their codes.
        value_quantizer: Quantizer of the values, or None where they are as they came.
        value_scales: ``[B, Hkv, >= count, 1]``, or None likewise.
    """

    count: int
    keys: Quantizer
    words: mx.array
    key_scales: mx.array
    values: mx.array
    value_quantizer: Quantizer | None = None
    value_scales: mx.array | None = None

    @property
    def value_dim(self) -> int:
        """Dimension of the values."""
        return int(self.values.shape[3]) if self.value_quantizer is None else self.value_quantizer.dim


def attend(
    stored: Stored,
    queries: mx.array,
    last: ExactRows,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    first: ExactRows | None,
) -> mx.array | None:
    """Attend to packed rows, the last and the first of them as they are given; as ``attend_rows`` does.

    Args:
        stored: All rows.
        queries: Queries of the last L rows ``[B, Hq, L, Dk]``.
        last: The last E rows, E >= L; their values are read from ``stored`` where those are as they came.
        scale: Factor on the logits.
        mask: None, ``"causal"``, or an array.
        sinks: Sink logits ``[Hq]``, or None.
        first: The first rows, likewise, or None.

    Returns:
        ``[B, Hq, L, Dv]`` in the dtype of the queries, or None where the kernels do not serve.
    """
    exact = last.count + (0 if first is None else first.count)
    if not (available() and _serves(stored, queries, last, mask) and exact < stored.count and exact <= _MOST_EXACT):
        return None
    partial = _partial(stored, queries, last, scale, first, causal=mask is not None and queries.shape[2] > 1)
    return _merged(partial, stored, queries, scale, sinks)


def _partial(
    stored: Stored, queries: mx.array, last: ExactRows, scale: float, first: ExactRows | None, *, causal: bool
) -> list[mx.array]:
    """Sums of values ``[B * Hkv, parts, G * L, Dv]``, references of logits and sums of weights likewise."""
    batch, heads, length, dim = queries.shape
    kv_heads = stored.words.shape[1]
    stacked = heads // kv_heads * length
    end = stored.count - last.count
    tiles = -(-end // _ROWS)
    # At least two tiles for a warp; otherwise all blocks at once.
    parts = 1 + max(1, min(_BLOCKS // (batch * kv_heads) - 1, -(-tiles // (2 * _WARPS))))
    oldest = last if first is None else first
    last_values = stored.values if last.values is None else last.values
    shape = (batch * kv_heads, parts, stacked)
    partial: list[mx.array] = _parts()(
        inputs=[
            queries,
            stored.words,
            stored.key_scales,
            stored.values,
            stored.key_scales if stored.value_scales is None else stored.value_scales,
            last.keys,
            last_values,
            oldest.keys,
            stored.values if oldest.values is None else oldest.values,
            stored.keys.rotation.signs,
            _counting(stored.key_scales, end),
            _factors(scale, stored.keys, stored.value_quantizer),
        ],
        template=[
            ("D", dim),
            ("DV", stored.value_dim),
            ("M", stacked),
            ("L", length),
            ("WARPS", _WARPS),
            ("WIDTH", stored.keys.width),
            ("VALUE_WIDTH", 0 if stored.value_quantizer is None else stored.value_quantizer.width),
            ("VALUE_BF16", stored.values.dtype == mx.bfloat16),
            ("OWN_VALUES", last.values is not None),
            ("FIRST", first is not None),
            ("CAUSAL", causal),
            # Pointers have these dtypes, and mlx tells kernels apart by their template arguments alone.
            ("T", queries.dtype),
            ("K", last.keys.dtype),
            ("V", last_values.dtype),
        ],
        grid=(parts * _WARPS * 32, batch * kv_heads, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(*shape, stored.value_dim), shape, shape],
        output_dtypes=[mx.float32, mx.float32, mx.float32],
    )
    return partial


def _merged(
    partial: list[mx.array], stored: Stored, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    batch, heads, length, _ = queries.shape
    dim, kv_heads = stored.value_dim, stored.words.shape[1]
    factors = _factors(scale, stored.keys, stored.value_quantizer)
    rotation = (stored.value_quantizer or stored.keys).rotation
    (output,) = _whole()(
        inputs=[*partial, factors if sinks is None else sinks, rotation.signs, factors],
        template=[
            ("DV", dim),
            ("M", heads // kv_heads * length),
            ("L", length),
            ("HEADS", kv_heads),
            ("WAYS", _WAYS),
            ("MOST", max(2, _BLOCKS)),
            ("ROTATED", stored.value_quantizer is not None),
            ("SINKS", sinks is not None),
            ("CLIP", queries.dtype == mx.float16),
            ("T", queries.dtype),
            ("S", mx.float32 if sinks is None else sinks.dtype),
        ],
        grid=(batch * heads * length * _WAYS * dim, 1, 1),
        threadgroup=(_WAYS * dim, 1, 1),
        output_shapes=[(batch, heads, length, dim)],
        output_dtypes=[queries.dtype],
    )
    result: mx.array = output
    return result


def _counting(buffer: mx.array, count: int) -> mx.array:
    """An array whose shape tells kernels a count.

    A new array of numbers would be copied to the GPU in every call, which takes as long as attending to thousands of
    rows; shapes are passed with the launch.
    """
    return buffer.reshape(-1)[:count]


def _serves(stored: Stored, queries: mx.array, last: ExactRows, mask: mx.array | str | None) -> bool:
    """Whether there are kernels for these widths, shapes and dtypes."""
    stacked = queries.shape[1] // stored.words.shape[1] * queries.shape[2]
    if isinstance(mask, mx.array) or stacked > _QUERIES:
        return False
    if stored.keys.step is None or stored.keys.dim not in _DIMS or stored.value_dim not in _DIMS:
        return False
    quantizer = stored.value_quantizer
    if quantizer is None:
        return stored.values.dtype in _HALF
    fits = quantizer.width in (2, 4, 8) and quantizer.dim * quantizer.width % 256 == 0
    return quantizer.step is not None and fits and last.values is not None


def available() -> bool:
    """Whether the kernels run here: on a GPU with tensor cores that take bf16."""
    return mx.default_device().type == mx.DeviceType.gpu and _tensor_cores()


@functools.cache
def _tensor_cores() -> bool:
    """Whether there are tensor cores that take bf16."""
    return mx.cuda.is_available() and int(mx.device_info(mx.gpu).get("compute_capability_major", 0)) >= 8


@functools.lru_cache(maxsize=256)
def _factors(scale: float, keys: Quantizer, values: Quantizer | None) -> mx.array:
    return mx.array([scale, keys.step, 0.0 if values is None else values.step], dtype=mx.float32)


def _kernel(name: str, inputs: list[str], outputs: list[str], source: str, header: str = "") -> Any:
    # Every call of a kernel copies its source.
    source, header = (
        "\n".join(line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("//"))
        for text in (source, header)
    )
    # mlx keeps what it compiled on disk, by name alone.
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(f"turboquant_rvq_{name}_{digest}", inputs, outputs, source, header)


@functools.cache
def _parts() -> Any:
    stored = ["words", "key_scales", "values", "value_scales"]
    exact = ["last_keys", "last_values", "first_keys", "first_values"]
    inputs = ["queries", *stored, *exact, "signs", "rows", "factors"]
    return _kernel("parts", inputs, ["part_o", "part_at", "part_l"], PARTS, HEADER)


@functools.cache
def _whole() -> Any:
    inputs = ["part_o", "part_at", "part_l", "sinks", "signs", "factors"]
    return _kernel("whole", inputs, ["out"], WHOLE, HEADER)


@functools.cache
def _scores() -> Any:
    return _kernel("scores", ["queries", "words", "scales", "levels", "live"], ["out"], SCORES)


def serves(quantizer: Quantizer, words: int, queries: int) -> bool:
    """Whether the kernel runs here, for rows of so many words and so many queries per KV head."""
    shared = 4 * (quantizer.dim * queries + 2**quantizer.width + _THREADS * (words + 1))
    return available() and shared <= _SHARED_BYTES


def row_scores(rows: mx.array, words: mx.array, scales: mx.array, quantizer: Quantizer, count: int) -> mx.array:
    """Products of rotated queries with scaled rows.

    Args:
        rows: Rotated queries ``[B, H, M, dim]`` fp32.
        words: Packed codes ``[B, H, >= count, words]``, each row as ``pack_rows`` gave it.
        scales: Scales ``[B, H, >= count, 1]`` bf16.
        quantizer: What made the codes.
        count: Rows to read.

    Returns:
        ``[B, H, M, count]`` fp32.
    """
    batch, heads, queries, dim = rows.shape
    template = [
        ("THREADS", _THREADS),
        ("D", dim),
        ("M", queries),
        ("WORDS", words.shape[3]),
        ("WIDTH", quantizer.width),
        ("STREAMS", quantizer.streams),
        ("UNIFORM", quantizer.step is not None),
    ]
    blocks = -(-count // _THREADS)
    (scores,) = _scores()(
        inputs=[rows, words, scales, quantizer.levels, _counting(scales, count)],
        template=template,
        grid=(blocks * _THREADS, batch * heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(batch, heads, queries, count)],
        output_dtypes=[mx.float32],
    )
    result: mx.array = scores
    return result
