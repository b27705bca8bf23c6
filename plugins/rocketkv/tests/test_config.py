import math

import attrs
import pytest

from veloxquant import ConfigError
from veloxquant import get_cache
from veloxquant_rocketkv import RocketKVConfig


def test_the_default_is_a_ratio_of_eight():
    config = RocketKVConfig()
    assert config.rows_to_keep(32768) == 14868
    assert config.rows_to_read(32768) == 2048
    assert config.pages_and_channels(128) == (2, 70)
    assert config.stage1_ratio == pytest.approx(2.204, rel=1e-3)


@pytest.mark.parametrize(("tokens", "kept"), [(1, 36), (36, 36), (79, 36), (80, 36), (82, 37), (2000, 907)])
def test_stage_1_never_keeps_fewer_rows_than_sinks_and_window(tokens, kept):
    assert RocketKVConfig().rows_to_keep(tokens) == kept


@pytest.mark.parametrize(("tokens", "read"), [(1, 6), (111, 6), (112, 7), (16000, 1000)])
def test_rows_to_read_follow_the_tokens_and_have_a_floor(tokens, read):
    assert RocketKVConfig().rows_to_read(tokens) == read


def test_without_stage_1_everything_is_kept():
    assert [RocketKVConfig(stage1=False).rows_to_keep(n) for n in (40, 4000)] == [40, 4000]


def test_given_sizes_win():
    config = RocketKVConfig(page_size=4, head_topk1=500, topk=99)
    assert config.pages_and_channels(64) == (4, 64)
    assert config.rows_to_read(10**6) == 99
    assert RocketKVConfig(page_size=4).pages_and_channels(128) == (4, 128)
    assert RocketKVConfig(ranking="rows").pages_and_channels(48) == (1, 48)


@pytest.mark.parametrize("ratio", [1.0, 1, 0.5, 0, -8, math.nan, math.inf])
def test_a_ratio_that_compresses_nothing_is_a_config_error(ratio):
    with pytest.raises(ConfigError, match="above 1"):
        RocketKVConfig(compression_ratio=ratio)
    with pytest.raises(ConfigError, match="above 1"):
        get_cache("rocketkv", {"compression_ratio": ratio})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 62}, "kernel_size must be odd"),
        ({"kernel_size": 0}, "kernel_size"),
        ({"window": 0}, "window"),
        ({"sinks": -1}, "sinks"),
        ({"keep_recent": -1}, "keep_recent"),
        ({"topk": 0}, "topk"),
        ({"topk": 4, "keep_recent": 4}, "topk must exceed keep_recent = 4"),
        ({"exact_recent": -1}, "exact_recent"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 2.5}, "page_size"),
        ({"head_topk1": 0}, "head_topk1"),
        ({"multi_turn": True, "stage1": False}, "multi_turn filters the history by stage 1"),
        ({"ranking": "rows", "page_size": 2}, "uses no pages"),
        ({"ranking": "rows", "head_topk1": 8}, "uses no pages"),
        ({"ranking": "rows", "multi_turn": True}, "leave multi_turn"),
        ({"ranking": "columns"}, "ranking"),
        ({"compresion_ratio": 4}, "did you mean 'compression_ratio'"),
        ({"storage": "no_such_method"}, "no method 'no_such_method'"),
        ({"storage": "rocketkv"}, "offers no row store"),
        ({"window": 10**11}, "window"),
    ],
)
def test_bad_options_are_refused_with_the_reason(options, message):
    with pytest.raises((ConfigError, LookupError), match=message):
        get_cache("rocketkv", options)


def test_exact_rows_need_storage_and_are_read_as_part_of_topk():
    assert RocketKVConfig(topk=10, exact_recent=16).newest_rows == 1
    stacked = RocketKVConfig(storage="some", exact_recent=16, sinks=4)
    assert (stacked.exact_rows, stacked.newest_rows, stacked.rows_to_read(1)) == (16, 16, 21)
    assert RocketKVConfig(storage="some", exact_recent=16, window=8).exact_rows == 8
    assert RocketKVConfig(storage="some", exact_recent=3, keep_recent=5).newest_rows == 5
    with pytest.raises(ConfigError, match="topk must exceed exact_recent = 16"):
        RocketKVConfig(storage="some", topk=16, exact_recent=16)


def test_every_option_has_help():
    assert all(field.metadata.get("help") for field in attrs.fields(RocketKVConfig))
