"""Which pages a decode step attends to: channels of the query, bounds of the keys, the best pages of each KV head.

Pure functions of arrays, in fp32. Queries are grouped by KV head, ``[B, Hkv, G, D]``. Bounds lie channel by channel,
``[B, Hkv, planes * D, capacity]``: all minima, then all maxima, of the keys in each page, so that the few channels that
matter are read as whole rows; pages of one row have one plane. Section numbers refer to RocketKV, arXiv:2502.14051.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from veloxquant.buffers import flat_rows
from veloxquant.buffers import take_rows
from veloxquant.halves import ALL_HEADS

__all__ = [
    "channel_reader",
    "choose_channels",
    "page_bounds",
    "page_scores",
    "rank",
    "rank_roughly",
    "read_plan",
    "row_scores",
    "score_reader",
    "top",
]

# One unit of a logit, and the number 1, in the bits of a float.
BITS = 2**23 / math.log(2)
_ONE = float(127 * 2**23)
_TINY = 1e-30


def page_bounds(keys: mx.array, page_size: int, valid: mx.array | None = None) -> mx.array:
    """Element-wise minimum and maximum of the keys in each page (section 3.4).

    Args:
        keys: Rows of whole pages ``[B, Hkv, n * page_size, D]``.
        page_size: Rows of a page.
        valid: Live rows ``[B, Hkv, n * page_size]`` bool, or None when all are; dead rows do not count.

    Returns:
        ``[B, Hkv, planes * D, n]`` in the dtype of the keys; zeros where all rows of a page are dead.
    """
    if page_size == 1:
        if valid is not None:
            keys = mx.where(valid[..., None], keys, mx.zeros((), keys.dtype))
        return keys.swapaxes(2, 3)
    batch, heads, rows, dim = keys.shape
    shape = (batch, heads, rows // page_size, page_size)
    paged = keys.reshape(*shape, dim)
    if valid is None:
        low, high = paged.min(axis=3), paged.max(axis=3)
    else:
        alive = valid.reshape(*shape, 1)
        some = alive.any(axis=3)
        limit = mx.array(mx.inf, keys.dtype)
        zero = mx.zeros((), keys.dtype)
        low = mx.where(some, mx.where(alive, paged, limit).min(axis=3), zero)
        high = mx.where(some, mx.where(alive, paged, -limit).max(axis=3), zero)
    return mx.concatenate([low.swapaxes(2, 3), high.swapaxes(2, 3)], axis=2)


def choose_channels(queries: mx.array, count: int) -> mx.array:
    """The channels in which the queries of a group are largest (section 3.4, step 1).

    Args:
        queries: ``[B, Hkv, G, D]`` fp32.
        count: Channels to choose, at most D.

    Returns:
        ``[B, Hkv, count]`` int32, in no order.
    """
    size = mx.abs(queries).sum(axis=2)
    batch, heads, dim = size.shape
    if count == dim:
        return mx.broadcast_to(mx.arange(dim, dtype=mx.int32), (batch, heads, dim))
    return mx.argpartition(size, dim - count, axis=-1)[..., dim - count :].astype(mx.int32)


def page_scores(queries: mx.array, bounds: mx.array, channels: mx.array, scale: float) -> mx.array:
    """Approximate logits of every page for every query head (section 3.4, steps 2 to 4).

    A page is represented in a channel by its maximum where the queries of the group sum to more than 0, else by its
    minimum. What the unread channels would have added is made up for by a lower temperature.

    Args:
        queries: ``[B, Hkv, G, D]`` fp32.
        bounds: ``[B, Hkv, planes * D, capacity]``.
        channels: ``[B, Hkv, k1]`` int32.
        scale: Factor on the logits of exact attention.

    Returns:
        ``[B, Hkv, G, capacity]`` fp32.
    """
    return score_reader(queries, bounds, channels, scale)(ALL_HEADS)


def score_reader(queries: mx.array, bounds: mx.array, channels: mx.array, scale: float) -> Callable[[slice], mx.array]:
    """What gives ``page_scores`` of the KV heads of a slice."""
    weighted, planes = read_plan(queries, channels, scale, bounds.shape[2])
    if planes is None:
        return lambda heads: weighted[:, heads] @ bounds[:, heads].astype(mx.float32)
    read = channel_reader(bounds, planes)
    # The whole capacity is multiplied: cutting it first would copy what was read.
    return lambda heads: weighted[:, heads] @ read(heads).astype(mx.float32)


def read_plan(queries: mx.array, channels: mx.array, scale: float, planes: int) -> tuple[mx.array, mx.array | None]:
    """What is multiplied with the bounds, and which rows of them are read for that.

    Args:
        queries: ``[B, Hkv, G, D]`` fp32.
        channels: ``[B, Hkv, k1]`` int32.
        scale: Factor on the logits of exact attention.
        planes: Rows of the bounds, D or 2 * D.

    Returns:
        Queries in the channels, scaled ``[B, Hkv, G, k1]``; rows of the bounds ``[B, Hkv, k1]``, or None for all in
        order.
    """
    batch, heads, group, dim = queries.shape
    count = channels.shape[2]
    if count < dim:
        index = mx.broadcast_to(channels[:, :, None], (batch, heads, group, count))
        chosen = mx.take_along_axis(queries, index, axis=3)
        # Queries of zeros have no share; their logits are zero whatever the factor.
        read = mx.maximum(mx.abs(chosen).sum(axis=3, keepdims=True), _TINY)
        weighted = chosen * (mx.sqrt(mx.abs(queries).sum(axis=3, keepdims=True) / read) * scale)
    else:
        chosen, weighted = queries, queries * scale
    if planes > dim:
        return weighted, mx.where(chosen.sum(axis=2) > 0, channels + dim, channels)
    return weighted, None if count == dim else channels


def channel_reader(bounds: mx.array, planes: mx.array) -> Callable[[slice], mx.array]:
    """What reads the rows ``planes`` ``[B, Hkv, k1]`` of the bounds ``[B, Hkv, n, width]`` for a slice of heads."""
    numbers = flat_rows(planes, bounds.shape[2])
    return lambda heads: take_rows(bounds, numbers[:, heads])


def row_scores(scores: mx.array, kv_heads: int, scale: float) -> mx.array:
    """Exact logits of a store, grouped by KV head.

    Args:
        scores: Products of queries and keys ``[B, Hq, 1, rows]`` fp32.
        kv_heads: Hkv.
        scale: Factor on the logits.

    Returns:
        ``[B, Hkv, G, rows]`` fp32.
    """
    batch, _, _, rows = scores.shape
    return scores.reshape(batch, kv_heads, -1, rows) * scale


def rank(logits: mx.array, alive: mx.array | None = None) -> mx.array:
    """Attention that a group of query heads would give to each page or row (section 3.4, step 5).

    Args:
        logits: ``[B, Hkv, G, n]`` fp32.
        alive: Which of the n have a live row ``[B, Hkv, n]`` bool, or None when all do.

    Returns:
        ``[B, Hkv, n]`` fp32, summed over the group; below 0 for what is dead.
    """
    logits = _buried(logits, alive)
    return _summed(mx.exp(logits - logits.max(axis=-1, keepdims=True)), alive)


def rank_roughly(logits: mx.array, alive: mx.array | None = None) -> mx.array:
    """As ``rank``, with an exponential that is off by up to 5 percent and takes a fifth of the time.

    A number read as the bits of a float is an exponential that is exact at powers of 2 and linear in between. The
    order within a head is not changed by that; how heads are weighed against each other is, and far less so than by
    reading bounds of pages in place of keys.

    Args:
        logits: ``[B, Hkv, G, n]`` fp32, times ``BITS``.
        alive: As for ``rank``.

    Returns:
        As ``rank``.
    """
    logits = _buried(logits, alive)
    bits = mx.maximum(logits - (logits.max(axis=-1, keepdims=True) - _ONE), 0.0)
    return _summed(bits.astype(mx.int32).view(mx.float32), alive)


def _buried(logits: mx.array, alive: mx.array | None) -> mx.array:
    return logits if alive is None else logits + mx.where(alive, 0.0, -1e30)[:, :, None]


def _summed(weights: mx.array, alive: mx.array | None) -> mx.array:
    """Sum over the group, each head divided by its own sum: one product."""
    shares = mx.reciprocal(weights.sum(axis=-1, keepdims=True)).swapaxes(2, 3)
    summed = (shares @ weights).squeeze(2)
    return summed if alive is None else mx.where(alive, summed, -1.0)


def top(weights: mx.array, count: int) -> mx.array:
    """The ``count`` largest, ``[B, Hkv, count]`` int32, ascending by index."""
    size = weights.shape[-1]
    return mx.sort(mx.argpartition(weights, size - count, axis=-1)[..., size - count :].astype(mx.int32), axis=-1)
