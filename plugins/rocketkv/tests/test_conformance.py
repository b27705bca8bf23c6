"""The conformance kit of the core, run on RocketKV.

A run of the kit takes most of a minute. Two configs are always held to it, the others with the slow tests; those over
packed rows are in test_stacked.py.
"""

import pytest

from veloxquant.testing import MethodTests
from veloxquant_rocketkv import RocketKVConfig

DENSE = {"stage1": False, "topk": 10**6}
KEEPS_ALL = {
    "eviction_declared": "the method evicts, but this option keeps every row",
    "later_prompt_evicts": "as above",
}


class TestDefault(MethodTests):
    """As it comes: a ratio of 8."""

    method = "rocketkv"
    dense_config = DENSE


class TestChoosing(MethodTests):
    """A ratio of 8, however few rows there are."""

    method = "rocketkv"
    config = RocketKVConfig(dense_rows=0)
    dense_config = DENSE


@pytest.mark.slow
class TestFewThenMany(MethodTests):
    """All rows are read at first, and some of them later."""

    method = "rocketkv"
    config = RocketKVConfig(dense_rows=95, page_size=2)
    dense_config = DENSE


class TestSmall(MethodTests):
    """Pages of three, few channels, few rows read, a short window."""

    method = "rocketkv"
    config = RocketKVConfig(
        compression_ratio=12, page_size=3, head_topk1=9, window=16, sinks=2, kernel_size=5, topk=12, keep_recent=2
    )
    dense_config = DENSE


@pytest.mark.slow
class TestSingleRows(MethodTests):
    """Pages of one row, nothing kept for being new."""

    method = "rocketkv"
    config = RocketKVConfig(compression_ratio=2, keep_recent=0, topk=20)
    dense_config = RocketKVConfig(stage1=False, page_size=1, topk=10**6)


@pytest.mark.slow
class TestExactRanking(MethodTests):
    """Rows ranked by their exact scores."""

    method = "rocketkv"
    config = RocketKVConfig(ranking="rows", topk=30)
    dense_config = RocketKVConfig(ranking="rows", stage1=False, topk=10**6)


@pytest.mark.slow
class TestWithoutStage1(MethodTests):
    """Sparse attention over the whole prompt."""

    method = "rocketkv"
    config = RocketKVConfig(stage1=False, topk=24)
    dense_config = DENSE


@pytest.mark.slow
class TestMultiTurn(MethodTests):
    """The full history, filtered at each turn."""

    method = "rocketkv"
    config = RocketKVConfig(multi_turn=True, topk=24)
    expected_failures = KEEPS_ALL
