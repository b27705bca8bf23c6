"""Scores against packed rows in one CUDA kernel, for every codebook and width.

mlx's own kernels for affine codes take bf16 products (whose results are rounded to bf16) or are slow for 2 bits, and
each small operation around them costs as much as reading thousands of rows. Here a thread reads one row's words, and
all queries of its KV head meet every level once.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from veloxquant_turboquant_rvq.quantizer import Quantizer

__all__ = ["row_scores", "serves"]

_THREADS = 128
_SHARED_BYTES = 48 * 1024

_SOURCE = """
    // Queries of this head, a column per query: all threads read the same address at once.
    __shared__ float shared_queries[D * M];
    __shared__ float shared_levels[1 << WIDTH];
    // Words of this block's rows, read side by side; the odd width keeps rows in different banks.
    __shared__ unsigned int tile[THREADS * (WORDS + 1)];
    const int head = blockIdx.y;
    for (int i = threadIdx.x; i < D * M; i += blockDim.x) {
        shared_queries[(i % D) * M + i / D] = queries[(size_t)head * M * D + i];
    }
    for (int i = threadIdx.x; i < (1 << WIDTH); i += blockDim.x) {
        shared_levels[i] = levels[i];
    }
    const int rows = count[0];
    const int begin = blockIdx.x * THREADS;
    const int here = min(THREADS, rows - begin) * WORDS;
    const unsigned int* source = words + ((size_t)head * words_shape[2] + begin) * WORDS;
    for (int i = threadIdx.x; i < here; i += blockDim.x) {
        tile[i / WORDS * (WORDS + 1) + i % WORDS] = source[i];
    }
    __syncthreads();
    const int row = begin + threadIdx.x;
    if (row >= rows) return;

    const unsigned int* packed = tile + threadIdx.x * (WORDS + 1);
    const float first = shared_levels[0];
    const float step = shared_levels[1] - shared_levels[0];
    float sums[M];
    #pragma unroll
    for (int m = 0; m < M; ++m) sums[m] = 0.0f;
    #pragma unroll 32
    for (int d = 0; d < D; ++d) {
        unsigned int code = 0;
        #pragma unroll
        for (int s = 0; s < STREAMS; ++s) {
            const int bits = WIDTH / STREAMS;
            const int place = d * bits;
            const unsigned int* word = packed + s * (WORDS / STREAMS) + (place >> 5);
            unsigned int part = word[0] >> (place & 31);
            if ((place & 31) + bits > 32) part |= word[1] << (32 - (place & 31));
            code = (code << bits) | (part & ((1u << bits) - 1u));
        }
        const float level = UNIFORM ? fmaf((float)code, step, first) : shared_levels[code];
        #pragma unroll
        for (int m = 0; m < M; ++m) sums[m] = fmaf(level, shared_queries[d * M + m], sums[m]);
    }
    const float scale = (float)scales[(size_t)head * scales_shape[2] + row];
    #pragma unroll
    for (int m = 0; m < M; ++m) out[((size_t)head * M + m) * rows + row] = sums[m] * scale;
"""


def serves(quantizer: Quantizer, words: int, queries: int) -> bool:
    """Whether the kernel runs here, for rows of so many words and so many queries per KV head."""
    shared = 4 * (quantizer.dim * queries + 2**quantizer.width + _THREADS * (words + 1))
    return _available() and shared <= _SHARED_BYTES


@functools.cache
def _available() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available()


@functools.cache
def _kernel() -> Any:
    names = ["queries", "words", "scales", "levels", "count"]
    return mx.fast.cuda_kernel("turboquant_rvq_scores", names, ["out"], _SOURCE)


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
    (scores,) = _kernel()(
        inputs=[rows, words, scales, quantizer.levels, mx.array([count], dtype=mx.int32)],
        template=template,
        grid=(blocks * _THREADS, batch * heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(batch, heads, queries, count)],
        output_dtypes=[mx.float32],
    )
    result: mx.array = scores
    return result
