import math

import attrs
import pytest

from veloxquant import ConfigError
from veloxquant import get_cache
from veloxquant_snapkv import SnapKVConfig


def test_the_default_is_a_ratio_of_four():
    assert SnapKVConfig().rows_to_keep(4000) == 1000


@pytest.mark.parametrize(("tokens", "kept"), [(400, 100), (401, 100), (403, 100), (404, 101), (10, 36), (143, 36)])
def test_a_ratio_becomes_rows_and_never_fewer_than_sinks_and_window(tokens, kept):
    assert SnapKVConfig(compression_ratio=4).rows_to_keep(tokens) == kept


def test_a_budget_does_not_depend_on_the_tokens():
    assert [SnapKVConfig(budget=64).rows_to_keep(n) for n in (1, 64, 10**6)] == [64, 64, 64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 36}, "budget must exceed sinks + window = 36, not 36"),
        ({"budget": 4, "sinks": 4, "window": 1}, "budget must exceed sinks + window = 5"),
        ({"budget": 64, "compression_ratio": 2.0}, "not both"),
        ({"compression_ratio": 1.0}, "compression_ratio"),
        ({"compression_ratio": 0.5}, "compression_ratio"),
        ({"compression_ratio": math.nan}, "compression_ratio"),
        ({"compression_ratio": math.inf}, "compression_ratio"),
        ({"kernel_size": 4}, "kernel_size must be odd"),
        ({"kernel_size": 0}, "kernel_size"),
        ({"window": 0}, "window"),
        ({"sinks": -1}, "sinks"),
        ({"pooling": "mean"}, "pooling"),
        ({"eviction": "never"}, "eviction"),
        ({"budget": True}, "budget"),
        ({"budget": 64.5}, "budget"),
        ({"budgte": 64}, "did you mean 'budget'"),
        ({"storage": "no_such_method"}, "no method 'no_such_method'"),
        ({"storage_config": {"bits": 2}}, "storage"),
        ({"storage": "snapkv"}, "offers no row store"),
    ],
)
def test_bad_options_are_refused_with_the_reason(options, message):
    with pytest.raises((ConfigError, LookupError), match=message.replace("+", r"\+")):
        get_cache("snapkv", options)


def test_every_option_has_help():
    assert all(field.metadata.get("help") for field in attrs.fields(SnapKVConfig))


def test_the_caller_keeps_what_it_passed():
    options = {"budget": 64, "storage_config": None}
    get_cache("snapkv", options)
    assert options == {"budget": 64, "storage_config": None}
