"""Where the time goes: an observer that times the hooks of every method, layer by layer.

MLX is lazy: left alone, a hook returns before anything is computed, and what is timed is how long it takes to say what
to compute. With ``synchronize=True`` the work itself is timed, at the price of a slower run: what goes into a hook is
computed before the clock starts, and what it stored and answered before the clock stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.hooks import hookimpl
from veloxquant.layers import layer_of
from veloxquant.layers import remember_layer

if TYPE_CHECKING:
    from veloxquant.types import LayerSpec
    from veloxquant.types import Snapshot

__all__ = ["HookTime", "TimingObserver", "arrays_within", "total_by_hook"]

_Wrapper = Generator[None, Any, Any]


@attrs.define
class HookTime:
    """The calls of one hook in one layer, or in all.

    Args:
        hook: Name of the hook without its prefix.
        layer: Index of the layer. For the sum over layers the one with the slowest call. None where it is not known:
            for states that Python cannot refer to weakly.
        calls: Number of calls.
        total: Seconds in all.
        worst: Seconds of the slowest call.
    """

    hook: str
    layer: int | None
    calls: int = 0
    total: float = 0.0
    worst: float = 0.0

    @property
    def mean(self) -> float:
        """Seconds of a call, on average."""
        return self.total / self.calls if self.calls else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**attrs.asdict(self), "mean": self.mean}


class TimingObserver:
    """Times every hook that runs for a layer, of caches made while it observes.

    Use: ``registry.observe(observer)``, make the caches, run the model, ``observer.rows()``; then
    ``registry.unobserve(observer)``. One observer may watch caches in several threads.

    Args:
        synchronize: Compute inside the timing what would be computed later. Rows that are returned to the method's own
            ``attend`` stay lazy even so, since it may read few of them.
    """

    def __init__(self, *, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self._times: dict[tuple[str, int | None], HookTime] = {}
        self._lock = threading.Lock()

    # --------------------------------------------------------------- figures

    def rows(self) -> list[HookTime]:
        """One record a hook and layer, in the order in which hooks first ran, then by layer."""
        with self._lock:
            found = [attrs.evolve(entry) for entry in self._times.values()]
        order = {hook: place for place, hook in enumerate(dict.fromkeys(entry.hook for entry in found))}
        return sorted(found, key=lambda entry: (order[entry.hook], -1 if entry.layer is None else entry.layer))

    def reset(self) -> None:
        """Forget all figures."""
        with self._lock:
            self._times.clear()

    # ----------------------------------------------------------------- hooks

    @hookimpl(wrapper=True)
    def veloxquant_create(self, layer: LayerSpec) -> _Wrapper:
        """Time the making of a state."""
        return (yield from self._timed_making("create", layer))

    @hookimpl(wrapper=True)
    def veloxquant_restore(self, layer: LayerSpec, snapshot: Snapshot) -> _Wrapper:
        """As for ``veloxquant_create``."""
        self._compute(snapshot.arrays)
        return (yield from self._timed_making("restore", layer))

    @hookimpl(wrapper=True)
    def veloxquant_prefill(self, state: Any, keys: mx.array, values: mx.array) -> _Wrapper:
        """Time the storing of prompt rows."""
        return (yield from self._timed_rows("prefill", state, keys, values))

    @hookimpl(wrapper=True)
    def veloxquant_decode(self, state: Any, keys: mx.array, values: mx.array) -> _Wrapper:
        """Time the storing of later rows."""
        return (yield from self._timed_rows("decode", state, keys, values))

    @hookimpl(wrapper=True)
    def veloxquant_attend(self, state: Any, queries: mx.array, keys: mx.array, values: mx.array) -> _Wrapper:
        """Time the attention; where it is left to the core, the making of the rows that the core will read."""
        self._compute(queries, state)
        start = time.perf_counter()
        output = yield
        self._compute((keys, values) if output is None else output, state)
        self._record("attend", layer_of(state), start)
        return output

    @hookimpl(wrapper=True)
    def veloxquant_step(self, states: Sequence[Any], queries: mx.array, keys: mx.array, values: mx.array) -> _Wrapper:
        """Time the storing and the attention of several sequences at once."""
        self._compute(queries, keys, values, list(states))
        start = time.perf_counter()
        output = yield
        self._compute(output, list(states))
        self._record("step", layer_of(states[0]), start)
        return output

    @hookimpl(wrapper=True)
    def veloxquant_finish_prompt(self, state: Any) -> _Wrapper:
        """Time what is done at the end of a prompt."""
        return (yield from self._timed("finish_prompt", state))

    @hookimpl(wrapper=True)
    def veloxquant_trim(self, state: Any) -> _Wrapper:
        """Time a rewind."""
        return (yield from self._timed("trim", state))

    @hookimpl(wrapper=True)
    def veloxquant_account(self, state: Any) -> _Wrapper:
        """Time the counting of bytes."""
        return (yield from self._timed("account", state))

    @hookimpl(wrapper=True)
    def veloxquant_serialize(self, state: Any) -> _Wrapper:
        """Time the taking of a snapshot."""
        return (yield from self._timed("serialize", state))

    @hookimpl(wrapper=True)
    def veloxquant_unread(self, state: Any) -> _Wrapper:
        """Time the naming of arrays."""
        return (yield from self._timed("unread", state))

    # ---------------------------------------------------------------- timing

    def _timed(self, hook: str, state: Any) -> _Wrapper:
        self._compute(state)
        start = time.perf_counter()
        result = yield
        self._compute(state)
        self._record(hook, layer_of(state), start)
        return result

    def _timed_making(self, hook: str, layer: LayerSpec) -> _Wrapper:
        start = time.perf_counter()
        state = yield
        self._compute(state)
        self._record(hook, layer, start)
        remember_layer(state, layer)
        return state

    def _timed_rows(self, hook: str, state: Any, keys: mx.array, values: mx.array) -> _Wrapper:
        self._compute(keys, values, state)
        layer = layer_of(state)
        start = time.perf_counter()
        result = yield
        self._compute(state, None if layer is not None and layer.routed else result)
        self._record(hook, layer, start)
        return result

    def _compute(self, *items: Any) -> None:
        if self.synchronize:
            mx.eval(arrays_within(items))

    def _record(self, hook: str, layer: LayerSpec | None, start: float) -> None:
        seconds = time.perf_counter() - start
        index = None if layer is None else layer.index
        with self._lock:
            entry = self._times.setdefault((hook, index), HookTime(hook, index))
            entry.calls += 1
            entry.total += seconds
            entry.worst = max(entry.worst, seconds)


def total_by_hook(rows: Iterable[HookTime]) -> list[HookTime]:
    """Sum over layers.

    Args:
        rows: What ``TimingObserver.rows`` gave.

    Returns:
        One record a hook, in the same order; its layer is the one with the slowest call.
    """
    sums: dict[str, HookTime] = {}
    for row in rows:
        entry = sums.setdefault(row.hook, HookTime(row.hook, row.layer))
        if row.worst > entry.worst:
            entry.worst, entry.layer = row.worst, row.layer
        entry.calls += row.calls
        entry.total += row.total
    return list(sums.values())


def arrays_within(item: Any) -> list[mx.array]:
    """Every array that can be reached from a state, a result or a cache, each once."""
    found: list[mx.array] = []
    seen: dict[int, Any] = {}
    waiting = [item]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, mx.array):
            found.append(one)
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif attrs.has(type(one)):
            waiting += [getattr(one, field.name, None) for field in attrs.fields(type(one))]
        elif hasattr(one, "__dict__") and not callable(one) and not isinstance(one, ModuleType):
            waiting += vars(one).values()
    return found
