"""What RocketKV keeps and reads, driven through the cache as mlx-lm drives it."""

import copy
import sys

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
import veloxquant.halves
import veloxquant_rocketkv.attend
import veloxquant_rocketkv.selection
from veloxquant import LayerSpec
from veloxquant.attention import attention
from veloxquant_rocketkv import RocketKVConfig
from veloxquant_rocketkv import page_bounds
from veloxquant_rocketkv import select_indices
from veloxquant_snapkv import keep_indices
from veloxquant_snapkv import pool_scores
from veloxquant_snapkv import window_scores

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 32, 24
SCALE = DIM**-0.5


def routed(**options):
    options = {"dense_rows": 0, **options}
    return veloxquant.get_cache("rocketkv", options, layer=LayerSpec(query_mode="routed", query_heads=HEADS))


def data(tokens, batch=1, seed=0, dtype=mx.float32):
    keys = [mx.random.key(seed + part) for part in range(3)]
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)]
    return [
        mx.random.normal((batch, heads, tokens, dim), key=key).astype(dtype)
        for key, (heads, dim) in zip(keys, shapes, strict=True)
    ]


def feed(cache, rows, cuts):
    """Feed rows in blocks of the given lengths, as a model does; returns the attention outputs."""
    start, outputs = cache.offset, []
    for cut in cuts:
        queries, keys, values = (array[:, :, start : start + cut] for array in rows)
        mask = cache.make_mask(cut)
        all_keys, all_values = cache.update_and_fetch(keys, values)
        attend = getattr(cache, "attend", None)
        if attend:
            outputs.append(attend(queries, all_keys, all_values, scale=SCALE, mask=mask))
        else:
            outputs.append(attention(queries, all_keys, all_values, SCALE, mask))
        mx.eval(outputs[-1])
        start += cut
    return mx.concatenate(outputs, axis=2)


def held(cache):
    snapshot = cache.method.ops.serialize(cache.method_state)
    return {name: np.array(array.astype(mx.float32)) for name, array in snapshot.arrays.items()}


def same(one, other):
    first, second = held(one), held(other)
    return first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


@pytest.fixture
def attended(monkeypatch):
    """Rows that enter attention, call by call."""
    seen = []

    real = mx.fast.scaled_dot_product_attention

    def counting(queries, keys, values, **others):
        seen.append((keys.shape[2], values.shape[2]))
        return real(queries, keys, values, **others)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counting)
    return seen


# ------------------------------------------------------------------ stage 1


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_rows_kept_are_those_that_votes_with_wide_pooling_choose(dtype, batch):
    rows = data(301, batch, dtype=dtype)
    cache = routed()
    feed(cache, rows, [300, 1])
    queries, keys, values = rows
    votes = pool_scores(window_scores(queries[:, :, -32:], keys, SCALE), 31, "max")
    index = keep_indices(votes, 301, int(301 / 8**0.38), sinks=4)
    kept = held(cache)
    assert (kept["positions"] == np.array(index)).all()
    for name, array in (("keys", keys), ("values", values)):
        expected = mx.take_along_axis(array, index[..., None], axis=2)
        assert (kept[name] == np.array(expected.astype(mx.float32))).all()


@pytest.mark.parametrize("tokens", [1, 2, 10, 36, 50, 79])
@pytest.mark.parametrize("mode", ["routed", "proxy"])
def test_short_prompts_are_never_cut_below_sinks_and_window(tokens, mode):
    cache = routed() if mode == "routed" else veloxquant.get_cache("rocketkv")
    feed(cache, data(tokens + 1), [tokens - 1, 1] if tokens > 1 else [1])
    assert cache.rows == min(tokens, 36)
    if tokens >= 2:
        assert (held(cache)["keys"][:, :, :2] == np.array(data(tokens + 1)[1])[:, :, :2]).all()
    assert bool(mx.isfinite(feed(cache, data(tokens + 1), [1])).all())


def test_decoded_rows_are_stored_and_never_dropped():
    rows = data(400)
    cache = routed()
    feed(cache, rows, [299, 1])
    kept = cache.rows
    feed(cache, rows, [1] * 60)
    assert (cache.rows, cache.offset) == (kept + 60, 360)
    assert (held(cache)["keys"][:, :, kept:] == np.array(rows[1])[:, :, 300:360]).all()


# ------------------------------------------------------------------ stage 2


def test_attention_covers_the_chosen_rows_only(attended):
    rows = data(2048 + 40)
    cache = routed()
    feed(cache, rows, [2047, 1])
    attended.clear()
    feed(cache, rows, [1] * 40)
    for step, counts in enumerate(attended):
        read = (2049 + step) // 16
        assert counts[0] == counts[1]
        # Whole pages: at most one row more than asked for.
        assert read <= counts[0] <= read + 1
    assert cache.rows == int(2048 / 8**0.38) + 40


@pytest.mark.parametrize("options", [{"ranking": "rows"}, {"page_size": 1}, {"page_size": 3}, {"multi_turn": True}])
@pytest.mark.parametrize("keep_recent", [0, 1, 5])
def test_topk_is_the_number_of_rows_read(attended, options, keep_recent):
    rows = data(320)
    cache = routed(topk=24, keep_recent=keep_recent, **options)
    feed(cache, rows, [299, 1])
    attended.clear()
    feed(cache, rows, [1] * 10)
    size = options.get("page_size", 1 if options.get("ranking") else 2)
    assert {24 <= keys < 24 + size for keys, _ in attended} == {True}
    assert rows_read(cache) == attended[-1][0]


def rows_read(cache):
    return cache.method.ops.account(cache.method_state).details["rows_read"]


def test_few_rows_are_read_without_a_choice(attended):
    rows = data(400)
    cache = routed(dense_rows=None)
    outputs = feed(cache, rows, [299, 1, *[1] * 20])
    kept = held(cache)
    assert "bounds" not in kept
    assert rows_read(cache) == cache.rows == int(300 / 8**0.38) + 20
    queries = rows[0][:, :, 319:320]
    expected = attention(queries, mx.array(kept["keys"]), mx.array(kept["values"]), SCALE, None)
    assert mx.allclose(outputs[:, :, -1:], expected, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"stage1": False}, {"multi_turn": True}])
def test_rows_are_chosen_as_soon_as_there_are_more(attended, options):
    rows = data(420)
    cache, always = routed(dense_rows=145, **options), routed(**options)
    for one in (cache, always):
        feed(one, rows, [299, 1, *[1] * 9])
    attended.clear()
    for _ in range(30):
        outputs = [feed(one, rows, [1]) for one in (cache, always)]
        few = cache.method_state.selector.filtered_rows <= 145
        assert rows_read(cache) == (cache.method_state.selector.filtered_rows if few else rows_read(always))
        assert few or (outputs[0] == outputs[1]).all()
    # The last of those steps chose, and what it chose by is what it would be had it always been there.
    assert cache.method_state.selector.filtered_rows > 145
    assert same(cache, always)


def test_options_say_how_many_rows_are_few():
    assert RocketKVConfig().all_read_up_to == 384
    assert RocketKVConfig(topk=40).all_read_up_to == 0
    assert RocketKVConfig(topk=40, dense_rows=100).all_read_up_to == 100


def test_in_proxy_mode_the_key_chooses_and_the_chosen_rows_come_back():
    rows = data(320)
    cache = veloxquant.get_cache("rocketkv", {"topk": 20, "page_size": 1, "head_topk1": DIM})
    feed(cache, rows, [299, 1])
    before = held(cache)
    new_keys, new_values = rows[1][:, :, 300:301], rows[2][:, :, 300:301]
    keys, values = cache.update_and_fetch(new_keys, new_values)
    assert (keys.shape[2], values.shape[2], cache.rows) == (20, 20, int(300 / 8**0.38) + 1)
    for head in range(KV_HEADS):
        logits = before["keys"][0, head] @ np.array(new_keys)[0, head, 0]
        best = np.sort(np.argsort(-logits)[:19])
        assert (np.array(keys)[0, head, :19] == before["keys"][0, head, best]).all()
        assert (np.array(values)[0, head, :19] == before["values"][0, head, best]).all()
    assert (np.array(keys)[:, :, 19:] == np.array(new_keys)).all()


@pytest.mark.parametrize("topk", [331, 10**6])
@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"page_size": 7}, {"ranking": "rows"}])
def test_reading_all_rows_of_a_whole_prompt_is_dense_attention(topk, options):
    rows = data(331)
    cache = routed(stage1=False, topk=topk, **options)
    output = feed(cache, rows, [200, 99, 1, 1, 5, *[1] * 25])
    np.testing.assert_allclose(np.array(output), np.array(attention(*rows, SCALE, "causal")), atol=2e-6)
    assert cache.account().details["stage2_aux_bytes"] == 0


def exact_best(queries, keys, count):
    """The rows with the largest softmax weights, summed over the group."""
    logits = queries.astype(np.float64) @ keys.astype(np.float64).T * SCALE
    weights = np.exp(logits - logits.max(1, keepdims=True))
    ranks = (weights / weights.sum(1, keepdims=True)).sum(0)
    return np.sort(np.argsort(-ranks)[:count])


@pytest.mark.parametrize("options", [{"page_size": 1, "head_topk1": DIM}, {"ranking": "rows"}])
@pytest.mark.parametrize("batch", [1, 2])
def test_pages_of_one_row_with_all_channels_choose_exactly(options, batch):
    rows = data(400, batch)
    cache = routed(stage1=False, topk=40, **options)
    feed(cache, rows, [399, 1])
    queries, keys = (np.array(array) for array in rows[:2])
    for one in range(batch):
        for head in range(KV_HEADS):
            group = queries[one, 2 * head : 2 * head + 2, 399]
            found = select_indices(cache.method_state, mx.array(group), one, head)
            assert found.dtype == mx.int32
            assert np.array(found).tolist() == exact_best(group, keys[one, head], 40).tolist()


@pytest.mark.parametrize("keep_recent", [0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"page_size": 3, "head_topk1": 9}, {"multi_turn": True}])
def test_selected_indices_are_what_the_next_step_reads(monkeypatch, options, keep_recent):
    rows = data(330)
    cache = routed(topk=30, keep_recent=keep_recent, **options)
    feed(cache, rows, [299, 1, 1, 1])
    gathered = []
    store = type(cache.method_state.rows.store)
    real = store.reader
    monkeypatch.setattr(store, "reader", lambda self, index: (gathered.append(np.array(index)), real(self, index))[1])
    feed(cache, rows, [1])
    read = gathered[-1]
    before = held(cache)
    for head in range(KV_HEADS):
        group = rows[0][0, 2 * head : 2 * head + 2, 302]
        found = np.array(select_indices(cache.method_state, group, 0, head, keep_recent=keep_recent))
        assert found.tolist() == read[0, head].tolist()
        assert found.tolist() == sorted(set(found.tolist()))
        assert set(range(cache.rows - keep_recent, cache.rows)) <= set(found.tolist())
    assert all((before[name] == array).all() for name, array in held(cache).items())


def test_a_block_of_several_tokens_reads_for_each_what_it_would_alone():
    rows = data(360)
    block, single = routed(topk=20), routed(topk=20)
    for cache in (block, single):
        feed(cache, rows, [299, 1])
    together, alone = feed(block, rows, [9, 3, 1]), feed(single, rows, [1] * 13)
    np.testing.assert_allclose(np.array(together), np.array(alone), atol=1e-6)
    assert same(block, single)


@pytest.mark.parametrize("page_size", [1, 2, 3, 5])
def test_the_summary_grown_step_by_step_is_the_one_made_at_once(page_size):
    rows = data(700)
    cache = routed(topk=12, page_size=page_size)
    feed(cache, rows, [299, 1])
    for cuts in ([1] * 7, [5, 1, 3], [1] * 90, [20], [1] * 200):
        feed(cache, rows, cuts)
        summary = cache.method_state.selector.summary
        keys, _ = cache.method_state.rows.store.keys_values()
        assert summary.pages == (cache.rows - 1) // page_size
        rebuilt = page_bounds(keys[:, :, : summary.pages * page_size], page_size)
        assert (np.array(summary.live()) == np.array(rebuilt)).all()


@pytest.mark.parametrize("options", [{}, {"page_size": 3}, {"page_size": 1, "head_topk1": DIM}, {"summary_bits": 4}])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_on_two_threads_are_what_they_are_on_one(monkeypatch, batch, options):
    """Three heads: the halves are not alike. The rewind leaves heads with different rows, which are masked."""
    shape = {"query_heads": 6, "query_mode": "routed"}
    sinks = mx.random.normal((6,), key=mx.random.key(9))
    rows = [mx.random.normal((batch, heads, 400, DIM), key=mx.random.key(heads)) for heads in (6, 3, 3)]
    outputs = []
    for worth in (2**40, 0):
        monkeypatch.setattr(veloxquant.halves, "_WORTH_A_STREAM", worth)
        cache = veloxquant.get_cache("rocketkv", {"topk": 60, **options}, layer=LayerSpec(**shape))
        outputs.append([])
        for start, stop in [(0, 299), (299, 300), (300, 301), (301, 304), (280, 281), (281, 282)]:
            cache.trim(cache.offset - start)
            queries, keys, values = (array[:, :, start:stop] for array in rows)
            found = cache.update_and_fetch(keys, values)
            mask = cache.make_mask(stop - start)
            outputs[-1].append(np.array(cache.attend(queries, *found, scale=SCALE, mask=mask, sinks=sinks)))
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_copies_no_buffer():
    cache = routed()
    rows = data(6000)
    feed(cache, rows, [5999, 1])
    report = veloxquant.report(cache, measure_step=True)
    (layer,) = report.layers
    assert layer.step_bytes < 0.6 * layer.bytes_held


def test_bytes_are_those_of_the_formula_and_of_the_arrays():
    cache = routed()
    feed(cache, data(2000), [1999, 1])
    # Rows of 1 / 2.204 of the prompt, half as many bytes of page bounds for keys as wide as values, and positions.
    row = (DIM + VALUE_DIM) * KV_HEADS * 4
    kept = int(2000 / 8**0.38)
    expected = kept * row + 2 * (kept // 2) * DIM * KV_HEADS * 4
    assert cache.nbytes == pytest.approx(expected, rel=0.05)
    assert cache.nbytes == sum(array.nbytes for array in held(cache).values())
    details = cache.account().details
    assert details["stage2_aux_bytes"] == held(cache)["bounds"].nbytes
    assert details["stage1_bytes"] + details["stage2_aux_bytes"] == cache.nbytes
    assert details["dense_bytes"] == cache.plain_nbytes
    assert (details["tokens_kept"], details["tokens_seen"]) == (kept, 2000)
    assert details["keep_rate"] == kept / 2000
    assert (details["page_size"], details["head_topk1"]) == (2, int(DIM * 2 / 8**0.62))
    assert details["compression_ratio"] == 8
    assert details["stage1_ratio"] == pytest.approx(2.204, rel=1e-3)


def test_pages_of_one_row_hold_one_copy_of_the_keys():
    cache = routed(page_size=1)
    feed(cache, data(600), [599, 1])
    assert held(cache)["bounds"].shape == (1, KV_HEADS, DIM, int(600 / 8**0.38) - 1)


def test_exact_ranking_holds_no_summary():
    cache = routed(ranking="rows")
    feed(cache, data(610), [599, 1, *[1] * 10])
    assert cache.account().details["stage2_aux_bytes"] == 0


# ------------------------------------------------------------------- rewinds


@pytest.mark.parametrize("back", [1, 5, 40])
def test_a_rewind_leaves_no_trace_and_builds_no_page_anew(monkeypatch, back):
    rows = data(500)
    rewound, plain = routed(topk=12), routed(topk=12)
    for cache in (rewound, plain):
        feed(cache, rows, [299, 1, 1, 1])
    feed(rewound, data(500, seed=9), [1] * back)
    with monkeypatch.context() as patched:
        patched.setattr(veloxquant_rocketkv.selection, "page_bounds", None)
        assert rewound.trim(back) == back
    assert same(rewound, plain)
    assert rewound.nbytes == plain.nbytes


def test_a_deep_rewind_builds_only_the_touched_pages_anew(monkeypatch):
    rows = data(300)
    cache = routed(topk=12, kernel_size=1)
    feed(cache, rows, [299, 1])
    positions, built = held(cache)["positions"][0], []

    def counted(keys, page_size, valid=None):
        built.append(keys.shape[2] // page_size)
        return page_bounds(keys, page_size, valid)

    monkeypatch.setattr(veloxquant_rocketkv.selection, "page_bounds", counted)
    # Some length at which the heads hold different numbers of rows.
    counts = {length: [int((head < length).sum()) for head in positions] for length in range(150, 250)}
    length, alive = max(counts.items(), key=lambda item: abs(item[1][0] - item[1][1]))
    assert max(alive) > min(alive) + 2
    cache.trim(300 - length)
    assert built == [(max(alive) - 1) // 2 - min(alive) // 2]


@pytest.mark.parametrize("rewind", [10, 60, 150, 250])
def test_a_deep_rewind_reads_live_rows_only(rewind):
    rows = data(400)
    cache = routed(topk=16)
    feed(cache, rows, [299, 1])
    before = held(cache)["positions"]
    cache.trim(rewind)
    length = 300 - rewind
    survivors = [[int(p) for p in head if p < length] for head in before[0]]
    assert cache.rows == max(map(len, survivors))
    later = [*data(400, seed=7)]
    # What was forgotten would show.
    output = feed(cache, later, [1] * 5)
    assert bool(mx.isfinite(output).all())
    for head in range(KV_HEADS):
        group = later[0][0, 2 * head : 2 * head + 2, length + 4]
        found = np.array(select_indices(cache.method_state, group, 0, head, keep_recent=1))
        positions = np.array(cache.method_state.rows.positions())
        positions = np.broadcast_to(positions, (1, KV_HEADS, cache.rows))[0, head, found]
        assert (positions >= 0).all()
        assert set(positions.tolist()) <= {*survivors[head], *range(length, length + 5)}


def uneven(**options):
    """A cache rewound to where one head has kept far more rows than the other, which has fewer than are read."""
    queries, keys, values = map(np.array, data(300))
    queries[..., 0] = 6
    keys *= 0.1
    keys[0, 0, 40:150, 0] = 6
    keys[0, 1, 150:, 0] = 6
    cache = routed(window=8, sinks=2, kernel_size=5, **options)
    feed(cache, [mx.array(array) for array in (queries, keys, values)], [299, 1])
    cache.trim(160)
    return cache


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_a_head_with_few_live_rows_reads_none_twice_and_none_that_are_not_there(page_size):
    cache = uneven(topk=40, page_size=page_size)
    later = data(160, seed=7)
    for _ in range(12):
        feed(cache, later, [1])
        state = cache.method_state
        index = state.selector.choose(later[0][:, :, cache.offset - 1 : cache.offset], SCALE)
        alive = np.array(state.rows.valid())[0].sum(axis=1)
        assert min(alive) < index.shape[2] < max(alive)
        assert (np.diff(np.array(index)) > 0).all()
        assert np.array(index).max() < cache.rows


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"summary_bits": 4}, {"ranking": "rows", "stage1": False}])
def test_rewound_rows_that_are_not_finite_leave_no_trace(options, bad):
    rows = data(500)
    rewound, plain = routed(topk=12, **options), routed(topk=12, **options)
    for cache in (rewound, plain):
        feed(cache, rows, [299, 1, 1, 1])
    broken = [mx.where(mx.arange(500).reshape(1, 1, -1, 1) < 302, array, bad) for array in rows]
    feed(rewound, broken, [1] * 6)
    rewound.trim(6)
    assert np.array_equal(np.array(feed(rewound, rows, [1] * 9)), np.array(feed(plain, rows, [1] * 9)))


# ---------------------------------------------------------------- multi_turn


def test_one_turn_of_multi_turn_is_rocketkv():
    rows = data(400)
    several, once = routed(multi_turn=True, topk=20), routed(topk=20)
    outputs = [np.array(feed(cache, rows, [299, 1, *[1] * 40, 4, 1])) for cache in (several, once)]
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-6)
    assert (held(several)["bounds"] == held(once)["bounds"]).all()


def test_multi_turn_keeps_the_history_and_chooses_anew_each_turn():
    rows = data(900)
    cache = routed(multi_turn=True, topk=20)
    feed(cache, rows, [299, 1, *[1] * 20])
    first = held(cache)["filtered"]
    feed(cache, rows, [199, 1, *[1] * 10])
    assert (cache.rows, cache.offset) == (530, 530)
    assert (held(cache)["keys"] == np.array(rows[1])[:, :, :530]).all()
    second = held(cache)["filtered"]
    queries, keys, _ = rows
    votes = pool_scores(window_scores(queries[:, :, 488:520], keys[:, :, :520], SCALE), 31, "max")
    assert (second == np.array(keep_indices(votes, 520, int(520 / 8**0.38), sinks=4))).all()
    assert first.shape != second.shape
    details = cache.account().details
    assert "keeps every row" in details["memory_saved"]
    assert details["tokens_kept"] == int(520 / 8**0.38) + 10
    assert cache.nbytes > cache.plain_nbytes


def test_a_rewind_into_an_earlier_turn_reads_the_whole_history_again():
    rows = data(400)
    cache = routed(multi_turn=True, topk=20)
    feed(cache, rows, [299, 1, *[1] * 20])
    cache.trim(30)
    assert (cache.rows, cache.offset) == (290, 290)
    assert "filtered" not in held(cache)
    assert bool(mx.isfinite(feed(cache, rows, [1] * 3)).all())


# ------------------------------------------------------------- copies, masks


@pytest.mark.parametrize("options", [{}, {"multi_turn": True}, {"page_size": 1}])
@pytest.mark.parametrize("moment", [[50], [299], [299, 1], [299, 1, 1, 1, 1]])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(options, moment):
    rows = data(500)
    cache = routed(topk=20, **options)
    feed(cache, rows, moment)
    twins = [type(cache).from_state(cache.state), copy.deepcopy(cache)]
    assert all(same(cache, twin) for twin in twins)
    rest = [349 - cache.offset, 1, 1, 1] if cache.offset < 299 else [1] * 20
    outputs = [np.array(feed(one, rows, rest)) for one in (cache, *twins)]
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] == outputs[2]).all()
    assert all(same(cache, twin) for twin in twins)


def test_a_mask_array_is_refused_where_rows_are_chosen_and_honoured_elsewhere():
    rows = data(400)
    cache = routed(topk=20)
    feed(cache, rows, [299, 1])
    queries, keys, values = (array[:, :, 300:301] for array in rows)
    result = cache.update_and_fetch(keys, values)
    with pytest.raises(veloxquant.RoutingError, match="mask array"):
        cache.attend(queries, *result, scale=SCALE, mask=mx.ones((1, cache.rows), mx.bool_))
    assert cache.trim(1) == 1
    assert bool(mx.isfinite(feed(cache, rows, [1])).all())


def test_a_proxy_cache_is_not_trimmable_from_birth():
    cache = veloxquant.get_cache("rocketkv")
    assert not cache.is_trimmable()
    feed(cache, data(200), [199, 1])
    assert cache.trim(5) == 0
    assert cache.offset == 200


def test_without_stage_1_proxy_caches_can_be_trimmed_exactly():
    rows, (_, *other) = data(220), data(30, seed=7)
    cache, plain = (veloxquant.get_cache("rocketkv", {"stage1": False, "topk": 20}) for _ in range(2))
    assert cache.is_trimmable()
    for one in (cache, plain):
        feed(one, rows, [199, 1])
    for start in range(20):
        cache.update_and_fetch(*(array[:, :, start : start + 1] for array in other))
    assert cache.trim(20) == 20
    for start in range(200, 220):
        own = [array[:, :, start : start + 1] for array in rows[1:]]
        for got, expected in zip(cache.update_and_fetch(*own), plain.update_and_fetch(*own), strict=True):
            assert mx.array_equal(got, expected)


def test_the_work_in_python_does_not_grow_with_heads_or_batch():
    def calls(batch, kv_heads):
        layer = LayerSpec(query_mode="routed", query_heads=2 * kv_heads)
        cache = veloxquant.get_cache("rocketkv", {"topk": 20}, layer=layer)
        shapes = [(2 * kv_heads, DIM), (kv_heads, DIM), (kv_heads, VALUE_DIM)]
        rows = [mx.random.normal((batch, heads, 320, dim)) for heads, dim in shapes]
        feed(cache, rows, [299, 1])
        # The cheapest of some steps: one that grows no buffer, ends no page, and during which no garbage is collected.
        return min(one_step(cache, rows) for _ in range(8))

    def one_step(cache, rows):
        queries, keys, values = (array[:, :, cache.offset : cache.offset + 1] for array in rows)
        count = 0

        def counted(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counted)
        try:
            result = cache.update_and_fetch(keys, values)
            cache.attend(queries, *result, scale=SCALE)
        finally:
            sys.setprofile(None)
        return count

    assert calls(1, 1) == calls(1, 8) == calls(3, 4)
