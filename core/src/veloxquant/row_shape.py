"""Shape and dtypes of rows as plain values: dtypes as text, for an ``mx.Dtype`` can be neither copied nor saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.errors import UnsupportedShapeError

__all__ = ["one_row", "shape_of_rows"]


def shape_of_rows(keys: mx.array, values: mx.array, name: str) -> list[Any]:
    """Check that keys and values belong together.

    Args:
        keys: ``[B, Hkv, S, Dk]``.
        values: ``[B, Hkv, S, Dv]``.
        name: What to call the cache in a message.

    Returns:
        B, Hkv, Dk, Dv and the names of both dtypes.

    Raises:
        UnsupportedShapeError: They do not fit each other, are empty, or are not float arrays.
    """
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or 0 in keys.shape + values.shape:
        raise UnsupportedShapeError(
            f"{name}: keys and values must be [B, Hkv, S, D] with the same B, Hkv and S, none of them 0, "
            f"got {keys.shape} and {values.shape}"
        )
    for array in (keys, values):
        if not mx.issubdtype(array.dtype, mx.floating):
            raise UnsupportedShapeError(f"{name}: keys and values must be float arrays, got {array.dtype}")
    dtypes = [str(array.dtype).rpartition(".")[2] for array in (keys, values)]
    return [*keys.shape[:2], keys.shape[3], values.shape[3], *dtypes]


def one_row(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes and dtypes of the keys and values of one token, for comparison with arrays that come in."""
    batch, heads, key_dim, value_dim, key_dtype, value_dtype = shape[:6]
    shapes = [(batch, heads, 1, dim) for dim in (key_dim, value_dim)]
    return (*shapes, getattr(mx, key_dtype), getattr(mx, value_dtype))
