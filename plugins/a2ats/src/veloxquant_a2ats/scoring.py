"""Products with coded rows: through tables of query x centroid for one token, on rebuilt rows for many."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["code_index", "rebuild_keys", "rebuild_values", "table_scores"]


def code_index(codes: mx.array, centroids: int) -> mx.array:
    """Turn codes into row numbers of the flat list of all centroids.

    Args:
        codes: Codes of keys ``[B, H, rows, 1]``, H of them with a list of their own.
        centroids: Length of a list.

    Returns:
        ``[B, H, rows]`` uint32.
    """
    first = mx.arange(codes.shape[1], dtype=mx.uint32)[:, None] * centroids
    return codes[..., 0].astype(mx.uint32) + first


def table_scores(queries: mx.array, centroids: mx.array, codes: mx.array) -> mx.array:
    """Products of one token's queries with coded keys, added from a table of query x centroid.

    Args:
        queries: Far queries ``[B, Hkv, G, D]`` fp32.
        centroids: ``[Hkv, M, K, d]``.
        codes: ``[B, Hkv * M, rows, 1]``.

    Returns:
        ``[B, Hkv, G, rows]`` fp32.
    """
    batch, _, group, _ = queries.shape
    heads, parts, count, dim = centroids.shape
    split = queries.reshape(batch, heads, group, parts, dim).transpose(0, 1, 3, 4, 2)
    # One row of a table per centroid, with the products of all G queries side by side: one look-up serves a group.
    table = centroids @ split
    index = code_index(codes, count)
    if batch > 1:
        index = index + mx.arange(batch, dtype=mx.uint32).reshape(-1, 1, 1) * (heads * parts * count)
    found = mx.take(table.reshape(-1, group), index, axis=0)
    scores = found.reshape(batch, heads, parts, -1, group).sum(axis=2)
    return scores.swapaxes(2, 3)


def rebuild_keys(centroids: mx.array, codes: mx.array) -> mx.array:
    """Keys without position from their codes ``[B, Hkv * M, rows, 1]``: ``[B, Hkv, rows, D]`` fp32."""
    heads, parts, count, dim = centroids.shape
    found = mx.take(centroids.reshape(-1, dim), code_index(codes, count), axis=0)
    split = found.reshape(codes.shape[0], heads, parts, -1, dim).swapaxes(2, 3)
    return split.reshape(codes.shape[0], heads, -1, parts * dim)


def rebuild_values(centroids: mx.array, codes: mx.array) -> mx.array:
    """Values from their codes ``[B, Hkv, rows, M]``: ``[B, Hkv, rows, Dv]`` fp32."""
    heads, parts, count, dim = centroids.shape
    first = mx.arange(heads * parts, dtype=mx.uint32).reshape(heads, 1, parts) * count
    found = mx.take(centroids.reshape(-1, dim), codes.astype(mx.uint32) + first, axis=0)
    return found.reshape(*codes.shape[:3], parts * dim)
