"""What RocketKV costs on a real model; minutes long. The figures stand in docs/methods/rocketkv.md.

A prompt is processed once and handed to caches of every kind, which go on from its last token.
"""

import functools
import importlib.util

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

import veloxquant
from veloxquant import Snapshot
from veloxquant.bench.passkey import passkeys
from veloxquant.bench.quality import compare
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_tokens

pytestmark = pytest.mark.slow

PROMPT, CONTINUATION = 2048, 256
EIGHTH = PROMPT // 8

PACKED = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}}
# The two stacked configurations of the method's page, an eighth of the rows read.
STACKED = {
    "packed keys ranked": {"stage1": False, "ranking": "rows", **PACKED},
    "compact summary, pages of 2": {
        "stage1": False,
        "summary_bits": 4,
        "page_size": 2,
        "head_topk1": 32,
        **PACKED,
    },
    "compact summary, pages of 4": {
        "stage1": False,
        "summary_bits": 4,
        "page_size": 4,
        "head_topk1": 32,
        **PACKED,
    },
}


def stacked(tokens):
    """The stacked configurations, where the codec is installed."""
    if importlib.util.find_spec("veloxquant_turboquant_rvq") is None:
        return {}
    return {name: {**options, "topk": tokens // 8} for name, options in STACKED.items()}


# Queries that all methods here remember of an open prompt.
RECENT = 64


@functools.cache
def loaded():
    model, tokenizer = load_sample_model("float32")
    return model, tokenizer, sample_tokens(tokenizer, 24_000)


def open_prompt(model, tokens, step=2048):
    """Caches that have seen all of a prompt but its last token, nothing evicted yet."""
    caches = veloxquant.make_prompt_cache(model, "rocketkv", {"window": 32})
    for start in range(0, len(tokens) - 1, step):
        model(mx.array([tokens[start : min(start + step, len(tokens) - 1)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    return caches


def plain(caches):
    """mlx-lm's caches with the same rows."""
    found = []
    for cache in caches:
        found.append(KVCache())
        found[-1].update_and_fetch(*cache.method_state.rows.store.keys_values())
    return found


def forked(model, caches, name="rocketkv", true_queries=True, **options):
    """Caches of another method, or with other options, that have seen the same tokens of an open prompt."""
    found = veloxquant.make_prompt_cache(model, name, options, true_queries=true_queries)
    for old, new in zip(caches, found, strict=True):
        snapshot = old.method.ops.serialize(old.method_state)
        arrays = dict(snapshot.arrays)
        if not true_queries:
            arrays["recent"] = arrays["keys"][:, :, -RECENT:]
        if new.config.storage is not None:
            rows = arrays["keys"], arrays["values"]
            new.method_state.append(*rows)
            new.method_state.collecting, new.method_state.recent = True, arrays["recent"]
            new.method_state.scale = snapshot.values["scale"]
        else:
            new.method_state = new.method.ops.restore(new.config, new.layer, Snapshot(arrays, snapshot.values))
        new._resume(old._session())
    return found


def answer(model, tokenizer, caches, last, count=8):
    """Greedy text after the last token of the prompt."""
    token, tokens = last, []
    for _ in range(count):
        token = mx.argmax(model(mx.array([[token]]), cache=caches)[0, -1]).item()
        tokens.append(token)
    return str(tokenizer.decode(tokens)).strip()


def logprobs(model, caches, last, continuation):
    """Log-probabilities of each token of a continuation, fed one by one after the last token of the prompt."""
    rows = []
    for token in [last, *continuation[:-1]]:
        logits = model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits))
        mx.eval(rows[-1])
    return mx.stack(rows)


def divergences(model, tokens, continuation, arms):
    """What each arm costs against the plain cache: name -> Quality; arms are name -> (options for ``forked``)."""
    caches = open_prompt(model, tokens)
    reference = logprobs(model, plain(caches), tokens[-1], continuation)
    found = {}
    for name, options in arms.items():
        got = logprobs(model, forked(model, caches, **options), tokens[-1], continuation)
        found[name] = compare(reference, got, continuation)
        print(f"{name:44} KL {found[name].mean_kl:.4f} p95 {found[name].p95_kl:.3f} "
              f"top-1 {found[name].top1_agreement:.3f} ppl {found[name].perplexity:.2f}", flush=True)  # fmt: skip
    return found


@pytest.mark.parametrize("length", [1024, 2000])
def test_passkeys_are_found_as_often_as_with_the_plain_cache(length, record_property):
    model, tokenizer, text = loaded()
    arms = {
        "ratio 4": {"compression_ratio": 4},
        "ratio 8": {"compression_ratio": 8},
        "ratio 8, stage 1 off": {"stage1": False},
        "ratio 8, proxy": {"compression_ratio": 8, "true_queries": False},
        **stacked(length),
    }
    hits = dict.fromkeys(["plain", *arms], 0)
    for passkey in passkeys(tokenizer, text, length=length, count=10):
        caches, last = open_prompt(model, passkey.prompt), passkey.prompt[-1]
        hits["plain"] += answer(model, tokenizer, plain(caches), last).startswith(passkey.key)
        for name, options in arms.items():
            found = answer(model, tokenizer, forked(model, caches, **options), last)
            hits[name] += found.startswith(passkey.key)
        print(length, hits, flush=True)
    record_property("passkeys", str(hits))
    assert hits["plain"] >= 8
    assert hits["ratio 4"] >= hits["plain"] - 1
    assert hits["ratio 8"] >= hits["plain"] - 1
    if stacked(length):
        assert hits["packed keys ranked"] >= hits["plain"] - 1


def test_divergence_is_below_that_of_eviction_alone_and_of_proxy_mode(record_property):
    model, _, text = loaded()
    arms = {}
    for ratio in (4, 8):
        budget = PROMPT // (2 * ratio)
        arms[f"ratio {ratio}"] = {"compression_ratio": ratio}
        arms[f"ratio {ratio}, proxy"] = {"compression_ratio": ratio, "true_queries": False}
        arms[f"snapkv {budget}"] = {"name": "snapkv", "budget": budget}
    found = divergences(model, text[:PROMPT], text[PROMPT : PROMPT + CONTINUATION], arms)
    record_property("quality", str(found))
    for ratio in (4, 8):
        assert found[f"ratio {ratio}"].mean_kl < found[f"snapkv {PROMPT // (2 * ratio)}"].mean_kl
        assert found[f"ratio {ratio}"].mean_kl < found[f"ratio {ratio}, proxy"].mean_kl


def test_most_of_what_is_lost_is_lost_by_stage_1(record_property):
    model, _, text = loaded()
    off = {"stage1": False, "topk": EIGHTH}
    arms = {
        "exact top-k rows": {"stage1": False, "ranking": "rows", "topk": EIGHTH},
        "pages of 2, half the channels": {**off, "page_size": 2, "head_topk1": 32},
        "pages of 1, all channels": {**off, "page_size": 1, "head_topk1": 64},
        "pages of 2, all channels": {**off, "page_size": 2, "head_topk1": 64},
        "pages of 4, all channels": {**off, "page_size": 4, "head_topk1": 64},
        "pages of 16, all channels": {**off, "page_size": 16, "head_topk1": 64},
        "ratio 8, stage 1 off": {"stage1": False},
        "snapkv, 1 / 2.2 of the rows": {"name": "snapkv", "budget": 929, "kernel_size": 31},
    }
    found = divergences(model, text[:PROMPT], text[PROMPT : PROMPT + CONTINUATION], arms)
    record_property("quality", str(found))
    assert found["pages of 2, half the channels"].mean_kl <= 2.5 * found["exact top-k rows"].mean_kl


def test_a_conversation_of_three_turns(record_property):
    """A long first turn that hides a number, a second turn about something else, the question for it in the third."""
    model, tokenizer, text = loaded()
    hits = {"plain": 0, "multi_turn": 0, "one choice": 0, "multi_turn where plain is right": 0}
    for passkey in passkeys(tokenizer, text, length=1024, count=10, seed=1):
        question = tokenizer.encode("\nWhat is the pass key? The pass key is", add_special_tokens=False)
        assert list(passkey.prompt[-len(question) :]) == question
        first = [*passkey.prompt[: -len(question)], *tokenizer.encode("\nIn one word, this text is about")]
        second = tokenizer.encode("\nThat is all about this text. Now something else, and at some length, so that the "
                                  "past is chosen anew: the capital of France, which lies on the Seine and is known "
                                  "for its museums and its food, is called", add_special_tokens=False)  # fmt: skip
        third = tokenizer.encode("\nLet us come back to the long text with which we began, and which you have read "
                                 "with care. There was a number in the middle of it that you were told to remember."
                                 "\nWhat is the pass key? The pass key is", add_special_tokens=False)  # fmt: skip
        caches = open_prompt(model, first)
        right = {}
        for name, arm in {
            "plain": plain(caches),
            "multi_turn": forked(model, caches, multi_turn=True),
            "one choice": forked(model, caches, multi_turn=False),
        }.items():
            answer(model, tokenizer, arm, first[-1], count=4)
            for turn in (second, third):
                model(mx.array([turn[:-1]]), cache=arm)
                mx.eval([cache.state for cache in arm])
                said = answer(model, tokenizer, arm, turn[-1], count=8)
            right[name] = said.startswith(passkey.key)
            hits[name] += right[name]
        hits["multi_turn where plain is right"] += right["plain"] and right["multi_turn"]
        print(hits, flush=True)
    record_property("turns", str(hits))
    assert hits["plain"] >= 5
    assert hits["multi_turn where plain is right"] >= hits["plain"] - 1


def test_bytes_held_are_those_of_the_formula():
    model, _, text = loaded()
    caches = forked(model, open_prompt(model, text[:2000]), compression_ratio=8)
    model(mx.array([[text[1999]]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    report = veloxquant.report(caches)
    # Rows of 1 / 2.204 of the prompt, and half as many bytes of page bounds: methods page, bytes of RocketKV.
    assert report.bytes_held / report.bytes_plain == pytest.approx(0.681, rel=0.1)
    print(f"held {report.bytes_held / report.bytes_plain:.3f} of plain")


def test_stacked_on_packed_rows(record_property):
    pytest.importorskip("veloxquant_turboquant_rvq")
    model, _, text = loaded()
    arms = {"exact top-k rows": {"stage1": False, "ranking": "rows", "topk": EIGHTH}, **stacked(PROMPT)}
    arms["packed, all rows read"] = {"stage1": False, "topk": 10**6, **PACKED}
    found = divergences(model, text[:PROMPT], text[PROMPT : PROMPT + CONTINUATION], arms)
    record_property("quality", str(found))
    assert found["packed keys ranked"].mean_kl <= 3 * found["exact top-k rows"].mean_kl


def held_shares(cache, options):
    """Shares of the bytes of plain fp16 rows: all bytes held after a prompt, the most held later, the most of K + V."""
    new = veloxquant.get_cache("rocketkv", options, layer=cache.layer)
    keys, values = (array.astype(mx.float16) for array in cache.method_state.rows.store.keys_values())
    queries = mx.repeat(keys, cache.layer.query_heads // keys.shape[1], axis=1)
    shares = []
    for block in [slice(PROMPT - 1), *(slice(token, token + 1) for token in range(CONTINUATION + 1))]:
        some = queries[:, :, block]
        mask = new.make_mask(some.shape[2])
        rows = new.update_and_fetch(keys[:, :, block], values[:, :, block])
        mx.eval(new.attend(some, *rows, scale=0.125, mask=mask))
        count = new.account()
        shares.append((new.nbytes / new.plain_nbytes, (count.keys + count.values) / new.plain_nbytes))
    later = shares[2:]
    return shares[1][0], max(held for held, _ in later), max(rows for _, rows in later)


def test_bytes_of_packed_rows():
    pytest.importorskip("veloxquant_turboquant_rvq")
    model, _, text = loaded()
    cache = open_prompt(model, text[:PROMPT])[0]
    held = {name: held_shares(cache, options) for name, options in stacked(PROMPT).items()}
    print({name: [round(share, 3) for share in shares] for name, shares in held.items()})
    assert held["packed keys ranked"][0] <= 0.30
    assert held["packed keys ranked"][2] <= 0.30
    assert held["compact summary, pages of 2"][0] <= 0.42
    assert max(held["compact summary, pages of 4"]) <= 0.42
