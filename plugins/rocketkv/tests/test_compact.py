"""A summary in 4 bits against plain numpy, and the summary of full width."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.halves import ALL_HEADS
from veloxquant_rocketkv import choose_channels
from veloxquant_rocketkv import page_bounds
from veloxquant_rocketkv import page_scores
from veloxquant_rocketkv.compact import CompactSummary

DIM, PAGES = 16, 40


def bounds(pages=PAGES, seed=0, dtype=mx.float32):
    keys = mx.random.normal((2, 3, 2 * pages, DIM), key=mx.random.key(seed)).astype(dtype)
    return page_bounds(keys, 2)


def decoded(summary):
    """The bounds that the codes stand for, in float64."""
    arrays = {name: np.array(array) for name, array in summary.arrays().items()}
    codes = np.stack([arrays["codes"] & 15, arrays["codes"] >> 4], axis=-1)
    codes = codes.reshape(*codes.shape[:3], -1).astype(np.float64)
    low, step = (np.tile(arrays["levels"][:, :, part].astype(np.float64), (1, 1, 2)) for part in (0, 1))
    return low[..., None] + codes * step[..., None], step[..., None]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_codes_stand_for_bounds_that_are_no_tighter_and_less_than_a_level_off(dtype):
    summary, exact = CompactSummary(), bounds(dtype=dtype)
    summary.extend(exact)
    found, step = decoded(summary)
    exact = np.array(exact.astype(mx.float32)).astype(np.float64)
    slack = 1e-4 * step
    assert (found[:, :, :DIM] <= exact[:, :, :DIM] + slack[:, :, :DIM]).all()
    assert (found[:, :, DIM:] >= exact[:, :, DIM:] - slack[:, :, DIM:]).all()
    assert (np.abs(found - exact) <= step + slack).all()


@pytest.mark.parametrize("channels", [5, DIM])
def test_scores_are_those_of_the_decoded_bounds_up_to_one_number_a_head(channels):
    summary = CompactSummary()
    summary.extend(bounds())
    queries = mx.random.normal((2, 3, 4, DIM), key=mx.random.key(1))
    chosen = choose_channels(queries, channels)
    found = np.array(summary.scores(queries, chosen, 0.3)(ALL_HEADS))
    expected = np.array(page_scores(queries, mx.array(decoded(summary)[0].astype(np.float32)), chosen, 0.3))
    off = found - expected
    np.testing.assert_allclose(off, np.broadcast_to(off[..., :1], off.shape), atol=2e-4)


def test_pages_added_two_by_two_are_those_added_at_once():
    exact = bounds(80)
    one, several = CompactSummary(), CompactSummary()
    for summary in (one, several):
        summary.extend(exact[..., :42])
    one.extend(exact[..., 42:])
    for start in range(42, 80, 2):
        several.extend(exact[..., start : start + 2])
    for name, array in one.arrays().items():
        assert (np.array(array) == np.array(several.arrays()[name])).all()
    assert one.pages == several.pages == 80


def test_what_was_added_and_dropped_leaves_no_trace():
    exact = bounds(120)
    summary = CompactSummary()
    summary.extend(exact[..., :70])
    summary.extend(exact[..., 70:72])
    expected = copy.deepcopy(summary)
    for start in range(72, 120, 2):
        summary.extend(exact[..., start : start + 2])
    summary.truncate(72)
    assert summary.nbytes == expected.nbytes
    for name, array in summary.arrays().items():
        assert (np.array(array) == np.array(expected.arrays()[name])).all()


def test_levels_are_set_anew_when_there_are_twice_as_many_pages():
    summary = CompactSummary()
    summary.extend(bounds())
    assert not summary.outgrown(2 * PAGES - 2)
    assert summary.outgrown(2 * PAGES)
    summary.truncate(PAGES - 2)
    assert (summary.pages, summary.nbytes, summary.arrays()) == (0, 0, {})


def test_equal_keys_have_one_level():
    summary = CompactSummary()
    summary.extend(page_bounds(mx.ones((1, 1, 8, DIM)), 2))
    found = summary.scores(mx.ones((1, 1, 2, DIM)), choose_channels(mx.ones((1, 1, 2, DIM)), DIM), 1.0)(ALL_HEADS)
    assert bool(mx.isfinite(found).all())
    assert np.ptp(np.array(found)) == 0


def test_a_quarter_of_the_bytes_of_half_precision():
    summary, exact = CompactSummary(), bounds(2000, dtype=mx.float16)
    summary.extend(exact)
    assert summary.nbytes == exact.nbytes // 4 + 2 * 3 * 2 * DIM * 4
