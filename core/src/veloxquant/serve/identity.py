"""What a stored cache must have been made with, as one hash."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

import attrs
import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten

from veloxquant.config import config_to_dict
from veloxquant.method import Method

__all__ = ["LoadedModel", "model_identity"]

SAMPLES = 256
"""Values of each weight array that are looked at: every array counts, and large models start quickly."""


@attrs.frozen
class LoadedModel:
    """The model that caches are stored and loaded for.

    Args:
        key: What mlx-lm's server calls it by.
        model: The model.
        identity: See ``model_identity``.
        method: Name of the method.
        config: Its options.
    """

    key: Any
    model: Any
    identity: str
    method: str
    config: Any


def model_identity(model: Any, tokenizer: Any, method: Method, config: Any, query_mode: str) -> str:
    """Hash everything that decides what a cache holds, apart from the tokens.

    Args:
        model: The loaded model; its weights count, not where they came from.
        tokenizer: Its tokenizer, whose vocabulary counts.
        method: The method.
        config: Its options.
        query_mode: ``routed``, ``proxy`` or ``none``.

    Returns:
        64 hexadecimal digits.
    """
    parts = {
        "veloxquant": version("veloxquant").split(".")[:2],
        "mlx_lm": mlx_lm.__version__,
        "method": [method.name, method.distribution, method.version],
        "config": config_to_dict(config),
        "query_mode": query_mode,
        "model": type(model).__module__,
        "vocabulary": _hash(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
        "weights": _weights(model),
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _weights(model: Any) -> str:
    digest = hashlib.sha256()
    weights: Any = tree_flatten(model.parameters())
    for name, array in sorted(weights, key=lambda pair: pair[0]):
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
        if array.size:
            places = mx.array(np.linspace(0, array.size - 1, min(SAMPLES, array.size)).astype(np.uint32))
            digest.update(bytes(np.array(mx.take(array.reshape(-1), places).view(mx.uint8))))
    return digest.hexdigest()
