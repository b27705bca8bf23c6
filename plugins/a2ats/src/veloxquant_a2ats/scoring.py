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
    heads, parts, _, dim = centroids.shape
    split = queries.reshape(batch, heads, group, parts, dim).swapaxes(2, 3)
    # A row of the table for every query, looked up along itself: several times faster than taking rows.
    table = split @ centroids.swapaxes(-1, -2)
    rows = codes.shape[2]
    index = mx.broadcast_to(codes.reshape(batch, heads, parts, 1, rows), (batch, heads, parts, group, rows))
    return mx.take_along_axis(table, index, axis=-1).sum(axis=2)


def rebuild_keys(centroids: mx.array, codes: mx.array) -> mx.array:
    """Keys without position from their codes ``[B, Hkv * M, rows, 1]``: ``[B, Hkv, rows, D]`` fp32."""
    heads, parts, count, dim = centroids.shape
    found = mx.take(centroids.reshape(-1, dim), code_index(codes, count), axis=0)
    split = found.reshape(codes.shape[0], heads, parts, -1, dim).swapaxes(2, 3)
    return split.reshape(codes.shape[0], heads, -1, parts * dim)


def rebuild_values(centroids: mx.array, codes: mx.array) -> mx.array:
    """Values from their codes ``[B, Hkv, rows, M]``: ``[B, Hkv, rows, Dv]`` fp32."""
    heads, parts, _, dim = centroids.shape
    batch, _, rows, _ = codes.shape
    index = mx.broadcast_to(codes.swapaxes(2, 3)[:, :, :, None], (batch, heads, parts, dim, rows))
    table = mx.broadcast_to(centroids.swapaxes(-1, -2), (batch, heads, parts, dim, centroids.shape[2]))
    # Channel by channel, each looked up along its own list: faster than taking whole centroids.
    return mx.take_along_axis(table, index, axis=-1).reshape(batch, heads, parts * dim, rows).swapaxes(2, 3)
