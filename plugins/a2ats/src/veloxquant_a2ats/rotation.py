"""Taking the rotary embedding off keys, and putting one distance on far queries.

Every rotation goes through ``mx.fast.rope``, which the models use themselves, so that taking off undoes exactly what
was put on, rounding of large angles included. A factor that some schemes put on rotated channels stays on both
queries and keys, as it does in the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from veloxquant import ConfigError
from veloxquant import Rope
from veloxquant import UnsupportedModelError

__all__ = ["check_rope", "derotate", "far_query_rope", "rope_from_options", "rotate"]

_SCHEMES = "default, linear, llama3"


def rope_from_options(base: float, scaling: Mapping[str, Any] | None, dim: int) -> Rope:
    """Describe a rotary embedding from the options of a cache without a model.

    Args:
        base: Base of the frequencies.
        scaling: ``rope_scaling`` as models' config.json has it, or None.
        dim: Channels of a key, all of them rotated.

    Returns:
        The description.

    Raises:
        ConfigError: The scheme is not one that can be built from these options, or a number is missing.
    """
    check_scaling(scaling)
    scheme = _scheme(scaling)
    if scaling is None or scheme == "default":
        return Rope(dims=dim, base=base)
    if scheme == "linear":
        return Rope(dims=dim, base=base, scale=1.0 / float(scaling["factor"]))
    return Rope(dims=dim, base=None, frequencies=_llama3(base, scaling, dim))


def _scheme(scaling: Mapping[str, Any] | None) -> str:
    return "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Refuse a ``rope_scaling`` that cannot be undone.

    Raises:
        ConfigError: The scheme is unknown, or a number that it needs is missing.
    """
    scheme = _scheme(scaling)
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if scheme not in needed:
        raise ConfigError(
            f"a2ats: rope_scaling of type '{scheme}' cannot be undone here (known: {_SCHEMES}); make the cache with "
            "veloxquant.make_prompt_cache(model, 'a2ats', ...), which reads the rotation from the model"
        )
    for name in needed[scheme]:
        value = None if scaling is None else scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"a2ats: rope_scaling of type '{scheme}' needs a positive number '{name}', not {value!r}")


def _llama3(base: float, scaling: Mapping[str, Any], dim: int) -> tuple[float, ...]:
    """Wavelength divisors of Llama 3: long waves stretched by the factor, short ones kept, a ramp between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    # In the arithmetic of the model's own module, since angles at large positions show every last bit.
    frequencies = base ** (mx.arange(0, dim, 2) / dim)
    wavelengths = 2 * math.pi * frequencies
    smooth = (context / wavelengths - low) / (high - low)
    between = frequencies / ((1 - smooth) / factor + smooth)
    stretched = mx.where(wavelengths > context / low, frequencies * factor, frequencies)
    medium = (wavelengths > context / high) & (wavelengths < context / low)
    values: Any = mx.where(medium, between, stretched).tolist()
    return tuple(values)


def check_rope(rope: Rope, dim: int | None) -> None:
    """Refuse a rotation that cannot be undone.

    Args:
        rope: The rotation.
        dim: Channels of a key, or None while it is not known.

    Raises:
        UnsupportedModelError: It is not invertible, or does not fit the head dim.
    """
    numbers = [rope.scale, rope.magnitude, *([] if rope.base is None else [rope.base])]
    waves = rope.frequencies or ()
    # An infinite divisor means a channel pair that is not rotated.
    if (
        not all(math.isfinite(number) and number != 0 for number in numbers)
        or any(math.isnan(wave) or wave == 0 for wave in waves)
        or (rope.base is None and len(waves) != rope.dims // 2)
        or rope.dims % 2
        or (dim is not None and rope.dims > dim)
    ):
        raise UnsupportedModelError(
            f"a2ats must undo the model's rotary embedding and cannot undo this one: {rope}; use another method"
        )


def rotate(rows: mx.array, rope: Rope, start: int) -> mx.array:
    """Rotate rows at consecutive positions.

    Args:
        rows: ``[B, H, S, D]``.
        rope: The rotation; its magnitude is not applied.
        start: Position of the first row.

    Returns:
        Rotated rows, in fp32.
    """
    return _turn(rows, rope, start, rope.scale)


def derotate(rows: mx.array, rope: Rope, start: int | mx.array) -> mx.array:
    """Undo the rotation of rows at consecutive positions.

    Args:
        rows: Rotated rows ``[B, H, S, D]``.
        rope: The rotation; its magnitude stays on the rows.
        start: Position of the first row, or of that of each sequence ``[B]`` int32.

    Returns:
        Rows without position, in fp32.
    """
    return _turn(rows, rope, start, -rope.scale)


def far_query_rope(queries: mx.array, rope: Rope, position: int) -> mx.array:
    """Rotate every query at one and the same position (eq. 12: q~ = q R_b).

    Args:
        queries: Queries without position ``[B, H, S, D]``.
        rope: The rotation; its magnitude is not applied.
        position: The position b at which far tokens are seen.

    Returns:
        Queries to multiply keys without position by, in fp32.
    """
    # As sums of products: MLX's rotation on CUDA fails on many rows that have one position each.
    cosines, sines = _angles(rope, position)
    rows = queries.astype(mx.float32)
    turned, rest = rows[..., : rope.dims], rows[..., rope.dims :]
    found = turned * cosines + _swapped(turned, rope.traditional) * sines
    return found if rope.dims == rows.shape[-1] else mx.concatenate([found, rest], axis=-1)


@functools.lru_cache(maxsize=64)
def _angles(rope: Rope, position: int) -> tuple[mx.array, mx.array]:
    """What the channels of a row, and those of its pairs swapped, are multiplied with at a position ``[dims]`` each."""
    size = rope.dims // 2
    first = mx.concatenate([mx.ones(size), mx.zeros(size)])
    if rope.traditional:
        first = first.reshape(2, size).T.reshape(-1)
    # The first of each pair is turned into cosine and sine.
    turned = _turn(first.reshape(1, 1, 1, -1), rope, position, rope.scale).reshape(-1)
    swapped = _swapped(turned, rope.traditional)
    found = mx.where(first > 0, turned, swapped), mx.where(first > 0, -swapped, turned)
    # Once a rotation: whichever thread asks next, nothing is left to compute.
    mx.eval(found)
    return found


def _swapped(rows: mx.array, traditional: bool) -> mx.array:
    """The channels of every pair in the other order."""
    if traditional:
        pairs = rows.reshape(*rows.shape[:-1], -1, 2)
        return pairs[..., ::-1].reshape(rows.shape)
    size = rows.shape[-1] // 2
    return mx.concatenate([rows[..., size:], rows[..., :size]], axis=-1)


def _turn(rows: mx.array, rope: Rope, offset: int | mx.array, scale: float) -> mx.array:
    return mx.fast.rope(
        rows.astype(mx.float32),
        rope.dims,
        traditional=rope.traditional,
        base=rope.base,
        scale=scale,
        offset=offset,
        freqs=None if rope.frequencies is None else _frequencies(rope.frequencies),
    )


@functools.lru_cache(maxsize=64)
def _frequencies(values: tuple[float, ...]) -> mx.array:
    return mx.array(values)
