"""Prompt caches in files.

There are no class names and no code in a file: compressed layers are rebuilt by their method, the other layers by the
model's own ``make_cache``. Everything is checked before the first cache is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.attention import keep_routed
from veloxquant.batch import BatchLayerCache
from veloxquant.build import layer_specs
from veloxquant.build import native_caches
from veloxquant.cache import LayerCache
from veloxquant.config import parse_config
from veloxquant.errors import ConfigError
from veloxquant.errors import FileFormatError
from veloxquant.errors import VeloxQuantError
from veloxquant.registry import Registry
from veloxquant.registry import default_registry
from veloxquant.safefile import read_description
from veloxquant.safefile import read_file
from veloxquant.safefile import write_file
from veloxquant.state import STATE_FORMAT
from veloxquant.state import rebuild

__all__ = [
    "describe_prompt_cache",
    "load_prompt_cache",
    "pack_prompt_cache",
    "register_with_mlx_lm",
    "save_prompt_cache",
]


def save_prompt_cache(
    path: str | os.PathLike[str], caches: Sequence[Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Save the caches of a model, compressed as they are.

    Args:
        path: The file; written whole under another name first, so that an older one is never left damaged.
        caches: The list that ``make_prompt_cache`` gave, used or empty; layers that the model cached itself included.
        metadata: Texts to keep with them.

    Raises:
        VeloxQuantError: No layer is compressed, a batch is given, ``metadata`` holds something other than texts, or
            the file cannot be written.
    """
    write_file(path, *pack_prompt_cache(caches, metadata))


def pack_prompt_cache(
    caches: Sequence[Any], metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Take apart what ``save_prompt_cache`` writes, for those who write it elsewhere or later.

    Args:
        caches: As for ``save_prompt_cache``.
        metadata: Texts to keep with them.

    Returns:
        The description and the arrays for ``safefile.write_file``. Arrays are lazy: MLX computes them on the thread
        that asked for them only, so evaluate them before another thread writes.

    Raises:
        VeloxQuantError: No layer is compressed, a batch is given, or ``metadata`` holds something other than texts.
    """
    for key, value in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise VeloxQuantError(f"metadata maps texts to texts; {key!r}: {value!r} is not that")
    if any(isinstance(cache, BatchLayerCache) for cache in caches):
        raise VeloxQuantError("a batch is saved sequence by sequence; take each out with extract(index) first")
    if not any(isinstance(cache, LayerCache) for cache in caches):
        raise VeloxQuantError("no layer is compressed; save plain caches with mlx_lm.models.cache.save_prompt_cache")
    arrays: dict[str, mx.array] = {}
    layers = [_pack_layer(index, cache, arrays) for index, cache in enumerate(caches)]
    return {"metadata": dict(metadata or {}), "layers": layers}, arrays


def load_prompt_cache(
    path: str | os.PathLike[str],
    model: Any,
    *,
    method: str | None = None,
    config: object = None,
    registry: Registry | None = None,
) -> list[Any]:
    """Load the caches that ``save_prompt_cache`` wrote, and route the model's attention if they need it.

    Args:
        path: The file.
        model: The model that they belong to.
        method: The method that the caller expects; by default whatever the file says.
        config: The options that the caller expects with ``method``; by default whatever the file says.
        registry: Where to find methods; by default the installed ones.

    Returns:
        Caches that go on exactly as those saved would have.

    Raises:
        FileFormatError: The file is damaged, of a newer format, or of another model, method or options.
        UnknownMethodError: The method is not installed.
    """
    registry = registry or default_registry()
    file = read_file(path)
    layers = file.description["layers"]
    native = native_caches(model)
    if len(native) != len(layers):
        raise FileFormatError(
            f"{path} holds {len(layers)} layers and the model has {len(native)}: another model's file"
        )
    rebuilt = [_unpack_layer(layer, file.arrays, registry) for layer in layers]
    _check_model(path, model, rebuilt)
    _check_expected(path, rebuilt, method, config, registry)
    caches = []
    for index, (own, layer, cache) in enumerate(zip(native, layers, rebuilt, strict=True)):
        if cache is None:
            _fill_native(path, index, own, layer, file.arrays)
        caches.append(own if cache is None else cache)
    if any(isinstance(cache, LayerCache) and cache.query_mode == "routed" for cache in caches):
        keep_routed(model)
    return caches


def describe_prompt_cache(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Say what a file holds, with neither a model nor the method at hand.

    Args:
        path: The file.

    Returns:
        ``metadata``, and a list ``layers`` with each layer's method, version, options and tokens seen.

    Raises:
        FileFormatError: The file is damaged or of a newer format.
    """
    description = read_description(path)
    layers = []
    for layer in description["layers"]:
        if "native" in layer:
            layers.append({"method": None})
            continue
        header = json.loads(layer["state"][0]["value"])
        if header["format"] > STATE_FORMAT:
            raise FileFormatError(
                f"{path} holds caches of format {header['format']}, this veloxquant reads up to {STATE_FORMAT}; "
                "update veloxquant"
            )
        shown = {name: header[name] for name in ("method", "distribution", "version", "config")}
        layers.append({**shown, "index": header["layer"]["index"], "tokens_seen": header["session"]["offset"],
                       "query_mode": header["query_mode"]})  # fmt: skip
    return {"format": description["format"], "metadata": description["metadata"], "layers": layers}


def register_with_mlx_lm() -> None:
    """Let ``mlx_lm.models.cache.load_prompt_cache`` read compressed caches that mlx-lm's own function saved.

    mlx-lm looks cache classes up by name in its own module; this puts ours there. Such files carry no digest, and
    mlx-lm checks neither model nor options: prefer ``save_prompt_cache`` of this package.
    """
    from mlx_lm.models import cache as mlx_lm_cache

    from veloxquant.batch import MergeableLayerCache
    from veloxquant.routed import RoutedLayerCache

    for kind in (LayerCache, RoutedLayerCache, MergeableLayerCache, BatchLayerCache):
        setattr(mlx_lm_cache, kind.__name__, kind)


def _pack_layer(index: int, cache: Any, arrays: dict[str, mx.array]) -> dict[str, Any]:
    compressed = isinstance(cache, LayerCache)
    return {"state" if compressed else "native": _pack(cache.state, arrays, f"layer{index}")}


def _unpack_layer(layer: Mapping[str, Any], arrays: Mapping[str, mx.array], registry: Registry) -> LayerCache | None:
    return rebuild(_unpack(layer["state"], arrays), registry) if "state" in layer else None


def _fill_native(path: Any, index: int, cache: Any, layer: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> None:
    if isinstance(cache, LayerCache):
        raise FileFormatError(f"{path} holds no compressed cache for layer {index}: another model's file")
    try:
        cache.state = _unpack(layer["native"], arrays)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise FileFormatError(
            f"{path} does not fit the {type(cache).__name__} of layer {index}: another model's file, "
            "or one of another mlx-lm"
        ) from error


def _check_model(path: Any, model: Any, caches: Sequence[LayerCache | None]) -> None:
    """Compare what the file says of each layer with the model."""
    compressed = {index: cache for index, cache in enumerate(caches) if cache is not None}
    routed = any(cache.layer.routed for cache in compressed.values())
    try:
        specs = layer_specs(model, layers=list(compressed), routed=routed)
    except ConfigError as error:
        raise FileFormatError(f"{path} was saved for another model: {error}") from error
    for spec in specs:
        found = compressed[spec.index].layer
        if found.kv_heads is not None and found.index != spec.index:
            raise FileFormatError(f"{path} holds the cache of layer {found.index} in the place of layer {spec.index}")
        if (found.shard_index, found.shard_count) != (spec.shard_index, spec.shard_count):
            raise FileFormatError(
                f"{path} holds the heads of process {found.shard_index} of {found.shard_count}, and this is process "
                f"{spec.shard_index} of {spec.shard_count}; give every process of a sharded model a file of its own"
            )
        for field in ("query_heads", "kv_heads", "head_dim", "scale", "rope", "mixed"):
            theirs, ours = getattr(found, field), getattr(spec, field)
            # What the file does not know (caches made without a model) cannot disagree.
            if theirs is not None and theirs != ours:
                raise FileFormatError(
                    f"{path} was saved for another model: layer {spec.index} has {field} {theirs} there and {ours} here"
                )


def _check_expected(
    path: Any, caches: Sequence[LayerCache | None], method: str | None, config: object, registry: Registry
) -> None:
    if method is None:
        if config is not None:
            raise VeloxQuantError("say which method the options belong to: pass method= with config=")
        return
    info = registry.get(method).info
    expected: Any = None if config is None else parse_config(info.config, config, method=method)
    for cache in caches:
        if cache is None:
            continue
        if cache.method.name != method:
            raise FileFormatError(f"{path} was saved with {cache.method.name}, not with {method}")
        if expected is not None and cache.config != expected:
            raise FileFormatError(
                f"{path} was saved with {cache.method.name} and {cache.config}, not with {method} and {expected}"
            )


def _pack(value: Any, arrays: dict[str, mx.array], prefix: str) -> Any:
    """Turn a nested state into JSON values, its arrays moved into ``arrays`` under names with ``prefix``."""
    if isinstance(value, mx.array):
        name = f"{prefix}.{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, list | tuple):
        return [_pack(item, arrays, prefix) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise VeloxQuantError(f"a native cache holds a {type(value).__name__}, which cannot be saved")


def _unpack(value: Any, arrays: Mapping[str, mx.array]) -> Any:
    """The nested state that ``_pack`` was given, tuples as lists."""
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    return arrays[value["array"]] if "array" in value else value["value"]
