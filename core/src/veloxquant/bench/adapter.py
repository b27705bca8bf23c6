"""What the adapter between mlx-lm and a method costs: ``python -m veloxquant.bench.adapter``.

Times ``LayerCache.update_and_fetch`` on a method that does nothing against calling the method's hook directly, with
and without other methods registered, and the import of the package. Arms are interleaved in one process; medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.build import get_cache
from veloxquant.hooks import hookimpl
from veloxquant.registry import Registry
from veloxquant.types import ByteCount
from veloxquant.types import MethodInfo
from veloxquant.types import Snapshot

__all__ = ["adapter_cost", "import_time"]


@attrs.frozen(kw_only=True)
class _NoConfig:
    """No options."""


def _no_op(name: str) -> _Plugin:
    """A method that hands back what it is given and keeps nothing."""

    @hookimpl
    def veloxquant_method() -> MethodInfo:
        return MethodInfo(name=name, config=_NoConfig, summary="does nothing", kind="none")

    @hookimpl
    def veloxquant_create(config: Any, layer: Any) -> object:
        return object()

    @hookimpl
    def veloxquant_prefill(state: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    @hookimpl
    def veloxquant_decode(state: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    @hookimpl
    def veloxquant_account(state: Any) -> ByteCount:
        return ByteCount()

    @hookimpl
    def veloxquant_serialize(state: Any) -> Snapshot:
        return Snapshot()

    @hookimpl
    def veloxquant_restore(config: Any, layer: Any, snapshot: Any) -> object:
        return object()

    functions = {key: value for key, value in locals().items() if key.startswith("veloxquant_")}
    return _Plugin(**functions)


class _Plugin:
    """Hooks as attributes of an object; pluggy needs it hashable."""

    def __init__(self, **hooks: Any) -> None:
        vars(self).update(hooks)


def adapter_cost(others: int = 0, *, calls: int = 2000, rounds: int = 15) -> tuple[float, float]:
    """Time a decode call through the cache and a direct call of the hook.

    Args:
        others: Further methods registered beside the one that is timed.
        calls: Calls per round.
        rounds: Rounds of each arm, interleaved.

    Returns:
        Medians in microseconds: through the cache, and direct.
    """
    registry = Registry(entry_points=[], blocked=[])
    for number in range(others + 1):
        registry.register(_no_op(f"no_op_{number}"))
    cache = get_cache("no_op_0", registry=registry)
    row = mx.zeros((1, 8, 1, 128))
    cache.update_and_fetch(row, row)  # the first token is the prompt
    direct, state = cache.method.ops.decode, cache.method_state
    arms: dict[str, list[float]] = {"cache": [], "direct": []}
    for _ in range(rounds):
        arms["cache"].append(_time(lambda: cache.update_and_fetch(row, row), calls))
        arms["direct"].append(_time(lambda: direct(state, row, row), calls))
    return statistics.median(arms["cache"]), statistics.median(arms["direct"])


def _time(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def import_time(rounds: int = 9) -> float:
    """Median milliseconds of ``import veloxquant`` in a fresh process, the interpreter's own start not counted."""
    script = "import time; t = time.perf_counter(); import veloxquant; print(time.perf_counter() - t)"
    times = [float(subprocess.check_output([sys.executable, "-c", script], text=True)) for _ in range(rounds)]
    return statistics.median(times) * 1e3


def _main() -> None:
    for others in (0, 4, 20):
        through, direct = adapter_cost(others)
        print(f"{others:2} other methods: {through:.2f} us through the cache, {direct:.2f} us direct, "
              f"{through - direct:.2f} us for the adapter")  # fmt: skip
    print(f"import veloxquant: {import_time():.0f} ms")


if __name__ == "__main__":
    _main()
