"""From a method's name and options to caches: one layer's, or a whole model's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any

import attrs

from veloxquant.attention import keep_routed
from veloxquant.attention import route
from veloxquant.attention import unroute
from veloxquant.batch import MergeableLayerCache
from veloxquant.cache import LayerCache
from veloxquant.config import parse_config
from veloxquant.errors import ConfigError
from veloxquant.errors import UnsupportedModelError
from veloxquant.registry import default_registry
from veloxquant.routed import RoutedLayerCache
from veloxquant.types import LayerSpec

if TYPE_CHECKING:
    from veloxquant.method import Method
    from veloxquant.registry import Registry

__all__ = ["complete_layer", "get_cache", "layer_specs", "make_prompt_cache", "native_caches", "new_layer_cache", "use"]


def get_cache(
    name: str, config: object = None, *, layer: LayerSpec | None = None, registry: Registry | None = None
) -> LayerCache:
    """Make the cache of one layer. With no model at hand it runs in proxy mode.

    Args:
        name: Name of the method.
        config: Its options: an instance of its config class, a mapping, None, or ``key=value`` texts.
        layer: What is known of the layer; by default nothing.
        registry: Where to find the method; by default the installed ones.

    Returns:
        An empty cache.

    Raises:
        UnknownMethodError: There is no such method.
        PluginError: The plugin cannot be used.
        ConfigError: An option cannot be used, or the method needs true queries.
    """
    registry = registry or default_registry()
    method = registry.get(name)
    parsed: Any = parse_config(method.info.config, config, method=name)
    layer = layer or LayerSpec()
    if not layer.routed and "queries" in method.needs(parsed):
        raise ConfigError(f"{name} needs the model's true queries; use veloxquant.make_prompt_cache(model, '{name}')")
    return new_layer_cache(method, parsed, complete_layer(layer, parsed, registry))


def make_prompt_cache(
    model: Any,
    name: str,
    config: object = None,
    *,
    true_queries: bool = True,
    layers: Collection[int] | None = None,
    registry: Registry | None = None,
) -> list[Any]:
    """Make the caches of a model, compressed where its layers have full attention.

    The model's own caches are asked for first and stay where they are not plain: sliding-window, SSM and other
    layers keep what the model built. With true queries the model's attention is routed (once, however many caches
    are made) and stays so until ``veloxquant.unroute(model)``.

    Args:
        model: An mlx-lm model.
        name: Name of the method.
        config: Its options, as for ``get_cache``.
        true_queries: Bring the model's queries to the caches. False: proxy mode.
        layers: Indices of the layers to compress; by default all that can be.
        registry: Where to find the method; by default the installed ones.

    Returns:
        A list for mlx-lm's ``prompt_cache`` argument.

    Raises:
        UnknownMethodError: There is no such method.
        PluginError: The plugin cannot be used.
        ConfigError: An option cannot be used.
        UnsupportedModelError: The model cannot be served; the message says why.
    """
    caches = _make(model, name, config, true_queries, layers, registry or default_registry())
    if any(cache.query_mode == "routed" for cache in caches if isinstance(cache, LayerCache)):
        keep_routed(model)
    return caches


@contextlib.contextmanager
def use(
    model: Any,
    name: str,
    config: object = None,
    *,
    true_queries: bool = True,
    layers: Collection[int] | None = None,
    registry: Registry | None = None,
) -> Iterator[None]:
    """Let every cache that mlx-lm makes for ``model`` be compressed, inside a ``with`` block.

    Sets ``model.make_cache`` and routes the model's attention; both are undone on leaving. Caches made inside need
    the routing, so use them inside.

    Args:
        model: An mlx-lm model.
        name: Name of the method.
        config: Its options, as for ``get_cache``.
        true_queries: Bring the model's queries to the caches. False: proxy mode.
        layers: Indices of the layers to compress; by default all that can be.
        registry: Where to find the method; by default the installed ones.

    Raises:
        VeloxQuantError: As for ``make_prompt_cache``, before anything is changed.
    """
    registry = registry or default_registry()
    # A trial run, so that what is refused is refused here and not in the middle of a generation.
    trial = _make(model, name, config, true_queries, layers, registry)
    routed = any(cache.query_mode == "routed" for cache in trial if isinstance(cache, LayerCache))
    before = vars(model).get("make_cache")

    def make_cache() -> list[Any]:
        return _make(model, name, config, true_queries, layers, registry)

    if routed:
        route(model)
    ours = _CompressedMakeCache(make_cache, before)
    _set_make_cache(model, ours)
    try:
        yield
    finally:
        _take_out(model, ours)
        if routed:
            unroute(model)


def new_layer_cache(method: Method, config: Any, layer: LayerSpec, state: Any = None) -> LayerCache:
    """Make the cache of a layer: routed where the layer is and the method attends, mergeable where that is safe."""
    if not layer.routed or method.ops.attend is None:
        return LayerCache(method, config, layer, state)
    return (RoutedLayerCache if layer.mixed else MergeableLayerCache)(method, config, layer, state)


def complete_layer(layer: LayerSpec, config: Any, registry: Registry) -> LayerSpec:
    """Give the layer the row store that the config asks for with its option ``storage``, if it has one.

    Raises:
        ConfigError: The storage method offers no row store, or its options cannot be used.
    """
    storage = getattr(config, "storage", None)
    options = getattr(config, "storage_config", None)
    if storage is None:
        if options is not None:
            raise ConfigError("storage_config is given and storage is not; name the method that stores the rows")
        return layer
    method = registry.get(storage)
    make = method.ops.rows
    if make is None:
        raise ConfigError(f"storage='{storage}' cannot be used: {storage} offers no row store to other methods")
    parsed: Any = parse_config(method.info.config, options, method=storage)
    return attrs.evolve(layer, make_rows=lambda: make(parsed, layer))


@attrs.define(eq=False)
class _CompressedMakeCache:
    """What ``use`` puts in the place of ``model.make_cache``, remembering what was there."""

    make: Callable[[], list[Any]]
    before: Any

    def __call__(self) -> list[Any]:
        return self.make()


def _take_out(model: Any, ours: _CompressedMakeCache) -> None:
    """Take one block's ``make_cache`` out, wherever it stands: blocks may be left in another order than entered."""
    current = vars(model).get("make_cache")
    if current is ours:
        _set_make_cache(model, ours.before)
    while isinstance(current, _CompressedMakeCache):
        if current.before is ours:
            current.before = ours.before
        current = current.before


@attrs.frozen
class _Layers:
    """A model without ``make_cache``, for which mlx-lm makes plain caches."""

    layers: Any


def native_caches(model: Any) -> list[Any]:
    """The caches that the model makes by itself, inside and outside of ``use``."""
    from mlx_lm.models.cache import make_prompt_cache as make_native

    own = vars(model).get("make_cache")
    while isinstance(own, _CompressedMakeCache):
        own = own.before
    if own is not None:
        caches = own()
    elif hasattr(type(model), "make_cache"):
        caches = type(model).make_cache(model)
    else:
        caches = make_native(_Layers(model.layers))
    return list(caches)


def layer_specs(model: Any, *, layers: Collection[int] | None, routed: bool) -> list[LayerSpec]:
    """Describe the layers of a model whose caches can be compressed, see ``models.inspect``."""
    return _inspect(model, layers, routed)[1]


def _inspect(model: Any, layers: Collection[int] | None, routed: bool) -> tuple[list[Any], list[LayerSpec]]:
    # Imported at first use: it brings mlx-lm.
    from veloxquant.models import inspect
    from veloxquant.models import refuse_without_layers

    refuse_without_layers(model)
    native = native_caches(model)
    return native, inspect(model, native, layers=layers, routed=routed)


def _set_make_cache(model: Any, make_cache: Any) -> None:
    if make_cache is None:
        vars(model).pop("make_cache", None)
    else:
        object.__setattr__(model, "make_cache", make_cache)


def _make(
    model: Any, name: str, config: object, true_queries: bool, layers: Collection[int] | None, registry: Registry
) -> list[Any]:
    method = registry.get(name)
    parsed: Any = parse_config(method.info.config, config, method=name)
    routed = true_queries and method.ops.attend is not None
    needs = method.needs(parsed)
    if not true_queries and "queries" in needs:
        raise ConfigError(f"{name} needs the model's true queries; leave true_queries=False out")
    caches, specs = _inspect(model, layers, routed)
    for spec in specs:
        if "rope" in needs and spec.rope is None:
            raise UnsupportedModelError(
                f"{name} must undo the model's rotary embedding, and that of layer {spec.index} cannot be described"
            )
        _make_layer(caches, spec, method, parsed, registry)
    return caches


def _make_layer(caches: list[Any], spec: LayerSpec, method: Method, config: Any, registry: Registry) -> None:
    caches[spec.index] = new_layer_cache(method, config, complete_layer(spec, config, registry))
