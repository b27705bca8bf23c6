"""What compress mode stores, forgets and counts."""

import copy

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant import UnsupportedShapeError

HEADS, KV_HEADS, DIM = 4, 2, 64
SCALE = DIM**-0.5
SMALL = {"allow_uncalibrated": True, "window": 16, "sinks": 2}


def routed(**options):
    layer = LayerSpec(query_mode="routed", query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, rope=Rope(dims=DIM))
    return veloxquant.get_cache("a2ats", {"allow_uncalibrated": True, **options}, layer=layer)


def data(tokens, seed=0, batch=1, dtype=mx.float32):
    keys = mx.random.split(mx.random.key(seed), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [mx.random.normal((batch, h, tokens, DIM), key=k).astype(dtype) for h, k in zip(heads, keys, strict=True)]


def feed(cache, rows, cuts):
    start, outputs = cache.offset, []
    for cut in cuts:
        queries, keys, values = (array[:, :, start : start + cut] for array in rows)
        found = cache.update_and_fetch(keys, values)
        outputs.append(cache.attend(queries, *found, scale=SCALE, mask=cache.make_mask(cut)))
        mx.eval(outputs[-1])
        start += cut
    return mx.concatenate(outputs, axis=2)


def held(cache):
    snapshot = cache.method.ops.serialize(cache.method_state)
    return {name: np.array(array.astype(mx.float32)) for name, array in snapshot.arrays.items()}


def same(one, other):
    first, second = held(one), held(other)
    return first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("cuts", [[1] * 90, [89, 1], [7] * 12 + [6], [33, 50, 7]])
def test_codes_do_not_depend_on_the_chunks(dtype, cuts):
    rows = data(90, dtype=dtype)
    whole, chunked = routed(window=16, retrieval_fraction=0.5), routed(window=16, retrieval_fraction=0.5)
    feed(whole, rows, [90])
    feed(chunked, rows, cuts)
    assert same(whole, chunked)
    assert whole.nbytes == chunked.nbytes


def test_codes_do_not_depend_on_the_batch():
    rows = data(150, batch=3)
    together = routed(window=16, retrieval_fraction=0.5)
    feed(together, rows, [149, 1])
    for row in range(3):
        alone = routed(window=16, retrieval_fraction=0.5)
        feed(alone, [array[row : row + 1] for array in rows], [100, 49, 1])
        assert all((array[0] == held(together)[name][row]).all() for name, array in held(alone).items())


def test_codes_do_not_depend_on_where_the_prompt_stands():
    """Keys of the same tokens, rotated elsewhere, have the same codes but for rare ties that rounding decides."""
    _, keys, values = data(50)
    plain, shifted = (mx.fast.rope(keys, DIM, traditional=False, base=10000.0, scale=1.0, offset=n) for n in (0, 300))
    one, other = routed(window=16), routed(window=16)
    one.update_and_fetch(plain, values)
    filler = data(300, seed=3)
    feed(other, filler, [300])
    other.update_and_fetch(shifted, values)
    first, second = held(one), held(other)
    # Of 350 rows the last 14 wait for their codes, of 50 the last two.
    assert (first["keys"][:, :, :36] == second["keys"][:, :, 300:]).mean() > 0.99
    assert (first["values"][:, :, :36] == second["values"][:, :, 300:]).all()


@pytest.mark.parametrize("tokens", [3000, 4096])
def test_held_bytes_are_codes(tokens):
    cache = routed()
    rows = data(tokens, dtype=mx.float16)
    feed(cache, rows, [tokens - 1, 1])
    count = cache.account()
    plain = cache.plain_nbytes
    assert plain == 2 * 2 * DIM * KV_HEADS * tokens
    exact = (128 + 8) * 2 * 2 * DIM * KV_HEADS
    assert count.keys + count.values <= 0.09 * plain + exact
    details = count.details
    assert details["compressed_key_bytes"] <= 0.09 * plain / 2
    assert details["compressed_key_bytes"] >= tokens * KV_HEADS * 8
    assert details["compressed_key_bytes"] + details["compressed_value_bytes"] + details["exact_bytes"] == (
        count.keys + count.values
    )
    assert details["codebook_bytes"] == count.static > 0
    assert (details["dense_bytes_keys"], details["dense_bytes_values"]) == (plain // 2, plain // 2)
    assert details["assigned_avg_bits"] == 1.0
    assert details["ratio"] == pytest.approx(plain / cache.nbytes)
    assert details["tokens_seen"] == tokens
    assert details["codebook"] == "uncalibrated"
    assert veloxquant.report(cache).layers[0].details["codebook"] == "uncalibrated"


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5, 1.0])
def test_the_share_of_tokens_that_is_coded_query_aware(fraction):
    """With H = I the energies of random keys follow chi squared, which the random codebook's quantiles assume."""
    cache = routed(window=16, retrieval_fraction=fraction)
    feed(cache, data(2000), [2000])
    assert cache.account().details["tokens_retrieved"] == pytest.approx(2000 * fraction, abs=60)


@pytest.mark.parametrize("count", [1, 5, 40, 64])
def test_a_trim_within_the_ring_leaves_no_trace(count):
    rows, other = data(300), data(300, seed=9)
    trimmed, plain = routed(**SMALL, retrieval_fraction=0.5), routed(**SMALL, retrieval_fraction=0.5)
    feed(plain, rows, [150, 1])
    feed(trimmed, rows, [150, 1])
    feed(trimmed, other, [1] * count)
    assert trimmed.trim(count) == count
    assert same(trimmed, plain)
    assert (trimmed.nbytes, trimmed.offset) == (plain.nbytes, 151)
    assert trimmed.account() == plain.account()
    assert (np.array(feed(trimmed, rows, [1, 1, 5, 1])) == np.array(feed(plain, rows, [1, 1, 5, 1]))).all()


def test_a_trim_beyond_the_ring_leaves_codes_in_the_window():
    rows = data(400)
    cache, whole = routed(**SMALL), routed(**SMALL)
    feed(cache, rows, [300])
    feed(whole, rows, [200])
    assert cache.trim(100) == 100
    found, expected = held(cache), held(whole)
    same_codes_and_sinks(found, expected, 200)
    # Rows 184 to 199 are rebuilt from their codes at their own positions: near what they were, and not equal.
    assert found["near_keys"].shape == expected["near_keys"].shape == (1, KV_HEADS, 16, DIM)
    difference = ((found["near_keys"] - expected["near_keys"]) ** 2).sum() / (expected["near_keys"] ** 2).sum()
    assert 0.1 < difference < 0.9
    # Once 16 new rows have come the window is as it would have been.
    feed(cache, rows, [1] * 16)
    feed(whole, rows, [1] * 16)
    assert same(cache, whole) or held(cache)["aware"].sum() != held(whole)["aware"].sum()
    assert all(
        (held(cache)[name] == held(whole)[name]).all() for name in ("keys", "values", "near_keys", "near_values")
    )


def same_codes_and_sinks(found, expected, tokens):
    """After a deep rewind all rows have codes, for some are there only as those; without it the last ones wait."""
    coded = tokens - tokens % 16
    for name in ("keys", "values"):
        assert found[name].shape[2] == tokens
        assert coded == 0 or (found[name][:, :, :coded] == expected[name]).all()
    for name in ("sink_keys", "sink_values"):
        assert (found[name] == expected[name]).all()


@pytest.mark.parametrize("left", [1, 2, 3, 17, 80, 120])
def test_a_deep_trim_at_every_length(left):
    rows, other = data(400), data(400, seed=4)
    cache, whole = routed(**SMALL), routed(**SMALL)
    feed(cache, rows, [250, 1])
    feed(whole, rows, [left])
    cache.trim(251 - left)
    found, expected = held(cache), held(whole)
    same_codes_and_sinks(found, expected, left)
    outputs = [np.array(feed(one, other, [1, 1, 3, 1])) for one in (cache, whole)]
    assert np.isfinite(outputs[0]).all()
    # The sinks are exact in both, and so is everything where only sinks were left.
    if left <= 2:
        np.testing.assert_allclose(*outputs, atol=1e-6)


def test_trim_to_nothing_is_a_new_cache():
    cache, fresh = routed(**SMALL), routed(**SMALL)
    feed(cache, data(100), [100])
    cache.trim(10**6)
    assert (cache.nbytes, cache.offset) == (0, 0)
    for one in (cache, fresh):
        feed(one, data(90), [90])
    assert same(cache, fresh)


@pytest.mark.parametrize("moment", [[30], [150, 1], [150, 1, 1, 1], [300]])
def test_restored_and_copied_states_go_on_alike(moment):
    rows = data(500)
    cache = routed(**SMALL)
    feed(cache, rows, moment)
    twins = [type(cache).from_state(cache.state), copy.deepcopy(cache)]
    outputs = [np.array(feed(one, rows, [1, 5, 40, 1])) for one in (cache, *twins)]
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] == outputs[2]).all()
    assert all(same(cache, twin) for twin in twins)


def test_a_copy_made_before_a_trim_keeps_the_rows_that_make_it_exact():
    rows, other = data(300), data(300, seed=9)
    cache, plain = routed(**SMALL), routed(**SMALL)
    feed(plain, rows, [150, 1])
    feed(cache, rows, [150, 1])
    feed(cache, other, [1] * 30)
    twin = copy.deepcopy(cache)
    twin.trim(30)
    assert same(twin, plain)


@pytest.mark.parametrize(("dim", "options"), [(63, {}), (64, {"sub_dim": 7}), (36, {"sub_dim": 8})])
def test_head_dims_that_cannot_be_served_are_refused(dim, options):
    keys = mx.zeros((1, 2, 5, dim))
    cache = veloxquant.get_cache("a2ats", {"allow_uncalibrated": True, **options})
    with pytest.raises(UnsupportedShapeError, match="channels"):
        cache.update_and_fetch(keys, keys)
    assert (cache.offset, cache.nbytes) == (0, 0)


@pytest.mark.parametrize(("bits", "dtype"), [(2, mx.uint8), (8, mx.uint8), (9, mx.uint16), (12, mx.uint16)])
def test_codes_take_a_byte_or_two(bits, dtype):
    cache = routed(codebook_bits=bits, window=16)
    feed(cache, data(40), [40])
    codes = cache.method_state.codes.live("keys")
    assert codes.dtype == dtype
    assert int(codes.max().item()) < 2**bits
