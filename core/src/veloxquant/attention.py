"""Attention itself, and the routing that brings the model's true queries to a cache.

mlx-lm's models call ``update_and_fetch(keys, values)`` on the cache, which gets no queries, and right after it
``scaled_dot_product_attention(queries, keys, values, cache=...)``, a name that each model file imports from
``mlx_lm.models.base``. ``route`` rebinds that name in the files of one model's layers to a dispatcher that lets a
cache with an ``attend`` method answer and hands every other call on.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.errors import RoutingError
from veloxquant.errors import UnsupportedModelError

__all__ = [
    "attention",
    "causal_mask",
    "is_routed",
    "live_attention",
    "live_mask",
    "refuse_other_rows",
    "route",
    "unroute",
]

BASE = "mlx_lm.models.base"
NAME = "scaled_dot_product_attention"

Attention = Callable[..., mx.array]


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Dense attention over all given rows.

    Args:
        queries: ``[B, Hq, L, Dk]``.
        keys: ``[B, Hkv, rows, Dk]``.
        values: ``[B, Hkv, rows, Dv]``.
        scale: Factor on the logits.
        mask: None, ``"causal"`` (aligned to the last row), or an array that broadcasts to ``[B, Hq, L, rows]``.
        sinks: Sink logits ``[Hq]``, or None.

    Returns:
        ``[B, Hq, L, Dv]`` in the dtype of the queries.

    Raises:
        RoutingError: An array mask does not fit the rows.
    """
    refuse_other_rows(mask, keys.shape[2])
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def live_attention(
    method: str,
    valid: mx.array | None,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Dense attention around rows that a rewind left dead in some heads.

    Args:
        method: Name of the method, for a message.
        valid: Live rows ``[B, Hkv, rows]`` bool, as ``PositionedRows.valid`` gives them, or None when all are.
        queries: As for ``attention``, and so are all that follow.
        keys: As for ``attention``.
        values: As for ``attention``.
        scale: As for ``attention``.
        mask: As for ``attention``.
        sinks: As for ``attention``.

    Returns:
        ``[B, Hq, L, Dv]`` in the dtype of the queries.

    Raises:
        RoutingError: An array mask does not fit the rows, or meets dead ones.
    """
    if valid is not None:
        if isinstance(mask, mx.array):
            raise RoutingError(
                f"{method} cannot combine a mask array of the model with rows that were rewound head by head; "
                "start a new cache instead of rewinding into the evicted prompt"
            )
        mask = live_mask(valid, queries.shape[1], queries.shape[2])
    return attention(queries, keys, values, scale, mask, sinks)


def refuse_other_rows(mask: mx.array | str | None, rows: int) -> None:
    """Refuse a mask array that was made for another number of rows.

    Raises:
        RoutingError: It was.
    """
    if isinstance(mask, mx.array) and mask.shape[-1] not in (1, rows):
        raise RoutingError(
            f"the model's mask covers {mask.shape[-1]} rows where the cache holds {rows}: layers that hold "
            "different numbers of rows cannot share one mask array; use a method that keeps all layers alike"
        )


def causal_mask(length: int, rows: int) -> mx.array:
    """The causal mask ``[length, rows]`` (bool) for queries of the last ``length`` of ``rows`` rows."""
    return mx.arange(rows) <= mx.arange(rows - length, rows)[:, None]


def live_mask(valid: mx.array, query_heads: int, length: int) -> mx.array:
    """Combine the causal mask with the rows that each head still holds.

    Args:
        valid: Live rows ``[B, Hkv, rows]`` bool.
        query_heads: Hq.
        length: Number of queries L, those of the last L rows.

    Returns:
        Bool mask ``[B, Hq, L, rows]``.
    """
    batch, kv_heads, rows = valid.shape
    by_query_head = mx.repeat(valid, query_heads // kv_heads, axis=1).reshape(batch, query_heads, 1, rows)
    return by_query_head & causal_mask(length, rows)


@attrs.define(eq=False)
class _Route:
    original: Attention
    # How often each model, by its id, was routed: models of one family share their modules.
    counts: dict[int, int] = attrs.field(factory=dict)


_routes: dict[str, _Route] = {}
_kept: set[int] = set()
# Models that are watched for their end: once each, however often they are routed.
_watched: set[int] = set()
# Reentrant: a model may be collected, and forgotten, while another one is being routed.
_lock = threading.RLock()


def route(model: Any) -> list[str]:
    """Bring the true queries of ``model`` to its caches; counted, and undone by as many calls of ``unroute``.

    Args:
        model: An mlx-lm model.

    Returns:
        Names of the Python modules whose attention call is routed.

    Raises:
        UnsupportedModelError: The model's layers do not call mlx-lm's attention function by name.
    """
    names = _modules(model)
    if not names:
        raise UnsupportedModelError(
            f"{type(model).__module__} does not call mlx-lm's {NAME}, so its queries cannot be routed to the cache; "
            "pass true_queries=False for the proxy mode, if the method has one"
        )
    with _lock:
        for name in names:
            entry = _routes.get(name)
            if entry is None:
                entry = _routes[name] = _Route(getattr(sys.modules[name], NAME))
                setattr(sys.modules[name], NAME, _dispatcher(entry.original))
            entry.counts[id(model)] = entry.counts.get(id(model), 0) + 1
        if id(model) not in _watched:
            _watched.add(id(model))
            weakref.finalize(model, _forget, id(model))
    return names


def unroute(model: Any) -> None:
    """Undo one ``route(model)``; the last one of all models that share a module restores its attention call."""
    with _lock:
        for name in _modules(model):
            entry = _routes.get(name)
            if entry is None or id(model) not in entry.counts:
                continue
            entry.counts[id(model)] -= 1
            if entry.counts[id(model)] == 0:
                del entry.counts[id(model)]
                _kept.discard(id(model))
            if not entry.counts:
                _restore(name, entry)


def _forget(gone: int) -> None:
    """Drop the counts of a model that no longer exists, before another one takes over its id."""
    with _lock:
        _kept.discard(gone)
        _watched.discard(gone)
        for name, entry in list(_routes.items()):
            entry.counts.pop(gone, None)
            if not entry.counts:
                _restore(name, entry)


def _restore(name: str, entry: _Route) -> None:
    del _routes[name]
    if name in sys.modules:
        setattr(sys.modules[name], NAME, entry.original)


def keep_routed(model: Any) -> None:
    """Route ``model`` once, however often this is called, until ``unroute(model)``; ``use`` blocks count apart."""
    if not (id(model) in _kept and is_routed(model)):
        route(model)
        _kept.add(id(model))


def is_routed(model: Any) -> bool:
    """Whether ``route(model)`` is in force for every attention call of this model's layers."""
    names = _modules(model)
    return bool(names) and all(name in _routes and id(model) in _routes[name].counts for name in names)


def routable(layer: Any) -> bool:
    """Whether some part of a layer calls mlx-lm's attention function by name."""
    return any(_routable_module(part) for part in parts(layer))


def _modules(model: Any) -> list[str]:
    found = {
        type(part).__module__
        for layer in getattr(model, "layers", ())
        for part in parts(layer)
        if _routable_module(part)
    }
    return sorted(found)


def parts(layer: Any) -> list[Any]:
    """A layer and every module inside it."""
    return [part for _, part in layer.named_modules()] if hasattr(layer, "named_modules") else [layer]


def _routable_module(part: Any) -> bool:
    name = type(part).__module__
    function = getattr(sys.modules.get(name), NAME, None)
    # The dispatcher carries the module name of what it wraps, so a routed module still counts.
    return name != BASE and getattr(function, "__module__", None) == BASE


def _dispatcher(original: Attention) -> Attention:
    @functools.wraps(original)
    def dispatch(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        attend = getattr(cache, "attend", None)
        if attend is None:
            if sinks is not None:
                others["sinks"] = sinks
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)
        output: mx.array = attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return output

    return dispatch
