"""One decode step (append, choose, attend) against mlx-lm's plain cache: ``python bench_step.py [rows ...]``.

32 query heads, 8 KV heads, D 128, fp32, random keys and values. Arms are interleaved in one process; medians, and the
ratio to the plain arm of the same run. veloxquant-mlx is measured too where it is installed (an environment of its
own). ``nox -s bench`` runs this file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

import veloxquant
from veloxquant import LayerSpec

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5


def rows(count: int, heads: int, seed: int) -> mx.array:
    """Random rows ``[1, heads, count, D]``."""
    return mx.random.normal((1, heads, count, DIM), key=mx.random.key(seed))


def plain(keys: mx.array, values: mx.array) -> Any:
    """mlx-lm's cache, filled."""
    cache = KVCache()
    mx.eval(cache.update_and_fetch(keys, values))
    return cache


def compressed(keys: mx.array, values: mx.array, name: str, kv_heads: int = KV_HEADS, **options: Any) -> Any:
    """A routed cache of one layer that has seen the rows as a prompt."""
    heads = QUERY_HEADS // KV_HEADS * kv_heads
    layer = LayerSpec(query_mode="routed", query_heads=heads, kv_heads=kv_heads, head_dim=DIM, scale=SCALE)
    cache = veloxquant.get_cache(name, options, layer=layer)
    queries = rows(64, heads, 7)
    for start, stop in ((0, keys.shape[2] - 1), (keys.shape[2] - 1, keys.shape[2])):
        cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
        # Only the last queries of the prompt matter; the attention of all others is left out, it would take minutes.
        state, length = cache.method_state, min(64, stop - start)
        state.scale = SCALE
        state.observe(queries[:, :, :length])
        cache._awaiting = 0
    cache.method.ops.finish_prompt(cache.method_state)
    cache._finish_after, cache._prompt_open = False, False
    mx.eval(cache.state)
    return cache


def peer(keys: mx.array, values: mx.array) -> Any:
    """The rocketkv of veloxquant-mlx at ratio 8, or None where it is not installed."""
    if importlib.util.find_spec("veloxquant_mlx") is None:
        return None
    base = importlib.import_module("veloxquant_mlx.cache.base")
    cache = base.KVCacheBuilder().with_method("rocketkv").with_head_dim(DIM).build()
    # Its prompt ends with the first single token.
    for start, stop in ((0, keys.shape[2] - 1), (keys.shape[2] - 1, keys.shape[2])):
        mx.eval(cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop]))
    return cache


def step(cache: Any) -> Callable[[int], None]:
    """One decode step as a model runs it."""
    heads = QUERY_HEADS
    kv_heads = KV_HEADS
    if getattr(cache, "layer", None) is not None:
        heads, kv_heads = cache.layer.query_heads, cache.layer.kv_heads
    attend = getattr(cache, "attend", None)

    def run(seed: int) -> None:
        queries, keys, values = (
            rows(1, heads, 3 * seed),
            rows(1, kv_heads, 3 * seed + 1),
            rows(1, kv_heads, 3 * seed + 2),
        )
        mx.eval(queries, keys, values)
        start = time.perf_counter()
        all_keys, all_values = cache.update_and_fetch(keys, values)
        if attend is None:
            mx.eval(scaled_dot_product_attention(queries, all_keys, all_values, cache=cache, scale=SCALE, mask=None))
        else:
            mx.eval(attend(queries, all_keys, all_values, scale=SCALE, mask=None))
        run.took = time.perf_counter() - start  # type: ignore[attr-defined]

    return run


def measure(arms: dict[str, Any], steps: int) -> dict[str, float]:
    """Median milliseconds of a step of each arm, interleaved."""
    runs = {name: step(cache) for name, cache in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(steps + 3):
        for name, run in runs.items():
            run(number)
            if number >= 3:
                times[name].append(run.took)  # type: ignore[attr-defined]
    return {name: statistics.median(taken) * 1e3 for name, taken in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=[4096, 32768])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    for count in options.rows:
        keys, values = rows(count, KV_HEADS, 1), rows(count, KV_HEADS, 2)
        arms = {
            "plain": plain(keys, values),
            "rocketkv 8": compressed(keys, values, "rocketkv", compression_ratio=8),
            "rocketkv 16": compressed(keys, values, "rocketkv", compression_ratio=16),
            "rocketkv 8, stage 1 off": compressed(keys, values, "rocketkv", compression_ratio=8, stage1=False),
            "rocketkv 8, 32 KV heads of 1,024 rows": compressed(
                rows(1024, 32, 1), rows(1024, 32, 2), "rocketkv", kv_heads=32, compression_ratio=8
            ),
            "rocketkv 8, 8 KV heads of 1,024 rows": compressed(
                keys[:, :, :1024], values[:, :, :1024], "rocketkv", compression_ratio=8
            ),
            "veloxquant-mlx rocketkv 8": peer(keys, values),
        }
        if importlib.util.find_spec("veloxquant_turboquant_rvq") is not None:
            packed = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}, "topk": count // 8}
            compact = {"stage1": False, "summary_bits": 4, "head_topk1": DIM // 2, **packed}
            ranked = {"stage1": False, "ranking": "rows", **packed}
            arms["packed 4 bits, keys ranked"] = compressed(keys, values, "rocketkv", **ranked)
            for size in (2, 4):
                name = f"packed 4 bits, compact pages of {size}"
                arms[name] = compressed(keys, values, "rocketkv", page_size=size, **compact)
        found = measure({name: cache for name, cache in arms.items() if cache is not None}, options.steps)
        print(f"{count} rows, fp32, {QUERY_HEADS} query heads, {KV_HEADS} KV heads, D {DIM}")
        for name, taken in found.items():
            print(f"  {name:40} {taken:8.2f} ms   {found['plain'] / taken:6.2f} x plain")


if __name__ == "__main__":
    main()
