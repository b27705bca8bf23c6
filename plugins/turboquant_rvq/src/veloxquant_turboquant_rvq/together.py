"""A decode step of several sequences: what they share is computed once, and nothing that is not read is prepared."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from veloxquant import attend_rows
from veloxquant.attention import attention
from veloxquant.rows import grouped
from veloxquant.rows import products
from veloxquant.rows import weighted
from veloxquant_turboquant_rvq.exact import ExactRows
from veloxquant_turboquant_rvq.state import TurboQuantRVQState

__all__ = ["attend_packed", "step_together"]


def attend_packed(
    state: TurboQuantRVQState,
    fresh: ExactRows,
    queries: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend to rows as they are packed, the first and the newest as they came.

    Args:
        state: The state, more rows held than ``fresh`` has.
        fresh: The recent rows and the new ones.
        queries: Queries of the new rows ``[B, Hq, L, Dk]``.
        scale: Factor on the logits.
        mask: As for ``attend_rows``.
        sinks: As for ``attend_rows``.

    Returns:
        ``[B, Hq, L, Dv]`` in the dtype of the queries.
    """
    leading = state.leading(state.rows.count - fresh.count)
    first = None if leading is None else (leading.keys, leading.values)
    return attend_rows(state.rows, queries, (fresh.keys, fresh.values), scale, mask, sinks, first=first)


def step_together(
    states: Sequence[TurboQuantRVQState],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Store one row of each sequence and attend.

    Args:
        states: One state a sequence.
        queries: ``[n, Hq, 1, Dk]``.
        keys: ``[n, Hkv, 1, Dk]``.
        values: ``[n, Hkv, 1, Dv]``.
        scale: Factor on the logits.
        sinks: Sink logits ``[Hq]``, or None.

    Returns:
        ``[n, Hq, 1, Dv]`` in the dtype of the queries.
    """
    count = len(states)
    new = zip(states, mx.split(keys, count), mx.split(values, count), strict=True)
    fresh = [state.store(key, value) for state, key, value in new]
    if states[0].config.value_bits is not None or sinks is not None:
        pairs = zip(states, fresh, mx.split(queries, count), strict=True)
        return mx.concatenate([_attended(*pair, scale, sinks) for pair in pairs])
    plain = grouped(queries, keys.shape[1]).astype(mx.float32) * scale
    rotated = states[0].rows.rotated(plain)
    parts = zip(states, fresh, mx.split(plain, count), mx.split(rotated, count), strict=True)
    output = mx.concatenate([_with_values_as_they_came(*part) for part in parts])
    return output.reshape(*queries.shape[:3], output.shape[-1]).astype(queries.dtype)


def _attended(
    state: TurboQuantRVQState, fresh: ExactRows, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    state.fresh = None
    if fresh.count == state.rows.count:
        return attention(queries, *state.returned(fresh), scale, None, sinks)
    return attend_packed(state, fresh, queries, scale, None, sinks)


def _with_values_as_they_came(
    state: TurboQuantRVQState, fresh: ExactRows, queries: mx.array, rotated: mx.array
) -> mx.array:
    """Attention ``[1, Hkv, G, Dv]`` of one sequence, in fp32.

    Args:
        state: Its state, the new row stored.
        fresh: The recent rows and the new one.
        queries: ``[1, Hkv, G, Dk]`` fp32, scaled.
        rotated: The same, rotated.
    """
    state.fresh = None
    rows = state.rows
    end = rows.count - fresh.count
    leading = state.leading(end)
    logits = [products(queries, fresh.keys)]
    start = 0 if leading is None else leading.count
    if start < end:
        logits.insert(0, rows.products(rotated)[..., start:end])
    if leading is not None:
        logits.insert(0, products(queries, leading.keys))
    joined = logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=-1)
    return weighted(mx.softmax(joined, axis=-1, precise=True), rows.values_as_they_came())
