"""Which rows of a prompt to keep: votes of the last queries, pooled, the best rows of each KV head.

Pure functions of arrays, in fp32. Section numbers refer to SnapKV, arXiv:2404.14469.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

__all__ = ["append_recent", "keep_indices", "pool_scores", "window_scores"]


def append_recent(recent: mx.array | None, new: mx.array, limit: int) -> mx.array:
    """Roll a buffer of the latest queries forward.

    Args:
        recent: The buffer ``[B, H, n, D]``, or None.
        new: Queries of the new tokens ``[B, H, S, D]``.
        limit: Rows to hold at most.

    Returns:
        The last ``limit`` rows of both together.
    """
    joined = new if recent is None or new.shape[2] >= limit else mx.concatenate([recent, new], axis=2)
    # A copy, so that a long block of queries is not held for the sake of its end.
    return mx.contiguous(joined[:, :, -limit:, :])


def window_scores(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    *,
    valid: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Votes of the observation window for the rows before it (section 4, eqs. 1 to 3).

    The softmax runs over all rows, those of the window causally included; votes are summed over the window and over
    the query heads of a KV head.

    Args:
        queries: Queries of the last W tokens ``[B, Hq, W, D]``.
        keys: All rows ``[B, Hkv, N, D]``, the last W being those of the window; N >= W.
        scale: Factor on the logits.
        valid: Live rows ``[B, Hkv, N]`` bool, or None when all are.
        sinks: Sink logits ``[Hq]`` of models that have them; they take part in the softmax and get no vote.

    Returns:
        Votes ``[B, Hkv, N - W]``, fp32.
    """
    batch, query_heads, window, dim = queries.shape
    kv_heads, rows = keys.shape[1], keys.shape[2]
    grouped = queries.astype(mx.float32).reshape(batch, kv_heads, -1, dim)
    logits = (grouped * scale) @ keys.astype(mx.float32).swapaxes(-1, -2)
    logits = logits.reshape(batch, kv_heads, query_heads // kv_heads, window, rows)
    visible = mx.arange(rows) <= mx.arange(rows - window, rows)[:, None]
    if valid is not None:
        visible = visible & valid[:, :, None, None, :]
    logits = mx.where(visible, logits, -mx.inf)
    if sinks is not None:
        column = sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1, 1)
        logits = mx.concatenate([logits, mx.broadcast_to(column, (*logits.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(logits, axis=-1, precise=True)
    return weights[..., : rows - window].sum(axis=(2, 3))


def pool_scores(votes: mx.array, kernel_size: int, pooling: Literal["max", "avg"]) -> mx.array:
    """Pool votes over neighbouring rows, stride 1, same length.

    Args:
        votes: ``[B, Hkv, N]``, fp32.
        kernel_size: Odd width.
        pooling: ``max`` ignores what lies beyond the edges; ``avg`` divides by the full width there too.

    Returns:
        Pooled votes ``[B, Hkv, N]``.
    """
    if kernel_size == 1 or votes.shape[2] == 0:
        return votes
    half = kernel_size // 2
    if pooling == "max":
        return _sliding_max(mx.pad(votes, [(0, 0), (0, 0), (half, half)], constant_values=-mx.inf), kernel_size)
    padded = mx.pad(votes, [(0, 0), (0, 0), (half, half)])
    rows = votes.shape[2]
    # Summed term by term, not by differences of a running sum, which would cancel.
    total = padded[..., :rows]
    for shift in range(1, kernel_size):
        total = total + padded[..., shift : shift + rows]
    return total / kernel_size


def _sliding_max(padded: mx.array, width: int) -> mx.array:
    """Maximum over every ``width`` neighbours, by doubling: log2(width) passes."""
    reach, best = 1, padded
    while reach * 2 <= width:
        best = mx.maximum(best[..., :-reach], best[..., reach:])
        reach *= 2
    rest = width - reach
    return mx.maximum(best[..., : best.shape[-1] - rest], best[..., rest:]) if rest else best


def keep_indices(scores: mx.array, rows: int, budget: int, *, sinks: int, valid: mx.array | None = None) -> mx.array:
    """Choose the rows to keep: the sinks, the best of the middle, and everything behind the scored rows.

    Args:
        scores: Pooled votes of the rows before the window ``[B, Hkv, n]``.
        rows: Rows held N; rows n to N - 1 are the window.
        budget: Rows to keep per KV head, at least ``sinks`` + N - n and less than N.
        sinks: First rows, always kept.
        valid: Live rows ``[B, Hkv, N]`` bool, or None when all are; dead rows are chosen last.

    Returns:
        Indices ``[B, Hkv, budget]`` int32, ascending. Of equal scores the earlier row is kept.
    """
    batch, heads, scored = scores.shape
    sinks = min(sinks, scored)
    chosen = budget - sinks - (rows - scored)
    middle = mx.nan_to_num(scores[..., sinks:], nan=0.0)
    if valid is not None:
        middle = mx.where(valid[..., sinks:scored], middle, -1.0)
    parts = [mx.broadcast_to(mx.arange(sinks, dtype=mx.int32), (batch, heads, sinks))]
    if chosen > 0:
        parts.append(_top(middle, chosen) + sinks)
    window = mx.arange(scored, rows, dtype=mx.int32)
    parts.append(mx.broadcast_to(window, (batch, heads, rows - scored)))
    return mx.concatenate(parts, axis=2)


def _top(scores: mx.array, count: int) -> mx.array:
    """Indices of the ``count`` largest scores, ascending; ties go to the lower index on every back end."""
    rows = scores.shape[-1]
    threshold = mx.sort(scores, axis=-1)[..., rows - count : rows - count + 1]
    above, level = scores > threshold, scores == threshold
    room = count - above.sum(axis=-1, keepdims=True)
    taken = above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= room))
    index = mx.arange(rows, dtype=mx.int32)
    return mx.sort(mx.where(taken, index, rows), axis=-1)[..., :count]
