"""What A2ATS costs on a real model; minutes long. The figures stand in docs/methods/a2ats.md.

Codebooks are learned from the first four fifths of the sample text, and measured on the last fifth. With the
environment variable ``A2ATS_CODEBOOKS`` they are kept in a folder and used again.
"""

import functools
import importlib.util
import json
import os
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache

import veloxquant
from veloxquant.attention import is_routed
from veloxquant.attention import unroute
from veloxquant.bench.passkey import passkeys
from veloxquant.bench.quality import compare
from veloxquant.bench.quality import continuation_logprobs
from veloxquant.build import layer_specs
from veloxquant.cli import main
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_text
from veloxquant.testing.sample import sample_tokens
from veloxquant_a2ats.recorder import collect

pytestmark = pytest.mark.slow

# Tokens of the sample text from here on were not learned from.
HELD_OUT = 95_000
PEER = importlib.util.find_spec("veloxquant_mlx") is not None
# Retrieve codebooks of a third of the default tokens, and 2,048 centroids, so that this ends in minutes.
TOKENS = {"compress": 18_432, "retrieve": 37_888}


@functools.cache
def loaded():
    model, tokenizer = load_sample_model("float32")
    return model, tokenizer


@functools.cache
def codebook(mode):
    """A codebook file, made by the command as users make it."""
    folder = Path(os.environ.get("A2ATS_CODEBOOKS") or tempfile.mkdtemp())
    target, text = folder / f"{mode}.safetensors", folder / "text.txt"
    if not target.exists():
        whole = sample_text()
        text.write_text(whole[: len(whole) * 4 // 5])
        words = ["calibrate", "a2ats", "--mode", mode, "--text", str(text), "--tokens", str(TOKENS[mode])]
        assert main([*words, "-o", str(target)]) == 0
    return str(target)


def a2ats(mode="compress", **options):
    return veloxquant.make_prompt_cache(loaded()[0], "a2ats", {"mode": mode, "codebook": codebook(mode), **options})


@pytest.fixture(autouse=True)
def _nothing_stays_routed():
    yield
    while is_routed(loaded()[0]):
        unroute(loaded()[0])


def measure(arms, prompt, continuation):
    """Quality of every arm against the plain cache; prints it."""
    model, _ = loaded()
    plain = continuation_logprobs(model, make_prompt_cache(model), prompt, continuation)
    quality = {}
    for name, make in arms.items():
        quality[name] = compare(plain, continuation_logprobs(model, make(), prompt, continuation), continuation)
        print(f"{name}: {quality[name]}", flush=True)
    return quality


@functools.cache
def _peer_codebooks():
    """The peer's own training, layer by layer, on the text that ours was learned from: keys without position."""
    from veloxquant_mlx.allocators.vecinfer import train_codebook

    model, tokenizer = loaded()
    tokens = sample_tokens(tokenizer, 8192)
    specs = layer_specs(model, layers=None, routed=True)
    take = collect(
        model,
        [tokens[start : start + 1024] for start in range(0, 8192, 1024)],
        specs,
        far_position=2048,
        with_values=False,
        on_progress=lambda _: None,
    )
    rng, books = np.random.default_rng(0), []
    for spec in specs:
        vectors = take(spec.index).keys.reshape(-1, 8)
        books.append(train_codebook(mx.array(vectors[rng.choice(len(vectors), 32_768, replace=False)]), 256))
    return books


def _peer():
    from veloxquant_mlx.cache.a2ats_cache import A2ATSKVCache
    from veloxquant_mlx.cache.base import KVCacheConfig

    base = loaded()[0].layers[0].self_attn.rope.base
    return [
        A2ATSKVCache(KVCacheConfig(method="a2ats", head_dim=64, a2ats_rope_base=base, a2ats_codebook=book))
        for book in _peer_codebooks()
    ]


def test_compress_on_held_out_text(record_property):
    _, tokenizer = loaded()
    text = sample_tokens(tokenizer, 1024 + 128, HELD_OUT)
    arms = {"compress": a2ats}
    if PEER:
        arms["veloxquant-mlx"] = _peer
    quality = measure(arms, text[:1024], text[1024:])
    record_property("quality", str(quality))
    assert quality["compress"].mean_kl < 0.5
    if PEER:
        assert quality["compress"].mean_kl <= quality["veloxquant-mlx"].mean_kl / 4


def test_retrieve_on_held_out_text(record_property):
    model, tokenizer = loaded()
    text = sample_tokens(tokenizer, 2048 + 128, HELD_OUT)
    arms = {
        "retrieve": lambda: a2ats("retrieve", retrieval_fraction=0.1),
        "snapkv, a tenth": lambda: veloxquant.make_prompt_cache(model, "snapkv", {"compression_ratio": 10.0}),
    }
    if importlib.util.find_spec("veloxquant_snapkv") is None:
        del arms["snapkv, a tenth"]
    quality = measure(arms, text[:2048], text[2048:])
    record_property("quality", str(quality))
    assert quality["retrieve"].mean_kl < 0.1
    if "snapkv, a tenth" in quality:
        assert quality["retrieve"].mean_kl <= quality["snapkv, a tenth"].mean_kl / 5


def test_retrieving_everything_is_dense():
    model, tokenizer = loaded()
    text = sample_tokens(tokenizer, 300 + 16, HELD_OUT)
    plain = continuation_logprobs(model, make_prompt_cache(model), text[:300], text[300:])
    ours = continuation_logprobs(model, a2ats("retrieve", retrieval_fraction=1.0), text[:300], text[300:])
    np.testing.assert_allclose(np.array(ours), np.array(plain), atol=1e-3)


def test_passkeys_are_found_as_often_as_with_the_plain_cache(record_property):
    model, tokenizer = loaded()
    text = sample_tokens(tokenizer, 12_000, HELD_OUT)
    hits = {"plain": 0, "retrieve": 0}
    for passkey in passkeys(tokenizer, text, length=1024, count=10):
        retrieve = a2ats("retrieve", retrieval_fraction=0.1)
        # A prompt is attended whole, so that one pass over it serves both.
        mx.eval(model(mx.array([passkey.prompt[:-1]]), cache=retrieve))
        for name, caches in (("plain", _plain(retrieve)), ("retrieve", retrieve)):
            hits[name] += _answer(model, tokenizer, caches, passkey.prompt[-1]).startswith(passkey.key)
        print(hits, flush=True)
    record_property("passkeys", str(hits))
    assert hits["plain"] >= 8
    assert hits["retrieve"] >= hits["plain"] - 1


def _plain(caches):
    """mlx-lm's caches with the same rows."""
    found = []
    for cache in caches:
        found.append(KVCache())
        found[-1].update_and_fetch(*cache.method_state.rows.store.keys_values())
    return found


def _answer(model, tokenizer, caches, last):
    """Greedy text after the last token of the prompt."""
    tokens = [last]
    for _ in range(8):
        tokens.append(mx.argmax(model(mx.array([tokens[-1:]]), cache=caches)[0, -1]).item())
    return str(tokenizer.decode(tokens[1:])).strip()


@pytest.mark.parametrize("mode", ["compress", "retrieve"])
def test_calibration_says_how_much_it_found_and_query_aware_codes_are_better(mode, record_property):
    _, metadata = mx.load(codebook(mode), return_metadata=True)
    header = json.loads(metadata["veloxquant_a2ats"])
    centroids, tokens, errors = (header[name] for name in ("centroids", "tokens", "errors"))
    print(f"{mode}: {centroids} centroids from {tokens} tokens, errors {errors}")
    record_property("errors", str(errors))
    assert centroids == min(256 if mode == "compress" else 4096, tokens // 16)
    assert errors["query_aware"] < errors["plain"]
