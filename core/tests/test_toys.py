import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from veloxquant.testing import toys

CACHES = {
    "tiny_llama": ["KVCache"] * 2,
    "tiny_gemma3": ["RotatingKVCache"] * 5 + ["KVCache"],
    "tiny_mla": ["KVCache"] * 2,
    "tiny_shared_kv": ["RotatingKVCache", "KVCache"],
    "tiny_unroutable": ["KVCache"] * 2,
    "tiny_hybrid": ["ArraysCache", "KVCache"] * 2,
}


def test_every_toy_is_tested():
    assert sorted(CACHES) == sorted(toys.__all__)


@pytest.mark.parametrize("name", toys.__all__)
def test_a_toy_runs_with_the_caches_its_docstring_names(name):
    model = getattr(toys, name)()
    caches = make_prompt_cache(model)
    assert [type(cache).__name__ for cache in caches] == CACHES[name]

    tokens = mx.arange(20)[None] % 64
    steps = [model(tokens[:, :12], cache=caches)]
    steps += [model(tokens[:, index : index + 1], cache=caches) for index in range(12, 20)]
    logits = mx.concatenate(steps, axis=1)
    assert logits.shape == (1, 20, 64)
    assert logits.dtype == mx.float32
    assert mx.allclose(logits, model(tokens), atol=1e-4)
    assert mx.std(logits).item() > 0.01


@pytest.mark.parametrize("name", toys.__all__)
def test_a_toy_is_float32_and_set_by_its_seed(name):
    first, second, other = (tree_flatten(getattr(toys, name)(seed=seed).parameters()) for seed in (0, 0, 1))
    assert {array.dtype for _, array in first} == {mx.float32}
    assert all(mx.array_equal(left, right) for (_, left), (_, right) in zip(first, second, strict=True))
    assert not all(mx.array_equal(left, right) for (_, left), (_, right) in zip(first, other, strict=True))


def test_a_toy_leaves_the_global_random_state_alone():
    mx.random.seed(2**40 + 7)
    expected = mx.random.normal((4,)).tolist()
    mx.random.seed(2**40 + 7)
    toys.tiny_llama(seed=3)
    assert mx.random.normal((4,)).tolist() == expected


def test_the_shape_of_tiny_llama():
    model = toys.tiny_llama(kv_heads=1, query_heads=3, layers=5, head_dim=8, vocab=32)
    caches = make_prompt_cache(model)
    assert model(mx.array([[1, 2, 3], [4, 5, 6]]), cache=caches).shape == (2, 3, 32)
    assert len(caches) == 5
    assert caches[0].keys.shape[:2] == (2, 1)
    assert caches[0].keys.shape[3] == 8


def test_tiny_mla_caches_a_latent_head_and_a_rotary_head():
    model = toys.tiny_mla()
    caches = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    assert model.args.kv_lora_rank == 32
    assert caches[0].keys.shape[1::2] == (1, 32)
    assert caches[0].values.shape[1::2] == (1, 8)


def test_tiny_shared_kv_has_fewer_caches_than_layers():
    model = toys.tiny_shared_kv()
    assert model.args.num_kv_shared_layers == 2
    assert (len(model.layers), len(make_prompt_cache(model))) == (4, 2)


def test_tiny_unroutable_does_not_import_the_attention_function():
    model = toys.tiny_unroutable()
    module = sys.modules[type(model.layers[0].self_attn).__module__]
    assert not hasattr(module, "scaled_dot_product_attention")
