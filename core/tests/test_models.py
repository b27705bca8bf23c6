import json
import math

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope

from veloxquant import ConfigError
from veloxquant import Rope
from veloxquant import UnsupportedModelError
from veloxquant import build
from veloxquant.models import describe_rope
from veloxquant.testing import toys as models


def inspect(model, *, layers, routed):
    """The model's own caches and the layers that can be compressed, as ``make_prompt_cache`` asks for them."""
    return build._inspect(model, layers, routed)


def indices(specs):
    return [spec.index for spec in specs]


# ---------------------------------------------------------------- what is described


def test_a_llama_layer_is_described():
    model = models.tiny_llama(kv_heads=2, query_heads=4, layers=3, head_dim=16)
    native, specs = inspect(model, layers=None, routed=True)
    assert [type(cache) for cache in native] == [KVCache] * 3
    assert indices(specs) == [0, 1, 2]
    for spec in specs:
        assert (spec.query_mode, spec.query_heads, spec.kv_heads, spec.head_dim) == ("routed", 4, 2, 16)
        assert spec.scale == pytest.approx(0.25)
        assert spec.rope == Rope(dims=16, traditional=False, base=10000.0, scale=1.0)
        assert spec.layer_count == 3
        assert spec.make_rows().count == 0


def test_proxy_mode_is_told_to_the_layer():
    _, specs = inspect(models.tiny_llama(), layers=None, routed=False)
    assert {spec.query_mode for spec in specs} == {"proxy"}


def test_only_the_full_layer_of_a_sliding_window_model_is_taken():
    """Case 89."""
    native, specs = inspect(models.tiny_gemma3(kv_heads=1, query_heads=2, head_dim=16), layers=None, routed=True)
    assert [type(cache) for cache in native] == [RotatingKVCache] * 5 + [KVCache]
    assert indices(specs) == [5]
    assert (specs[0].query_heads, specs[0].kv_heads, specs[0].head_dim) == (2, 1, 16)


def test_state_layers_of_a_hybrid_are_left_alone():
    """Case 91."""
    native, specs = inspect(models.tiny_hybrid(kv_heads=2, query_heads=4), layers=None, routed=True)
    assert [type(cache) for cache in native] == [ArraysCache, KVCache] * 2
    assert indices(specs) == [1, 3]
    assert {(spec.query_heads, spec.kv_heads, spec.head_dim) for spec in specs} == {(4, 2, 16)}


# ---------------------------------------------------------------- layers=


@pytest.mark.parametrize(("layers", "expected"), [([1], [1]), ([2, 0], [0, 2]), ((1, 1), [1]), ({0, 1, 2}, [0, 1, 2])])
def test_the_layers_can_be_chosen(layers, expected):
    _, specs = inspect(models.tiny_llama(layers=3), layers=layers, routed=True)
    assert indices(specs) == expected


@pytest.mark.parametrize(
    ("build", "layers", "words"),
    [
        ("tiny_llama", [5], ["layer 5", "does not exist", "0-1"]),
        ("tiny_llama", [-1], ["layer -1", "does not exist"]),
        ("tiny_llama", ["0"], ["whole numbers", "'0'", "0-1"]),
        ("tiny_llama", [], ["no layer", "0-1"]),
        ("tiny_gemma3", [5, 0], ["layer 0", "RotatingKVCache", "5"]),
        ("tiny_hybrid", [0], ["layer 0", "ArraysCache", "1, 3"]),
    ],
)
def test_a_layer_that_cannot_be_compressed_is_named_with_those_that_can(build, layers, words):
    with pytest.raises(ConfigError) as caught:
        inspect(getattr(models, build)(), layers=layers, routed=True)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("tiny_mla", ["deepseek_v3", "latent attention", "kv_lora_rank", "mlx-lm's own cache"]),
        ("tiny_shared_kv", ["gemma4_text", "other layers", "mlx-lm's own cache"]),
    ],
)
def test_models_that_cannot_be_served_are_refused_with_the_reason(build, words, routed):
    with pytest.raises(UnsupportedModelError) as caught:
        inspect(getattr(models, build)(), layers=None, routed=routed)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_model_whose_attention_cannot_be_routed_is_served_in_proxy_mode_only():
    model = models.tiny_unroutable()
    with pytest.raises(UnsupportedModelError, match=r"gemma2.*true_queries=False"):
        inspect(model, layers=None, routed=True)
    _, specs = inspect(model, layers=None, routed=False)
    assert indices(specs) == [0, 1]


def test_a_model_with_one_unroutable_layer_is_refused_unless_it_is_left_out():
    model = models.tiny_llama(layers=2)
    model.model.layers[1] = models.tiny_unroutable().layers[1]
    model.model.layers[1].use_sliding = False
    with pytest.raises(UnsupportedModelError, match="every layer"):
        inspect(model, layers=None, routed=True)
    assert indices(inspect(model, layers=[0], routed=True)[1]) == [0]


def test_a_model_without_plain_layers_is_refused():
    model = models.tiny_llama()
    object.__setattr__(model, "make_cache", lambda: [RotatingKVCache(max_size=8) for _ in range(2)])
    with pytest.raises(UnsupportedModelError, match="nothing to compress"):
        inspect(model, layers=None, routed=True)


def test_an_object_that_is_no_model_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"mlx_lm\.load"):
        inspect("a path", layers=None, routed=True)


# ---------------------------------------------------------------- what a sharded model is


class _Process:
    """As much of a group of processes as mlx-lm's sharding asks for before anything is computed."""

    def __init__(self, index, count):
        self.index, self.count = index, count

    def rank(self):
        return self.index

    def size(self):
        return self.count


@pytest.mark.parametrize("index", [0, 1])
def test_a_layer_of_a_sharded_model_knows_its_share(index):
    model = models.tiny_llama(kv_heads=4, query_heads=8)
    model.shard(_Process(index, 2))
    for spec in inspect(model, layers=None, routed=True)[1]:
        assert (spec.query_heads, spec.kv_heads, spec.head_dim) == (4, 2, 16)
        assert (spec.shard_index, spec.shard_count) == (index, 2)


def test_a_whole_model_is_no_shard():
    specs = inspect(models.tiny_llama(), layers=None, routed=True)[1]
    assert {(spec.shard_index, spec.shard_count) for spec in specs} == {(0, 1)}


def test_a_model_whose_heads_were_cut_through_is_refused():
    model = models.tiny_llama(kv_heads=3, query_heads=9)
    model.shard(_Process(0, 2))
    with pytest.raises(UnsupportedModelError, match="over 2 processes, among which its KV heads cannot be divided"):
        inspect(model, layers=None, routed=True)


# ---------------------------------------------------------------- rotary embeddings

SCALED = {
    "none": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn with magnitudes": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 0.2,
    },
    "su": {
        "type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + 0.3 * i for i in range(16)],
    },
    "proportional": {"type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}


def rotate(rope, array, offset):
    """Apply a described rotary embedding in float64, from its definition."""
    x = np.array(array, dtype=np.float64)
    half = rope.dims // 2
    divisors = (
        rope.base ** (np.arange(half) * 2.0 / rope.dims) if rope.frequencies is None else np.array(rope.frequencies)
    )
    positions = (offset + np.arange(x.shape[2])) * rope.scale
    angle = positions[:, None] / divisors
    out = x.copy()
    if rope.traditional:
        first, second = slice(0, rope.dims, 2), slice(1, rope.dims, 2)
    else:
        first, second = slice(0, half), slice(half, rope.dims)
    a, b = rope.magnitude * x[..., first], rope.magnitude * x[..., second]
    out[..., first] = a * np.cos(angle) - b * np.sin(angle)
    out[..., second] = a * np.sin(angle) + b * np.cos(angle)
    return out


@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize("head_dim", [32, 48])
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("kind", SCALED)
def test_a_described_embedding_rotates_as_the_module_does(rows, kind, traditional, head_dim, offset):
    """Case 6: every scaling, interleaved and not, and partial rotation (32 of 48 channels)."""
    module = initialize_rope(
        32, base=10000.0, traditional=traditional, scaling_config=SCALED[kind], max_position_embeddings=16384
    )
    rope = describe_rope(module)
    assert rope.dims == 32
    keys, _ = rows(20, key_dim=head_dim)
    assert np.allclose(np.array(module(keys, offset=offset)), rotate(rope, keys, offset), atol=2e-3)
    # The description is a plain value: it survives JSON and can be compared.
    assert json.loads(json.dumps(attrs.asdict(rope)))["dims"] == 32
    assert rope == describe_rope(module)


def test_the_scalings_differ_so_that_the_test_above_can_fail(rows):
    keys, _ = rows(20, key_dim=32)
    results = []
    for config in SCALED.values():
        module = initialize_rope(
            32, base=10000.0, traditional=False, scaling_config=config, max_position_embeddings=16384
        )
        results.append(np.array(module(keys, offset=1000)))
    for i, one in enumerate(results):
        assert all(np.abs(one - other).max() > 0.05 for other in results[:i])


def test_an_embedding_that_depends_on_the_length_is_not_described():
    module = initialize_rope(32, 10000.0, False, {"type": "dynamic", "factor": 2.0}, max_position_embeddings=128)
    assert describe_rope(module) is None


def test_what_is_no_known_embedding_is_not_described():
    class Own(nn.RoPE):
        def __call__(self, x, offset=0):
            return x

    assert describe_rope(None) is None
    assert describe_rope(nn.Linear(2, 2)) is None
    assert describe_rope(Own(8)) is None


def test_the_embedding_of_a_scaled_model_reaches_the_layer():
    from mlx_lm.models import llama

    shape = models.tiny_llama(head_dim=16).args
    model = llama.Model(
        llama.ModelArgs.from_dict({**vars(shape), "rope_scaling": SCALED["llama3"], "rope_theta": 500000.0})
    )
    mx.eval(model.parameters())
    _, specs = inspect(model, layers=None, routed=True)
    frequencies = specs[0].rope.frequencies
    assert len(frequencies) == 8
    assert specs[0].rope.base is None
    # The fastest pair is untouched, the slowest is stretched by the factor.
    assert frequencies[0] == pytest.approx(1.0)
    assert frequencies[-1] == pytest.approx(32 * 500000.0 ** (14 / 16), rel=1e-4)
    assert not any(math.isinf(value) for value in frequencies)
