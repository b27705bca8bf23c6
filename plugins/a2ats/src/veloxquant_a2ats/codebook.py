"""The codebook of one layer: what calibration learned, and the tables made of it for coding and for attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import attrs
import mlx.core as mx

from veloxquant import UnsupportedShapeError
from veloxquant_a2ats.assign import Assigner
from veloxquant_a2ats.assign import Energy
from veloxquant_a2ats.assign import make_assigner
from veloxquant_a2ats.assign import make_energy

__all__ = ["QUANTILES", "Codebook", "compress_codebook", "metric_blocks", "retrieve_codebook", "uncalibrated_codebook"]

QUANTILES = 101
"""Energies that a calibration stores: those that 0, 1, ... 100 percent of the keys stay below."""

# Random codebooks cover coordinates of this size; those of real keys are of any size.
_RANDOM_REACH = 4.0


@attrs.frozen(eq=False, kw_only=True)
class Codebook:
    """Centroids of a layer with the tables for using them; shared by all its caches and never changed.

    Args:
        keys: Centroids of keys without position ``[Hkv, M, K, d]``.
        values: Centroids of values ``[Hkv, Mv, Kv, d]``, or None in retrieve mode.
        key_codes: Chooses codes of keys.
        value_codes: Chooses codes of values, or None in retrieve mode.
        energy: Tells keys that queries look at, or None where all are coded alike.
        threshold: Energy above which a key is coded query-aware ``[Hkv, 1, 1]``, or None.
        calibrated: False for random centroids.
    """

    keys: mx.array
    values: mx.array | None = None
    key_codes: Assigner
    value_codes: Assigner | None = None
    energy: Energy | None = None
    threshold: mx.array | None = None
    calibrated: bool = True

    @property
    def value_centroids(self) -> mx.array:
        """Centroids of values ``[Hkv, Mv, Kv, d]``; only in compress mode."""
        assert self.values is not None
        return self.values

    @property
    def head_dims(self) -> tuple[int, int | None]:
        """Channels of keys and of values, the latter None in retrieve mode."""
        return _width(self.keys), None if self.values is None else _width(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every array held."""
        own = [array for array in (self.keys, self.values, self.threshold) if array is not None]
        parts = [part for part in (self.key_codes, self.value_codes, self.energy) if part is not None]
        return [*own, *(array for part in parts for array in part.arrays())]

    def aware(self, keys: mx.array) -> mx.array | bool:
        """Which keys without position ``[B, Hkv, S, D]`` are coded query-aware: ``[B, Hkv, S, 1]``, or one answer."""
        if self.energy is None or self.threshold is None:
            return False
        return self.energy.of(keys) > self.threshold

    def encode_keys(self, keys: mx.array) -> tuple[mx.array, mx.array | bool]:
        """Code keys without position.

        Args:
            keys: ``[B, Hkv, S, D]`` fp32.

        Returns:
            Codes ``[B, Hkv * M, S, 1]``, and which keys were coded query-aware, as from ``aware``.
        """
        aware = self.aware(keys)
        parts = self.keys.shape[1]
        each = aware if isinstance(aware, bool) else mx.repeat(aware, parts, axis=1)
        return _narrow(self.key_codes.codes(_split(keys, parts), each), self.keys.shape[2])[..., None], aware

    def encode_values(self, values: mx.array) -> mx.array:
        """Code values ``[B, Hkv, S, Dv]``; returns ``[B, Hkv, S, Mv]``."""
        assert self.values is not None
        assert self.value_codes is not None
        batch, heads, rows, _ = values.shape
        parts = self.values.shape[1]
        codes = self.value_codes.codes(_split(values.astype(mx.float32), parts))
        return _narrow(codes.reshape(batch, heads, parts, rows).swapaxes(2, 3), self.values.shape[2])

    def check_rows(self, keys: mx.array, values: mx.array) -> None:
        """Refuse rows that the codebook is not made for.

        Raises:
            UnsupportedShapeError: Other heads or head dims.
        """
        key_dim, value_dim = self.head_dims
        found = (keys.shape[1], keys.shape[3], value_dim if value_dim is None else values.shape[3])
        if found != (self.keys.shape[0], key_dim, value_dim):
            raise UnsupportedShapeError(
                f"a2ats: the codebook is for {self.keys.shape[0]} KV heads with keys of {key_dim} and values of "
                f"{value_dim or 'any number of'} channels, and the rows have {keys.shape[1]}, {keys.shape[3]} and "
                f"{values.shape[3]}; calibrate with this model"
            )

    def __deepcopy__(self, memo: object) -> Codebook:
        return self


def _width(centroids: mx.array) -> int:
    return centroids.shape[1] * centroids.shape[3]


def _split(rows: mx.array, parts: int) -> mx.array:
    """``[B, H, S, D]`` as ``[B, H * parts, S, D / parts]``."""
    batch, heads, count, dim = rows.shape
    split = rows.reshape(batch, heads, count, parts, dim // parts).swapaxes(2, 3)
    return split.reshape(batch, heads * parts, count, dim // parts)


def _narrow(codes: mx.array, centroids: int) -> mx.array:
    return codes.astype(mx.uint8 if centroids <= 256 else mx.uint16)


def _groups(array: mx.array) -> mx.array:
    """Join the axes of KV heads and sub-vectors."""
    return array.reshape(-1, *array.shape[2:])


def metric_blocks(moment: mx.array, sub_dim: int, beta: float) -> mx.array:
    """The query-aware metric of each sub-vector: (1 - beta) I + beta H_mm / mean(diag H_mm).

    Args:
        moment: Second moment H of the far queries ``[Hkv, D, D]``.
        sub_dim: Channels of a sub-vector.
        beta: How much the queries count.

    Returns:
        ``[Hkv, M, sub_dim, sub_dim]``.
    """
    heads, dim, _ = moment.shape
    parts = dim // sub_dim
    index = mx.arange(parts)
    blocks = moment.reshape(heads, parts, sub_dim, parts, sub_dim)[:, index, :, index, :].swapaxes(0, 1)
    mean = mx.diagonal(blocks, axis1=-2, axis2=-1).mean(axis=-1)[..., None, None]
    return (1 - beta) * mx.eye(sub_dim) + beta * blocks / mx.maximum(mean, 1e-30)


def compress_codebook(
    arrays: Mapping[str, mx.array], *, beta: float, fraction: float, aware: bool, calibrated: bool = True
) -> Codebook:
    """Make the tables of compress mode.

    Args:
        arrays: ``keys``, ``key_center``, ``key_reach``, ``values``, ``value_center``, ``value_reach`` (centroids
            ``[Hkv, M, K, d]``, the others ``[Hkv, D]``), ``moment`` and its ``factor`` ``[Hkv, D, D]``, and
            ``energies`` ``[Hkv, QUANTILES]``.
        beta: Weight of the queries in the metric.
        fraction: Share of the keys that is coded query-aware.
        aware: Whether any is.
        calibrated: False for random centroids.
    """
    keys, values = arrays["keys"], arrays["values"]
    aware = aware and fraction > 0
    key_parts, value_parts = keys.shape[1], values.shape[1]
    metric = _groups(metric_blocks(arrays["moment"], keys.shape[3], beta)) if aware else None
    center, reach = (_by_part(arrays[name], key_parts) for name in ("key_center", "key_reach"))
    value_center, value_reach = (_by_part(arrays[name], value_parts) for name in ("value_center", "value_reach"))
    return Codebook(
        keys=keys,
        values=values,
        key_codes=make_assigner(_groups(keys), center, reach, metric),
        value_codes=make_assigner(_groups(values), value_center, value_reach, None),
        energy=make_energy(arrays["factor"], mx.abs(arrays["key_center"]) + arrays["key_reach"]) if aware else None,
        threshold=_quantile(arrays["energies"], 1 - fraction)[:, None, None] if aware else None,
        calibrated=calibrated,
    )


def retrieve_codebook(arrays: Mapping[str, mx.array], *, aware: bool, calibrated: bool = True) -> Codebook:
    """Make the tables of retrieve mode: one code a key, chosen in the full metric of the queries.

    Args:
        arrays: ``keys`` ``[Hkv, 1, K, D]``, ``key_center`` and ``key_reach`` ``[Hkv, D]``, and ``moment``
            ``[Hkv, D, D]``.
        aware: Use the metric; otherwise the nearest centroid.
        calibrated: False for random centroids.
    """
    metric = arrays["moment"] if aware else None
    codes = make_assigner(_groups(arrays["keys"]), arrays["key_center"], arrays["key_reach"], metric, always=True)
    return Codebook(keys=arrays["keys"], key_codes=codes, calibrated=calibrated)


def _by_part(rows: mx.array, parts: int) -> mx.array:
    heads, dim = rows.shape
    return rows.reshape(heads * parts, dim // parts)


def _quantile(energies: mx.array, share: float) -> mx.array:
    """The energy that a share of the keys stays below ``[Hkv]``, between the stored ones by linear interpolation."""
    place = share * (energies.shape[1] - 1)
    low = min(int(place), energies.shape[1] - 2)
    below, above = energies[:, low], energies[:, low + 1]
    return below + (place - low) * (above - below)


@functools.lru_cache(maxsize=256)
def uncalibrated_codebook(
    seed: int,
    heads: int,
    shard: int,
    shards: int,
    key_dim: int,
    value_dim: int | None,
    sub_dim: int,
    centroids: int,
    beta: float,
    fraction: float,
    aware: bool,
) -> Codebook:
    """Random centroids, for tests: the same for the same arguments.

    Args:
        seed: Index of the layer.
        heads: KV heads of this process.
        shard: Which of the processes of a sharded model it is.
        shards: Number of those; the heads of all of them are drawn, so that together they are those of one process.
        key_dim: Channels of a key.
        value_dim: Channels of a value, or None for retrieve mode.
        sub_dim: Channels of a sub-vector in compress mode.
        centroids: Centroids of a sub-vector, or of a head in retrieve mode.
        beta: As for ``compress_codebook``.
        fraction: As for ``compress_codebook``.
        aware: As for ``compress_codebook``.
    """
    first, second = mx.random.split(mx.random.key(seed))
    own = slice(shard * heads, (shard + 1) * heads)
    arrays: dict[str, Any] = {
        "key_center": mx.zeros((heads, key_dim)),
        "key_reach": mx.full((heads, key_dim), _RANDOM_REACH),
        "moment": mx.broadcast_to(mx.eye(key_dim), (heads, key_dim, key_dim)),
    }
    if value_dim is None:
        arrays["keys"] = mx.random.normal((heads * shards, 1, centroids, key_dim), key=first)[own]
        return retrieve_codebook(arrays, aware=aware, calibrated=False)
    # With H = I the energy of a random key is distributed like chi squared, here approximated by Wilson and Hilferty.
    normal, part = NormalDist(), 2 / (9 * key_dim)
    shares = [min(max(place / (QUANTILES - 1), 0.001), 0.999) for place in range(QUANTILES)]
    spread = mx.array([key_dim * (1 - part + normal.inv_cdf(share) * part**0.5) ** 3 for share in shares])
    arrays |= {
        "keys": mx.random.normal((heads * shards, key_dim // sub_dim, centroids, sub_dim), key=first)[own],
        "values": mx.random.normal((heads * shards, value_dim // sub_dim, centroids, sub_dim), key=second)[own],
        "value_center": mx.zeros((heads, value_dim)),
        "value_reach": mx.full((heads, value_dim), _RANDOM_REACH),
        "factor": arrays["moment"],
        "energies": mx.broadcast_to(spread, (heads, QUANTILES)),
    }
    return compress_codebook(arrays, beta=beta, fraction=fraction, aware=aware, calibrated=False)
