"""One decode step (update and attention) against mlx-lm's plain cache: ``python bench_step.py [rows ...]``.

32 query heads, 8 KV heads, D 128, random keys and values. Arms are interleaved in one process; medians, and the ratio
to the plain arm of the same run. On a GPU the steps of one arm are timed together, since a single one is shorter than
the clock can tell. veloxquant-mlx is measured too where it is installed. ``nox -s bench`` runs this file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import QuantizedKVCache

import veloxquant
from veloxquant import LayerSpec

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
CHUNK = 2048


def normal(count: int, heads: int, seed: int, dtype: mx.Dtype) -> mx.array:
    """Random rows ``[1, heads, count, D]``."""
    return mx.random.normal((1, heads, count, DIM), key=mx.random.key(seed)).astype(dtype)


def ours(**options: Any) -> Any:
    """A routed cache of one layer."""
    layer = LayerSpec(query_mode="routed", query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=SCALE)
    return veloxquant.get_cache("turboquant_rvq", options, layer=layer)


def peer(bits: int) -> Any:
    """The method of the same name in veloxquant-mlx, or None where it is not installed."""
    if importlib.util.find_spec("veloxquant_mlx") is None:
        return None
    base = importlib.import_module("veloxquant_mlx.cache.base")

    return base.KVCacheBuilder().with_method("turboquant_rvq").with_head_dim(DIM).with_bit_width(bits).build()


def arms() -> dict[str, Any]:
    """Empty caches by name."""
    # It has no kernel there for numbers of rows that 8 does not divide.
    gpu = mx.default_device().type == mx.DeviceType.gpu
    found = {
        "plain": KVCache(),
        "QuantizedKVCache 4": None if gpu else QuantizedKVCache(group_size=64, bits=4),
        "bits=1": ours(bits=1),
        "bits=2": ours(bits=2),
        "bits=2 value_bits=4": ours(bits=2, value_bits=4),
        "bits=4 value_bits=8": ours(bits=4, value_bits=8),
        "laplace bits=1": ours(bits=1, codebook="laplace"),
        "laplace bits=2": ours(bits=2, codebook="laplace"),
        "matched bits=1": ours(bits=1, codebook="matched"),
        "matched bits=2": ours(bits=2, codebook="matched"),
        "veloxquant-mlx b=1": peer(1),
        "veloxquant-mlx b=2": peer(2),
    }
    return {name: cache for name, cache in found.items() if cache is not None}


def fill(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Feed rows as a prompt; the queries of a prompt do not matter to these caches."""
    for start in range(0, keys.shape[2], CHUNK):
        returned = cache.update_and_fetch(keys[:, :, start : start + CHUNK], values[:, :, start : start + CHUNK])
        if hasattr(cache, "attend"):
            cache.attend(normal(CHUNK, QUERY_HEADS, 0, keys.dtype)[:, :, : keys.shape[2] - start], *returned, SCALE)
        del returned
        mx.eval(cache.state)
    if hasattr(cache, "attend"):
        cache.trim(0)  # as a decoder does that has read its prompt
        cache._prompt_open = False


def step(cache: Any, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """One decode step as a model runs it."""
    all_keys, all_values = cache.update_and_fetch(keys, values)
    if hasattr(cache, "attend"):
        return cache.attend(queries, all_keys, all_values, scale=SCALE, mask=None)
    return scaled_dot_product_attention(queries, all_keys, all_values, cache=cache, scale=SCALE, mask=None)


def measure(caches: dict[str, Any], repeats: int, steps: int, dtype: mx.Dtype) -> dict[str, list[float]]:
    """Milliseconds a step, for each arm as many figures as repeats, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in caches}
    for repeat in range(repeats + 2):
        new = [
            [normal(1, h, repeat * 1000 + n, dtype) for h in (QUERY_HEADS, KV_HEADS, KV_HEADS)] for n in range(steps)
        ]
        mx.eval(new)
        for name, cache in caches.items():
            start = time.perf_counter()
            outputs = []
            for rows in new:
                outputs.append(step(cache, *rows))
                mx.async_eval(outputs[-1])
            mx.eval(outputs)
            if repeat >= 2:
                times[name].append((time.perf_counter() - start) * 1e3 / steps)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=[4096, 32768])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="", help="names of arms, separated by commas")
    options = parser.parse_args()
    dtype = getattr(mx, options.dtype)
    gpu = mx.default_device().type == mx.DeviceType.gpu
    for count in options.rows:
        names = ["plain", *options.only.split(",")] if options.only else None
        caches = {name: cache for name, cache in arms().items() if names is None or name in names}
        keys, values = (normal(count, KV_HEADS, seed, dtype) for seed in (1, 2))
        for cache in caches.values():
            fill(cache, keys, values)
        times = measure(caches, options.repeats, 20 if gpu else 1, dtype)
        plain = statistics.median(times["plain"])
        print(f"{count} rows, {options.dtype}, {mx.default_device()}, 32 query heads, 8 KV heads, D 128")
        for name, taken in times.items():
            median = statistics.median(taken)
            print(
                f"  {name:24} {median:9.3f} ms  {median / plain:6.2f} x plain  ({min(taken):.3f} to {max(taken):.3f})"
            )


if __name__ == "__main__":
    main()
