"""What SnapKV costs on a real model; minutes long. The figures stand in docs/methods/snapkv.md."""

import functools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import veloxquant
from veloxquant.bench.passkey import found
from veloxquant.bench.passkey import passkeys
from veloxquant.bench.quality import compare
from veloxquant.bench.quality import continuation_logprobs
from veloxquant.bench.quality import prefill
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_tokens

pytestmark = pytest.mark.slow

PROMPT, CONTINUATION, BUDGET = 2048, 256, 256


@functools.cache
def loaded():
    model, tokenizer = load_sample_model("float32")
    return model, tokenizer, sample_tokens(tokenizer, 20_000)


def snapkv(model, **options):
    true_queries = options.pop("true_queries", True)
    return veloxquant.make_prompt_cache(model, "snapkv", options, true_queries=true_queries)


def test_passkeys_are_found_as_often_as_with_the_plain_cache(record_property):
    model, tokenizer, text = loaded()
    arms = {
        "plain": lambda: make_prompt_cache(model),
        "routed": lambda: snapkv(model, compression_ratio=2.0),
        "proxy": lambda: snapkv(model, compression_ratio=2.0, true_queries=False),
    }
    hits = dict.fromkeys(arms, 0)
    for passkey in passkeys(tokenizer, text, length=1024, count=10):
        for name, make in arms.items():
            hits[name] += found(model, tokenizer, make(), passkey)
    print(f"passkeys found of 10: {hits}")
    record_property("passkeys", str(hits))
    assert hits["plain"] >= 8
    assert hits["routed"] >= hits["plain"] - 1
    assert hits["routed"] > hits["proxy"]


def test_divergence_after_a_cut_prompt(record_property):
    model, _, text = loaded()
    prompt, continuation = text[:PROMPT], text[PROMPT : PROMPT + CONTINUATION]
    plain = continuation_logprobs(model, make_prompt_cache(model), prompt, continuation)
    quality = {
        name: compare(plain, continuation_logprobs(model, caches, prompt, continuation), continuation)
        for name, caches in {
            "routed": snapkv(model, budget=BUDGET),
            "proxy": snapkv(model, budget=BUDGET, true_queries=False),
        }.items()
    }
    print(quality)
    record_property("quality", str(quality))
    assert quality["routed"].mean_kl < quality["proxy"].mean_kl
    assert quality["routed"].mean_kl < 0.30


def test_kept_rows_and_bytes_right_after_the_eviction():
    model, _, text = loaded()
    caches = snapkv(model, budget=BUDGET)
    mx.eval(prefill(model, caches, text[:PROMPT]))
    report = veloxquant.report(caches)
    assert {layer.tokens_kept for layer in report.layers} == {BUDGET}
    assert {layer.tokens_seen for layer in report.layers} == {PROMPT}
    assert report.bytes_held <= 1.15 * report.bytes_plain * BUDGET / PROMPT


def test_the_same_rows_are_kept_whatever_the_prefill_step():
    model, _, text = loaded()
    kept = {}
    for step in (64, 512, 2048, PROMPT):
        caches = snapkv(model, budget=BUDGET)
        mx.eval(prefill(model, caches, text[:PROMPT], step=step))
        kept[step] = mx.stack([cache.method_state.rows.positions() for cache in caches])
        assert {cache.offset for cache in caches} == {PROMPT}
    for step in (64, 512, 2048):
        assert bool((kept[step] == kept[PROMPT]).all())
