import attrs
import mlx.core as mx
import pytest

from veloxquant import ConfigError
from veloxquant import VeloxQuantError
from veloxquant import get_cache
from veloxquant_turboquant_rvq import TurboQuantRVQConfig


def test_the_defaults_are_those_of_the_documentation():
    config = TurboQuantRVQConfig()
    assert (config.bits, config.seed, config.value_bits, config.codebook) == (1, 42, None, "uniform")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits"),
        ({"bits": 5}, "bits"),
        ({"bits": 1.0}, "bits"),
        ({"bits": None}, "bits"),
        ({"bits": True}, "bits"),
        ({"bits": "2"}, "bits"),
        ({"value_bits": 1}, "value_bits"),
        ({"value_bits": 5}, "value_bits"),
        ({"value_bits": 6}, "value_bits"),
        ({"value_bits": 16}, "value_bits"),
        ({"value_bits": 4.0}, "value_bits"),
        ({"value_bits": False}, "value_bits"),
        ({"codebook": "gaussian"}, "codebook"),
        ({"codebook": None}, "codebook"),
        ({"sinks": -1}, "sinks"),
        ({"sinks": 2**16 + 1}, "sinks"),
        ({"recent": -1}, "recent"),
        ({"recent": 2**16 + 1}, "recent"),
        ({"recent": 1.5}, "recent"),
        ({"recent": None}, "recent"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"bit": 2}, "did you mean 'bits'"),
        ({"values_bits": 2}, "did you mean 'value_bits'"),
        ({"codebok": "laplace"}, "did you mean 'codebook'"),
    ],
)
def test_bad_options_are_refused_with_the_reason(options, message):
    with pytest.raises(ConfigError, match=message) as refused:
        get_cache("turboquant_rvq", options)
    assert "turboquant_rvq" in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"bits": bits} for bits in (1, 2, 3, 4)),
        *({"value_bits": bits} for bits in (None, 2, 3, 4, 8)),
        *({"codebook": kind} for kind in ("uniform", "matched", "laplace")),
        {"sinks": 0, "recent": 0},
        {"sinks": 2**16, "recent": 2**16},
        {"seed": 0},
        {"seed": 2**63 - 1},
    ],
)
def test_what_is_allowed_can_be_used(options):
    cache = get_cache("turboquant_rvq", options)
    rows = mx.random.normal((1, 1, 3, 32), key=mx.random.key(0))
    keys, values = cache.update_and_fetch(rows, rows)
    assert keys.shape == values.shape == rows.shape
    assert bool(mx.isfinite(keys).all() & mx.isfinite(values).all())


def test_every_option_has_help():
    assert all(field.metadata.get("help") for field in attrs.fields(TurboQuantRVQConfig))


def test_no_cache_has_an_attribute_named_bits():
    """mlx-lm takes a cache with such an attribute for its own quantized one."""
    cache = get_cache("turboquant_rvq", {"bits": 2})
    assert not hasattr(cache, "bits")
    with pytest.raises(VeloxQuantError, match="already compressed"):
        cache.to_quantized()


def test_the_caller_keeps_what_it_passed():
    options = {"bits": 2, "value_bits": None}
    get_cache("turboquant_rvq", options)
    assert options == {"bits": 2, "value_bits": None}
