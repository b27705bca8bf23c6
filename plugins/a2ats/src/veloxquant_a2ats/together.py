"""A decode step of several sequences in compress mode, with what they share computed once."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from veloxquant.rows import products
from veloxquant_a2ats.compress_state import CompressState
from veloxquant_a2ats.rotation import derotate
from veloxquant_a2ats.rotation import far_query_rope
from veloxquant_a2ats.scoring import rebuild_values
from veloxquant_a2ats.scoring import table_scores

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
    rope, place = states[0].model.rope, states[0].config.far_position
    shape = (count, keys.shape[1], heads // keys.shape[1], dim)
    near = queries.astype(mx.float32) * scale
    # Each at its own position.
    plain = derotate(near, rope, mx.array([state.count - 1 for state in states], dtype=mx.int32))
    far = far_query_rope(plain, rope, place)
    parts = zip(states, mx.split(near.reshape(shape), count), mx.split(far.reshape(shape), count), strict=True)
    output = mx.concatenate([_attended(*part) for part in parts])
    return output.reshape(count, heads, 1, -1).astype(queries.dtype)


def _attended(state: CompressState, near: mx.array, far: mx.array) -> mx.array:
    """Attention ``[1, Hkv, G, Dv]`` of one sequence in fp32.

    Args:
        state: Its state, the new row stored.
        near: Scaled queries ``[1, Hkv, G, Dk]`` fp32.
        far: The same as far tokens see them.
    """
    start = state.near_start(state.count - 1)
    exact = state.ring.parts(start, state.count)
    sinks = state.first_rows(start)
    begin = 0 if sinks is None else sinks[0].shape[2]
    if sinks is not None:
        exact.insert(0, sinks)
    logits = [products(near, keys) for keys, _ in exact]
    places = [keys.shape[2] for keys, _ in exact]
    values = [rows for _, rows in exact]
    if begin < start:
        key_codes, value_codes = state.codes_of(begin, start)
        codebook = state.model.codebook
        assert codebook is not None
        assert codebook.values is not None
        logits.append(table_scores(far, codebook.keys, key_codes))
        places.append(start - begin)
        values.append(rebuild_values(codebook.values, value_codes))
    # In any order: a softmax does not look at it.
    weights = mx.softmax(mx.concatenate(logits, axis=-1), axis=-1, precise=True)
    total, first = None, 0
    for size, rows in zip(places, values, strict=True):
        part = weights[..., first : first + size] @ rows.astype(mx.float32)
        total, first = part if total is None else total + part, first + size
    assert total is not None  # the new row is one of them
    return total
