"""A decode step of several sequences in compress mode, with what they share computed once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx

from veloxquant.rows import products
from veloxquant_a2ats.compress_state import CompressState
from veloxquant_a2ats.rotation import derotate
from veloxquant_a2ats.rotation import far_query_rope
from veloxquant_a2ats.scoring import codes_are_summed
from veloxquant_a2ats.scoring import query_table
from veloxquant_a2ats.scoring import rebuild_values
from veloxquant_a2ats.scoring import scores_from
from veloxquant_a2ats.scoring import sum_by_code
from veloxquant_a2ats.scoring import weights_by_code

__all__ = ["step_together"]


def step_together(
    states: Sequence[CompressState], queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """Store one row of each sequence and attend.

    Args:
        states: One state a sequence.
        queries: ``[n, Hq, 1, Dk]``.
        keys: ``[n, Hkv, 1, Dk]``.
        values: ``[n, Hkv, 1, Dv]``.
        scale: Factor on the logits.

    Returns:
        ``[n, Hq, 1, Dv]`` in the dtype of the queries.
    """
    count, heads, _, dim = queries.shape
    for state, key, value in zip(states, mx.split(keys, count), mx.split(values, count), strict=True):
        state.store(key, value)
    model = states[0].model
    rope, codebook = model.rope, model.codebook
    assert codebook is not None
    shape = (count, keys.shape[1], heads // keys.shape[1], dim)
    near = queries.astype(mx.float32) * scale
    # Each at its own position.
    plain = derotate(near, rope, mx.array([state.count - 1 for state in states], dtype=mx.int32))
    far = far_query_rope(plain, rope, states[0].config.far_position)
    # The queries of all sequences at once: centroids are read once.
    stacked = far.reshape(shape).swapaxes(0, 1).reshape(1, shape[1], -1, dim)
    tables = mx.split(query_table(stacked, codebook.keys), count, axis=3)
    parts = zip(states, mx.split(near.reshape(shape), count), tables, strict=True)
    attended = [_attended(*part) for part in parts]
    output = mx.concatenate([exact for exact, _ in attended])
    coded = [weights for _, weights in attended if weights is not None]
    if coded:
        none = mx.zeros(coded[0].shape, dtype=mx.float32)
        weights = mx.concatenate([none if own is None else own for _, own in attended], axis=3)
        summed = sum_by_code(weights, codebook.value_centroids)[0]
        output = output + summed.reshape(shape[1], count, shape[2], -1).swapaxes(0, 1)
    return output.reshape(count, heads, 1, -1).astype(queries.dtype)


def _attended(state: CompressState, near: mx.array, table: mx.array) -> tuple[mx.array, mx.array | None]:
    """Attention of one sequence.

    Args:
        state: Its state, the new row stored.
        near: Scaled queries ``[1, Hkv, G, Dk]`` fp32.
        table: Products ``[1, Hkv, M, G, K]`` of these queries, as far tokens see them, with the centroids of keys.

    Returns:
        Sums of values ``[1, Hkv, G, Dv]`` fp32, and what is to be added to them: sums over centroids, by the weights
        ``[1, Hkv, Mv, G, Kv]``, or nothing.
    """
    start = state.near_start(state.count - 1)
    rows = state.ring.parts(start, state.count)
    sinks = state.first_rows(start)
    if sinks is not None:
        rows.insert(0, sinks)
    begin = 0 if sinks is None else sinks[0].shape[2]
    logits = [products(near, keys) for keys, _ in rows]
    sizes = [keys.shape[2] for keys, _ in rows]
    if begin < start:
        # In any order: a softmax does not look at it.
        key_codes, value_codes = state.codes_of(begin, start)
        logits.append(scores_from(table, key_codes))
        sizes.append(start - begin)
    weights = mx.softmax(mx.concatenate(logits, axis=-1), axis=-1, precise=True)
    pieces = mx.split(weights, list(itertools.accumulate(sizes[:-1])), axis=-1)
    # The weights of coded rows, if there are any, are one piece more.
    sums = [piece @ values.astype(mx.float32) for piece, (_, values) in zip(pieces, rows, strict=False)]
    total = sum(sums[1:], sums[0])
    if begin == start:
        return total, None
    assert state.model.codebook is not None
    centroids = state.model.codebook.value_centroids
    if codes_are_summed():
        return total, weights_by_code(pieces[-1], value_codes, centroids.shape[2])
    return total + pieces[-1] @ rebuild_values(centroids, value_codes), None
