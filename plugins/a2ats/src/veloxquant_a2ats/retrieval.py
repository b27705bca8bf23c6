"""Ranking rows by their codes: one look-up a row in a table of query x centroid (section 4 of the paper)."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["centroid_shares", "choose_rows", "count_codes", "union_of_heads"]


def count_codes(codes: mx.array, centroids: int) -> mx.array:
    """How often each code occurs.

    Args:
        codes: ``[B, Hkv, rows]``.
        centroids: Number of codes there are.

    Returns:
        ``[B, Hkv, centroids]`` fp32.
    """
    batch, heads, rows = codes.shape
    flat = codes.astype(mx.uint32).reshape(batch * heads, rows)
    index = flat + mx.arange(batch * heads, dtype=mx.uint32)[:, None] * centroids
    counts = mx.zeros((batch * heads * centroids,)).at[index.reshape(-1)].add(mx.ones((batch * heads * rows,)))
    return counts.reshape(batch, heads, centroids)


def centroid_shares(queries: mx.array, centroids: mx.array, counts: mx.array, scale: float) -> mx.array:
    """The softmax weight that a row has for a query by its code alone, over the rows that may be chosen.

    Rows with one code have one logit, so the softmax is computed over codes, each as often as it occurs.

    Args:
        queries: Far queries of one token ``[B, Hkv, G, D]`` fp32.
        centroids: ``[Hkv, K, D]``.
        counts: How often each code occurs ``[B, Hkv, K]``.
        scale: Factor on the logits.

    Returns:
        ``[B, Hkv, G, K]`` fp32.
    """
    logits = (queries * scale) @ centroids.swapaxes(-1, -2)
    times = counts[:, :, None, :]
    largest = mx.where(times > 0, logits, -mx.inf).max(axis=-1, keepdims=True)
    # Codes that do not occur may score higher; what they get is never looked up.
    weights = mx.exp(mx.minimum(logits - largest, 0.0))
    return weights / (weights * times).sum(axis=-1, keepdims=True)


def choose_rows(shares: mx.array, codes: mx.array, chosen: int) -> mx.array:
    """The rows with the largest shares.

    Args:
        shares: Share of a row by its code ``[B, Hkv, n, K]``: n choices a KV head.
        codes: ``[B, Hkv, rows]``.
        chosen: Rows to choose, fewer than there are.

    Returns:
        Row numbers ``[B, Hkv, n, chosen]`` int32, ascending.
    """
    batch, heads, choices, centroids = shares.shape
    if chosen == 0:
        return mx.zeros((batch, heads, choices, 0), dtype=mx.int32)
    lists = mx.arange(batch * heads * choices, dtype=mx.uint32).reshape(batch, heads, choices, 1) * centroids
    scores = mx.take(shares.reshape(-1), codes.astype(mx.uint32)[:, :, None, :] + lists)
    rows = codes.shape[2]
    best = mx.argpartition(scores, rows - chosen, axis=-1)[..., rows - chosen :]
    return mx.sort(best.astype(mx.int32), axis=-1)


def union_of_heads(shares: mx.array, codes: mx.array, chosen: int) -> tuple[mx.array, mx.array]:
    """What the query heads of a KV head choose, each for itself, side by side.

    Args:
        shares: ``[B, Hkv, G, K]``.
        codes: ``[B, Hkv, rows]``.
        chosen: Rows for each query head.

    Returns:
        Row numbers ``[B, Hkv, G * chosen]`` int32, ascending, and bools of the same shape: this row stands there
        before already.
    """
    found = choose_rows(shares, codes, chosen)
    joined = mx.sort(found.reshape(*found.shape[:2], -1), axis=-1)
    if joined.shape[2] == 0:
        return joined, mx.zeros(joined.shape, dtype=mx.bool_)
    again = joined[..., 1:] == joined[..., :-1]
    return joined, mx.concatenate([mx.zeros((*joined.shape[:2], 1), dtype=mx.bool_), again], axis=-1)
