import pytest

import veloxquant
from veloxquant import ConfigError
from veloxquant_a2ats import A2ATSConfig


def test_defaults_are_those_of_the_specification():
    config = A2ATSConfig()
    found = (config.codebook_bits, config.sub_dim, config.window, config.far_position, config.sinks)
    assert found == (8, 8, 128, 2048, 8)
    assert (config.beta, config.retrieval_fraction, config.rope_base) == (0.5, 0.2, 10000.0)
    assert (config.mode, config.use_query_aware, config.allow_uncalibrated) == ("compress", True, False)
    assert (config.rope_scaling, config.codebook, config.storage, config.per_head) == (None, None, None, False)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"beta": 1.5}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"retrieval_fraction": -0.1}, "retrieval_fraction"),
        ({"codebook_bits": 13}, "codebook_bits"),
        ({"window": 0}, "window"),
        ({"window": 10**11}, "window"),
        ({"sub_dim": 0}, "sub_dim"),
        ({"sinks": -1}, "sinks"),
        ({"far_position": 2.5}, "far_position"),
        ({"rope_base": 0}, "rope_base"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"mode": "compres"}, "mode"),
        ({"storage": "dense"}, "retrieve"),
        ({"per_head": True}, "retrieve"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        veloxquant.get_cache("a2ats", {"allow_uncalibrated": True, **options})


def test_choosing_rows_needs_true_queries():
    assert A2ATSConfig().needs == ()
    with pytest.raises(ConfigError, match="make_prompt_cache"):
        veloxquant.get_cache("a2ats", {"mode": "retrieve", "allow_uncalibrated": True})


def test_without_a_codebook_the_command_that_makes_one_is_named():
    for mode in ("compress", "retrieve"):
        layer = veloxquant.LayerSpec(query_mode="routed")
        with pytest.raises(ConfigError, match=f"veloxquant calibrate a2ats --mode {mode}"):
            veloxquant.get_cache("a2ats", {"mode": mode}, layer=layer)
