"""Peak memory and bytes held on the sample model, a fresh process for each arm: ``python bench_memory_model.py``.

A prompt of 4,000 tokens of the sample text in chunks of 2,048, then 100 tokens, greedy. The peak is that of
``mx.get_peak_memory`` above the weights. Bytes are those held at the end against the rows of the plain cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache

import veloxquant
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_tokens

ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "QuantizedKVCache 4 bits": None,
    "bits=1": {},
    "bits=2": {"bits": 2},
    "bits=2 value_bits=4": {"bits": 2, "value_bits": 4},
    "bits=4 value_bits=8": {"bits": 4, "value_bits": 8},
}


def measure(arm: str, tokens: int, dtype: str) -> dict[str, Any]:
    """Run one arm in this process."""
    model, tokenizer = load_sample_model(dtype)
    mx.eval(model.parameters())
    prompt = mx.array(sample_tokens(tokenizer, tokens))
    options = ARMS[arm]
    caches: list[Any]
    if arm == "plain":
        caches = make_prompt_cache(model)
    elif options is None:
        caches = [QuantizedKVCache(64, 4) for _ in model.layers]
    else:
        caches = veloxquant.make_prompt_cache(model, "turboquant_rvq", options)
    mx.clear_cache()
    weights = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in generate_step(prompt, model, max_tokens=100, prompt_cache=caches):
        pass
    peak = mx.get_peak_memory() - weights
    live = sum(2 * cache.offset * 3 * 64 * getattr(mx, dtype).size for cache in caches)
    found = {"peak": peak, "held": sum(cache.nbytes for cache in caches), "plain": live}
    if options is not None:
        found["keys"] = sum(cache.account().keys for cache in caches)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options.arm, options.tokens, options.dtype)))
        return
    print(f"{options.tokens} + 100 tokens, {options.dtype}; MB; bytes against the plain cache's rows")
    for arm in ARMS:
        command = [sys.executable, __file__, "--arm", arm, "--tokens", str(options.tokens), "--dtype", options.dtype]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        keys = f"{found['keys'] / found['plain'] * 2:.3f}" if "keys" in found else ""
        print(
            f"{arm:24} peak {found['peak'] / 1e6:7.1f}   held {found['held'] / 1e6:6.1f}   "
            f"held / plain {found['held'] / found['plain']:.3f}   keys / plain keys {keys}",
            flush=True,
        )


if __name__ == "__main__":
    main()
