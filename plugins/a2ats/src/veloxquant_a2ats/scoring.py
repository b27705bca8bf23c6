"""Products with coded rows: through tables of query x centroid for one token, on rebuilt rows for many."""

from __future__ import annotations

import mlx.core as mx

from veloxquant.devices import on_cpu

__all__ = [
    "code_index",
    "codes_are_summed",
    "query_table",
    "rebuild_keys",
    "rebuild_values",
    "scores_from",
    "sum_by_code",
    "table_scores",
    "weights_by_code",
]


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
    return scores_from(query_table(queries, centroids), codes)


def query_table(queries: mx.array, centroids: mx.array) -> mx.array:
    """Products ``[B, Hkv, M, G, K]`` of the parts of queries ``[B, Hkv, G, D]`` with centroids ``[Hkv, M, K, d]``."""
    batch, _, group, _ = queries.shape
    heads, parts, _, dim = centroids.shape
    return queries.reshape(batch, heads, group, parts, dim).swapaxes(2, 3) @ centroids.swapaxes(-1, -2)


def scores_from(table: mx.array, codes: mx.array) -> mx.array:
    """Look the products of keys of codes ``[B, Hkv * M, rows, 1]`` up in a table: ``[B, Hkv, G, rows]``."""
    batch, heads, parts, group, _ = table.shape
    rows = codes.shape[2]
    # A row of the table for every query, looked up along itself: several times faster than taking rows.
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


def weights_by_code(weights: mx.array, codes: mx.array, centroids: int) -> mx.array:
    """Sum the weights of rows that have a code in common.

    Args:
        weights: ``[B, Hkv, G, rows]`` fp32.
        codes: Codes of values ``[B, Hkv, rows, M]``.
        centroids: How many codes there are.

    Returns:
        ``[B, Hkv, M, G, centroids]`` fp32.
    """
    batch, heads, group, rows = weights.shape
    shape = (batch, heads, codes.shape[3], group, rows)
    index = mx.broadcast_to(codes.swapaxes(2, 3)[:, :, :, None], shape)
    table = mx.zeros((*shape[:4], centroids), dtype=mx.float32)
    # Adding at indices along an axis is, in MLX, to be had as the derivative of a look-up; it is the only form of it
    # that is fast on a CPU. The look-up itself is not computed.
    return mx.vjp(_look_up, [table, index], [mx.broadcast_to(weights[:, :, None], shape)])[1][0]


def _look_up(table: mx.array, index: mx.array) -> mx.array:
    # The index is an argument, so that the search for what to derive by ends at it: fresh codes are the end of a long
    # graph.
    return mx.take_along_axis(table, mx.stop_gradient(index), axis=-1)


def sum_by_code(weights: mx.array, centroids: mx.array) -> mx.array:
    """Sums of values from the weights of their codes ``[B, Hkv, M, G, K]``: ``[B, Hkv, G, Dv]`` fp32."""
    sums = weights @ centroids
    batch, heads, parts, group, dim = sums.shape
    return sums.swapaxes(2, 3).reshape(batch, heads, group, parts * dim)


def codes_are_summed() -> bool:
    """Whether a token's coded values are summed code by code, and not rebuilt.

    Only on the CPU back end. On a GPU rows of a head would wait for one another to add to the same centroids.
    """
    return on_cpu()
