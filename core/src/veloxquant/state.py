"""A layer cache as plain text and arrays, and back: what mlx-lm calls ``state``, and what files hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.config import config_to_dict
from veloxquant.config import parse_config
from veloxquant.errors import ConfigError
from veloxquant.errors import FileFormatError
from veloxquant.errors import VeloxQuantError
from veloxquant.types import LayerSpec
from veloxquant.types import Rope
from veloxquant.types import Snapshot

if TYPE_CHECKING:
    from veloxquant.cache import LayerCache
    from veloxquant.method import Method
    from veloxquant.registry import Registry

__all__ = ["STATE_FORMAT", "describe", "rebuild"]

STATE_FORMAT = 1

_FIELDS = ("method", "distribution", "version", "config", "layer", "session", "values", "arrays")


def describe(cache: LayerCache, snapshot: Snapshot) -> dict[str, Any]:
    """Everything about a cache but its arrays, as values that JSON can hold."""
    layer = attrs.asdict(cache.layer, filter=attrs.filters.exclude("make_rows"))
    return {
        "format": STATE_FORMAT,
        "method": cache.method.name,
        "distribution": cache.method.distribution,
        "version": cache.method.version,
        "config": config_to_dict(cache.config),
        "layer": layer,
        "query_mode": cache.query_mode,
        "session": cache._session(),
        "values": dict(snapshot.values),
        "arrays": list(snapshot.arrays),
    }


def rebuild(state: Sequence[Any], registry: Registry | None = None, method: Method | None = None) -> LayerCache:
    """Make a cache from the list that ``LayerCache.state`` gave.

    Args:
        state: JSON text, then the arrays it names.
        registry: Where to find the method; by default the installed ones.
        method: The method to use if it has the name that the state gives.

    Raises:
        FileFormatError: The list is not such a state, or is of a newer format.
        UnknownMethodError: The method is not installed.
    """
    from veloxquant.build import complete_layer
    from veloxquant.build import new_layer_cache
    from veloxquant.registry import default_registry

    header, arrays = _read(state)
    registry = registry or default_registry()
    if method is None or method.name != header["method"]:
        method = registry.get(header["method"])
    _refuse_other_version(header, method)
    try:
        config: Any = parse_config(method.info.config, header["config"], method=method.name)
    except ConfigError as error:
        raise FileFormatError(
            f"the state was made by {header['distribution']} {header['version']}, whose options "
            f"{method.distribution} {method.version} does not understand: {error}"
        ) from error
    try:
        layer = complete_layer(_layer(header["layer"]), config, registry)
        inner = method.ops.restore(config, layer, Snapshot(arrays, header["values"]))
        cache = new_layer_cache(method, config, layer, inner)
        cache._resume(header["session"])
    except VeloxQuantError:
        raise
    except Exception as error:  # whatever a method trips over in an altered state
        raise FileFormatError(f"the state of {method.name} is damaged: {type(error).__name__}: {error}") from error
    return cache


def _refuse_other_version(header: Mapping[str, Any], method: Method) -> None:
    """What a method stores may change between minor versions, and nothing else would notice."""
    saved, installed = (str(version).split(".")[:2] for version in (header["version"], method.version))
    if saved != installed:
        raise FileFormatError(
            f"the state was made by {header['distribution']} {header['version']}, and {method.distribution} "
            f"{method.version} is installed; install {header['distribution']}=={header['version']} to read it"
        )


def _read(state: Sequence[Any]) -> tuple[dict[str, Any], dict[str, mx.array]]:
    if not state or not isinstance(state[0], str):
        raise FileFormatError("this is not the state of a veloxquant cache")
    try:
        header = json.loads(state[0])
        number = header["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise FileFormatError("this is not the state of a veloxquant cache") from error
    if number != STATE_FORMAT:
        raise FileFormatError(f"the state has format {number}, this veloxquant reads {STATE_FORMAT}; update veloxquant")
    missing = [field for field in _FIELDS if field not in header]
    if missing:
        raise FileFormatError(f"the state is damaged: it lacks {', '.join(missing)}")
    names = header["arrays"]
    if len(names) != len(state) - 1:
        raise FileFormatError(f"the state names {len(names)} arrays and brings {len(state) - 1}")
    return header, dict(zip(names, state[1:], strict=True))


def _layer(values: Mapping[str, Any]) -> LayerSpec:
    rope = values["rope"]
    if rope is not None:
        frequencies = rope["frequencies"]
        rope = Rope(**{**rope, "frequencies": None if frequencies is None else tuple(frequencies)})
    return LayerSpec(**{**values, "rope": rope})
