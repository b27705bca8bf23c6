"""Retrieve mode over the packed rows of another method."""

import copy

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant.testing import MethodTests
from veloxquant_a2ats import A2ATSConfig

pytest.importorskip("veloxquant_turboquant_rvq")

# Coarse, so that a rebuilt row is far from what came.
PACKED = {"storage": "turboquant_rvq", "storage_config": {"bits": 1, "value_bits": 2}}
HEADS, KV_HEADS, DIM = 4, 2, 64
SCALE = DIM**-0.5
OPTIONS = {"mode": "retrieve", "allow_uncalibrated": True, "window": 16, "sinks": 3, "retrieval_fraction": 0.1}


def routed(**options):
    layer = LayerSpec(query_mode="routed", query_heads=HEADS, rope=Rope(dims=DIM))
    return veloxquant.get_cache("a2ats", {**OPTIONS, **PACKED, **options}, layer=layer)


def data(tokens, seed=0, batch=1, dtype=mx.float32):
    keys, heads = mx.random.split(mx.random.key(seed), 3), (HEADS, KV_HEADS, KV_HEADS)
    return [mx.random.normal((batch, h, tokens, DIM), key=k).astype(dtype) for h, k in zip(heads, keys, strict=True)]


def feed(cache, rows, cuts):
    outputs = []
    for cut in cuts:
        start = cache.offset
        queries, keys, values = (array[:, :, start : start + cut] for array in rows)
        found = cache.update_and_fetch(keys, values)
        outputs.append(cache.attend(queries, *found, scale=SCALE, mask=cache.make_mask(cut)))
        mx.eval(outputs[-1])
    return np.array(mx.concatenate(outputs, axis=2).astype(mx.float32))


def chosen(cache, query):
    state = cache.method_state
    count = state.count
    index, doubled = state._chosen(query, SCALE, -(-count // 10), 3, count - 16)
    return np.array(index), None if doubled is None else np.array(doubled)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_step_reads_chosen_rows_as_stored_and_its_own_as_it_came(per_head, batch):
    rows = data(310, batch=batch)
    cache = routed(per_head=per_head)
    feed(cache, rows, [299, 1])
    for count in (301, 302):
        output = feed(cache, rows, [1])[:, :, 0]
        query = rows[0][:, :, count - 1 : count]
        index, doubled = chosen(cache, query)
        stored = [np.array(array, np.float64) for array in cache.method_state.rows.store.keys_values()]
        for array, came in zip(stored, rows[1:], strict=True):
            assert np.abs(array[:, :, -1] - np.array(came)[:, :, count - 1]).max() > 0.1
            array[:, :, -1] = np.array(came, np.float64)[:, :, count - 1]
        for b in range(batch):
            for head in range(HEADS):
                own = head * KV_HEADS // HEADS
                kept = index[b, own] if doubled is None else index[b, own][~doubled[b, own]]
                keys, values = (array[b, own][kept] for array in stored)
                logits = keys @ np.array(query, np.float64)[b, head, 0] * SCALE
                weights = np.exp(logits - logits.max())
                np.testing.assert_allclose(output[b, head], weights / weights.sum() @ values, atol=2e-4)


def test_a_token_that_looks_at_itself_gets_its_own_value():
    rows = data(301)
    cache = routed()
    feed(cache, rows, [299, 1])
    own = rows[1][:, :, 300:301]
    looking = [50 * mx.repeat(own, HEADS // KV_HEADS, axis=1), own, rows[2][:, :, 300:301]]
    found = cache.update_and_fetch(*looking[1:])
    output = cache.attend(looking[0], *found, scale=SCALE)
    expected = np.repeat(np.array(looking[2]), HEADS // KV_HEADS, axis=1)
    np.testing.assert_allclose(np.array(output), expected, atol=1e-5)


def test_nothing_of_a_call_is_held_after_its_attention_nor_counted_as_packed():
    rows = data(400)
    cache = routed()
    feed(cache, rows, [299, 1, 1, 4, 1])
    assert cache.method_state.fresh is None
    count, dense = cache.account(), 306 * KV_HEADS * DIM * 4
    assert count.details["dense_bytes_keys"] == count.details["dense_bytes_values"] == dense
    assert count.details["ratio"] == pytest.approx(2 * dense / count.held)
    assert count.details["ratio"] > 4


def test_files_and_copies_go_on_alike():
    rows = data(310)
    cache = routed()
    feed(cache, rows, [299, 1, 1])
    twins = [type(cache).from_state(cache.state), copy.deepcopy(cache)]
    outputs = [feed(one, rows, [1, 3, 1]) for one in (cache, *twins)]
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] == outputs[2]).all()
    assert {one.account().details["dense_bytes_keys"] for one in (cache, *twins)} == {306 * KV_HEADS * DIM * 4}


@pytest.mark.parametrize("count", [1, 30, 150])
def test_every_rewind_is_exact(count):
    rows, other = data(400), data(400, seed=9)
    trimmed, plain = routed(), routed()
    for one in (trimmed, plain):
        feed(one, rows, [200, 1])
    feed(trimmed, other, [1] * count)
    assert trimmed.trim(count) == count
    assert trimmed.nbytes == plain.nbytes
    assert (feed(trimmed, rows, [1] * 5) == feed(plain, rows, [1] * 5)).all()


class TestRetrieveOverPackedRows(MethodTests):
    """A fifth of the rows in a step, packed."""

    method = "a2ats"
    config = A2ATSConfig(
        mode="retrieve",
        allow_uncalibrated=True,
        window=32,
        storage="turboquant_rvq",
        storage_config={"bits": 2, "value_bits": 4},
    )
    dense_config = A2ATSConfig(mode="retrieve", allow_uncalibrated=True, retrieval_fraction=1.0)
