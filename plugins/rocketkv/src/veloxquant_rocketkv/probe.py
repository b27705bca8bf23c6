"""Asking a layer which rows a query would read."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np

from veloxquant_rocketkv.state import RocketKVState

__all__ = ["select_indices"]


def select_indices(state: RocketKVState, query: mx.array, batch: int, head: int, keep_recent: int = 0) -> mx.array:
    """The rows that a decode step would attend to in one KV head; the state is not changed.

    Args:
        state: State of a layer, its prompt complete.
        query: The query of one head ``[D]``, or the queries of the group ``[G, D]``.
        batch: Index of the sequence.
        head: Index of the KV head.
        keep_recent: Newest rows that are attended in any case.

    Returns:
        Row numbers of the store, int32, ascending, each once.
    """
    group = query.reshape(-1, query.shape[-1]).astype(mx.float32)
    probe = copy.copy(state.selector)
    # The real summary must not get pages that are not due yet.
    probe.summary = copy.deepcopy(probe.summary)
    index = probe.choose_alike(group, keep_recent)
    chosen = mx.arange(state.rows.count, dtype=mx.int32) if index is None else index[batch, head]
    valid = state.rows.valid()
    if valid is None:
        return chosen
    alive = np.array(valid[batch, head])
    rows = np.array(chosen)
    return mx.array(rows[alive[rows]])
