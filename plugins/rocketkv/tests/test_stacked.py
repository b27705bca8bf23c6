"""RocketKV over the packed rows of a codec."""

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant.testing import MethodTests
from veloxquant_rocketkv import RocketKVConfig
from veloxquant_rocketkv import select_indices
from veloxquant_rocketkv.exact import SPARE

pytest.importorskip("veloxquant_turboquant_rvq")

PACKED = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}}
HEADS, KV_HEADS, DIM = 4, 2, 64


def routed(**options):
    layer = LayerSpec(query_mode="routed", query_heads=HEADS)
    return veloxquant.get_cache("rocketkv", {"dense_rows": 0, **PACKED, **options}, layer=layer)


def feed(cache, rows, cuts):
    outputs = []
    for cut in cuts:
        start = cache.offset
        queries, keys, values = (array[:, :, start : start + cut] for array in rows)
        mask = cache.make_mask(cut)
        result = cache.update_and_fetch(keys, values)
        outputs.append(cache.attend(queries, *result, scale=DIM**-0.5, mask=mask))
        mx.eval(outputs[-1])
    return np.array(mx.concatenate(outputs, axis=2).astype(mx.float32))


def data(tokens, seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    return [
        mx.random.normal((1, h, tokens, DIM), key=key) for h, key in zip((HEADS, KV_HEADS, KV_HEADS), keys, strict=True)
    ]


def expected(index, stored, exact, query, recent):
    """Attention of a group of queries over chosen rows: sinks and ``recent`` newest as they came, others as stored."""
    keys, values = (array[index] for array in stored)
    for array, came in zip((keys, values), exact, strict=True):
        array[:4] = came[:4]
        array[len(index) - recent :] = came[len(came) - recent :]
    logits = query @ keys.T * DIM**-0.5
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ values


def check_last(output, state, rows, recent):
    """The attention output of the last token ``[Hq, Dv]`` is over the rows chosen, in the forms promised."""
    tokens = state.rows.end
    stored = [np.array(array, np.float64)[0] for array in state.rows.store.keys_values()]
    queries, *exact = (np.array(array, np.float64)[0, :, :tokens] for array in rows)
    for head in range(KV_HEADS):
        group = slice(2 * head, 2 * head + 2)
        probe = mx.array(queries[group, -1].astype(np.float32))
        index = np.array(select_indices(state, probe, 0, head, keep_recent=state.config.newest_rows))
        assert {*range(4), *range(state.rows.count - recent, state.rows.count)} <= set(index.tolist())
        found = expected(
            index, [array[head] for array in stored], [array[head] for array in exact], queries[group, -1], recent
        )
        np.testing.assert_allclose(output[group], found, atol=2e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"topk": 40, "ranking": "rows"},
        {"topk": 40},
        {"topk": 40, "summary_bits": 4, "page_size": 4},
        {"topk": 10**6},
        {"topk": 41, "page_size": 3, "multi_turn": True},
    ],
)
@pytest.mark.parametrize("stage1", [True, False])
@pytest.mark.parametrize("recent", [0, 1, 11])
def test_attention_is_over_the_stored_form_with_sinks_and_newest_rows_as_they_came(options, stage1, recent):
    if not stage1 and options.get("multi_turn"):
        pytest.skip("multi_turn is stage 1 at every turn")
    rows = data(310)
    cache = routed(stage1=stage1, exact_recent=recent, **options)
    feed(cache, rows, [299, 1])
    for cuts in ([1, 1, 1], [5], [1]):
        output = feed(cache, rows, cuts)[0, :, -1]
        if cuts == [5] and options["topk"] == 10**6:
            continue  # all rows of a block count as they came
        # A token's own row counts as it came in any case.
        check_last(output, cache.method_state, rows, max(recent, 1))


def test_exact_rows_are_at_most_those_of_the_window():
    rows = data(310)
    cache = routed(exact_recent=100, window=8, topk=40)
    feed(cache, rows, [299, 1])
    check_last(feed(cache, rows, [1])[0, :, -1], cache.method_state, rows, 8)


@pytest.mark.parametrize("options", [{"ranking": "rows"}, {}, {"multi_turn": True}, {"stage1": False}])
def test_the_newest_rows_survive_evictions_and_rewinds(options):
    rows = data(900)
    cache = routed(topk=50, exact_recent=9, **options)
    feed(cache, rows, [299, 1, *[1] * 40])
    for back in (3, SPARE, 9):
        cache.trim(back)
        check_last(feed(cache, rows, [1])[0, :, -1], cache.method_state, rows, 9)
        feed(cache, rows, [1] * 12)
    # A later turn evicts again, and what is kept of it is still known as it came.
    feed(cache, rows, [80, 1])
    assert cache.method_state.exact.newest[0].shape[2] >= 9
    check_last(feed(cache, rows, [1])[0, :, -1], cache.method_state, rows, 9)


@pytest.mark.parametrize("options", [{"ranking": "rows", "stage1": False}, {"stage1": False}, {}])
def test_short_rewinds_are_exact(options):
    rows = data(500)
    for back in (1, SPARE):
        cache, plain = (routed(topk=50, exact_recent=9, **options) for _ in range(2))
        for one in (cache, plain):
            feed(one, rows, [299, 1, *[1] * 60])
        feed(cache, data(500, seed=9), [1] * back)
        assert cache.trim(back) == back
        assert (feed(cache, rows, [1, 1, 4, 1]) == feed(plain, rows, [1, 1, 4, 1])).all()


def test_beyond_what_is_spare_a_rewind_reads_codes_and_forgets():
    rows = data(500)
    cache = routed(topk=50, exact_recent=9, stage1=False)
    feed(cache, rows, [299, 1, *[1] * 60])
    cache.trim(100)
    state = cache.method_state
    assert state.exact.newest is None
    other = data(500, seed=3)
    feed(cache, other, [1])
    for held, came in zip(state.exact.newest, other[1:], strict=True):
        assert (np.array(held) == np.array(came)[:, :, 260:261]).all()
    mixed = [mx.concatenate([a[:, :, :260], b[:, :, 260:]], axis=2) for a, b in zip(rows, other, strict=True)]
    check_last(feed(cache, other, [1])[0, :, -1], state, mixed, 2)


def test_a_proxy_cache_returns_the_newest_rows_as_they_came():
    rows = data(320)
    cache = veloxquant.get_cache("rocketkv", {**PACKED, "topk": 40, "exact_recent": 7, "ranking": "rows"})
    for start, end in ((0, 299), (299, 300), (300, 301), (301, 302), (302, 303)):
        result = cache.update_and_fetch(*(array[:, :, start:end] for array in rows[1:]))
    for found, came in zip(result, rows[1:], strict=True):
        assert found.shape[2] == 40
        assert (np.array(found)[:, :, -7:] == np.array(came)[:, :, 296:303]).all()
        assert (np.array(found)[:, :, :4] == np.array(came)[:, :, :4]).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_is_held_is_itemised(dtype):
    cache = routed(stage1=False, topk=64, exact_recent=8)
    rows = [array.astype(dtype) for array in data(512)]
    for start, end in ((0, 511), (511, 512)):
        queries, keys, values = (array[:, :, start:end] for array in rows)
        result = cache.update_and_fetch(keys, values)
        mx.eval(cache.attend(queries, *result, scale=DIM**-0.5, mask=cache.make_mask(end - start)))
    details = cache.account().details
    assert details["exact_bytes"] == (4 + 8 + SPARE) * KV_HEADS * 2 * DIM * dtype.size
    assert cache.nbytes == details["stage1_bytes"] + details["stage2_aux_bytes"] + details["exact_bytes"]


def test_without_storage_nothing_is_held_twice():
    cache = veloxquant.get_cache(
        "rocketkv", {"stage1": False, "topk": 64}, layer=LayerSpec(query_mode="routed", query_heads=HEADS)
    )
    feed(cache, data(512), [510, 1, 1])
    assert cache.account().details["exact_bytes"] == 0


LOSSY = {"prompt_attended_whole": "a later block of a prompt reads the earlier ones as the codec holds them"}
# As in turboquant_rvq: a rewind leaves fewer rows as they came, and none of them beyond what is spare.
SHORTER = "fewer rows are left as they came after a rewind; the rows held and their packed form are the same"
REWOUND = {**LOSSY, "trim_state": SHORTER, "trim_forgets": SHORTER}


@pytest.mark.slow
class TestPackedRows(MethodTests):
    """Rows ranked on their packed keys."""

    method = "rocketkv"
    config = RocketKVConfig(ranking="rows", topk=40, **PACKED)
    expected_failures = REWOUND


@pytest.mark.slow
class TestPackedRowsCompactSummary(MethodTests):
    """Packed rows under a summary in 4 bits, none of the newest as they came: rewinds leave no trace."""

    method = "rocketkv"
    config = RocketKVConfig(summary_bits=4, topk=30, exact_recent=0, **PACKED)
    expected_failures = LOSSY
