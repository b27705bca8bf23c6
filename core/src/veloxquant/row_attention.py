"""Attention over rows that a store holds: chosen ones, or all in their stored form with the newest as they came."""

from __future__ import annotations

import mlx.core as mx

from veloxquant.attention import attention
from veloxquant.attention import causal_mask
from veloxquant.attention import refuse_other_rows
from veloxquant.halves import ALL_HEADS
from veloxquant.halves import by_halves
from veloxquant.rows import DenseRows
from veloxquant.rows import RowStore
from veloxquant.rows import grouped
from veloxquant.rows import products

__all__ = ["attend_rows", "attend_selected", "masked_weights"]


def attend_selected(
    store: RowStore,
    index: mx.array,
    queries: mx.array,
    scale: float,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to the rows ``index`` of a store and to no others, rebuilt in the input dtype.

    Args:
        store: The rows.
        index: Rows to attend to ``[B, Hkv, k]`` int32.
        queries: ``[B, Hq, L, Dk]``.
        scale: Factor on the logits.
        mask: Which of the chosen rows count ``[B, Hq, L, k]`` bool, or None for all.
        sinks: Sink logits ``[Hq]``, or None.

    Returns:
        ``[B, Hq, L, Dv]`` in the dtype of the queries.
    """
    if not isinstance(store, DenseRows):
        return attention(queries, *store.gather(index), scale, mask, sinks)
    gather, size = store.reader(index)
    kv_heads = index.shape[1]
    group = queries.shape[1] // kv_heads

    def attend(heads: slice) -> mx.array:
        own = heads if heads == ALL_HEADS else slice(heads.start * group, heads.stop * group)
        return attention(
            queries[:, own],
            *gather(heads),
            scale,
            None if mask is None else mask[:, own],
            None if sinks is None else sinks[own],
        )

    return by_halves(attend, kv_heads, size)


def attend_rows(
    store: RowStore,
    queries: mx.array,
    last: tuple[mx.array, mx.array | None],
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
    *,
    first: tuple[mx.array, mx.array | None] | None = None,
) -> mx.array:
    """Attend to the stored rows through ``scores`` and ``mix``; no stored row is rebuilt.

    The last rows, and the first if they are given, count as they are given and not as the store holds them: a call's
    own rows lose nothing.

    Args:
        store: All rows.
        queries: Queries of the last L rows ``[B, Hq, L, Dk]``.
        last: Keys and values of the last E rows ``[B, Hkv, E, D]``, E >= L. Without values, here and in ``first``, the
            store holds those as they came, and one sum takes all.
        scale: Factor on the logits.
        mask: None, ``"causal"``, or an array that broadcasts to ``[B, Hq, L, rows]``.
        sinks: Sink logits ``[Hq]``, or None.
        first: Keys and values of the first F rows, F + E at most all rows; or None.

    Returns:
        ``[B, Hq, L, Dv]`` in the dtype of the queries.

    Raises:
        RoutingError: An array mask does not fit the rows.
    """
    end = store.count - last[0].shape[2]
    start = 0 if first is None else first[0].shape[2]
    parts = [products(queries, last[0])]
    if start < end:
        parts.insert(0, store.scores(queries)[..., start:end])
    if first is not None:
        parts.insert(0, products(queries, first[0]))
    weights = masked_weights(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1), scale, mask, sinks)
    output = _mixed(store, weights, last[1], None if first is None else first[1], start, end)
    if queries.dtype == mx.float16:
        # Rows near the limit of fp16 may be beyond it after rounding.
        output = mx.clip(output, -65504.0, 65504.0)
    return output.astype(queries.dtype)


def _mixed(
    store: RowStore, weights: mx.array, last: mx.array | None, first: mx.array | None, start: int, end: int
) -> mx.array:
    if last is None:
        return store.mix(weights)
    output = _mix(weights[..., end:], last)
    if start < end:
        inner = weights[..., start:end]
        output = output + store.mix(mx.pad(inner, [(0, 0), (0, 0), (0, 0), (start, 0)]) if start else inner)
    return output if first is None else output + _mix(weights[..., :start], first)


def masked_weights(
    logits: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None = None
) -> mx.array:
    """Softmax of logits under a mask.

    Args:
        logits: ``[B, Hq, L, rows]`` fp32, unscaled; the queries are those of the last L rows.
        scale: Factor on the logits.
        mask: None, ``"causal"``, or an array that broadcasts to the logits: bool (True: attend) or added.
        sinks: Sink logits ``[Hq]``, which take part in the sum and get no weight here, or None.

    Returns:
        Weights of the same shape, fp32.

    Raises:
        RoutingError: An array mask does not fit the rows.
    """
    length, rows = logits.shape[2:]
    logits = logits * scale
    if isinstance(mask, str):
        mask = causal_mask(length, rows) if length > 1 else None
    refuse_other_rows(mask, rows)
    if mask is not None:
        # The lowest finite number and not -inf: a row that masks everything must not become NaN.
        logits = mx.where(mask, logits, mx.finfo(mx.float32).min) if mask.dtype == mx.bool_ else logits + mask
    if sinks is None:
        return mx.softmax(logits, axis=-1, precise=True)
    column = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, -1, 1, 1), (*logits.shape[:3], 1))
    return mx.softmax(mx.concatenate([column, logits], axis=-1), axis=-1, precise=True)[..., 1:]


def _mix(weights: mx.array, values: mx.array) -> mx.array:
    batch, heads, length, _ = weights.shape
    product = grouped(weights, values.shape[1]) @ values.astype(mx.float32)
    return product.reshape(batch, heads, length, values.shape[3])
