"""SnapKV on a real language model."""

import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

import veloxquant
from veloxquant.testing.sample import load_sample_model


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request):
    model, tokenizer = load_sample_model(request.param)
    yield model, tokenizer
    veloxquant.unroute(model)


def greedy(model, tokenizer, prompt, caches, step, count=12):
    stream = mlx_lm.stream_generate(
        model, tokenizer, prompt, max_tokens=count, prompt_cache=caches, prefill_step_size=step
    )
    return [response.token for response in stream]


def test_a_budget_above_the_prompt_gives_the_very_same_tokens(loaded):
    model, tokenizer = loaded
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    plain = greedy(model, tokenizer, prompt, make_prompt_cache(model), 2048)
    assert "Paris" in tokenizer.decode(plain)
    for step in (2048, 8):
        # In bf16 the chunks of a prompt round differently, so chunked is compared with chunked.
        expected = plain if step == 2048 else greedy(model, tokenizer, prompt, make_prompt_cache(model), step)
        caches = veloxquant.make_prompt_cache(model, "snapkv", {"budget": 256})
        assert greedy(model, tokenizer, prompt, caches, step) == expected
        assert all(cache.rows == cache.offset > len(prompt) for cache in caches)
