"""Attention over the rows that were chosen, and over all rows where nothing is to be chosen."""

from __future__ import annotations

import mlx.core as mx

from veloxquant import RoutingError
from veloxquant import attend_rows
from veloxquant import attend_selected
from veloxquant.attention import live_attention
from veloxquant.attention import live_mask
from veloxquant_rocketkv.exact import Pair
from veloxquant_rocketkv.exact import placed
from veloxquant_rocketkv.state import RocketKVState

__all__ = ["attend_all", "attend_chosen", "read_chosen"]


def attend_all(
    state: RocketKVState,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend to every row returned, around those that a rewind left dead.

    Raises:
        RoutingError: Dead rows and a mask array of the model come together.
    """
    valid = state.rows.valid()
    seen = None if valid is None else valid[..., : keys.shape[2]]
    return live_attention("rocketkv", seen, queries, keys, values, scale, mask, sinks)


def attend_chosen(
    state: RocketKVState,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend to the rows that each query chooses; the queries of a block choose one by one, as they would alone.

    Args:
        state: State of the layer, the rows of the queries stored.
        queries: ``[B, Hq, S, Dk]``.
        keys: All rows, unread unless a query chooses all of them.
        values: As ``keys``.
        scale: Factor on the logits.
        mask: None or ``"causal"``.
        sinks: Sink logits ``[Hq]``, or None.

    Returns:
        ``[B, Hq, S, Dv]``.

    Raises:
        RoutingError: The model brings a mask array and rows are to be chosen.
    """
    if state.selector.chooses_all:
        return _attend_whole(state, queries, keys, values, scale, mask, sinks)
    if isinstance(mask, mx.array):
        raise RoutingError(
            "rocketkv chooses rows head by head and cannot apply a mask array of the model to them; use snapkv, or "
            "stage1=False with a topk that covers all rows"
        )
    length = queries.shape[2]
    outputs = [
        _attend_one(state, queries[:, :, place : place + 1], keys, values, scale, sinks, place - length)
        for place in range(length)
    ]
    state.exact.fresh = None
    return outputs[0] if length == 1 else mx.concatenate(outputs, axis=2)


def _attend_whole(
    state: RocketKVState,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend to all rows, in their stored form where that is another one than they came in."""
    fresh, state.exact.fresh = state.exact.fresh, None
    if fresh is None or isinstance(mask, mx.array):
        return attend_all(state, queries, keys, values, scale, mask, sinks)
    valid = state.rows.valid()
    alive = mask if valid is None else live_mask(valid, queries.shape[1], queries.shape[2])
    first = state.exact.leading(state.rows.count - fresh[0].shape[2])
    return attend_rows(state.rows.store, queries, fresh, scale, alive, sinks, first=first)


def _attend_one(
    state: RocketKVState,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
    place: int,
) -> mx.array:
    """Attention of one token of a block, counted from its end: -1 is the newest."""
    count = state.rows.count + place + 1
    index = state.selector.choose(queries, scale, count)
    if index is None:
        seen = keys[:, :, :count], values[:, :, :count]
        return attend_all(state, queries, *seen, scale, None, sinks)
    mask = _mask(state, index, queries.shape[1])
    newest = state.exact.of_token(place)
    if newest is None or not state.config.newest_rows:
        return attend_selected(state.rows.store, index, queries, scale, mask, sinks)
    # The newest rows, that of the token itself the last one, count as they came, and so do the sinks.
    first = _leading(state, index, newest)
    return attend_rows(state.rows.store.select(index), queries, newest, scale, mask, sinks, first=first)


def _leading(state: RocketKVState, index: mx.array, newest: Pair) -> Pair | None:
    """The sinks as they came, if they are the first of the chosen rows."""
    chosen = index.shape[2]
    return state.exact.leading(chosen - newest[0].shape[2]) if state.selector.reads_sinks(chosen) else None


def _mask(state: RocketKVState, index: mx.array, query_heads: int) -> mx.array | None:
    """Which of the chosen rows are live ``[B, Hq, 1, k]``; None when all are."""
    valid = state.rows.valid()
    if valid is None:
        return None
    alive = mx.take_along_axis(valid, index, axis=2)
    batch, heads, count = alive.shape
    return mx.repeat(alive, query_heads // heads, axis=1).reshape(batch, query_heads, 1, count)


def read_chosen(state: RocketKVState, keys: mx.array) -> tuple[mx.array, mx.array] | None:
    """The rows that a key chooses in place of a query, sinks and newest ones as they came; None for all rows."""
    index = state.selector.choose(keys, keys.shape[3] ** -0.5)
    if index is None:
        return None
    chosen = state.rows.store.gather(index)
    newest = state.exact.of_token(-1)
    if newest is None or not state.config.newest_rows:
        return chosen
    return placed(chosen, _leading(state, index, newest), newest)
