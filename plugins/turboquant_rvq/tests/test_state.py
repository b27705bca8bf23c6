"""What the method holds, returns and attends to, driven through the cache as mlx-lm drives it."""

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant.testing.rules.account import reachable
from veloxquant_turboquant_rvq import TurboQuantRows
from veloxquant_turboquant_rvq import TurboQuantRVQConfig

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 64, 40
GROUP = HEADS // KV_HEADS
SPARE = 64
"""Rows beyond the recent ones that stay as they came."""

CONFIGS = {
    "default": TurboQuantRVQConfig(),
    "values": TurboQuantRVQConfig(bits=2, value_bits=4),
    "all packed": TurboQuantRVQConfig(value_bits=8, sinks=0, recent=0),
    "sinks only": TurboQuantRVQConfig(bits=3, recent=0),
    "laplace": TurboQuantRVQConfig(codebook="laplace", value_bits=2, sinks=0, recent=5),
    "matched": TurboQuantRVQConfig(codebook="matched", bits=2, value_bits=3, sinks=1),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
EXACT = [name for name in CONFIGS if CONFIGS[name].recent == 0]


def new_cache(config, mode="routed", **sizes):
    return veloxquant.get_cache("turboquant_rvq", config, layer=LayerSpec(query_mode=mode, query_heads=HEADS, **sizes))


def data(tokens, batch=1, seed=0, dtype=mx.float32, dim=DIM, value_dim=VALUE_DIM, heads=HEADS, kv_heads=KV_HEADS):
    keys = [mx.random.key(seed + part) for part in range(3)]
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim)]
    rows = [mx.random.normal((batch, n, tokens, d), key=key) for key, (n, d) in zip(keys, shapes, strict=True)]
    return [array.astype(dtype) for array in rows]


def call(cache, rows, count, mask=None, sinks=None):
    """One call of the layer with the next tokens: rows returned, and the output."""
    start = cache.offset
    queries, keys, values = (array[:, :, start : start + count] for array in rows)
    mask = cache.make_mask(count) if mask is None else mask
    returned = cache.update_and_fetch(keys, values)
    scale = keys.shape[3] ** -0.5
    return returned, cache.attend(queries, *returned, scale=scale, mask=mask, sinks=sinks)


def feed(cache, rows, cuts):
    for cut in cuts:
        _, output = call(cache, rows, cut)
    return np.array(output)


def numbers(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def dense(queries, keys, values, mask, sinks=None):
    """Attention in float64; the mask is bool, or added."""
    queries, keys, values = (numbers(array) for array in (queries, keys, values))
    group = queries.shape[1] // keys.shape[1]
    logits = queries @ keys.repeat(group, 1).swapaxes(2, 3) * keys.shape[3] ** -0.5
    logits = np.where(mask, logits, -np.inf) if mask.dtype == bool else logits + mask
    top = logits.max(axis=3, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=3, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.array(sinks).reshape(1, -1, 1, 1) - top)
    return weights / total @ values.repeat(group, 1)


def causal(length, rows):
    return np.arange(rows) <= np.arange(rows - length, rows)[:, None]


def held(cache):
    snapshot = cache.method.ops.serialize(cache.method_state)
    return {name: (str(array.dtype), numbers(array)) for name, array in snapshot.arrays.items()}


def assert_same(one, other):
    first, second = held(one), held(other)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name][0] == second[name][0]
        np.testing.assert_array_equal(first[name][1], second[name][1], err_msg=name)


def packed_output(cache, rows, count, mask=None, sinks=None):
    """A call whose attention must take the packed form; queries, rows returned, output."""
    start = cache.offset
    queries, keys, values = (array[:, :, start : start + count] for array in rows)
    returned = cache.update_and_fetch(keys, values)
    attend, state = cache.method.ops.attend, copy.deepcopy(cache.method_state)
    default = cache.make_mask(count)
    assert attend(state, queries, *returned, keys.shape[3] ** -0.5, default, None) is not None
    mask = default if mask is None else mask
    output = cache.attend(queries, *returned, scale=keys.shape[3] ** -0.5, mask=mask, sinks=sinks)
    return queries, returned, output


# ---------------------------------------------------------------- attention


@every_config
@pytest.mark.parametrize(("prompt", "length"), [(60, 1), *((200, length) for length in range(1, 9))])
def test_attention_on_the_packed_form_is_dense_attention_over_the_rows_returned(config, prompt, length):
    rows = data(prompt + 16)
    cache = new_cache(config)
    feed(cache, rows, [prompt - 1, 1])
    for _ in range(2):
        queries, returned, output = packed_output(cache, rows, length)
        expected = dense(queries, *returned, causal(length, cache.offset))
        assert output.dtype == mx.float32
        np.testing.assert_allclose(np.array(output), expected, atol=3e-6)


@every_config
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(3, 1, 1), (2, 4, 4), (2, 8, 2), (3, 5, 1)])
def test_attention_with_batches_and_groups(config, batch, heads, kv_heads):
    rows = data(155, batch, heads=heads, kv_heads=kv_heads)
    cache = new_cache(config)
    feed(cache, rows, [149, 1])
    queries, returned, output = packed_output(cache, rows, 3)
    np.testing.assert_allclose(np.array(output), dense(queries, *returned, causal(3, 153)), atol=3e-6)


@every_config
@pytest.mark.parametrize("length", [1, 5])
def test_attention_under_any_mask(config, length):
    random = np.random.default_rng(0)
    count = 150 + length
    shapes = [(length, count), (1, 1, length, count), (2, HEADS, length, count), (2, 1, 1, count)]
    for shape in shapes:
        # Far rows, near rows and those of the call itself are masked; never all of them.
        mask = random.random(shape) < 0.6
        mask[..., 0] = True
        added = np.where(mask, random.standard_normal(shape), -1e9).astype(np.float32)
        for one in (mask, added):
            rows = data(count, 2)
            cache = new_cache(config)
            feed(cache, rows, [149, 1])
            queries, returned, output = packed_output(cache, rows, length, mask=mx.array(one))
            np.testing.assert_allclose(np.array(output), dense(queries, *returned, one), atol=3e-6)


@every_config
@pytest.mark.parametrize("length", [1, 4])
def test_attention_with_sink_logits(config, length):
    rows, sinks = data(160), mx.random.normal((HEADS,), key=mx.random.key(3)) * 3
    cache = new_cache(config)
    feed(cache, rows, [149, 1])
    queries, returned, output = packed_output(cache, rows, length, sinks=sinks)
    expected = dense(queries, *returned, causal(length, cache.offset), sinks)
    np.testing.assert_allclose(np.array(output), expected, atol=3e-6)
    without = dense(queries, *returned, causal(length, cache.offset))
    assert np.abs(expected - without).max() > 1e-3


@pytest.mark.parametrize("sinks", [0, 1, 50, 200])
@pytest.mark.parametrize("recent", [0, 1, 32, 120])
@pytest.mark.parametrize("value_bits", [None, 3])
def test_any_number_of_first_and_recent_rows(sinks, recent, value_bits):
    config = TurboQuantRVQConfig(sinks=sinks, recent=recent, value_bits=value_bits)
    rows = data(140)
    cache = new_cache(config)
    for cut in (129, 1, 1, 3, 2):
        start = cache.offset
        returned, output = call(cache, rows, cut)
        mask = causal(cut, cache.offset)
        queries = rows[0][:, :, start : cache.offset]
        np.testing.assert_allclose(np.array(output), dense(queries, *returned, mask), atol=3e-6)


@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [
        (32, 32),
        (40, 40),
        (56, 64),
        (64, 56),
        (80, 80),
        (96, 32),
        (112, 112),
        (128, 128),
        (192, 128),
        (256, 256),
        (33, 7),
    ],
)
@pytest.mark.parametrize("config", [CONFIGS["values"], CONFIGS["laplace"]], ids=["uniform", "laplace"])
def test_every_dimension(config, dim, value_dim):
    rows = data(140, dim=dim, value_dim=value_dim)
    cache = new_cache(config)
    feed(cache, rows, [132, 1])
    queries, returned, output = packed_output(cache, rows, 2)
    assert output.shape == (1, HEADS, 2, value_dim)
    np.testing.assert_allclose(np.array(output), dense(queries, *returned, causal(2, 135)), atol=5e-6)


@every_config
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 3e-3), (mx.bfloat16, 3e-2)])
def test_half_precision(config, dtype, tolerance):
    """The rows returned are rounded to the dtype, what is packed is not."""
    rows = data(150, dtype=dtype)
    cache = new_cache(config)
    feed(cache, rows, [139, 1]) if dtype == mx.float16 else call(cache, rows, 140)
    queries, returned, output = packed_output(cache, rows, 2)
    assert output.dtype == returned[0].dtype == returned[1].dtype == dtype
    np.testing.assert_allclose(numbers(output), dense(queries, *returned, causal(2, 142)), atol=tolerance)


@every_config
def test_long_blocks_attend_to_the_rows_returned(config):
    rows = data(200)
    cache = new_cache(config)
    feed(cache, rows, [100])
    returned, output = call(cache, rows, 100)
    expected = dense(rows[0][:, :, 100:], *returned, causal(100, 200))
    np.testing.assert_allclose(np.array(output), expected, atol=3e-6)


@every_config
def test_a_proxy_cache_returns_the_same_rows_and_holds_nothing_more(config):
    rows = data(150)
    routed, proxy = new_cache(config), new_cache(config, "proxy")
    for cut in (140, 1, 1, 3):
        start = routed.offset
        expected, _ = call(routed, rows, cut)
        found = proxy.update_and_fetch(*(array[:, :, start : start + cut] for array in rows[1:]))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(other))
        assert proxy.nbytes == routed.nbytes
    assert_same(routed, proxy)


# ------------------------------------------------------------ rows returned


@every_config
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_first_recent_and_own_rows_are_returned_as_they_came_and_the_rest_rebuilt(config, dtype):
    rows = data(250, batch=2, dtype=dtype)
    cache, packed = new_cache(config), TurboQuantRows(config)
    for cut in (150, 1, 1, 7, 40, 1, 8):
        start = cache.offset
        returned, _ = call(cache, rows, cut)
        packed.append(*(array[:, :, start : start + cut] for array in rows[1:]))
        end = max(0, start - config.recent)
        first = min(config.sinks, end)
        kinds = zip(returned, rows[1:], packed.keys_values(), (True, config.value_bits), strict=True)
        for found, came, rebuilt, quantized in kinds:
            assert found.dtype == dtype
            assert found.shape[2] == cache.offset
            found, came, rebuilt = numbers(found), numbers(came), numbers(rebuilt)
            np.testing.assert_array_equal(found[:, :, :first], came[:, :, :first])
            np.testing.assert_array_equal(found[:, :, end:], came[:, :, end : cache.offset])
            np.testing.assert_array_equal(found[:, :, first:end], rebuilt[:, :, first:end])
            changed = (found[:, :, first:end] != came[:, :, first:end]).any()
            assert changed == bool(quantized and first < end)


@every_config
def test_the_first_call_is_attended_exactly(config):
    rows = data(100)
    returned, output = call(new_cache(config), rows, 100)
    for found, came in zip(returned, rows[1:], strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(came))
    np.testing.assert_allclose(np.array(output), dense(*rows, causal(100, 100)), atol=3e-6)


@every_config
@pytest.mark.parametrize("cuts", [[128, 72], [1] * 10 + [190], [33] * 6 + [2]])
def test_what_is_held_does_not_depend_on_the_chunks(config, cuts):
    rows = data(201)
    whole, chunked = new_cache(config), new_cache(config)
    feed(whole, rows, [200, 1])
    feed(chunked, rows, [*cuts, 1])
    assert_same(whole, chunked)
    assert whole.account() == chunked.account()


@every_config
def test_what_is_held_does_not_depend_on_the_batch(config):
    rows = data(150, batch=3)
    together = new_cache(config)
    feed(together, rows, [149, 1])
    for row in range(3):
        alone = new_cache(config)
        feed(alone, [array[row : row + 1] for array in rows], [149, 1])
        for name, (_, array) in held(alone).items():
            if not name.endswith("_like"):
                np.testing.assert_array_equal(array[0], held(together)[name][1][row])


# -------------------------------------------------------------------- trim


def drafted(rows, other, length):
    """Rows whose tokens from ``length`` on are others, to be forgotten."""
    return [mx.concatenate([a[:, :, :length], b[:, :, length:]], 2) for a, b in zip(rows, other, strict=True)]


def assert_goes_on_alike(one, other, rows, cuts):
    for cut in cuts:
        first, second = call(one, rows, cut), call(other, rows, cut)
        for found, expected in zip((*first[0], first[1]), (*second[0], second[1]), strict=True):
            np.testing.assert_array_equal(np.array(found), np.array(expected))


@every_config
@pytest.mark.parametrize(("length", "count"), [(40, 3), (40, 64), (150, 1), (150, 8), (193, 63), (193, 64)])
def test_a_rewind_of_up_to_64_tokens_is_exact(config, count, length):
    """Whatever comes next, its rows and outputs are those of a cache that never saw the tokens forgotten."""
    rows, other = data(length + 100), data(length + 100, seed=50)
    rewound, plain = new_cache(config), new_cache(config)
    feed(plain, rows, [length - 1, 1])
    mixed = drafted(rows, other, length)
    feed(rewound, mixed, [length - 1, 1])
    feed(rewound, mixed, [count] if count % 2 else [1] * (count // 2) + [count // 2])
    assert rewound.trim(count) == count
    assert rewound.offset == rewound.rows == plain.offset
    assert_goes_on_alike(rewound, plain, rows, [1, 1, 4, 20, 1])


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("left", [1, 2, 5, 64, 127, 128, 129, 250])
def test_without_recent_rows_any_rewind_is_exact(name, left):
    rows, other = data(300), data(300, seed=50)
    rewound, plain = new_cache(CONFIGS[name]), new_cache(CONFIGS[name])
    feed(plain, rows, [left])
    feed(rewound, drafted(rows, other, left), [200, 1, 1, 90])
    assert rewound.trim(292 - left) == 292 - left
    assert_same(rewound, plain)
    assert rewound.account() == plain.account()
    assert_goes_on_alike(rewound, plain, rows, [1, 3, 30, 1])


@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name].recent])
@pytest.mark.parametrize("count", [65, 90, 120, 180])
def test_a_deeper_rewind_leaves_fewer_rows_as_they_came_and_nothing_of_what_was_forgotten(name, count):
    config = CONFIGS[name]
    rows, other = data(260), data(260, seed=50)
    cache, packed = new_cache(config), TurboQuantRows(config)
    length = 200 - count
    feed(cache, drafted(rows, other, length), [200])
    cache.trim(count)
    returned, output = call(cache, rows, 2)
    packed.append(*(array[:, :, : length + 2] for array in rows[1:]))
    end = length - max(0, min(config.recent, config.recent + SPARE - count))
    first = min(config.sinks, end)
    for found, came, rebuilt in zip(returned, rows[1:], packed.keys_values(), strict=True):
        found, came, rebuilt = numbers(found), numbers(came), numbers(rebuilt)
        np.testing.assert_array_equal(found[:, :, :first], came[:, :, :first])
        np.testing.assert_array_equal(found[:, :, first:end], rebuilt[:, :, first:end])
        np.testing.assert_array_equal(found[:, :, end:], came[:, :, end : length + 2])
    expected = dense(rows[0][:, :, length : length + 2], *returned, causal(2, length + 2))
    np.testing.assert_allclose(np.array(output), expected, atol=3e-6)


@every_config
def test_a_rewind_into_the_first_rows_lets_later_ones_take_their_place(config):
    rows, other = data(200), data(200, seed=50)
    cache, plain = new_cache(config), new_cache(config)
    feed(cache, drafted(rows, other, 2), [40])
    cache.trim(38)
    feed(plain, rows, [2])
    assert_goes_on_alike(cache, plain, rows, [1, 1, 60, 1])


@every_config
def test_trim_to_nothing_is_a_new_cache(config):
    rows = data(200)
    cache, fresh = new_cache(config), new_cache(config)
    feed(cache, rows, [150, 1])
    assert cache.trim(10**6) == 151
    assert (cache.offset, cache.rows, cache.nbytes, cache.empty()) == (0, 0, 0, True)
    feed(cache, rows, [150, 1])
    feed(fresh, rows, [150, 1])
    assert_same(cache, fresh)


def test_a_rewind_between_a_call_and_its_attention_drops_the_call():
    config = CONFIGS["values"]
    rows = data(160)
    failed, plain = new_cache(config), new_cache(config)
    feed(failed, rows, [140, 1])
    feed(plain, rows, [140, 1])
    failed.update_and_fetch(*(array[:, :, 141:144] for array in rows[1:]))
    assert failed.trim(3) == 3
    assert_goes_on_alike(failed, plain, rows, [1, 3, 1])
    assert failed.nbytes == plain.nbytes


# ------------------------------------------------------------ states, bytes


@every_config
@pytest.mark.parametrize("moment", [[3], [128], [140, 1, 1, 5]])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(config, moment):
    rows = data(250)
    cache = new_cache(config)
    feed(cache, rows, moment)
    for twin in (type(cache).from_state(cache.state), copy.deepcopy(cache)):
        assert_same(cache, twin)
        one = copy.deepcopy(cache)
        assert_goes_on_alike(one, twin, rows, [1, 2, 60, 1])
        assert one.trim(61) == twin.trim(61) == 61
        assert_goes_on_alike(one, twin, rows, [1, 1])
        assert_same(one, twin)


@every_config
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_bytes_and_details_are_those_of_the_arrays(config, dtype):
    rows = data(300, dtype=dtype)
    cache = new_cache(config)
    size = 4 if dtype == mx.float32 else 2
    for cut in (2, 100, 64, 1, 60):
        call(cache, rows, cut)
        account, state = cache.account(), cache.method_state
        # What all layers share is counted apart.
        shared = reachable(state.rows.quantizers())
        assert account.held == sum(array.nbytes for key, array in reachable(state).items() if key not in shared)
        newest = min(cache.offset, config.recent + SPARE) if config.recent else 0
        exact = (min(config.sinks, cache.offset) + newest) * KV_HEADS * size
        assert account.details["exact_key_bytes"] == exact * DIM
        assert account.details["exact_value_bytes"] == (exact * VALUE_DIM if config.value_bits else 0)
        assert account.details["compressed_key_bytes"] == account.keys - exact * DIM
        assert account.details["dense_key_bytes"] == cache.offset * KV_HEADS * DIM * size
        assert cache.plain_nbytes == cache.offset * KV_HEADS * (DIM + VALUE_DIM) * size
    report = veloxquant.report(cache).layers[0]
    assert (report.tokens_seen, report.tokens_kept) == (227, 227)
    if not config.recent:
        assert report.trim == "exact"
    assert report.bytes_held == account.held
    assert report.bytes_static == account.static > 0
    for name, value in account.details.items():
        assert report.details[name] == value
    # The last rows wait for their codes where rows are attended to as they came.
    coded = 227 - 227 % max(1, min(16, config.recent))
    bits = 8 * account.details["compressed_key_bytes"] / (coded * KV_HEADS * DIM)
    assert report.details["assigned_bits"] == pytest.approx(bits, abs=1e-3)
    assert 2 * config.bits <= bits < 2 * config.bits * 1.25 + 0.6


def test_an_empty_cache_holds_nothing_and_says_so():
    cache = new_cache(CONFIGS["values"])
    account = cache.account()
    assert (account.held, account.static, cache.rows) == (0, 0, 0)
    assert set(account.details.values()) == {0}


@pytest.mark.parametrize(("config", "most"), [(TurboQuantRVQConfig(), 0.20), (TurboQuantRVQConfig(bits=2), 0.32)])
def test_held_keys_of_a_long_prompt_are_a_small_part_of_plain_ones_in_fp16(config, most):
    rows = data(2000, dtype=mx.float16, dim=64, value_dim=64)
    cache = new_cache(config)
    call(cache, rows, 2000)
    if mx.default_device() == mx.gpu:
        most += 0.01  # codes are packed row by row, with spare rows behind
    assert cache.account().keys <= most * 2000 * KV_HEADS * 64 * 2


def test_held_keys_and_values_with_4_bits_each():
    rows = data(2000, dtype=mx.float16, dim=64, value_dim=64)
    cache = new_cache(TurboQuantRVQConfig(bits=2, value_bits=4))
    call(cache, rows, 2000)
    assert cache.nbytes <= 0.35 * cache.plain_nbytes


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("config", [CONFIGS["values"], CONFIGS["all packed"]], ids=["exact rows", "all packed"])
def test_after_a_call_no_memory_is_held_but_what_is_reported(config, kv_heads):
    """Slices of one head are contiguous, and must hold no more than their own rows either."""
    feed(new_cache(config), data(10, kv_heads=kv_heads), [9, 1])
    gc.collect()
    before = mx.get_active_memory()
    cache, rows = new_cache(config), data(1500, heads=kv_heads, kv_heads=kv_heads)
    for cut in (1000, 490, 1, 1):
        returned = cache.update_and_fetch(*(array[:, :, cache.offset : cache.offset + cut] for array in rows[1:]))
        output = cache.attend(rows[0][:, :, :1], *returned, scale=DIM**-0.5)
        mx.eval(returned, output, cache.state[1:])
    assert mx.get_active_memory() - before > 1500 * kv_heads * DIM * 4
    del rows, returned, output
    gc.collect()
    # Buffers are rounded up to pages.
    assert mx.get_active_memory() - before <= cache.nbytes + 10 * 16_384


@every_config
def test_the_layout_for_a_gpu_gives_the_same(config, monkeypatch):
    """Codes packed row by row, which files hand to the other layout and back."""
    rows = data(250)
    cache = new_cache(config)
    monkeypatch.setattr(
        "veloxquant_turboquant_rvq.state.TurboQuantRows", lambda config, blocked: TurboQuantRows(config)
    )
    other = new_cache(config)
    for cut in (150, 1, 5, 40, 1):
        (expected, output), (found, other_output) = call(cache, rows, cut), call(other, rows, cut)
        for one, two in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(two))
        np.testing.assert_allclose(np.array(other_output), np.array(output), atol=3e-6)
    assert "key_blocks" not in held(other)
    moved_there = type(cache).from_state(cache.state)
    assert_same(moved_there, other)
    monkeypatch.undo()
    assert_same(type(cache).from_state(other.state), cache)
    assert cache.trim(60) == moved_there.trim(60) == 60
    np.testing.assert_allclose(feed(moved_there, rows, [3]), feed(cache, rows, [3]), atol=3e-6)


# ------------------------------------------------------------------ numbers


@every_config
def test_extreme_norms_zeros_and_nan_stay_in_their_rows(config):
    queries, keys, values = data(200, dtype=mx.bfloat16)
    place = mx.arange(200).reshape(1, 1, -1, 1)
    head = mx.arange(KV_HEADS).reshape(1, -1, 1, 1)
    keys = mx.where(place == 70, 20_000 * keys, mx.where(place == 71, 0 * keys, keys)).astype(mx.bfloat16)
    clean, spoiled = new_cache(config), new_cache(config)
    rows = [queries, keys, values]
    call(clean, rows, 150)
    returned, output = call(clean, rows, 1)
    assert bool(mx.isfinite(output).all())
    assert bool(mx.isfinite(returned[0]).all())
    assert bool((returned[0][:, :, 71] == 0).all())
    bad = mx.where((place == 90) & (head == 1), mx.array(mx.nan, mx.bfloat16), keys)
    call(spoiled, [queries, bad, values], 150)
    found, spoiled_output = call(spoiled, [queries, bad, values], 1)
    for one, other in zip(found, returned, strict=True):
        one, other = numbers(one), numbers(other)
        np.testing.assert_array_equal(np.delete(one, 90, 2), np.delete(other, 90, 2))
        np.testing.assert_array_equal(one[:, 0], other[:, 0])
    assert bool(mx.isnan(found[0][:, 1, 90]).all())
    # Heads of the other group see nothing of it.
    np.testing.assert_array_equal(numbers(spoiled_output)[:, :GROUP], numbers(output)[:, :GROUP])


@every_config
def test_masked_rows_play_no_part(config):
    """However large they are, as rows of padding may be."""
    queries, keys, values = data(200)
    place = mx.arange(200).reshape(1, 1, -1, 1)
    outputs = []
    for factor in (1.0, 1e4):
        hidden = (place < 30) & (place >= 10)
        rows = [queries, mx.where(hidden, factor * keys, keys), mx.where(hidden, factor * values, values)]
        cache = new_cache(config)
        feed(cache, rows, [149, 1])
        mask = mx.arange(151) != mx.clip(mx.arange(151), 10, 29)
        outputs.append(np.array(call(cache, rows, 1, mask=mask)[1]))
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-6)


def test_another_seed_is_another_state_and_the_same_seed_is_the_same():
    rows = data(100)
    caches = [new_cache(TurboQuantRVQConfig(seed=seed, value_bits=4, recent=0)) for seed in (1, 1, 2)]
    for cache in caches:
        feed(cache, rows, [100])
    assert_same(*caches[:2])
    for name in ("key_codes", "value_codes"):
        assert (held(caches[0])[name][1] != held(caches[2])[name][1]).mean() > 0.5
