"""A method that keeps everything, driven by mlx-lm itself, must give what the plain cache gives, bit for bit."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache as plain_caches
from mlx_lm.models.cache import trim_prompt_cache

from veloxquant import VeloxQuantError
from veloxquant.build import make_prompt_cache
from veloxquant.build import use
from veloxquant.testing import toys as models

PROMPT = mx.array([(7 * i * i + 3 * i + 1) % 64 for i in range(67)])


def lively(seed=0, strength=60.0):
    """A tiny llama whose layers outweigh its embeddings: the plain one says one token again and again."""
    model = models.tiny_llama(kv_heads=2, query_heads=4, layers=2, seed=seed)
    for layer in model.layers:
        layer.self_attn.q_proj.weight *= 4
        layer.self_attn.o_proj.weight *= strength
        layer.mlp.down_proj.weight *= strength
    return model


@pytest.fixture(scope="module")
def model():
    return lively()


def generated(model, caches, **options):
    tokens, logprobs = zip(*generate_step(PROMPT, model, prompt_cache=caches, max_tokens=24, **options), strict=True)
    return list(tokens), mx.stack(logprobs)


@pytest.mark.parametrize("step", [2048, 66, 64, 16, 5, 2])
@pytest.mark.parametrize(("name", "true_queries"), [("noop_attend", True), ("noop_attend", False), ("noop", True)])
def test_generation_with_every_row_kept(registry, model, step, name, true_queries):
    expected = generated(model, plain_caches(model), prefill_step_size=step)
    with use(model, name, true_queries=true_queries, registry=registry):
        caches = plain_caches(model)
        got = generated(model, caches, prefill_step_size=step)
    assert got[0] == expected[0]
    assert mx.array_equal(got[1], expected[1]).item()
    assert {cache.offset for cache in caches} == {67 + 24}


@pytest.mark.parametrize("step", [2048, 64, 16, 5])
def test_an_evictor_with_room_for_everything_is_dense(registry, model, step):
    expected = generated(model, plain_caches(model), prefill_step_size=step)
    with use(model, "evictor", {"keep": 500}, registry=registry):
        got = generated(model, plain_caches(model), prefill_step_size=step)
    assert got[0] == expected[0]
    assert mx.array_equal(got[1], expected[1]).item()


def test_an_evictor_without_room_changes_the_outcome(registry, model):
    """So that the tests above can fail."""
    expected = generated(model, plain_caches(model))
    with use(model, "evictor", {"keep": 8}, registry=registry):
        caches = plain_caches(model)
        got = generated(model, caches)
    # The token that ends the prompt still sees all of it, so the first two figures agree.
    assert mx.array_equal(got[1][0], expected[1][0]).item()
    assert not mx.allclose(got[1][5:], expected[1][5:], atol=1e-3).item()
    assert {(cache.offset, cache.rows) for cache in caches} == {(67 + 24, 8 + 24)}


@pytest.mark.parametrize("sizes", [[1, 1, 1], [40, 1, 1], [20, 20, 1, 3, 1]], ids=str)
def test_a_batch_in_direct_calls(registry, model, sizes):
    tokens = mx.stack([PROMPT, PROMPT[::-1]])
    plain = plain_caches(model)
    with use(model, "noop_attend", registry=registry):
        caches, start = plain_caches(model), 0
        for size in sizes:
            block = tokens[:, start : start + size]
            assert mx.array_equal(model(block, cache=caches), model(block, cache=plain)).item()
            start += size
    assert caches[0].row_shape == (2, 2, 16, 16)
    assert [cache.offset for cache in caches] == [cache.offset for cache in plain]


def speculated(model, draft, caches, drafts):
    tokens, _, kinds = zip(
        *speculative_generate_step(
            PROMPT, model, draft, prompt_cache=caches, num_draft_tokens=drafts, max_tokens=24, prefill_step_size=16
        ),
        strict=True,
    )
    return list(tokens), list(kinds)


DRAFTS = {
    "the model itself": (lively, lambda accepted, most: accepted == most),
    "a weaker one": (lambda: lively(strength=5.0), lambda accepted, most: 0 < accepted < most),
    "another": (lambda: lively(seed=1), lambda accepted, most: accepted == 0),
}


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("name", "config"), [("noop_attend", None), ("noop", None), ("evictor", {"keep": 500})])
def test_speculative_decoding_with_every_row_kept(registry, model, drafts, draft, name, config):
    make_draft, as_meant = DRAFTS[draft]
    draft = make_draft()
    plain = plain_caches(model) + plain_caches(draft)
    expected = speculated(model, draft, plain, drafts)
    assert as_meant(sum(expected[1]), 24 * drafts // (drafts + 1))
    with use(model, name, config, registry=registry):
        caches = plain_caches(model) + plain_caches(draft)
        assert speculated(model, draft, caches, drafts) == expected
    assert [cache.offset for cache in caches] == [cache.offset for cache in plain]


def test_speculative_decoding_ends_the_prompt_once_and_before_the_answer(registry, plugins, model):
    draft = lively(seed=1)
    with use(model, "noop_attend", registry=registry):
        caches = plain_caches(model) + plain_caches(draft)
        speculated(model, draft, caches, 2)
    finished = [event for event in plugins["noop_attend"].log if event[0] == "finish"]
    # Two layers; 67 tokens of prompt and at most 2 accepted ones.
    assert len(finished) == 2
    assert all(67 <= count <= 69 for _, count in finished)


def test_mlx_lm_refuses_speculation_on_a_cache_that_cannot_be_trimmed(registry, model):
    caches = make_prompt_cache(model, "evictor", true_queries=False, registry=registry) + plain_caches(model)
    with pytest.raises(ValueError, match="trimmable"):
        speculated(model, model, caches, 2)


def test_kv_bits_are_refused_and_not_ignored(registry, model):
    with use(model, "noop_attend", registry=registry), pytest.raises(VeloxQuantError, match="kv-bits"):
        generated(model, plain_caches(model), kv_bits=4, kv_group_size=32, quantized_kv_start=0)


def test_a_rewound_conversation_goes_on_as_if_it_had_not_been(registry, model):
    with use(model, "noop_attend", registry=registry):
        rewound, never = plain_caches(model), plain_caches(model)
        model(PROMPT[None, :50], cache=rewound)
        model(PROMPT[None, 50:55], cache=rewound)
        assert trim_prompt_cache(rewound, 5) == 5
        model(PROMPT[None, :50], cache=never)
        for start in (55, 56):
            step = PROMPT[None, start : start + 1]
            assert mx.array_equal(model(step, cache=rewound), model(step, cache=never)).item()
        assert {cache.offset for cache in rewound} == {52}
