"""What each configuration costs in quality, and holds, on the sample model: ``python bench_model.py [arm ...]``.

512 tokens after a 1,024-token prompt of the sample text, fp32, everything through the cache, the evaluated tokens one
by one. Bytes are those held at the end against the rows of the plain cache, without its spare capacity. veloxquant-mlx
is measured too where it is installed, and snapkv over packed rows. OpenBLAS makes this several times faster.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache

import veloxquant
from veloxquant.bench.quality import compare
from veloxquant.bench.quality import continuation_logprobs
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_tokens

PROMPT, CONTINUATION = 1024, 512
NAKED = {"sinks": 0, "recent": 0}
ARMS: dict[str, dict[str, Any]] = {
    "bits=1": {},
    "bits=1, recent=0": {"recent": 0},
    "bits=1, sinks=0": {"sinks": 0},
    "bits=1, sinks=0, recent=0": NAKED,
    "bits=1, matched": {"codebook": "matched"},
    "bits=1, laplace": {"codebook": "laplace"},
    "bits=2": {"bits": 2},
    "bits=2, sinks=0": {"bits": 2, "sinks": 0},
    "bits=2, recent=16": {"bits": 2, "recent": 16},
    "bits=2, recent=128": {"bits": 2, "recent": 128},
    "bits=2, sinks=0, recent=0": {"bits": 2, **NAKED},
    "bits=2, matched": {"bits": 2, "codebook": "matched"},
    "bits=2, laplace": {"bits": 2, "codebook": "laplace"},
    "bits=2, value_bits=4": {"bits": 2, "value_bits": 4},
    "bits=2, value_bits=4, sinks=0, recent=0": {"bits": 2, "value_bits": 4, **NAKED},
    "bits=2, value_bits=3": {"bits": 2, "value_bits": 3},
    "bits=2, value_bits=2": {"bits": 2, "value_bits": 2},
    "bits=3": {"bits": 3},
    "bits=3, value_bits=3, sinks=0, recent=0": {"bits": 3, "value_bits": 3, **NAKED},
    "bits=3, value_bits=2, sinks=0, recent=0": {"bits": 3, "value_bits": 2, **NAKED},
    "bits=4, value_bits=8": {"bits": 4, "value_bits": 8},
}


def arms(model: Any) -> dict[str, Callable[[], list[Any]]]:
    """Makers of caches by name."""
    layers = len(model.layers)
    found: dict[str, Callable[[], list[Any]]] = {
        f"QuantizedKVCache {bits} bits": lambda bits=bits: [QuantizedKVCache(64, bits) for _ in range(layers)]
        for bits in (8, 4)
    }
    for name, options in ARMS.items():
        found[name] = lambda options=options: veloxquant.make_prompt_cache(model, "turboquant_rvq", options)
    if "snapkv" in veloxquant.methods():
        packed = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}}
        for name, options in {"snapkv ratio 2": {}, "snapkv ratio 2 over bits=2, value_bits=4": packed}.items():
            config = {"compression_ratio": 2, **options}
            found[name] = lambda config=config: veloxquant.make_prompt_cache(model, "snapkv", config)
    if importlib.util.find_spec("veloxquant_mlx") is not None:
        for bits in (1, 2):
            found[f"veloxquant-mlx b={bits}"] = lambda bits=bits: peers(layers, bits)
    return found


def peers(layers: int, bits: int) -> list[Any]:
    """Caches of the method of the same name in veloxquant-mlx."""
    base = importlib.import_module("veloxquant_mlx.cache.base")

    build = base.KVCacheBuilder().with_method("turboquant_rvq").with_head_dim(64).with_bit_width(bits).build
    return [build() for _ in range(layers)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="*", help="names of arms; all by default")
    options = parser.parse_args()
    model, tokenizer = load_sample_model("float32")
    text = sample_tokens(tokenizer, PROMPT + CONTINUATION)
    prompt, continuation = text[:PROMPT], text[PROMPT:]
    caches = make_prompt_cache(model)
    plain = continuation_logprobs(model, caches, prompt, continuation)
    bytes_plain = sum(2 * cache.offset * cache.keys[:, :, 0].nbytes for cache in caches)
    print(f"{'':42} mean KL   p95 KL   top-1   perplexity   bytes / plain")
    for name, make in arms(model).items():
        if options.arms and name not in options.arms:
            continue
        start, caches = time.perf_counter(), make()
        found = compare(plain, continuation_logprobs(model, caches, prompt, continuation), continuation)
        held = sum(cache.nbytes for cache in caches)
        print(
            f"{name:42} {found.mean_kl:7.4f}  {found.p95_kl:7.4f}   {found.top1_agreement:.3f}   "
            f"{found.perplexity:7.3f}      {held / bytes_plain:.3f}   ({time.perf_counter() - start:.0f} s)",
            flush=True,
        )
        del caches
        mx.clear_cache()


if __name__ == "__main__":
    main()
