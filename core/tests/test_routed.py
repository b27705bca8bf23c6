import copy

import mlx.core as mx
import numpy as np
import pytest
from core_test_helpers import facts
from core_test_helpers import feed
from core_test_helpers import same

from veloxquant import RoutingError
from veloxquant.state import rebuild


def test_attention_is_dense_over_the_returned_rows_when_the_method_declines(routed, rows, queries, attend_numpy):
    cache = routed("noop_attend")
    keys, values = rows(6, batch=2)
    q = queries(6, batch=2, heads=4)
    got = cache.attend(q, *cache.update_and_fetch(keys, values), 0.5, cache.make_mask(6))
    assert np.allclose(np.array(got), attend_numpy(q, keys, values, 0.5, np.tril(np.ones((6, 6), bool))), atol=1e-5)


def test_dead_rows_after_a_deep_rewind_are_not_attended(routed, rows, queries, attend_numpy):
    cache = routed("evictor", {"keep": 6})
    keys, values = feed(cache, rows, 29, 1)
    assert cache.trim(4) == 4  # back to 26 tokens: head 0 had kept 24 to 29, head 1 row 0 and 25 to 29
    step = rows(1)
    q = queries(1, heads=4)
    got = np.array(cache.attend(q, *cache.update_and_fetch(*step), 0.5))
    for head, kept in ((0, [24, 25]), (1, [0, 25])):
        alone = [
            mx.concatenate([a[:, head : head + 1, kept], b[:, head : head + 1]], axis=2)
            for a, b in zip((keys, values), step, strict=True)
        ]
        expected = attend_numpy(q[:, 2 * head : 2 * head + 2], *alone, 0.5, np.ones((1, 3), bool))
        assert np.allclose(got[:, 2 * head : 2 * head + 2], expected, atol=1e-5)
    assert cache.offset == 27


@pytest.mark.parametrize("first", [1, 9])
def test_queries_that_did_not_come_are_missed_at_the_next_call(routed, rows, first):
    cache = routed("noop_attend")
    cache.update_and_fetch(*rows(first))
    before = facts(cache)
    for _ in range(2):
        with pytest.raises(RoutingError, match=r"route\(model\).*true_queries=False"):
            cache.update_and_fetch(*rows(1))
    assert facts(cache) == before


def test_a_copy_and_a_restored_cache_miss_them_too(routed, registry, rows):
    cache = routed("noop_attend")
    cache.update_and_fetch(*rows(3))
    for other in (copy.deepcopy(cache), rebuild(cache.state, registry)):
        with pytest.raises(RoutingError):
            other.update_and_fetch(*rows(1))


def test_a_proxy_cache_has_no_attend(proxy, routed):
    assert not hasattr(proxy("noop_attend"), "attend")
    assert not hasattr(routed("noop"), "attend")
    assert hasattr(routed("noop_attend"), "attend")


@pytest.mark.parametrize(
    ("name", "in_proxy", "in_routed"), [("noop", None, None), ("evictor", "proxy", "routed"), ("rigid", None, None)]
)
def test_the_query_mode_is_told(proxy, routed, name, in_proxy, in_routed):
    assert (proxy(name).query_mode, routed(name).query_mode) == (in_proxy, in_routed)


def test_routed_the_prompt_ends_after_the_attention_of_its_last_token(routed, plugins, rows):
    cache = routed("noop_attend")
    feed(cache, rows, 9)
    keys, values = rows(1)
    got = cache.update_and_fetch(keys, values)
    assert plugins["noop_attend"].log[-1] == ("prefill", 1)
    cache.attend(keys, *got, 1.0)
    assert plugins["noop_attend"].log[-2:] == [("attend", 1), ("finish", 10)]


def test_routed_a_draft_is_attended_and_trimmed_before_the_prompt_ends(routed, plugins, rows):
    cache = routed("noop_attend")
    feed(cache, rows, 9, 3)
    cache.trim(2)
    assert plugins["noop_attend"].log[-3:] == [("attend", 3), ("trim", 2), ("finish", 10)]


@pytest.mark.parametrize("count", [3, 5])
def test_rows_that_were_never_attended_can_be_trimmed_away(routed, rows, count):
    """A forward pass that failed half way: forgetting its rows makes the cache usable again."""
    cache = routed("noop_attend")
    feed(cache, rows, 9, 1)
    cache.update_and_fetch(*rows(3))
    assert cache.trim(count) == count
    feed(cache, rows, 1)
    assert cache.offset == 14 - count


# ---------------------------------------------------------------- deep rewinds


@pytest.mark.parametrize("count", range(1, 32))
def test_a_routed_evictor_can_be_rewound_to_any_length(routed, rows, count):
    cache = routed("evictor", {"keep": 6})
    feed(cache, rows, 29, 1, 1)
    assert cache.is_trimmable()
    assert cache.trim(count) == count
    left = 31 - count
    assert cache.offset == left
    if left:
        positions, valid = cache.method_state.rows.positions(), cache.method_state.rows.valid()
        alive = np.array(positions >= 0 if valid is None else valid)
        positions = np.broadcast_to(np.array(positions), alive.shape)
        expected = [[p for p in kept if p < left] for kept in ([*range(24, 31)], [0, *range(25, 31)])]
        assert [positions[0, h][alive[0, h]].tolist() for h in range(2)] == expected
    step = rows(1)
    got, _ = cache.update_and_fetch(*step)
    cache.attend(step[0], got, got, 1.0)
    assert same(got[:, :, -1:], step[0])
    assert cache.offset == left + 1
