"""Bounds, channels, page scores and ranks against plain numpy in float64, and the properties that the paper states."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_rocketkv import choose_channels
from veloxquant_rocketkv import page_bounds
from veloxquant_rocketkv import page_scores
from veloxquant_rocketkv import rank
from veloxquant_rocketkv.sparse import BITS
from veloxquant_rocketkv.sparse import rank_roughly
from veloxquant_rocketkv.sparse import top


def normal(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def reference_scores(queries, keys, page_size, channels, scale):
    """Queries [G, D] and keys [n, D] of one KV head, page by page, channel by channel."""
    total = queries.sum(0)
    chosen = sorted(np.argsort(-np.abs(queries).sum(0), kind="stable")[:channels])
    found = np.zeros((len(queries), len(keys) // page_size))
    for page in range(found.shape[1]):
        rows = keys[page * page_size : (page + 1) * page_size]
        for channel in chosen:
            bound = rows[:, channel].max() if total[channel] > 0 else rows[:, channel].min()
            found[:, page] += queries[:, channel] * bound
    share = np.abs(queries[:, chosen]).sum(1) / np.abs(queries).sum(1)
    return found * scale / np.sqrt(share)[:, None]


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "dim", "channels"), [(1, 1, 1, 7, 3), (2, 3, 4, 32, 18), (1, 2, 2, 5, 5)]
)
def test_page_scores_equal_numpy(page_size, batch, heads, group, dim, channels):
    queries, keys = normal(batch, heads, group, dim), normal(batch, heads, 48, dim, seed=1)
    bounds = page_bounds(mx.array(keys), page_size)
    chosen = choose_channels(mx.array(queries), channels)
    found = np.array(page_scores(mx.array(queries), bounds, chosen, 0.3))
    for b in range(batch):
        for h in range(heads):
            expected = reference_scores(queries[b, h].astype(float), keys[b, h].astype(float), page_size, channels, 0.3)
            np.testing.assert_allclose(found[b, h], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 2, 5])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_bounds_are_minimum_and_maximum_channel_by_channel(page_size, dtype):
    keys = mx.array(normal(2, 3, 40, 7)).astype(dtype)
    bounds = page_bounds(keys, page_size)
    exact = np.array(keys.astype(mx.float32)).reshape(2, 3, 40 // page_size, page_size, 7)
    planes = [exact.min(3)] if page_size == 1 else [exact.min(3), exact.max(3)]
    assert bounds.dtype == dtype
    assert (np.array(bounds.astype(mx.float32)) == np.concatenate(planes, axis=3).swapaxes(2, 3)).all()


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_dead_rows_do_not_count_and_dead_pages_are_zero(page_size):
    keys = normal(1, 2, 16, 5)
    valid = np.ones((1, 2, 16), bool)
    valid[0, 0, 5:9] = valid[0, 1, 12:] = False
    bounds = np.array(page_bounds(mx.array(keys), page_size, mx.array(valid)))
    for head in range(2):
        for page in range(16 // page_size):
            part = slice(page * page_size, (page + 1) * page_size)
            rows = keys[0, head, part][valid[0, head, part]]
            expected = np.zeros((2, 5)) if not len(rows) else np.stack([rows.min(0), rows.max(0)])
            found = bounds[0, head, :, page].reshape(-1, 5)
            assert (found == expected[: len(found)]).all()


@pytest.mark.parametrize("page_size", [1, 2, 4, 7])
def test_with_all_channels_a_score_bounds_the_sum_over_the_group(page_size):
    queries, keys = normal(1, 2, 4, 64), normal(1, 2, 28 * page_size, 64, seed=1)
    everything = choose_channels(mx.array(queries), 64)
    found = np.array(page_scores(mx.array(queries), page_bounds(mx.array(keys), page_size), everything, 1.0)).sum(2)
    exact = np.einsum("bhgd,bhnd->bhn", queries, keys).reshape(1, 2, 28, page_size).max(3)
    assert (found >= exact - 1e-3).all()
    if page_size == 1:
        np.testing.assert_allclose(found, exact, atol=1e-3)


def test_a_single_query_head_is_bounded_row_by_row():
    queries, keys = normal(1, 3, 1, 32), normal(1, 3, 80, 32, seed=1)
    everything = choose_channels(mx.array(queries), 32)
    found = np.array(page_scores(mx.array(queries), page_bounds(mx.array(keys), 4), everything, 1.0))
    exact = np.einsum("bhgd,bhnd->bhgn", queries, keys).reshape(1, 3, 1, 20, 4)
    assert (found[..., None] >= exact - 1e-4).all()


def test_what_unread_channels_can_change_is_bounded():
    """With the usual temperature taken out, the score differs by no more than the unread channels can add."""
    queries, keys, count = normal(1, 1, 4, 32), normal(1, 1, 60, 32, seed=1), 12
    bounds = np.array(page_bounds(mx.array(keys), 3))[0, 0]
    chosen = np.array(choose_channels(mx.array(queries), count))[0, 0]
    rest = sorted(set(range(32)) - set(chosen.tolist()))
    every = choose_channels(mx.array(queries), 32)
    whole = np.array(page_scores(mx.array(queries), mx.array(bounds[None, None]), every, 1.0))[0, 0]
    part = np.array(page_scores(mx.array(queries), mx.array(bounds[None, None]), mx.array(chosen[None, None]), 1.0))[
        0, 0
    ]
    share = np.abs(queries[0, 0][:, chosen]).sum(1) / np.abs(queries[0, 0]).sum(1)
    largest = np.maximum(np.abs(bounds[:32]), np.abs(bounds[32:]))[rest]
    limit = np.abs(queries[0, 0][:, rest]) @ largest
    assert (np.abs(part * np.sqrt(share)[:, None] - whole) <= limit + 1e-4).all()


def test_channels_are_those_where_the_group_is_largest():
    queries = normal(2, 3, 4, 40)
    found = np.sort(np.array(choose_channels(mx.array(queries), 9)), axis=-1)
    expected = np.sort(np.argsort(-np.abs(queries).sum(2), axis=-1)[..., :9], axis=-1)
    assert (found == expected).all()


def test_permuting_the_heads_of_a_group_changes_nothing():
    queries, bounds = normal(1, 2, 4, 32), page_bounds(mx.array(normal(1, 2, 64, 32, seed=1)), 2)
    found = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        group = mx.array(queries[:, :, order])
        found.append(np.array(rank(page_scores(group, bounds, choose_channels(group, 16), 0.2))))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_queries_of_zeros_rank_all_pages_alike():
    bounds = page_bounds(mx.array(normal(1, 1, 64, 32)), 2)
    found = rank(page_scores(mx.zeros((1, 1, 2, 32)), bounds, mx.arange(8, dtype=mx.int32).reshape(1, 1, 8), 0.2))
    np.testing.assert_allclose(np.array(found), 2 / 32, rtol=1e-5)


def test_ranks_are_the_softmax_summed_over_the_group():
    logits = normal(2, 3, 4, 50, scale=5)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True)).sum(2)
    np.testing.assert_allclose(np.array(rank(mx.array(logits))), expected, rtol=1e-5)
    rough = np.array(rank_roughly(mx.array(logits * np.float32(BITS))))
    np.testing.assert_allclose(rough, expected, rtol=0.07, atol=1e-30)


def test_rough_ranks_keep_the_order_within_a_head():
    logits = normal(1, 2, 1, 400, scale=8)
    found = np.array(rank_roughly(mx.array(logits * np.float32(BITS))))[0]
    for head in range(2):
        ordered = found[head][np.argsort(logits[0, head, 0])]
        # Far below the maximum, numbers become too small to tell apart, as in any softmax in fp32.
        assert (np.diff(ordered) >= 0).all()
        assert (np.diff(ordered[-100:]) > 0).all()


@pytest.mark.parametrize("ranks", [rank, rank_roughly])
def test_what_is_dead_ranks_last(ranks):
    alive = np.ones((1, 1, 30), bool)
    alive[..., [3, 17, 29]] = False
    logits = mx.array(normal(1, 1, 4, 30, scale=1e7))
    found = np.array(top(ranks(logits, mx.array(alive)), 27))[0, 0]
    assert found.tolist() == [page for page in range(30) if alive[0, 0, page]]


def test_top_is_ascending_and_each_once():
    weights = normal(2, 3, 100)
    found = top(mx.array(weights), 20)
    assert found.dtype == mx.int32
    assert (np.array(found) == np.sort(np.argsort(-weights, axis=-1)[..., :20], axis=-1)).all()
