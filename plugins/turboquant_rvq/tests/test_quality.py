"""What TurboQuant-RVQ costs on a real model; minutes long. The figures stand in docs/methods/turboquant_rvq.md."""

import functools

import pytest
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache

import veloxquant
from veloxquant.bench.quality import compare
from veloxquant.bench.quality import continuation_logprobs
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_tokens

pytestmark = pytest.mark.slow

PROMPT, CONTINUATION = 1024, 256


@functools.cache
def plain():
    model, tokenizer = load_sample_model("float32")
    text = sample_tokens(tokenizer, PROMPT + CONTINUATION)
    return model, text, continuation_logprobs(model, make_prompt_cache(model), text[:PROMPT], text[PROMPT:])


def divergence(caches):
    model, text, expected = plain()
    found = continuation_logprobs(model, caches, text[:PROMPT], text[PROMPT:])
    return compare(expected, found, text[PROMPT:]).mean_kl


def ours(**options):
    return veloxquant.make_prompt_cache(plain()[0], "turboquant_rvq", options)


def test_keys_of_four_bits_cost_little():
    kl = divergence(ours(bits=2))
    print(f"bits=2: {kl:.4f}")
    assert kl < 0.02


def test_more_bits_cost_less():
    costs = [divergence(ours(bits=bits)) for bits in (1, 2, 3)]
    print(costs)
    assert costs[0] > costs[1] > costs[2]


def test_half_the_divergence_of_mlx_lm_at_no_more_bytes():
    """Everything packed, nothing kept as it came, against mlx-lm's own 4-bit cache."""
    caches = ours(bits=3, value_bits=3, sinks=0, recent=0)
    packed = divergence(caches)
    quantized = [QuantizedKVCache(64, 4) for _ in caches]
    try:
        theirs = divergence(quantized)
    except RuntimeError as error:
        if "[quantized_matmul] No implementation" not in str(error):
            raise
        pytest.skip(f"MLX has no kernel for mlx-lm's cache here: {error}")
    print(f"packed {packed:.4f}, QuantizedKVCache {theirs:.4f}")
    assert packed < theirs / 2
    assert sum(cache.nbytes for cache in caches) <= 1.05 * sum(cache.nbytes for cache in quantized)


def test_snapkv_over_packed_rows_chooses_as_well():
    if "snapkv" not in veloxquant.methods():
        pytest.skip("snapkv is not installed")
    packed = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}}
    costs = {}
    for name, options in {"plain": {}, "packed": packed}.items():
        costs[name] = divergence(
            veloxquant.make_prompt_cache(plain()[0], "snapkv", {"compression_ratio": 2, **options})
        )
    print(costs)
    assert costs["packed"] < costs["plain"] + 0.1
