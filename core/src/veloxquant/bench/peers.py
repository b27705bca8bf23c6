"""Other libraries, measured on the same work where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import attrs

from veloxquant.bench.arms import Arm
from veloxquant.build import layer_specs
from veloxquant.build import native_caches
from veloxquant.config import suggest
from veloxquant.errors import VeloxQuantError
from veloxquant.types import LayerSpec

__all__ = ["PEERS", "peer_arms"]

VERSION = "0.94.15"
_PACKAGE = "veloxquant_mlx"
_INSTALL = f"pip install --no-deps veloxquant-mlx=={VERSION}"


@attrs.frozen
class _Setting:
    """One method of veloxquant-mlx as it is measured.

    Args:
        name: What tables call it, after the library's name.
        method: What the library calls the method.
        options: Fields of the library's config.
    """

    name: str
    method: str
    options: dict[str, Any]


def _settings(tokens: int) -> tuple[_Setting, ...]:
    """What is measured: settings that store or read about as much as the methods here do at their defaults."""
    budget = max(64, tokens // 4)
    return (
        _Setting("turboquant_rvq b=1", "turboquant_rvq", {"bit_width_inlier": 1}),
        _Setting("turboquant_rvq b=2", "turboquant_rvq", {"bit_width_inlier": 2}),
        _Setting("rocketkv ratio 8", "rocketkv", {"rocketkv_compression_ratio": 8.0}),
        _Setting(f"snapkv {budget} rows", "snapkv", {"snap_budget": budget}),
    )


def _veloxquant_mlx(tokens: int) -> list[Arm]:
    if importlib.util.find_spec(_PACKAGE) is None:
        raise VeloxQuantError(
            f"veloxquant-mlx is not installed; run '{_INSTALL}' (or nox -s peers, which keeps it in an environment of "
            "its own), or leave --peer out"
        )
    return [_arm(setting) for setting in _settings(tokens)]


def _arm(setting: _Setting) -> Arm:
    def one(dim: int) -> Any:
        base = importlib.import_module(f"{_PACKAGE}.cache.base")
        return base.KVCacheFactory.create(base.KVCacheConfig(method=setting.method, head_dim=dim, **setting.options))

    def make(model: Any) -> list[Any]:
        caches = native_caches(model)
        for spec in layer_specs(model, layers=None, routed=False):
            caches[spec.index] = one(_head_dim(spec))
        return caches

    return Arm(
        name=f"veloxquant-mlx {setting.name}",
        method=f"veloxquant-mlx {setting.method}",
        role="peer",
        config=dict(setting.options),
        make=make,
        make_layer=lambda layer: one(_head_dim(layer)),
    )


def _head_dim(layer: LayerSpec) -> int:
    if layer.head_dim is None:
        raise VeloxQuantError("veloxquant-mlx must be told the head dim, and the model does not say its own")
    return layer.head_dim


PEERS: dict[str, Callable[[int], list[Arm]]] = {"veloxquant-mlx": _veloxquant_mlx}
"""Makers of arms by the name of the library, from the tokens of the prompt."""


def peer_arms(name: str, tokens: int = 1024) -> list[Arm]:
    """The arms of another library.

    Args:
        name: Its name.
        tokens: Tokens of the prompt, for methods that take a number of rows.

    Raises:
        VeloxQuantError: It is not known or not installed; the message says what to do.
    """
    if name not in PEERS:
        raise VeloxQuantError(f"there is no peer '{name}'{suggest(name, PEERS)} (peers: {', '.join(PEERS)})")
    return PEERS[name](tokens)
