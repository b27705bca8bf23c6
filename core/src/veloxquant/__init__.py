"""A plugin registry of KV-cache compression methods for mlx-lm models.

``get_cache`` makes the cache of one layer, ``make_prompt_cache`` those of a model, ``use`` wraps a model for a while;
``methods`` lists what is installed and ``report`` says what caches hold. Methods are plugins: see ``hookspecs``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any

try:
    import mlx.core  # noqa: F401 - mlx-lm on Linux brings no back end, and everything else needs one
except ImportError as error:
    raise ImportError(
        "veloxquant needs an MLX back end: on Linux install one with pip install 'veloxquant[cpu]' "
        "or pip install 'veloxquant[cuda13]'"
    ) from error

from veloxquant.errors import ConfigError
from veloxquant.errors import FileFormatError
from veloxquant.errors import PluginError
from veloxquant.errors import RoutingError
from veloxquant.errors import UnknownMethodError
from veloxquant.errors import UnsupportedModelError
from veloxquant.errors import UnsupportedShapeError
from veloxquant.errors import VeloxQuantError
from veloxquant.hooks import hookimpl
from veloxquant.types import ByteCount
from veloxquant.types import LayerSpec
from veloxquant.types import MethodInfo
from veloxquant.types import Rope
from veloxquant.types import Snapshot

if TYPE_CHECKING:
    from veloxquant.attention import route
    from veloxquant.attention import unroute
    from veloxquant.build import get_cache
    from veloxquant.build import make_prompt_cache
    from veloxquant.build import use
    from veloxquant.positions import PositionedRows
    from veloxquant.reports import report
    from veloxquant.rewind import trim_prompt_cache
    from veloxquant.row_attention import attend_rows
    from veloxquant.row_attention import attend_selected
    from veloxquant.rows import DenseRows
    from veloxquant.rows import RowStore
    from veloxquant.store import load_prompt_cache
    from veloxquant.store import register_with_mlx_lm
    from veloxquant.store import save_prompt_cache

__all__ = [
    "ByteCount",
    "ConfigError",
    "DenseRows",
    "FileFormatError",
    "LayerSpec",
    "MethodInfo",
    "PluginError",
    "PositionedRows",
    "Rope",
    "RoutingError",
    "RowStore",
    "Snapshot",
    "UnknownMethodError",
    "UnsupportedModelError",
    "UnsupportedShapeError",
    "VeloxQuantError",
    "attend_rows",
    "attend_selected",
    "get_cache",
    "hookimpl",
    "load_prompt_cache",
    "make_prompt_cache",
    "method_info",
    "methods",
    "register_with_mlx_lm",
    "report",
    "route",
    "save_prompt_cache",
    "trim_prompt_cache",
    "unroute",
    "use",
]

# Resolved at first use: listing methods needs none of it, and importing mlx-lm takes most of a second.
_LAZY = {
    "DenseRows": "rows",
    "PositionedRows": "positions",
    "RowStore": "rows",
    "attend_rows": "row_attention",
    "attend_selected": "row_attention",
    "get_cache": "build",
    "load_prompt_cache": "store",
    "make_prompt_cache": "build",
    "register_with_mlx_lm": "store",
    "report": "reports",
    "route": "attention",
    "save_prompt_cache": "store",
    "trim_prompt_cache": "rewind",
    "unroute": "attention",
    "use": "build",
}


def methods() -> list[str]:
    """Names of the installed methods; no plugin is imported."""
    from veloxquant.registry import default_registry

    return default_registry().names()


def method_info(name: str) -> MethodInfo:
    """What a method says of itself; imports that one plugin.

    Args:
        name: Name of the method.

    Raises:
        UnknownMethodError: There is no such method.
        PluginError: The plugin cannot be used.
    """
    from veloxquant.registry import default_registry

    return default_registry().get(name).info


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'veloxquant' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"veloxquant.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
