"""What SnapKV keeps, driven through the cache as mlx-lm drives it."""

import copy

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant.attention import attention
from veloxquant_snapkv import keep_indices
from veloxquant_snapkv import pool_scores
from veloxquant_snapkv import window_scores

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 32, 24
SCALE = DIM**-0.5


def routed(config=None, **options):
    return veloxquant.get_cache("snapkv", config or options, layer=LayerSpec(query_mode="routed", query_heads=HEADS))


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
        start += cut
    return mx.concatenate(outputs, axis=2)


def held(cache):
    snapshot = cache.method.ops.serialize(cache.method_state)
    return {name: np.array(array.astype(mx.float32)) for name, array in snapshot.arrays.items()}


def drafted(rows, other, length):
    """Rows whose tokens from ``length`` on are those of a draft that will be rejected."""
    return [mx.concatenate([a[:, :, :length], b[:, :, length:]], 2) for a, b in zip(rows, other, strict=True)]


def same(one, other):
    first, second = held(one), held(other)
    return first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_kept_rows_are_copies_of_the_rows_that_the_votes_choose(dtype, batch):
    rows = data(201, batch, dtype=dtype)
    cache = routed(budget=80, window=16)
    feed(cache, rows, [200, 1])
    queries, keys, values = rows
    votes = pool_scores(window_scores(queries[:, :, -16:], keys, SCALE), 7, "max")
    index = keep_indices(votes, 201, 80, sinks=4)
    kept = held(cache)
    assert (kept["positions"] == np.array(index)).all()
    for name, array in (("keys", keys), ("values", values)):
        expected = mx.take_along_axis(array, index[..., None], axis=2)
        assert (kept[name] == np.array(expected.astype(mx.float32))).all()


def test_the_prompt_is_attended_whole_and_exactly():
    rows = data(300)
    output = feed(routed(budget=64), rows, [128, 128, 43, 1])
    expected = attention(*rows, SCALE, "causal")
    np.testing.assert_allclose(np.array(output), np.array(expected), atol=2e-6)


@pytest.mark.parametrize("cuts", [[300, 1], [256, 44, 1], [64, 64, 64, 64, 44, 1], [298, 2, 1], [33] * 9 + [3, 1]])
@pytest.mark.parametrize("ratio", [2.0, 4.0])
def test_what_is_kept_does_not_depend_on_the_chunks(cuts, ratio):
    rows = data(301)
    whole, chunked = routed(compression_ratio=ratio), routed(compression_ratio=ratio)
    feed(whole, rows, [300, 1])
    feed(chunked, rows, cuts)
    assert whole.rows == int(301 / ratio)
    assert same(whole, chunked)
    assert whole.nbytes == chunked.nbytes


def test_what_is_kept_does_not_depend_on_the_batch():
    rows = data(201, batch=3)
    together = routed(budget=64)
    feed(together, rows, [200, 1])
    for row in range(3):
        alone = routed(budget=64)
        feed(alone, [array[row : row + 1] for array in rows], [200, 1])
        for name, array in held(alone).items():
            assert (array[0] == held(together)[name][row]).all()


@pytest.mark.parametrize("tokens", [1, 2, 10, 36, 50, 63, 64])
@pytest.mark.parametrize("mode", ["routed", "proxy"])
def test_short_prompts_are_kept_whole(tokens, mode):
    rows = data(tokens)
    cache = routed(budget=64) if mode == "routed" else veloxquant.get_cache("snapkv", {"budget": 64})
    feed(cache, rows, [tokens - 1, 1] if tokens > 1 else [1])
    assert cache.rows == cache.offset == tokens
    assert (held(cache)["keys"] == np.array(rows[1])).all()


@pytest.mark.parametrize("tokens", range(1, 64, 6))
def test_a_ratio_never_cuts_below_sinks_and_window(tokens):
    cache = veloxquant.get_cache("snapkv", {"compression_ratio": 100.0})
    feed(cache, data(tokens), [tokens - 1, 1] if tokens > 1 else [1])
    assert cache.rows == min(tokens, 36)


def test_decoded_rows_are_stored_and_never_evicted():
    rows = data(260)
    cache = routed(budget=64)
    feed(cache, rows, [199, 1])
    assert cache.rows == 64
    for step in range(60):
        feed(cache, rows, [1])
        assert (cache.rows, cache.offset) == (65 + step, 201 + step)
    kept = held(cache)
    assert (kept["keys"][:, :, 64:] == np.array(rows[1])[:, :, 200:]).all()


def test_decoding_attends_over_the_kept_rows_and_nothing_else():
    rows = data(201)
    cache = routed(budget=64)
    feed(cache, rows, [199, 1])
    index = mx.array(held(cache)["positions"]).astype(mx.int32)[..., None]
    output = feed(cache, rows, [1])
    queries, keys, values = rows
    kept = [mx.concatenate([mx.take_along_axis(a[:, :, :200], index, 2), a[:, :, 200:]], 2) for a in (keys, values)]
    expected = attention(queries[:, :, 200:], *kept, SCALE, None)
    np.testing.assert_allclose(np.array(output), np.array(expected), atol=1e-6)


def test_a_long_later_turn_chooses_anew_over_all_rows_held():
    rows = data(500)
    cache = routed(compression_ratio=4.0)
    feed(cache, rows, [199, 1] + [1] * 20)
    assert cache.rows == 50 + 20
    feed(cache, rows, [180])
    assert cache.rows == 250
    feed(cache, rows, [1])
    assert (cache.rows, cache.offset) == (401 // 4, 401)
    positions = held(cache)["positions"]
    assert (np.diff(positions) > 0).all()
    assert (positions[..., :4] == np.arange(4)).all()
    assert (positions[..., -32:] == np.arange(369, 401)).all()


def test_a_short_later_block_is_decoded_not_evicted():
    rows = data(300)
    cache = routed(budget=64)
    feed(cache, rows, [199, 1, 8, 1])
    assert (cache.rows, cache.offset) == (64 + 9, 209)


@pytest.mark.parametrize("chunk", [64, 100, 128])
def test_chunk_eviction_bounds_the_rows_during_a_long_prompt(chunk):
    rows = data(1025)
    cache = routed(budget=96, eviction="chunk")
    while cache.offset < 1024:
        feed(cache, rows, [min(chunk, 1024 - cache.offset)])
        assert cache.rows <= 96 + chunk
        assert cache.nbytes <= (96 + 64) * KV_HEADS * (DIM + VALUE_DIM + 1) * 4 + 64 * HEADS * DIM * 4
    feed(cache, rows, [1])
    assert cache.rows == 96
    positions = held(cache)["positions"]
    assert (positions[..., :4] == np.arange(4)).all()
    assert (positions[..., -32:] == np.arange(1025 - 32, 1025)).all()


def test_bytes_right_after_the_eviction_are_those_of_the_budget():
    rows = data(2048)
    cache = routed(budget=256)
    feed(cache, rows, [2047])
    assert cache.account().details["query_bytes"] == 64 * HEADS * DIM * 4
    feed(cache, rows, [1])
    assert cache.account().details["query_bytes"] == 0
    assert cache.nbytes <= 1.15 * cache.plain_nbytes * 256 / 2048
    assert cache.nbytes == sum(array.nbytes for array in held(cache).values())


def test_a_small_budget_has_little_slack():
    cache = routed(budget=64)
    feed(cache, data(300), [199, 1, 1])
    assert cache.account().keys <= (64 + 16) * KV_HEADS * DIM * 4


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_drafts_leave_no_trace(accepted):
    """mlx-lm's speculative decoding feeds the prompt's last token with the draft, then trims what was rejected."""
    rows, other = data(260), data(260, seed=50)
    speculative, plain = routed(budget=64), routed(budget=64)
    feed(plain, rows, [199, 1] + [1] * accepted)
    feed(speculative, drafted(rows, other, 200 + accepted), [199, 4])
    assert speculative.trim(3 - accepted) == 3 - accepted
    assert speculative.offset == plain.offset == 200 + accepted
    if accepted == 0:
        assert same(speculative, plain)
        assert speculative.nbytes == plain.nbytes
    # With accepted drafts the block's last surviving queries vote: one prompt of 200 + accepted tokens.
    whole = routed(budget=64)
    feed(whole, rows, [199 + accepted, 1])
    assert same(speculative, whole)
    assert (speculative.rows, speculative.nbytes) == (whole.rows, whole.nbytes)


def test_later_drafts_leave_no_trace_either():
    rows, other = data(300), data(300, seed=50)
    speculative, plain = routed(budget=64), routed(budget=64)
    feed(plain, rows, [199, 1] + [1] * 40)
    feed(speculative, rows, [199, 1])
    while speculative.offset < 240:
        mixed = drafted(rows, other, speculative.offset + 1)
        feed(speculative, mixed, [4])
        speculative.trim(3)
    assert same(speculative, plain)
    assert speculative.nbytes == plain.nbytes


def test_a_rewind_within_the_decoded_rows_is_exact():
    rows, other = data(300), data(300, seed=50)
    rewound, plain = routed(budget=64), routed(budget=64)
    feed(plain, rows, [199, 1] + [1] * 30)
    feed(rewound, rows, [199, 1] + [1] * 10)
    feed(rewound, other, [1] * 25)
    assert rewound.trim(25) == 25
    assert same_output(rewound, plain, rows, 20)
    assert same(rewound, plain)


def same_output(one, other, rows, steps):
    feed(one, rows, [1] * steps)
    return one.offset == other.offset


@pytest.mark.parametrize("rewind", [20, 33, 120, 180, 199])
def test_a_deep_rewind_masks_what_each_head_lost(rewind):
    """Heads keep different rows, so after a rewind into the prompt they hold different counts."""
    rows = data(400)
    cache = routed(budget=64)
    feed(cache, rows, [199, 1])
    before = held(cache)["positions"]
    assert cache.trim(rewind) == rewind
    length = 200 - rewind
    assert cache.offset == length
    survivors = [[int(p) for p in head if p < length] for head in before[0]]
    assert cache.rows == max(map(len, survivors))
    later = data(400, seed=7)
    output = np.array(feed(cache, [a[:, :, : length + 5] for a in later], [1] * 5))
    queries, keys, values = (np.array(a)[0].astype(np.float64) for a in later)
    old_keys, old_values = (np.array(a)[0].astype(np.float64) for a in rows[1:])
    for head in range(HEADS):
        chosen = survivors[head // 2]
        for step in range(5):
            new = range(length, length + step + 1)
            k = np.concatenate([old_keys[head // 2][chosen], keys[head // 2][new]])
            v = np.concatenate([old_values[head // 2][chosen], values[head // 2][new]])
            logits = k @ queries[head, length + step] * SCALE
            weights = np.exp(logits - logits.max())
            np.testing.assert_allclose(output[0, head, step], weights @ v / weights.sum(), atol=1e-5)


def test_a_prompt_after_a_deep_rewind_chooses_among_live_rows():
    rows = data(600)
    cache = routed(budget=64)
    feed(cache, rows, [199, 1])
    cache.trim(90)
    feed(cache, rows, [300, 1])
    assert (cache.rows, cache.offset) == (64, 411)
    positions = held(cache)["positions"]
    assert (positions >= 0).all()
    assert (np.diff(positions) > 0).all()


def test_trim_to_nothing_is_a_new_cache():
    rows = data(300)
    cache, fresh = routed(budget=64), routed(budget=64)
    feed(cache, rows, [199, 1, 1])
    assert cache.trim(10**6) == 201
    assert (cache.offset, cache.nbytes, cache.rows, cache.empty()) == (0, 0, 0, True)
    feed(cache, rows, [250, 1])
    feed(fresh, rows, [250, 1])
    assert same(cache, fresh)


def test_a_proxy_cache_is_not_trimmable_from_birth_and_says_so():
    cache = veloxquant.get_cache("snapkv", {"budget": 64})
    assert not cache.is_trimmable()
    rows = data(200)
    feed(cache, rows, [199, 1])
    before = held(cache)
    assert cache.trim(5) == 0
    assert (cache.offset, cache.rows) == (200, 64)
    assert all((before[name] == array).all() for name, array in held(cache).items())


def test_proxy_mode_votes_with_the_keys():
    rows = data(201)
    cache = veloxquant.get_cache("snapkv", {"budget": 80, "window": 16})
    feed(cache, rows, [200, 1])
    keys = rows[1]
    votes = pool_scores(window_scores(keys[:, :, -16:], keys, SCALE), 7, "max")
    assert (held(cache)["positions"] == np.array(keep_indices(votes, 201, 80, sinks=4))).all()
    assert cache.query_mode == "proxy"


@pytest.mark.parametrize("moment", [[50], [199], [199, 1], [199, 1, 1, 1]])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(moment):
    rows = data(400)
    cache = routed(budget=64)
    feed(cache, rows, moment)
    twins = [type(cache).from_state(cache.state), copy.deepcopy(cache)]
    for twin in twins:
        assert same(cache, twin)
    rest = [249 - cache.offset, 1, 1, 1] if cache.offset < 199 else [1] * 20
    outputs = [np.array(feed(one, rows, rest)) for one in (cache, *twins)]
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] == outputs[2]).all()
    assert same(cache, twins[0])
    assert same(cache, twins[1])


def test_extreme_values_stay_finite_and_nan_stays_in_its_head():
    queries, keys, values = data(201)
    keys = mx.where(mx.arange(201).reshape(1, 1, -1, 1) == 70, 6e4, keys)
    keys = mx.where(mx.arange(201).reshape(1, 1, -1, 1) == 71, 1e-7, keys)
    cache = routed(budget=64)
    output = feed(cache, [queries, keys, values], [200, 1])
    assert bool(mx.isfinite(output).all())
    clean = held(cache)["positions"]
    spoiled = mx.where(
        (mx.arange(201).reshape(1, 1, -1, 1) == 90) & (mx.arange(2).reshape(1, 2, 1, 1) == 1), mx.nan, keys
    )
    cache = routed(budget=64)
    feed(cache, [queries, spoiled, values], [200, 1])
    assert cache.rows == 64
    assert (held(cache)["positions"][:, 0] == clean[:, 0]).all()


@pytest.mark.parametrize("back", [5, 40, 60, 90])
def test_the_window_stays_after_a_rewind_inside_an_open_prompt(back):
    """Fewer queries are left to vote, yet the last rows are kept whole."""
    rows = data(300)
    cache = routed(budget=64)
    feed(cache, rows, [150])
    cache.trim(back)
    feed(cache, rows, [10, 1])
    length = 150 - back + 11
    assert (cache.rows, cache.offset) == (64, length)
    assert (held(cache)["positions"][..., -32:] == np.arange(length - 32, length)).all()
    assert (held(cache)["positions"][..., :4] == np.arange(4)).all()


def test_a_step_that_failed_before_its_attention_ends_no_prompt():
    rows = data(300)
    failed, plain = routed(budget=64), routed(budget=64)
    feed(plain, rows, [100, 100, 1])
    feed(failed, rows, [100])
    failed.update_and_fetch(rows[1][:, :, 100:101], rows[2][:, :, 100:101])
    assert veloxquant.report(failed).query_mode == "routed, queries missing"
    assert failed.trim(1) == 1
    assert failed.rows == 100
    assert veloxquant.report(failed).query_mode == "routed"
    feed(failed, rows, [100])
    assert failed.rows == 200
    feed(failed, rows, [1])
    assert same(failed, plain)


def test_a_refused_mask_evicts_nothing():
    rows = data(200)
    cache = routed(budget=64, eviction="chunk")
    queries, keys, values = (array[:, :, :100] for array in rows)
    result = cache.update_and_fetch(keys, values)
    with pytest.raises(veloxquant.RoutingError):
        cache.attend(queries, *result, scale=SCALE, mask=mx.ones((100, 70), mx.bool_))
    assert cache.rows == 100
    assert cache.trim(100) == 100


@pytest.mark.parametrize("option", ["window", "kernel_size", "sinks", "budget"])
def test_a_size_beyond_all_arrays_is_refused(option):
    with pytest.raises(veloxquant.ConfigError, match=option):
        veloxquant.get_cache("snapkv", {option: 10**11 + 1})
