"""Which layer a method's state serves, for observers: copies of a cache pass through no hook."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from veloxquant.types import LayerSpec

__all__ = ["layer_of", "remember_layer"]

# By id, since states need not be hashable; the weak reference frees the id for another state.
_layers: dict[int, tuple[weakref.ref[Any], LayerSpec]] = {}


def remember_layer(state: Any, layer: LayerSpec) -> None:
    """Note that ``state`` serves ``layer`` for as long as it lives; states without weak references are left out."""
    key = id(state)
    try:
        _layers[key] = (weakref.ref(state, lambda _: _layers.pop(key, None)), layer)
    except TypeError:
        return


def layer_of(state: Any) -> LayerSpec | None:
    """The layer that a state serves, or None where that is not known."""
    reference, layer = _layers.get(id(state), (None, None))
    return layer if reference is not None and reference() is state else None
