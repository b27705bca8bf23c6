"""What the bench compares: arms, each a way to make the caches of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import QuantizedKVCache

from veloxquant.attention import keep_routed
from veloxquant.bench.references import RecentRows
from veloxquant.bench.references import RecentRowsConfig
from veloxquant.bench.references import ReferenceCache
from veloxquant.bench.references import TopRows
from veloxquant.bench.references import TopRowsConfig
from veloxquant.build import get_cache
from veloxquant.build import make_prompt_cache
from veloxquant.build import native_caches
from veloxquant.config import config_to_dict
from veloxquant.config import parse_config
from veloxquant.registry import Registry
from veloxquant.registry import default_registry
from veloxquant.types import LayerSpec

__all__ = ["GROUP_SIZES", "Arm", "method_arm", "plain_arm", "quantized_arm", "recent_rows_arm", "top_rows_arm"]

GROUP_SIZES = (64, 32, 128)
"""Group sizes of mlx-lm's quantized cache, the preferred one first."""


@attrs.frozen(kw_only=True)
class Arm:
    """One way to make caches.

    Args:
        name: What tables call it; no two arms of a run have the same.
        method: The method, or the cache that serves in its place.
        role: ``method``, ``reference`` or ``peer``.
        config: All its options, as plain values.
        make: Makes the caches of a model; routes the model's attention where that is needed.
        make_layer: Makes the cache of one layer from a ``LayerSpec``, for rows that come from no model.
        take: Makes caches that go on from plain ones, which have seen a prompt but for its last token, and leaves
            those as they are. None for arms that must see the prompt themselves.
        note: A sentence on it, or None.
    """

    name: str
    method: str
    role: str = "method"
    config: dict[str, Any] = attrs.field(factory=dict)
    make: Callable[[Any], list[Any]]
    make_layer: Callable[[LayerSpec], Any]
    take: Callable[[Any, list[Any]], list[Any]] | None = None
    note: str | None = None

    def describe(self) -> dict[str, Any]:
        """The fields of a result that describe it."""
        return {"arm": self.name, "method": self.method, "role": self.role, "config": self.config}


def method_arm(method: str, config: object = None, *, name: str | None = None, registry: Registry | None = None) -> Arm:
    """A method of the registry.

    Args:
        method: Its name.
        config: Its options, as ``get_cache`` takes them.
        name: Name of the arm; by default the method's name and the options that were given.
        registry: Where to find the method.

    Raises:
        VeloxQuantError: There is no such method, or an option cannot be used.
    """
    registry = registry or default_registry()
    parsed: Any = parse_config(registry.get(method).info.config, config, method=method)
    return Arm(
        name=name or method,
        method=method,
        config=config_to_dict(parsed),
        make=lambda model: make_prompt_cache(model, method, parsed, registry=registry),
        make_layer=lambda layer: get_cache(
            method, parsed, layer=attrs.evolve(layer, query_mode="routed"), registry=registry
        ),
    )


def plain_arm() -> Arm:
    """mlx-lm's own caches, as the model makes them."""
    return Arm(
        name="plain",
        method="plain",
        role="reference",
        make=native_caches,
        make_layer=_plain_layer,
        take=lambda _, plain: copy.deepcopy(plain),
    )


def _plain_layer(_: LayerSpec) -> Any:
    kind: Any = KVCache  # mlx-lm's classes have no types
    return kind()


def quantized_arm(bits: int, group_size: int = GROUP_SIZES[0]) -> Arm:
    """mlx-lm's quantized cache in every layer of full attention.

    Args:
        bits: Bits of a number.
        group_size: Numbers that share a scale; must divide the head dim.
    """

    def one(_: Any = None) -> QuantizedKVCache:
        return QuantizedKVCache(group_size, bits)

    return Arm(
        name=f"QuantizedKVCache {bits} bits",
        method="QuantizedKVCache",
        role="reference",
        config={"bits": bits, "group_size": group_size},
        make=lambda model: _replaced(native_caches(model), one),
        make_layer=one,
    )


def recent_rows_arm(rows: int, *, growth: float = 1.0, sinks: int = 4, name: str | None = None) -> Arm:
    """The simplest evictor, see ``references.RecentRows``."""
    config = RecentRowsConfig(rows=rows, growth=growth, sinks=sinks)
    return _reference(name or f"first {sinks} + newest rows, {rows}", "recent rows", RecentRows, config, routed=False)


def top_rows_arm(rows: int, *, sinks: int = 4, recent: int = 32, name: str | None = None) -> Arm:
    """The best choice of rows to read, see ``references.TopRows``."""
    config = TopRowsConfig(rows=rows, sinks=sinks, recent=recent)
    return _reference(name or f"exact top {rows} rows", "top rows", TopRows, config, routed=True)


def _reference(name: str, method: str, kind: type[ReferenceCache], config: Any, *, routed: bool) -> Arm:
    def route_if_needed(model: Any) -> None:
        if routed:
            keep_routed(model)

    def make(model: Any) -> list[Any]:
        route_if_needed(model)
        return _replaced(native_caches(model), lambda _: kind(config))

    def take(model: Any, plain: list[Any]) -> list[Any]:
        route_if_needed(model)
        return _replaced(plain, lambda cache: _continued(kind(config), cache))

    return Arm(
        name=name,
        method=method,
        role="reference",
        config=attrs.asdict(config),
        make=make,
        make_layer=lambda _: kind(config),
        take=take,
    )


def _replaced(caches: Iterable[Any], make: Callable[[Any], Any]) -> list[Any]:
    """The caches with something else in the place of the plain ones, which serve full attention."""
    return [make(cache) if type(cache) is KVCache else copy.deepcopy(cache) for cache in caches]


def _continued(cache: ReferenceCache, plain: Any) -> ReferenceCache:
    if not plain.empty():
        cache.take(*plain.keys_and_values())
        mx.eval(cache.state)
    return cache
