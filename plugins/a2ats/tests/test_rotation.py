"""Rotations against the models' own modules; the oracles of the method's fact sheet."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

import veloxquant
from veloxquant import ConfigError
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant import UnsupportedModelError
from veloxquant.models import describe_rope
from veloxquant.testing.toys import tiny_llama
from veloxquant_a2ats.rotation import derotate
from veloxquant_a2ats.rotation import far_query_rope
from veloxquant_a2ats.rotation import rope_from_options
from veloxquant_a2ats.rotation import rotate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SCHEMES = {
    "default": lambda: initialize_rope(64, 10000.0, False),
    "large base": lambda: initialize_rope(64, 500000.0, False),
    "linear": lambda: initialize_rope(64, 10000.0, False, {"type": "linear", "factor": 4.0}),
    "llama3": lambda: initialize_rope(64, 500000.0, False, LLAMA3, 131072),
    "traditional": lambda: initialize_rope(64, 10000.0, True),
    "partial": lambda: nn.RoPE(24, base=10000.0),
    "partial, traditional": lambda: nn.RoPE(32, traditional=True, base=10000.0),
    "yarn": lambda: initialize_rope(64, 10000.0, False, YARN, 8192),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def rows(count, seed=0, heads=2):
    return mx.random.normal((1, heads, count, 64), key=mx.random.key(seed))


def magnitude(rope):
    """What the model multiplies rotated channels with."""
    return mx.where(mx.arange(64) < rope.dims, rope.magnitude, 1.0)


@every_scheme
@pytest.mark.parametrize("start", [0, 1, 127, 4096, 20000])
def test_the_models_own_rotation_is_undone(scheme, start):
    module = SCHEMES[scheme]()
    rope = describe_rope(module)
    keys = rows(7)
    plain = derotate(module(keys, offset=start), rope, start)
    np.testing.assert_allclose(np.array(plain), np.array(keys * magnitude(rope)), atol=2e-6)


@every_scheme
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_undone_to_its_own_precision(scheme, dtype):
    module = SCHEMES[scheme]()
    rope = describe_rope(module)
    keys = rows(5).astype(dtype)
    plain = derotate(module(keys, offset=300), rope, 300)
    assert plain.dtype == mx.float32
    np.testing.assert_allclose(np.array(plain), np.array(keys.astype(mx.float32) * magnitude(rope)), atol=3e-2)


@every_scheme
def test_putting_on_again_is_the_inverse(scheme):
    rope = describe_rope(SCHEMES[scheme]())
    keys = rows(9)
    np.testing.assert_allclose(np.array(rotate(derotate(keys, rope, 777), rope, 777)), np.array(keys), atol=2e-6)


@every_scheme
@pytest.mark.parametrize(("query", "key"), [(5, 2), (3000, 40), (9000, 8999)])
def test_a_far_score_is_the_exact_score_of_a_token_at_distance_b(scheme, query, key):
    """(q R_{j+b}).(k R_j) = (q R_b).k, and q~ comes from the rotated query by R_{b-i}."""
    module, distance = SCHEMES[scheme](), 2048
    rope = describe_rope(module)
    q, k = rows(1, 1), rows(1, 2)
    exact = (module(q, offset=key + distance) * module(k, offset=key)).sum(axis=-1)
    far = far_query_rope(derotate(module(q, offset=query), rope, query), rope, distance)
    found = (far * derotate(module(k, offset=key), rope, key)).sum(axis=-1)
    np.testing.assert_allclose(np.array(found), np.array(exact), atol=5e-3)


def test_rotating_against_fp64():
    rope = Rope(dims=8, base=100.0)
    x = np.random.default_rng(0).standard_normal((1, 1, 3, 8))
    angles = np.arange(40, 43)[:, None] * 100.0 ** (-np.arange(4) / 4)
    first, second = x[..., :4], x[..., 4:]
    expected = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)], axis=-1
    )
    np.testing.assert_allclose(np.array(rotate(mx.array(x), rope, 40)), expected, atol=1e-5)


def test_every_query_is_put_at_the_same_distance():
    rope = Rope(dims=64)
    one = rows(1, 3)
    far = far_query_rope(mx.repeat(one, 5, axis=2), rope, 100)
    np.testing.assert_allclose(np.array(far), np.array(mx.repeat(rotate(one, rope, 100), 5, axis=2)), atol=1e-6)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"type": "linear", "factor": 4.0}, LLAMA3])
def test_options_describe_what_the_models_module_does(scaling):
    module = initialize_rope(64, 50000.0, False, scaling, 131072)
    assert rope_from_options(50000.0, scaling, 64) == describe_rope(module)


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        (YARN, "yarn"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0}, "factor"),
        ({**LLAMA3, "high_freq_factor": None}, "high_freq_factor"),
    ],
)
def test_a_scheme_that_cannot_be_undone_is_refused_when_the_cache_is_made(scaling, word):
    with pytest.raises(ConfigError, match=word):
        veloxquant.get_cache("a2ats", {"allow_uncalibrated": True, "rope_scaling": scaling})


@pytest.mark.parametrize(
    "rope",
    [
        Rope(dims=64, scale=0.0),
        Rope(dims=64, base=math.nan),
        Rope(dims=63),
        Rope(dims=128),
        Rope(dims=64, base=None, frequencies=(1.0,) * 31),
        Rope(dims=64, base=None, frequencies=(0.0,) * 32),
    ],
)
def test_a_rotation_that_is_not_invertible_is_refused_when_the_cache_is_made(rope):
    with pytest.raises(UnsupportedModelError, match="rotary"):
        veloxquant.get_cache("a2ats", {"allow_uncalibrated": True}, layer=LayerSpec(head_dim=64, rope=rope))


def test_a_model_whose_rotation_depends_on_the_length_is_refused():
    from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

    model = tiny_llama()
    model.layers[1].self_attn.rope = DynamicNTKScalingRoPE(16, 128, False, 10000.0, 2.0)
    with pytest.raises(UnsupportedModelError, match="layer 1"):
        veloxquant.make_prompt_cache(model, "a2ats", {"allow_uncalibrated": True})
