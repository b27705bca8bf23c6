"""The split of a ratio against the figures of the paper and of its code."""

import math

import pytest

from veloxquant import ConfigError
from veloxquant_rocketkv import split_budget
from veloxquant_rocketkv import split_compression_ratio
from veloxquant_rocketkv import split_pages_and_channels

# tokens, budget, new tokens -> exponent, capacity, prompt budget, stage 2 ratio, page size, channels, topk (D = 128)
TABLE = [
    ((32768, 4096, 0), (0.38, 14868, 14868, 3.630, 2, 70, 2048)),
    ((32768, 2048, 128), (0.44, 9674, 9546, 4.724, 3, 81, 1024)),
    ((32768, 1024, 128), (0.50, 5792, 5664, 5.656, 3, 67, 512)),
    ((32768, 512, 128), (0.56, 3191, 3063, 6.232, 3, 61, 256)),
    ((32768, 256, 128), (0.62, 1618, 1490, 6.320, 3, 60, 128)),
    ((131072, 256, 128), (0.74, 1296, 1168, 5.063, 3, 75, 128)),
    ((2048, 1024, 64), (0.26, 1710, 1646, 1.670, 1, 76, 512)),
    ((4096, 4096, 0), (0.20, 4096, 4096, 1, 1, 128, 2048)),
]
# ratio -> stage 1, stage 2, page size, head ratio
RATIOS = [
    (2, 1.197, 1.670, 1, 1.670),
    (4, 1.558, 2.567, 2, 1.283),
    (8, 2.204, 3.630, 2, 1.815),
    (16, 3.387, 4.724, 3, 1.575),
    (32, 5.657, 5.657, 3, 1.886),
    (64, 10.267, 6.233, 3, 2.078),
    (128, 20.25, 6.320, 3, 2.107),
    (512, 101.1, 5.063, 3, 1.688),
    (1024, 256, 4, 2, 2),
]


@pytest.mark.parametrize(("given", "expected"), TABLE)
def test_a_budget_is_split_as_in_the_table(given, expected):
    tokens, budget, new = given
    found = split_budget(tokens, budget, new_tokens=new)
    exponent, capacity, prompt, ratio, page, channels, topk = expected
    assert found.exponent == pytest.approx(exponent, abs=1e-9)
    assert found.stage2_ratio == pytest.approx(ratio, abs=5e-4)
    assert (found.capacity, found.prompt_budget) == (capacity, prompt)
    assert (found.page_size, found.head_topk1, found.topk) == (page, channels, topk)


@pytest.mark.parametrize(("ratio", "stage1", "stage2", "page", "head"), RATIOS)
def test_a_ratio_is_split_as_in_the_table(ratio, stage1, stage2, page, head):
    found = split_compression_ratio(ratio)
    assert found == pytest.approx((stage1, stage2), rel=5e-4)
    assert split_pages_and_channels(found[1], 128) == (page, int(128 / (found[1] / page)))
    assert found[1] / page == pytest.approx(head, abs=6e-4)


def test_room_for_a_long_answer_is_kept():
    assert split_budget(1000, 100, new_tokens=450).capacity == 900
    assert split_budget(1000, 100, new_tokens=600).capacity == 1000


@pytest.mark.parametrize("ratio", [1, 1.01, 1.9, 2, 2.6, 3, 7.3, 64, 1000, 1024, 5000, 1e6])
@pytest.mark.parametrize("dim", [1, 7, 64, 128, 576])
def test_the_parts_multiply_to_the_ratio_and_pages_fit_them(ratio, dim):
    stage1, stage2 = split_compression_ratio(ratio)
    assert stage1 * stage2 == pytest.approx(ratio)
    page, channels = split_pages_and_channels(stage2, dim)
    assert 1 <= page <= stage2
    assert 1 <= channels <= dim


def test_the_share_of_stage_1_grows_to_four_fifths():
    shares = [math.log(split_compression_ratio(2.0**power)[0]) / math.log(2.0**power) for power in range(1, 16)]
    assert shares == sorted(shares)
    assert shares[9:] == pytest.approx([0.8] * 6)


def test_a_page_size_of_ones_own_moves_the_channels():
    assert split_pages_and_channels(3.630, 128, 1) == (1, 35)
    assert split_pages_and_channels(3.630, 128, 8) == (8, 128)


@pytest.mark.parametrize("ratio", [0.99, 0, -4, math.nan, math.inf])
def test_no_ratio_below_one(ratio):
    with pytest.raises(ConfigError, match="ratio"):
        split_compression_ratio(ratio)


@pytest.mark.parametrize(("tokens", "budget", "new"), [(100, 0, 0), (100, 101, 0), (100, 50, 100), (100, 50, -1)])
def test_impossible_budgets_are_refused(tokens, budget, new):
    with pytest.raises(ConfigError, match="budget"):
        split_budget(tokens, budget, new_tokens=new)
