"""Small integers packed into 32-bit words: least significant bit first, rows padded to whole words."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

__all__ = ["pack", "unpack", "words"]


def words(count: int, bits: int) -> int:
    """Words that ``count`` integers of ``bits`` bits take."""
    return -(-count * bits // 32)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack the last axis.

    Args:
        codes: Integers below ``2^bits``, ``[..., n]``.
        bits: 1 to 8.

    Returns:
        ``[..., words(n, bits)]`` uint32.
    """
    codes = codes.astype(mx.uint32)
    count = codes.shape[-1]
    if 32 % bits == 0:
        return _joined(codes, bits, 32 // bits)
    # Codes straddle words: take them apart into bits first.
    planes = (codes[..., None] >> mx.arange(bits, dtype=mx.uint32)) & 1
    return _joined(planes.reshape(*codes.shape[:-1], count * bits), 1, 32)


def _joined(parts: mx.array, bits: int, per_word: int) -> mx.array:
    spare = -parts.shape[-1] % per_word
    if spare:
        parts = mx.pad(parts, [(0, 0)] * (parts.ndim - 1) + [(0, spare)])
    parts = parts.reshape(*parts.shape[:-1], -1, per_word)
    return (parts << _shifts(per_word, bits)).sum(axis=-1)


@functools.lru_cache(maxsize=64)
def _shifts(count: int, bits: int) -> mx.array:
    # From numpy: nothing is left to compute, whichever thread asks first.
    return mx.array(np.arange(count, dtype=np.uint32) * np.uint32(bits))


def unpack(packed: mx.array, bits: int, count: int) -> mx.array:
    """Unpack what ``pack`` gave.

    Args:
        packed: ``[..., words(count, bits)]`` uint32.
        bits: 1 to 8.
        count: Integers per row.

    Returns:
        ``[..., count]`` uint32.
    """
    if 32 % bits == 0:
        parts = (packed[..., None] >> _shifts(32 // bits, bits)) & (2**bits - 1)
        codes: mx.array = parts.reshape(*packed.shape[:-1], -1)[..., :count]
        return codes
    planes = (packed[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    planes = planes.reshape(*packed.shape[:-1], -1)[..., : count * bits]
    planes = planes.reshape(*packed.shape[:-1], count, bits)
    return (planes << mx.arange(bits, dtype=mx.uint32)).sum(axis=-1)
