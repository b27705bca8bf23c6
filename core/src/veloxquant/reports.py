"""What caches hold and what they would hold uncompressed, from the arrays themselves."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.attention import attention
from veloxquant.batch import BatchLayerCache
from veloxquant.cache import LayerCache
from veloxquant.errors import VeloxQuantError
from veloxquant.types import ByteCount
from veloxquant.types import Snapshot

__all__ = ["LayerReport", "Report", "report"]


@attrs.frozen(kw_only=True)
class LayerReport:
    """One layer's part of a report.

    Args:
        index: Position in the cache list.
        method: Name of the method, or the class of a cache that the model built itself.
        query_mode: ``routed``, ``proxy``, or None where queries play no part; ``routed, queries missing`` when those of
            the last rows did not come.
        trim: What ``trim`` does: ``exact``, ``approximate`` when a deep one leaves fewer rows, or codes in
            the place of exact rows; or ``refused``.
        tokens_seen: Tokens that passed through; in a batch the sum over its sequences, as for all that follows.
        tokens_kept: Rows held per KV head.
        bytes_held: Bytes of the arrays held by this cache alone.
        bytes_plain: Bytes that mlx-lm's plain cache would hold for the tokens seen, without its spare capacity.
        bytes_static: Bytes of arrays shared with other caches.
        step_bytes: Bytes that one decode step allocated for a moment, or None when not measured.
        details: Keys, values and auxiliary bytes, and what the method adds.
    """

    index: int
    method: str
    query_mode: str | None
    trim: str
    tokens_seen: int
    tokens_kept: int
    bytes_held: int
    bytes_plain: int
    bytes_static: int
    step_bytes: int | None
    details: dict[str, Any]


@attrs.frozen(kw_only=True)
class Report:
    """The layers of a model's caches, and their sums."""

    layers: tuple[LayerReport, ...]

    @property
    def compressed(self) -> tuple[LayerReport, ...]:
        """The layers that a veloxquant method serves."""
        return tuple(layer for layer in self.layers if layer.query_mode is not None or layer.trim != "native")

    @property
    def tokens_seen(self) -> int:
        """Tokens that passed through; the most of any layer."""
        return max((layer.tokens_seen for layer in self.layers), default=0)

    @property
    def tokens_kept(self) -> float:
        """Rows held per KV head, the mean over the compressed layers."""
        kept = [layer.tokens_kept for layer in self.compressed]
        return sum(kept) / len(kept) if kept else 0.0

    @property
    def bytes_held(self) -> int:
        """Bytes held by all layers."""
        return sum(layer.bytes_held for layer in self.layers)

    @property
    def bytes_plain(self) -> int:
        """Bytes that plain caches would hold in the compressed layers, plus what the other layers hold."""
        return sum(layer.bytes_plain for layer in self.layers)

    @property
    def bytes_static(self) -> int:
        """Bytes of shared arrays, counted once."""
        return max((layer.bytes_static for layer in self.layers), default=0)

    @property
    def ratio(self) -> float:
        """Plain bytes over held bytes; 1.0 for empty caches."""
        return self.bytes_plain / self.bytes_held if self.bytes_held else 1.0

    @property
    def query_mode(self) -> str:
        """The query mode of the compressed layers, ``mixed`` when they differ, ``none`` when queries play no part."""
        modes = {layer.query_mode or "none" for layer in self.compressed}
        return modes.pop() if len(modes) == 1 else "mixed" if modes else "none"

    @property
    def step_bytes(self) -> int | None:
        """The most that any layer allocates for a moment in one step (layers run one after another)."""
        measured = [layer.step_bytes for layer in self.layers if layer.step_bytes is not None]
        return max(measured) if measured else None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON."""
        names = ("tokens_seen", "tokens_kept", "bytes_held", "bytes_plain", "bytes_static", "ratio", "query_mode")
        totals = {name: getattr(self, name) for name in (*names, "step_bytes")}
        return {**totals, "layers": [attrs.asdict(layer) for layer in self.layers]}


def report(caches: Any, *, measure_step: bool = False) -> Report:
    """Say what is really active, layer by layer.

    Args:
        caches: The list that ``make_prompt_cache`` gave, or one cache.
        measure_step: Run one decode step on a copy of each compressed layer and measure what it allocates. Takes
            a copy of one layer at a time and resets MLX's peak-memory counter.

    Returns:
        The report; figures come from the arrays held, never from a formula.

    Raises:
        VeloxQuantError: It is no list of caches.
    """
    if isinstance(caches, Mapping):  # which a model is
        raise VeloxQuantError(f"report takes the caches that make_prompt_cache gave, not {type(caches).__name__}")
    if not isinstance(caches, Iterable):
        caches = [caches]
    return Report(layers=tuple(_layer(index, cache, measure_step) for index, cache in enumerate(caches)))


def _layer(index: int, cache: Any, measure_step: bool) -> LayerReport:
    if isinstance(cache, BatchLayerCache):
        return _batch(index, cache)
    if not isinstance(cache, LayerCache):
        return _native(index, cache)
    count = cache.account()
    return LayerReport(
        index=index,
        method=cache.method.name,
        query_mode="routed, queries missing" if cache.queries_missing else cache.query_mode,
        trim=_trim(cache),
        tokens_seen=cache.offset,
        tokens_kept=cache.offset if count.rows is None else count.rows,
        bytes_held=count.held,
        bytes_plain=cache.plain_nbytes,
        bytes_static=count.static,
        step_bytes=_step_bytes(cache) if measure_step and not cache.empty() else None,
        details=_details(count),
    )


def _batch(index: int, cache: BatchLayerCache) -> LayerReport:
    """A batch is the sum of its sequences."""
    parts = [_layer(index, sequence, False) for sequence in cache.sequences]
    if not parts:
        return _native(index, cache)
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("tokens_seen", "tokens_kept", "bytes_held", "bytes_plain")
    }
    itemised = {name: sum(part.details[name] for part in parts) for name in ("keys", "values", "auxiliary")}
    return attrs.evolve(
        parts[0],
        **sums,
        bytes_static=max(part.bytes_static for part in parts),
        details={"sequences": len(parts), **itemised},
    )


def _details(count: ByteCount) -> dict[str, Any]:
    return {"keys": count.keys, "values": count.values, "auxiliary": count.auxiliary, **count.details}


def _trim(cache: LayerCache) -> str:
    if not cache.is_trimmable():
        return "refused"
    method, config = cache.method, cache.config
    lossy = method.evicts(config) or method.exact_rows(config) > 0
    return "approximate" if lossy else "exact"


def _native(index: int, cache: Any) -> LayerReport:
    offset = getattr(cache, "offset", 0)
    seen = offset if isinstance(offset, int) else 0
    held = int(cache.nbytes) if not cache.empty() else 0
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    plain = held
    if isinstance(keys, mx.array) and isinstance(values, mx.array) and seen <= keys.shape[2]:
        # Live rows only: mlx-lm's plain cache holds up to 255 spare ones.
        plain = (keys.nbytes + values.nbytes) * seen // keys.shape[2]
    # A sliding window holds fewer rows than it has seen.
    kept = min(seen, keys.shape[2]) if isinstance(keys, mx.array) else seen
    return LayerReport(
        index=index,
        method=type(cache).__name__,
        query_mode=None,
        trim="native",
        tokens_seen=seen,
        tokens_kept=kept,
        bytes_held=held,
        bytes_plain=plain,
        bytes_static=0,
        step_bytes=None,
        details={},
    )


def _step_bytes(cache: LayerCache) -> int:
    """Peak of one decode step above what is held before it, on a copy with arrays of its own."""
    twin, step = _twin(cache), _zero_step(cache)
    # The first step may have to grow the buffers; the second is what most steps are.
    mx.eval(_attend_once(twin, *step), twin.state)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(_attend_once(twin, *step), twin.state)
    return max(0, mx.get_peak_memory() - before)


def _twin(cache: LayerCache) -> LayerCache:
    ops = cache.method.ops
    snapshot = ops.serialize(cache.method_state)
    # Adding nothing makes new arrays; a view would share its buffer, and the step could then not write in place.
    arrays = {name: array + mx.zeros((), array.dtype) for name, array in snapshot.arrays.items()}
    mx.eval(arrays)
    state = ops.restore(cache.config, cache.layer, Snapshot(arrays, snapshot.values))
    twin = type(cache)(cache.method, cache.config, cache.layer, state)
    twin._resume(cache._session())
    return twin


def _zero_step(cache: LayerCache) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of one token, all zero, in the shapes that the cache has seen."""
    batch, heads, key_dim, value_dim = cache.row_shape
    dtype = getattr(mx, cache.row_dtype)
    keys, values = mx.zeros((batch, heads, 1, key_dim), dtype), mx.zeros((batch, heads, 1, value_dim), dtype)
    queries = mx.zeros((batch, cache.layer.query_heads or heads, 1, key_dim), dtype)
    mx.eval(keys, values, queries)
    return queries, keys, values


def _attend_once(cache: LayerCache, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    all_keys, all_values = cache.update_and_fetch(keys, values)
    attend = getattr(cache, "attend", None)
    if attend is None:
        return attention(queries, all_keys, all_values, 1.0, None)
    output: mx.array = attend(queries, all_keys, all_values, 1.0, None)
    return output
