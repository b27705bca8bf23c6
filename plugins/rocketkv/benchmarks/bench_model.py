"""Decoding after a long prompt on the sample model, end to end, fp32: ``python bench_model.py [tokens]``.

The prompt is processed once; every arm goes on from there, arms interleaved. Medians, and the ratio to plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

import veloxquant
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_tokens

ARMS: dict[str, dict[str, Any]] = {
    "rocketkv 4": {"compression_ratio": 4},
    "rocketkv 8": {"compression_ratio": 8},
    "rocketkv 8, stage 1 off": {"stage1": False},
}


def prompt(model: Any, tokens: list[int]) -> list[Any]:
    """Caches that have seen all of a prompt but its last token, nothing evicted yet."""
    caches = veloxquant.make_prompt_cache(model, "rocketkv")
    for start in range(0, len(tokens) - 1, 2048):
        model(mx.array([tokens[start : min(start + 2048, len(tokens) - 1)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    return caches


def plain(caches: list[Any]) -> list[Any]:
    """mlx-lm's caches with the same rows."""
    found = [KVCache() for _ in caches]
    for cache, new in zip(caches, found, strict=True):
        new.update_and_fetch(*cache.method_state.rows.store.keys_values())
        mx.eval(new.keys, new.values)
    return found


def with_options(model: Any, caches: list[Any], options: dict[str, Any]) -> list[Any]:
    """Caches with other options, in the same state."""
    found = veloxquant.make_prompt_cache(model, "rocketkv", options)
    for old, new in zip(caches, found, strict=True):
        new.method_state = new.method.ops.restore(new.config, new.layer, old.method.ops.serialize(old.method_state))
        new._resume(old._session())
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", nargs="?", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    model, tokenizer = load_sample_model("float32")
    text = sample_tokens(tokenizer, options.tokens + options.steps + 8)
    caches = prompt(model, text[: options.tokens])
    arms = {"plain": plain(caches)}
    arms |= {name: with_options(model, caches, chosen) for name, chosen in ARMS.items()}
    del caches
    took: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.steps + 3):
        for name, arm in arms.items():
            start = time.perf_counter()
            mx.eval(model(mx.array([[text[options.tokens - 1 + number]]]), cache=arm))
            took[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[3:]) * 1e3 for name, times in took.items()}
    print(f"{options.tokens} tokens of context, SmolLM2-135M-Instruct, fp32")
    for name, taken in medians.items():
        print(f"  {name:28} {taken:8.1f} ms a token   {medians['plain'] / taken:5.2f} x plain")


if __name__ == "__main__":
    main()
