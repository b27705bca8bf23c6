"""Votes, pooling and choice against a plain numpy reference in float64."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_snapkv import append_recent
from veloxquant_snapkv import keep_indices
from veloxquant_snapkv import pool_scores
from veloxquant_snapkv import window_scores


def reference_votes(queries, keys, scale, sinks=None):
    """Queries [Hq, W, D] and keys [Hkv, N, D] of one sequence; one head, one query at a time."""
    group = queries.shape[0] // keys.shape[0]
    window, rows = queries.shape[1], keys.shape[1]
    votes = np.zeros((keys.shape[0], rows - window))
    for head, head_queries in enumerate(queries):
        for place, query in enumerate(head_queries):
            seen = rows - window + place + 1
            logits = keys[head // group, :seen] @ query * scale
            weights = np.exp(logits - logits.max())
            total = weights.sum()
            if sinks is not None:
                total += np.exp(sinks[head] - logits.max())
            votes[head // group] += (weights / total)[: rows - window]
    return votes


def reference_pool(votes, width, pooling):
    half = width // 2
    pooled = np.empty_like(votes)
    for place in range(votes.shape[-1]):
        part = votes[..., max(0, place - half) : place + half + 1]
        pooled[..., place] = part.max(-1) if pooling == "max" else part.sum(-1) / width
    return pooled


def reference_keep(scores, rows, budget, sinks):
    """Indices of one head: sinks, best of the middle with ties to the earlier row, window."""
    scored = len(scores)
    middle = sorted(range(sinks, scored), key=lambda row: (-scores[row], row))[: budget - sinks - (rows - scored)]
    return sorted([*range(sinks), *middle, *range(scored, rows)])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(2, 2), (8, 2), (4, 1)])
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize(("dim", "window", "rows"), [(16, 8, 70), (7, 1, 33), (64, 16, 129)])
def test_selection_equals_numpy(batch, query_heads, kv_heads, pooling, dim, window, rows):
    rng = np.random.default_rng(rows + dim + batch)
    queries = rng.standard_normal((batch, query_heads, window, dim)).astype(np.float32)
    keys = rng.standard_normal((batch, kv_heads, rows, dim)).astype(np.float32) * 2
    budget, sinks, scale = rows // 2, 3, dim**-0.5
    votes = window_scores(mx.array(queries), mx.array(keys), scale)
    pooled = pool_scores(votes, 5, pooling)
    kept = np.array(keep_indices(pooled, rows, budget, sinks=sinks))
    assert kept.dtype == np.int32
    for row in range(batch):
        expected = reference_votes(queries[row].astype(np.float64), keys[row].astype(np.float64), scale)
        np.testing.assert_allclose(np.array(votes)[row], expected, rtol=2e-5, atol=1e-7)
        expected = reference_pool(expected, 5, pooling)
        np.testing.assert_allclose(np.array(pooled)[row], expected, rtol=2e-5, atol=1e-7)
        for head in range(kv_heads):
            # The choice is judged on the scores that were computed: near ties may round either way.
            assert kept[row, head].tolist() == reference_keep(np.array(pooled)[row, head], rows, budget, sinks)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_votes_of_half_types_are_computed_in_fp32(dtype):
    rng = np.random.default_rng(0)
    queries = mx.array(rng.standard_normal((1, 4, 8, 32))).astype(dtype)
    keys = mx.array(rng.standard_normal((1, 2, 100, 32))).astype(dtype)
    votes = window_scores(queries, keys, 32**-0.5)
    exact = reference_votes(*(np.array(a.astype(mx.float32))[0].astype(np.float64) for a in (queries, keys)), 32**-0.5)
    assert votes.dtype == mx.float32
    np.testing.assert_allclose(np.array(votes)[0], exact, rtol=2e-5, atol=1e-7)


def test_sink_logits_take_their_share_of_the_softmax():
    rng = np.random.default_rng(1)
    queries, keys = rng.standard_normal((4, 8, 16)), rng.standard_normal((2, 40, 16))
    sinks = rng.standard_normal(4) * 3
    votes = window_scores(
        mx.array(queries[None].astype(np.float32)), mx.array(keys[None].astype(np.float32)), 0.25,
        sinks=mx.array(sinks.astype(np.float32)),
    )  # fmt: skip
    np.testing.assert_allclose(np.array(votes)[0], reference_votes(queries, keys, 0.25, sinks), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("width", [1, 3, 5, 7, 13, 63])
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("rows", [1, 2, 40, 100])
def test_pooling_equals_numpy_at_the_edges_too(width, pooling, rows):
    votes = np.random.default_rng(width).random((2, 3, rows)).astype(np.float32)
    pooled = np.array(pool_scores(mx.array(votes), width, pooling))
    np.testing.assert_allclose(pooled, reference_pool(votes, width, pooling), rtol=1e-5)


def test_a_planted_row_is_kept_with_its_neighbours():
    """One key aligned with all window queries: it and kernel_size // 2 rows on each side win (max pooling)."""
    rng = np.random.default_rng(2)
    direction = rng.standard_normal(32)
    queries = np.broadcast_to(direction, (1, 2, 8, 32)) + 0.01 * rng.standard_normal((1, 2, 8, 32))
    keys = 0.1 * rng.standard_normal((1, 1, 200, 32))
    keys[0, 0, 77] = direction * 3
    votes = window_scores(mx.array(queries.astype(np.float32)), mx.array(keys.astype(np.float32)), 32**-0.5)
    kept = np.array(keep_indices(pool_scores(votes, 7, "max"), 200, 4 + 8 + 7, sinks=4))[0, 0].tolist()
    assert kept == [0, 1, 2, 3, *range(74, 81), *range(192, 200)]


def test_equal_scores_keep_the_earlier_rows():
    kept = keep_indices(mx.ones((1, 2, 50)), 58, 20, sinks=4)
    assert np.array(kept)[0].tolist() == [[*range(12), *range(50, 58)]] * 2


def test_scaling_all_votes_changes_nothing():
    votes = mx.random.uniform(shape=(2, 2, 90), key=mx.random.key(3))
    one, other = (np.array(keep_indices(v, 100, 40, sinks=2)) for v in (votes, votes * 32))
    assert (one == other).all()


def test_nan_votes_still_give_as_many_distinct_rows():
    votes = mx.full((1, 1, 50), mx.nan)
    kept = np.array(keep_indices(votes, 58, 20, sinks=4))[0, 0].tolist()
    assert len(set(kept)) == 20
    assert max(kept) == 57


def test_dead_rows_get_no_vote_and_are_chosen_last():
    rng = np.random.default_rng(4)
    queries, keys = rng.standard_normal((1, 2, 4, 16)), rng.standard_normal((1, 1, 40, 16))
    dead = [7, 20, 21]
    valid = np.ones((1, 1, 40), bool)
    valid[..., dead] = False
    queries, keys, alive = (mx.array(a.astype(np.float32)) for a in (queries, keys, valid))
    votes = window_scores(queries, keys, 0.25, valid=alive.astype(mx.bool_))
    without = [row for row in range(40) if row not in dead]
    expected = reference_votes(np.array(queries)[0].astype(np.float64), np.array(keys)[0][:, without], 0.25)
    np.testing.assert_allclose(np.delete(np.array(votes)[0], dead, axis=1), expected, rtol=2e-5, atol=1e-7)
    assert not np.array(votes)[0, :, dead].any()
    kept = np.array(keep_indices(pool_scores(votes, 7, "max"), 40, 36, sinks=2, valid=alive.astype(mx.bool_)))
    assert not set(dead) & set(kept[0, 0].tolist())


def test_the_query_buffer_holds_the_latest_rows_only():
    rows = mx.arange(100, dtype=mx.float32).reshape(1, 1, 100, 1)
    for cuts in ([100], [30, 70], [1] * 100, [64, 35, 1], [3, 97]):
        recent, start = None, 0
        for cut in cuts:
            recent = append_recent(recent, rows[:, :, start : start + cut], 16)
            start += cut
        assert recent is not None
        assert recent.reshape(-1).tolist() == list(range(84, 100))
