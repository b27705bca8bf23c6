import copy
import json

import attrs
import mlx.core as mx
import numpy as np
import pytest
from core_test_helpers import facts
from core_test_helpers import feed
from core_test_helpers import mask_for
from core_test_helpers import same
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import can_trim_prompt_cache

from veloxquant import FileFormatError
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant import RoutingError
from veloxquant import UnsupportedShapeError
from veloxquant import VeloxQuantError
from veloxquant.build import get_cache
from veloxquant.cache import LayerCache
from veloxquant.routed import RoutedLayerCache
from veloxquant.state import rebuild

WINDOW = 4  # of the toy methods
TRIMMABLE = ["noop", "coarse"]
CALLS = {"prefill", "decode", "finish"}


def events(plugins, name):
    return [event for event in plugins[name].log if event[0] in CALLS]


# ---------------------------------------------------------------- what a call returns


@pytest.mark.parametrize("name", ["noop", "evictor"])
@pytest.mark.parametrize("sizes", [[1], [9], [1, 1, 1], [6, 1, 1, 3], [1, 9, 1], [40, 40, 1]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_call_returns_what_was_held_and_then_its_own_rows_exactly(proxy, rows, name, sizes, dtype):
    cache = proxy(name)
    for size in sizes:
        held = cache.rows
        keys, values = rows(size, batch=3, heads=1, key_dim=8, value_dim=4, dtype=dtype)
        all_keys, all_values = cache.update_and_fetch(keys, values)
        assert all_keys.shape == (3, 1, held + size, 8)
        assert all_values.shape == (3, 1, held + size, 4)
        assert same(all_keys[:, :, held:], keys)
        assert same(all_values[:, :, held:], values)


def test_a_method_that_keeps_everything_equals_the_plain_cache(proxy, rows):
    cache, plain = proxy("noop"), KVCache()
    for size in (5, 1, 1, 300, 1):
        keys, values = rows(size)
        assert all(map(same, cache.update_and_fetch(keys, values), plain.update_and_fetch(keys, values)))
        assert cache.offset == plain.offset


def test_the_first_call_after_an_eviction_sees_the_kept_rows_only(proxy, rows):
    cache = proxy("evictor", {"keep": 5})
    keys, _ = feed(cache, rows, 20, 1)
    step = rows(1)
    got, _ = cache.update_and_fetch(*step)
    # KV head 0 keeps the last five rows, head 1 its first row and the last four.
    assert same(got[:, 0], mx.concatenate([keys[:, 0, 16:], step[0][:, 0]], axis=1))
    assert same(got[:, 1], mx.concatenate([keys[:, 1, :1], keys[:, 1, 17:], step[0][:, 1]], axis=1))
    assert (cache.offset, cache.rows) == (22, 6)


def test_the_offset_is_the_number_of_tokens_seen(proxy, rows):
    cache = proxy("evictor", {"keep": 6})
    feed(cache, rows, 64)
    for step in range(5):
        feed(cache, rows, 1)
        assert cache.offset == cache.size() == 65 + step
        assert type(cache.offset) is int
    assert cache.rows == 6 + 4


def test_extreme_values_pass_through(proxy, rows):
    cache = proxy("noop_attend")
    extreme = mx.array([[60000.0, -60000.0], [np.inf, np.nan], [6e-8, 0.0], [0.0, 0.0]], dtype=mx.float16)
    extreme = extreme.reshape(1, 1, 4, 2)
    got, _ = cache.update_and_fetch(extreme, extreme)
    assert np.array_equal(np.array(got), np.array(extreme), equal_nan=True)
    got, _ = cache.update_and_fetch(extreme[:, :, :1], extreme[:, :, :1])
    assert np.array_equal(np.array(got)[:, :, :4], np.array(extreme), equal_nan=True)


# ---------------------------------------------------------------- the end of the prompt (design 5.4)

# Blocks fed, and the hooks that must have run; ("trim", n) in between is a call of trim. The window is 4.
PHASES = {
    "chunks and the last token": ([9, 9, 1], [("prefill", 9), ("prefill", 9), ("prefill", 1), ("finish", 19)]),
    "then decode": ([9, 1, 1], [("prefill", 9), ("prefill", 1), ("finish", 10), ("decode", 1)]),
    "one token first": ([1, 1], [("prefill", 1), ("finish", 1), ("decode", 1)]),
    "one token first, then the prompt": (
        [1, 4, 1, 1],
        [("prefill", 1), ("finish", 1), ("prefill", 4), ("prefill", 1), ("finish", 6), ("decode", 1)],
    ),
    "a short prompt": ([3, 1], [("prefill", 3), ("prefill", 1), ("finish", 4)]),
    "a short chunk inside the prompt": ([9, 2, 9, 1], [("prefill", n) for n in (9, 2, 9, 1)] + [("finish", 21)]),
    "short blocks afterwards are decode": (
        [9, 1, 3, 2, 1],
        [("prefill", 9), ("prefill", 1), ("finish", 10), ("decode", 3), ("decode", 2), ("decode", 1)],
    ),
    "a block of the window opens it again": (
        [9, 1, 1, 4, 2, 1, 1],
        [
            *[("prefill", 9), ("prefill", 1), ("finish", 10), ("decode", 1)],
            *[("prefill", 4), ("prefill", 2), ("prefill", 1), ("finish", 18), ("decode", 1)],
        ],
    ),
    "one row below the window does not": (
        [9, 1, 3],
        [("prefill", 9), ("prefill", 1), ("finish", 10), ("decode", 3)],
    ),
    "a draft that is accepted whole": (
        [9, 3, ("trim", 0), 3, ("trim", 0)],
        [("prefill", 9), ("prefill", 3), ("finish", 12), ("decode", 3)],
    ),
    "a draft that is rejected in part": (
        [9, 3, ("trim", 2), 3, ("trim", 1)],
        [("prefill", 9), ("prefill", 3), ("finish", 10), ("decode", 3)],
    ),
    "trims after the end do not end it twice": (
        [9, 1, ("trim", 0), ("trim", 1), ("trim", 2)],
        [("prefill", 9), ("prefill", 1), ("finish", 10)],
    ),
    "a trim after a long block ends nothing": (
        [9, ("trim", 0), ("trim", 3), 2, 1],
        [("prefill", 9), ("prefill", 2), ("prefill", 1), ("finish", 9)],
    ),
    "a trim after a block of the window ends nothing": (
        [9, 4, ("trim", 0), 1],
        [("prefill", 9), ("prefill", 4), ("prefill", 1), ("finish", 14)],
    ),
    "a trim to nothing begins anew": (
        [9, 1, ("trim", 99), 2, 1],
        [("prefill", 9), ("prefill", 1), ("finish", 10), ("prefill", 2), ("prefill", 1), ("finish", 3)],
    ),
    "a trim of an empty cache": ([("trim", 0), 2, 1], [("prefill", 2), ("prefill", 1), ("finish", 3)]),
    "a draft with the whole of a short prompt": (
        [3, ("trim", 1), 3, ("trim", 0)],
        [("prefill", 3), ("finish", 2), ("decode", 3)],
    ),
}


@pytest.mark.parametrize("mode", ["proxy", "routed"])
@pytest.mark.parametrize("case", PHASES)
def test_the_core_decides_when_a_prompt_ends(request, plugins, rows, mode, case):
    steps, expected = PHASES[case]
    cache = request.getfixturevalue(mode)("noop_attend")
    for step in steps:
        if isinstance(step, tuple):
            cache.trim(step[1])
        else:
            feed(cache, rows, step)
    assert events(plugins, "noop_attend") == expected


def test_a_method_without_a_window_of_its_own_has_one_of_32(registry, plugins, rows):
    cache = get_cache("rigid", registry=registry)
    feed(cache, rows, 40, 1, 31, 32)
    # rigid has no finish_prompt hook, so the phases show in what runs.
    shared = [event for event in plugins["rigid"].log if event[0] in CALLS]
    assert shared == [("prefill", 40), ("prefill", 1), ("decode", 31), ("prefill", 32)]


def test_a_window_of_one_does_not_make_every_step_a_prompt(proxy, plugins, rows):
    cache = proxy("noop", {"window": 1})
    feed(cache, rows, 5, 1, 1, 2)
    assert events(plugins, "noop") == [("prefill", 5), ("prefill", 1), ("finish", 6), ("decode", 1), ("prefill", 2)]


@pytest.mark.parametrize("name", ["evictor", "coarse"])
@pytest.mark.parametrize("chunks", [[41], [20, 21], [4, 4, 33], [5] * 8 + [1] * 0 + [1]], ids=str)
def test_the_pieces_of_a_prompt_leave_the_same_rows(proxy, name, chunks):
    """Cases 20 to 22: neither the budget nor the kept rows depend on the chunks."""
    generator = np.random.default_rng(3)
    keys, values = (mx.array(generator.standard_normal((1, 2, 42, 8)).astype(np.float32)) for _ in range(2))
    cache, whole = proxy(name), proxy(name)
    whole.update_and_fetch(keys[:, :, :41], values[:, :, :41])
    start = 0
    # The last chunk of one token would be the documented edge: the prompt would end there.
    chunks = chunks if chunks[-1] != 1 else [*chunks[:-2], chunks[-2] + 1]
    for size in chunks:
        cache.update_and_fetch(keys[:, :, start : start + size], values[:, :, start : start + size])
        start += size
    last = keys[:, :, 41:], values[:, :, 41:]
    whole.update_and_fetch(*last)
    cache.update_and_fetch(*last)
    assert facts(cache)[:3] == facts(whole)[:3]
    assert facts(cache)[5] == facts(whole)[5]


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("name", ["noop", "evictor"])
@pytest.mark.parametrize("used", [0, 20])
def test_the_mask_is_a_word_for_several_tokens_and_nothing_for_one(proxy, rows, name, used):
    cache = proxy(name)
    if used:
        feed(cache, rows, used, 1)
    assert cache.make_mask(1) is None
    assert cache.make_mask(5) == "causal"
    assert cache.make_mask(5, return_array=False, window_size=None) == "causal"


@pytest.mark.parametrize("used", [0, 20])
def test_one_token_needs_no_mask_array(proxy, rows, used):
    """mlx-lm's own caches give none either, and an array would not fit layers that hold other numbers of rows."""
    cache = proxy("evictor", {"keep": 6})
    if used:
        feed(cache, rows, used, 1)
    assert cache.make_mask(1, return_array=True) is None


@pytest.mark.parametrize("used", [0, 20])
def test_a_mask_array_is_as_wide_as_what_the_next_call_returns(proxy, rows, used):
    cache = proxy("evictor", {"keep": 6})
    if used:
        feed(cache, rows, used, 1)
    mask = cache.make_mask(4, return_array=True)
    keys, _ = cache.update_and_fetch(*rows(4))
    count = keys.shape[2]
    assert mask.shape[-2:] == (4, count)
    assert mask.dtype == mx.bool_
    expected = np.tril(np.ones((4, count), bool), count - 4)
    assert np.array_equal(np.array(mask).reshape(4, count), expected)


def test_the_mask_taken_before_a_long_first_call_is_exact(proxy, rows, queries, attend_numpy):
    """Case 10: a budget far below the block, and still full causal attention in its own call."""
    cache = proxy("evictor", {"keep": 6})
    mask = cache.make_mask(64)
    keys, values = rows(64)
    q = queries(64)
    got = mx.fast.scaled_dot_product_attention(q, *cache.update_and_fetch(keys, values), scale=0.5, mask=mask)
    expected = attend_numpy(q, keys, values, 0.5, np.tril(np.ones((64, 64), bool)))
    assert np.allclose(np.array(got), expected, atol=1e-5)


@pytest.mark.parametrize("size", [1, 5])
def test_a_window_is_refused_with_advice(proxy, size):
    with pytest.raises(RoutingError, match=r"window of 8 .*layers="):
        proxy("noop").make_mask(size, window_size=8)


# ---------------------------------------------------------------- trim


@pytest.mark.parametrize("name", TRIMMABLE)
@pytest.mark.parametrize(("sizes", "count"), [([40], 5), ([40, 1, 1, 3], 3), ([16, 1], 1), ([5, 1, 1], 6)], ids=str)
def test_an_exact_trim_equals_never_having_seen_the_tokens(proxy, name, sizes, count):
    """Cases 3, 34 and 41: rows, offset and bytes."""
    generator = np.random.default_rng(5)
    total = sum(sizes)
    keys, values = (mx.array(generator.standard_normal((1, 2, total + 1, 8)).astype(np.float32)) for _ in range(2))
    cache, never = proxy(name), proxy(name)
    start = 0
    for size in sizes:
        cache.update_and_fetch(keys[:, :, start : start + size], values[:, :, start : start + size])
        start += size
    assert cache.trim(count) == count
    never.update_and_fetch(keys[:, :, : total - count], values[:, :, : total - count])
    assert (cache.offset, cache.rows, cache.nbytes, cache.plain_nbytes) == (
        never.offset,
        never.rows,
        never.nbytes,
        never.plain_nbytes,
    )
    last = keys[:, :, total:], values[:, :, total:]
    assert all(map(same, cache.update_and_fetch(*last), never.update_and_fetch(*last)))
    assert cache.offset == total - count + 1


@pytest.mark.parametrize("mode", ["proxy", "routed"])
@pytest.mark.parametrize("used", [[], [9], [9, 1, 1]], ids=str)
def test_trimming_nothing_changes_nothing(request, rows, mode, used):
    cache = request.getfixturevalue(mode)("noop_attend")
    if used:
        feed(cache, rows, *used)
    before = facts(cache)
    assert cache.trim(0) == 0
    assert facts(cache) == before


@pytest.mark.parametrize("mode", ["proxy", "routed"])
def test_trimming_more_than_was_seen_empties_the_cache(request, rows, mode):
    cache = request.getfixturevalue(mode)("noop_attend")
    feed(cache, rows, 9, 1)
    assert cache.trim(99) == 10
    assert (cache.offset, cache.rows, cache.nbytes, cache.plain_nbytes, cache.empty()) == (0, 0, 0, 0, True)
    assert cache.trim(5) == 0
    keys, values = rows(3)
    assert same(cache.update_and_fetch(keys, values)[0], keys)
    assert cache.offset == 3


def test_trimming_all_but_one_and_all(routed, rows):
    for count in (9, 10):
        cache = routed("evictor", {"keep": 6})
        feed(cache, rows, 9, 1)
        assert cache.trim(count) == count
        assert cache.offset == 10 - count


@pytest.mark.parametrize("name", ["noop", "rigid", "evictor"])
def test_a_negative_trim_is_refused(proxy, rows, name):
    cache = proxy(name)
    feed(cache, rows, 9, 1)
    before = facts(cache)
    with pytest.raises(VeloxQuantError, match="-1"):
        cache.trim(-1)
    assert facts(cache) == before


@pytest.mark.parametrize("name", ["rigid", "evictor"])
def test_a_cache_that_cannot_be_trimmed_says_so_from_birth_and_stays_as_it_is(proxy, rows, name):
    """Case 35: mlx-lm asks the empty cache."""
    cache = proxy(name)
    assert not cache.is_trimmable()
    assert not can_trim_prompt_cache([cache])
    feed(cache, rows, 9, 1, 2)
    before = facts(cache)
    assert cache.trim(3) == 0
    assert cache.trim(99) == 0
    assert facts(cache) == before
    assert not cache.is_trimmable()


# ---------------------------------------------------------------- copies

MOMENTS = {"empty": [], "in the prompt": [9, 9], "after the prompt": [9, 9, 1], "in the answer": [9, 1, 1, 1, 2]}
COPIED = ["noop", "noop_attend", "evictor", "coarse", "rigid"]


@pytest.mark.parametrize("mode", ["proxy", "routed"])
@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_deep_copy_is_independent_in_both_directions(request, rows, mode, name, moment):
    cache = request.getfixturevalue(mode)(name)
    if MOMENTS[moment]:
        feed(cache, rows, *MOMENTS[moment])
    other = copy.deepcopy([cache])[0]
    assert type(other) is type(cache)
    assert other.method is cache.method
    assert other.config is cache.config
    assert other.layer is cache.layer
    before = facts(cache)
    assert facts(other) == before
    feed(other, rows, 5, 1)
    other.trim(3)
    feed(other, rows, 1)
    assert facts(cache) == before
    frozen = facts(other)
    feed(cache, rows, 17, 1)
    assert facts(other) == frozen


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_copy_goes_on_as_the_original_does(routed, rows, name, moment):
    cache = routed(name)
    if MOMENTS[moment]:
        feed(cache, rows, *MOMENTS[moment])
    other = copy.deepcopy(cache)
    for size in (6, 1, 1, 2):
        step = rows(size)
        results = [one.update_and_fetch(*step) for one in (cache, other)]
        for one, result in zip((cache, other), results, strict=True):
            if hasattr(one, "attend"):
                one.attend(step[0], *result, 1.0, mask_for(size))
        assert all(map(same, *results))
    assert facts(cache) == facts(other)


def test_copies_of_copies_share_no_array_with_the_first(proxy, rows):
    first = proxy("noop")
    keys, values = feed(first, rows, 15)
    second = copy.deepcopy(first)
    third = copy.deepcopy(second)
    for cache in (second, third):
        cache.trim(1)
        feed(cache, rows, 1)
    assert same(first.state[1], keys)
    assert same(first.state[2], values)


# ---------------------------------------------------------------- state


def flat(state):
    return all(isinstance(item, mx.array | str | int | float | None) for item in state)


@pytest.mark.parametrize("mode", ["proxy", "routed"])
@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_state_is_a_flat_list_from_which_an_equal_cache_is_built(request, registry, rows, mode, name, moment):
    cache = request.getfixturevalue(mode)(name)
    if MOMENTS[moment]:
        feed(cache, rows, *MOMENTS[moment])
    state = cache.state
    assert isinstance(state, list)
    assert flat(state)
    mx.eval(state)
    before = facts(cache)
    other = rebuild(state, registry)
    assert type(other) is type(cache)
    assert (other.config, other.layer, other.offset, other.rows) == (
        cache.config,
        cache.layer,
        cache.offset,
        cache.rows,
    )
    assert type(other.offset) is int
    assert other.is_trimmable() == cache.is_trimmable()
    assert facts(other)[4:] == before[4:]
    for size in (6, 1, 1, 2):
        step = rows(size)
        results = [one.update_and_fetch(*step) for one in (cache, other)]
        for one, result in zip((cache, other), results, strict=True):
            if hasattr(one, "attend"):
                one.attend(step[0], *result, 1.0, mask_for(size))
        assert all(map(same, *results))
    # What was taken before is still what it was.
    assert [array.tolist() for array in state[1:]] == before[5]


def test_the_layer_survives_the_state(registry):
    rope = Rope(dims=8, base=None, frequencies=(1.0, 2.5, float("inf"), 3.0), magnitude=1.2)
    layer = LayerSpec(index=3, query_mode="routed", query_heads=4, kv_heads=2, head_dim=8, scale=0.5, rope=rope)
    cache = get_cache("noop_attend", {"window": 7}, layer=layer, registry=registry)
    other = rebuild(cache.state, registry)
    assert (other.layer, other.config.window) == (layer, 7)
    assert isinstance(other, RoutedLayerCache)


@pytest.fixture
def installed(registry, monkeypatch):
    monkeypatch.setattr("veloxquant.registry.default_registry", lambda: registry)


@pytest.mark.usefixtures("installed")
def test_from_state_and_the_setter(proxy, rows):
    cache, target = proxy("evictor"), proxy("evictor")
    feed(cache, rows, 20, 1, 1)
    other = LayerCache.from_state(cache.state)
    target.state = cache.state
    for one in (other, target):
        # A restored store fits exactly, so that only the bytes may differ.
        assert facts(one)[:2] == facts(cache)[:2]
        assert facts(one)[3:] == facts(cache)[3:]
    feed(target, rows, 1)
    assert cache.offset == 22


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "config"), [("noop", None), ("evictor", {"keep": 9})])
def test_the_state_of_another_cache_cannot_be_set(proxy, rows, name, config):
    cache, target = proxy("evictor"), proxy(name, config)
    feed(cache, rows, 9, 1)
    before = facts(target)
    with pytest.raises(FileFormatError, match="evictor"):
        target.state = cache.state
    assert facts(target) == before


def _altered(state, change):
    header = json.loads(state[0])
    return [json.dumps(change(header)), *state[1:]]


BAD_STATES = {
    "nothing": lambda state: [],
    "no list of ours": lambda state: list(state[1:]),
    "no json": lambda state: ["{", *state[1:]],
    "json of something else": lambda state: ["[1]", *state[1:]],
    "an empty record": lambda state: ["{}", *state[1:]],
    "only a format": lambda state: ['{"format": 1}', *state[1:]],
    "a newer format": lambda state: _altered(state, lambda h: {**h, "format": 99}),
    "an array too few": lambda state: state[:-1],
    "an array too many": lambda state: [*state, state[-1]],
    "other array names": lambda state: _altered(state, lambda h: {**h, "arrays": ["a", "b", "c"]}),
    "an option that is gone": lambda state: _altered(state, lambda h: {**h, "config": {"gone": 1}}),
    "no session": lambda state: _altered(state, lambda h: {**h, "session": {}}),
    "a layer of another kind": lambda state: _altered(state, lambda h: {**h, "layer": {"index": 0, "colour": 1}}),
    "values missing": lambda state: _altered(state, lambda h: {**h, "values": {}}),
    "no method": lambda state: _altered(state, lambda h: {k: v for k, v in h.items() if k != "method"}),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_that_cannot_be_read_is_refused_with_a_sentence(proxy, registry, rows, case):
    cache = proxy("evictor")
    feed(cache, rows, 20, 1)
    assert rebuild(cache.state, registry).offset == 21
    with pytest.raises(FileFormatError, match=r"\w+ \w+ \w+"):
        rebuild(BAD_STATES[case](cache.state), registry)


def test_a_state_of_a_method_that_is_not_installed(proxy, toys, rows):
    from veloxquant import UnknownMethodError
    from veloxquant.registry import Registry

    cache = proxy("noop")
    feed(cache, rows, 3)
    with pytest.raises(UnknownMethodError, match="noop"):
        rebuild(cache.state, Registry(entry_points=[], blocked=[]))


# ---------------------------------------------------------------- what is there, and what must not be


@pytest.mark.parametrize("mode", ["proxy", "routed"])
@pytest.mark.parametrize("name", ["noop_attend", "evictor"])
@pytest.mark.parametrize("used", [False, True])
def test_the_members_that_mlx_lm_looks_for(request, rows, mode, name, used):
    cache = request.getfixturevalue(mode)(name)
    if used:
        feed(cache, rows, 9, 1)
    assert cache.offset == cache.size() == (10 if used else 0)
    assert cache.empty() is not used
    assert (cache.nbytes > 0) is used
    assert isinstance(cache.state, list)
    assert isinstance(cache.is_trimmable(), bool)
    assert callable(type(cache).from_state)
    # mlx-lm tests "if cache and ...", so that a cache with a length of 0 would count as absent.
    assert not hasattr(cache, "__len__")
    assert not hasattr(cache, "__bool__")
    # mlx-lm takes caches with these for its own quantized or merged ones.
    assert not hasattr(cache, "bits")
    if mode == "proxy":
        assert not hasattr(cache, "merge")
    assert not any("mlx_lm" in kind.__module__ for kind in type(cache).__mro__)


@pytest.mark.parametrize("used", [False, True])
def test_kv_bits_is_refused(proxy, rows, used):
    cache = proxy("evictor")
    if used:
        feed(cache, rows, 9, 1)
    before = facts(cache)
    with pytest.raises(VeloxQuantError, match=r"evictor.*--kv-bits"):
        cache.to_quantized(group_size=64, bits=8)
    assert facts(cache) == before


def test_a_cache_says_what_it_is(routed, rows):
    cache = routed("evictor")
    feed(cache, rows, 9)
    assert repr(cache) == f"{type(cache).__name__}(evictor, layer 0, routed, 9 tokens)"


def test_the_shape_of_the_rows_is_known_after_the_first(proxy, rows):
    cache = proxy("noop")
    with pytest.raises(VeloxQuantError, match="layer 0"):
        _ = cache.row_shape
    feed(cache, rows, 3, batch=3, heads=2, key_dim=8, value_dim=4, dtype="bfloat16")
    assert cache.row_shape == (3, 2, 8, 4)
    assert cache.row_dtype == "bfloat16"
    assert cache.plain_nbytes == 3 * 2 * (8 + 4) * 2 * 3


# ---------------------------------------------------------------- what is refused

FIRST = {
    "three axes": ((2, 5, 8), (2, 5, 8)),
    "other lengths": ((1, 2, 5, 8), (1, 2, 4, 8)),
    "other heads": ((1, 2, 5, 8), (1, 1, 5, 8)),
    "other batch": ((1, 2, 5, 8), (2, 2, 5, 8)),
    "no rows": ((1, 2, 0, 8), (1, 2, 0, 8)),
}
LATER = {
    "another batch size": {"batch": 3},
    "other heads": {"heads": 4},
    "another key dim": {"key_dim": 16},
    "another value dim": {"value_dim": 16},
    "another dtype": {"dtype": "float16"},
}


@pytest.mark.parametrize("case", FIRST)
@pytest.mark.parametrize("used", [False, True])
def test_arrays_that_do_not_fit_each_other_are_refused(proxy, rows, case, used):
    cache = proxy("noop")
    if used:
        feed(cache, rows, 9)
    before = facts(cache)
    keys, values = (mx.zeros(shape) for shape in FIRST[case])
    with pytest.raises(UnsupportedShapeError, match=r"layer 0 \(noop\).*\[B, Hkv, S, D\]"):
        cache.update_and_fetch(keys, values)
    assert facts(cache) == before


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.bool_])
def test_arrays_that_are_not_float_are_refused(proxy, dtype):
    cache = proxy("noop")
    keys = mx.zeros((1, 2, 5, 8), dtype=dtype)
    with pytest.raises(UnsupportedShapeError, match="float"):
        cache.update_and_fetch(keys, keys)
    assert cache.empty()


@pytest.mark.parametrize("case", LATER)
@pytest.mark.parametrize("size", [2, 9])
def test_rows_of_another_kind_are_refused_by_a_used_cache(proxy, rows, case, size):
    cache = proxy("noop")
    feed(cache, rows, 9, 1)
    before = facts(cache)
    with pytest.raises(UnsupportedShapeError, match=r"layer 0 \(noop\).*new cache"):
        cache.update_and_fetch(*rows(size, **LATER[case]))
    assert facts(cache) == before


@pytest.mark.parametrize("case", LATER)
@pytest.mark.parametrize("sizes", [[9], [9, 1, 1]], ids=str)
def test_one_row_of_another_kind_is_refused_too(proxy, rows, case, sizes):
    """Case 52: one row of a batch of 1 would go into every row of a batch of 3."""
    shape = {"batch": 3, "heads": 2} if case != "another batch size" else {}
    other = {**shape, **LATER[case]}
    cache = proxy("noop")
    feed(cache, rows, *sizes, **shape)
    before = facts(cache)
    with pytest.raises(UnsupportedShapeError, match=r"layer 0 \(noop\)"):
        cache.update_and_fetch(*rows(1, **other))
    assert facts(cache) == before


def test_values_that_do_not_fit_the_keys_of_one_row_are_refused(proxy, rows):
    cache = proxy("noop")
    feed(cache, rows, 9, 1)
    before = facts(cache)
    with pytest.raises(UnsupportedShapeError, match=r"layer 0 \(noop\)"):
        cache.update_and_fetch(rows(1)[0], rows(2)[1])
    assert facts(cache) == before


@pytest.mark.parametrize("used", [False, True])
def test_arrays_of_two_axes_are_refused_with_a_sentence(proxy, rows, used):
    cache = proxy("noop")
    if used:
        feed(cache, rows, 9)
    with pytest.raises(UnsupportedShapeError, match=r"\[B, Hkv, S, D\]"):
        cache.update_and_fetch(mx.zeros((5, 8)), mx.zeros((5, 8)))


def test_what_a_method_refuses_leaves_the_cache_as_it_was(registry, rows):
    cache = get_cache("refuser", registry=registry)
    before = facts(cache)
    with pytest.raises(UnsupportedShapeError, match="refuser"):
        cache.update_and_fetch(*rows(5, key_dim=6))
    assert cache.empty()
    assert facts(cache) == before
    # Rows that the method can serve are welcome afterwards.
    feed(cache, rows, 5, key_dim=8)
    assert cache.offset == 5


def test_a_block_that_a_method_refuses_does_not_open_the_prompt_again(registry, plugins, rows):
    plugin = plugins["refuser"]
    cache = get_cache("refuser", registry=registry)
    feed(cache, rows, 9, 1)
    before = facts(cache)
    plugin.refuse_next = True
    with pytest.raises(UnsupportedShapeError, match="refuser"):
        cache.update_and_fetch(*rows(9))
    assert facts(cache) == before
    feed(cache, rows, 1)
    assert plugin.log[-1] == ("decode", 1)


def test_an_emptied_cache_takes_rows_of_any_kind(proxy, rows):
    """A trim to nothing equals never having seen a token."""
    cache, never = proxy("noop"), proxy("noop")
    feed(cache, rows, 9, 1)
    cache.trim(10)
    assert facts(cache) == facts(never)
    feed(cache, rows, 5, batch=3, dtype="float16")
    assert cache.row_shape == (3, 2, 8, 8)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("moment", MOMENTS)
def test_bytes_are_those_of_the_arrays_that_can_be_reached(routed, rows, reachable_bytes, name, moment):
    cache = routed(name)
    assert cache.nbytes == 0
    if MOMENTS[moment]:
        feed(cache, rows, *MOMENTS[moment], batch=2)
        assert cache.nbytes > 0
    assert cache.nbytes == reachable_bytes(cache.method_state)
    assert cache.nbytes == reachable_bytes(attrs.asdict(LayerSpec())) + reachable_bytes(vars(cache))


def test_a_bounded_cache_stops_growing(routed, rows):
    """Case 84: 256 rows of slack for a small budget."""
    cache = routed("evictor", {"keep": 64})
    feed(cache, rows, 500, 1)
    row = 2 * (8 + 8) * 4
    assert cache.nbytes == 64 * row + 2 * 64 * 4
    feed(cache, rows, 1)
    assert cache.nbytes <= (64 + 16) * row + 2 * 64 * 4
