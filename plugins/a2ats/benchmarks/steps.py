"""One decode step of A2ATS against the plain cache, and against veloxquant-mlx's a2ats where that is installed.

``python plugins/a2ats/benchmarks/steps.py``: update and attention of one layer in fp32, Hq 32, Hkv 8, D 128, arms
interleaved in one process; medians, and ratios to the plain cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

import veloxquant
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant import Snapshot

QUERY_HEADS, KV_HEADS, DIM, BASE = 32, 8, 128, 10000.0
SCALE = DIM**-0.5


def rows(count: int, seed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of so many tokens."""
    parts = mx.random.split(mx.random.key(seed), 3)
    heads = (QUERY_HEADS, KV_HEADS, KV_HEADS)
    found = tuple(mx.random.normal((1, n, count, DIM), key=key) for n, key in zip(heads, parts, strict=True))
    mx.eval(found)
    return found  # type: ignore[return-value]


def ours(options: dict[str, Any]) -> Any:
    """A routed cache of a2ats; a random codebook takes as long as a learned one."""
    layer = LayerSpec(
        query_mode="routed",
        query_heads=QUERY_HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=SCALE,
        rope=Rope(dims=DIM, base=BASE),
    )
    return veloxquant.get_cache("a2ats", {"allow_uncalibrated": True, **options}, layer=layer)


def peer() -> Any:
    """The a2ats of veloxquant-mlx, or None where it is not installed."""
    if importlib.util.find_spec("veloxquant_mlx") is None:
        return None
    from veloxquant_mlx.cache.a2ats_cache import A2ATSKVCache
    from veloxquant_mlx.cache.base import KVCacheConfig

    return A2ATSKVCache(KVCacheConfig(method="a2ats", head_dim=DIM, a2ats_rope_base=BASE))


def step(cache: Any, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Update and attention of one layer."""
    all_keys, all_values = cache.update_and_fetch(keys, values)
    attend = getattr(cache, "attend", None)
    if attend is not None:
        output: mx.array = attend(queries, all_keys, all_values, scale=SCALE, mask=None)
        return output
    return mx.fast.scaled_dot_product_attention(queries, all_keys, all_values, scale=SCALE)


def filled(options: dict[str, Any], count: int) -> Any:
    """A retrieve cache after so many tokens, with random codes: coding a long prompt is not what is timed."""
    empty = ours({"mode": "retrieve", **options})
    _, keys, values = rows(count, 0)
    codes = mx.random.randint(0, 2 ** options["codebook_bits"], (1, KV_HEADS, count, 1)).astype(mx.uint16)
    snapshot = Snapshot({"keys": keys, "values": values, "codes": codes}, {"start": 0, "ragged": False})
    state = empty.method.ops.restore(empty.config, empty.layer, snapshot)
    cache = type(empty)(empty.method, empty.config, empty.layer, state)
    cache.offset = count
    step_once(cache, 10**6)
    return cache


def fill(cache: Any, count: int) -> None:
    """Feed a prompt in blocks."""
    if cache.offset:
        return
    for start in range(0, count, 4096):
        queries, keys, values = rows(min(4096, count - start), start)
        all_keys, all_values = cache.update_and_fetch(keys, values)
        if getattr(cache, "attend", None) is not None:
            # What attention makes of the prompt is not needed; the cache wants to see its queries all the same.
            cache.attend(queries, all_keys, all_values, scale=SCALE, mask="causal")
        mx.eval([array for array in cache.state if isinstance(array, mx.array)])
        del all_keys, all_values
    step_once(cache, 10**6)


def step_once(cache: Any, seed: int) -> float:
    """Milliseconds of one step."""
    one = rows(1, seed)
    start = time.perf_counter()
    mx.eval(step(cache, *one))
    return (time.perf_counter() - start) * 1e3


def compare(arms: dict[str, Callable[[], Any]], count: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step by arm, after so many rows."""
    caches = {}
    for name, make in arms.items():
        cache = make()
        if cache is not None:
            fill(cache, count)
            caches[name] = cache
    times: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(rounds + 2):
        for name, cache in caches.items():
            found = step_once(cache, turn)
            if turn >= 2:
                times[name].append(found)
    return {name: statistics.median(found) for name, found in times.items()}


def show(title: str, medians: dict[str, float]) -> None:
    """Print medians and their ratios to the plain cache."""
    print(title)
    for name, found in medians.items():
        print(f"  {name:36} {found:8.1f} ms   {found / medians['plain']:6.2f} x plain")


def main() -> None:
    """Measure both modes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compress-rows", type=int, default=4096)
    parser.add_argument("--retrieve-rows", type=int, default=32768)
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--only", choices=("compress", "retrieve"))
    options = parser.parse_args()
    if options.only != "retrieve":
        arms = {"plain": KVCache, "compress": lambda: ours({}), "veloxquant-mlx a2ats": peer}
        show(f"compress, {options.compress_rows} rows", compare(arms, options.compress_rows, options.rounds))
    if options.only != "compress":
        chosen = {"retrieval_fraction": options.fraction, "codebook_bits": 12}
        count = options.retrieve_rows
        arms = {"plain": KVCache, f"retrieve, fraction {options.fraction:g}": lambda: filled(chosen, count)}
        show(f"retrieve, {options.retrieve_rows} rows", compare(arms, options.retrieve_rows, options.rounds))


if __name__ == "__main__":
    main()
