"""Which centroid stands for a vector: the nearest one, in a metric, and always the same one.

A code must not depend on how many rows came with the vector, yet matrix products round differently for one row and
for many. So vectors and centroids are put on a grid of small integers first: then every product and every sum of a
score is exact in fp32, in whatever order a back end adds. What is done before and after is element by element.
"""

from __future__ import annotations

import math

import attrs
import mlx.core as mx

__all__ = ["Assigner", "Energy", "make_assigner", "make_energy"]

# Integers of up to 2^24 are exact in fp32, of up to 2^11 also in the short formats that GPUs multiply in.
_EXACT_BITS = 24
_FACTOR_BITS = 11
# Rows scored at a time, to bound the score matrix.
_SCORES = 2**24


def _bits(terms: int) -> tuple[int, int]:
    """Bits of the two factors whose products, summed over ``terms``, stay exact."""
    room = _EXACT_BITS - math.ceil(math.log2(max(terms, 2)))
    return min(_FACTOR_BITS, (room + 1) // 2), min(_FACTOR_BITS, room // 2)


@attrs.frozen(eq=False)
class Assigner:
    """Tables for choosing centroids, made once for a codebook.

    Groups g are pairs of KV head and sub-vector: H of them, with d channels and K centroids.

    Args:
        center: What is subtracted first ``[H, 1, d]``.
        step: Size of a grid step, by channel ``[H, 1, d]``.
        limit: Largest integer of a coordinate.
        weights: Centroids on their grid, integers ``[H, d, K]``.
        plain: What a centroid's score is lowered by, for the nearest centroid ``[H, 1, K]``.
        metric: Symmetric metric ``[H, d, d]``, or None: only the nearest centroid is known.
        aware: As ``plain``, in the metric.
    """

    center: mx.array
    step: mx.array
    limit: float
    weights: mx.array
    plain: mx.array
    metric: mx.array | None = None
    aware: mx.array | None = None

    def codes(self, vectors: mx.array, aware: mx.array | bool = False) -> mx.array:
        """Choose a centroid for every vector.

        Args:
            vectors: ``[B, H, S, d]`` fp32.
            aware: Whether to choose in the metric: bools ``[B, H, S, 1]``, or one for all.

        Returns:
            Centroid numbers ``[B, H, S]`` uint32.
        """
        centered = vectors - self.center
        if self.metric is None or aware is False:
            aware = False
        else:
            turned = _product(centered, self.metric)
            centered = turned if aware is True else mx.where(aware, turned, centered)
        grid = mx.clip(mx.round(centered / self.step), -self.limit, self.limit)
        batch, groups, rows, _ = grid.shape
        piece = max(1, _SCORES // (batch * groups * self.weights.shape[2]))
        found = [
            self._nearest(grid[..., start : start + piece, :], _part(aware, start, start + piece))
            for start in range(0, rows, piece)
        ]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=2)

    def _nearest(self, grid: mx.array, aware: mx.array | bool) -> mx.array:
        lowered = self.plain
        if self.aware is not None and aware is not False:
            lowered = self.aware if aware is True else mx.where(aware, self.aware, self.plain)
        return mx.argmax(grid @ self.weights - lowered, axis=-1)

    def arrays(self) -> list[mx.array]:
        """Every array held."""
        return [array for array in attrs.astuple(self, recurse=False) if isinstance(array, mx.array)]


def _part(aware: mx.array | bool, start: int, stop: int) -> mx.array | bool:
    return aware if isinstance(aware, bool) else aware[..., start:stop, :]


def _product(vectors: mx.array, metric: mx.array) -> mx.array:
    """``vectors @ metric`` for symmetric metrics ``[H, d, d]``, added in one fixed order."""
    dim = metric.shape[-1]
    total = vectors[..., :1] * metric[:, None, 0]
    for channel in range(1, dim):
        total = total + vectors[..., channel : channel + 1] * metric[:, None, channel]
    return total


def make_assigner(
    centroids: mx.array, center: mx.array, reach: mx.array, metric: mx.array | None, *, always: bool = False
) -> Assigner:
    """Make the tables.

    Args:
        centroids: ``[H, K, d]``.
        center: Mean of the vectors ``[H, d]``.
        reach: Largest distance of a coordinate from its mean that is told apart ``[H, d]``.
        metric: Symmetric positive metric ``[H, d, d]``, or None.
        always: The metric is used for every vector. It then goes into the centroids' side of the product, which
            keeps full precision for metrics of any width and condition.

    Returns:
        The assigner. With ``always`` its ``codes`` takes no account of ``aware``.
    """
    shifted = centroids.astype(mx.float32) - center[:, None, :]
    x_bits, w_bits = _bits(centroids.shape[2])
    limit = float(2**x_bits - 1)
    if metric is None:
        step, weights, norms = _step(reach, limit), shifted, (shifted * shifted).sum(axis=-1)
        return _assigner(center, step, limit, weights, norms, 2**w_bits - 1)
    images = shifted @ metric
    norms = (images * shifted).sum(axis=-1)
    if always:
        return _assigner(center, _step(reach, limit), limit, images, norms, 2**w_bits - 1)
    # Vectors are turned by the metric before they meet the grid, which must hold both forms.
    turned_reach = (mx.abs(metric) @ reach[..., None])[..., 0]
    step = _step(mx.maximum(reach, turned_reach), limit)
    plain = _assigner(center, step, limit, shifted, (shifted * shifted).sum(axis=-1), 2**w_bits - 1)
    aware = _assigner(center, step, limit, shifted, norms, 2**w_bits - 1)
    return attrs.evolve(plain, metric=metric, aware=aware.plain)


def _step(reach: mx.array, limit: float) -> mx.array:
    return (mx.maximum(reach, 1e-6) / limit)[:, None, :]


def _assigner(
    center: mx.array, step: mx.array, limit: float, weights: mx.array, norms: mx.array, largest: int
) -> Assigner:
    """Score 2 c.x - |c|^2, in units in which the weights of a group fill their grid."""
    scaled = 2 * weights * step
    unit = mx.maximum(mx.abs(scaled).max(axis=(1, 2), keepdims=True), 1e-30) / largest
    grid = mx.contiguous(mx.round(scaled / unit).swapaxes(1, 2))
    return Assigner(center[:, None, :], step, limit, grid, norms[:, None, :] / unit)


@attrs.frozen(eq=False)
class Energy:
    """Tables for the energy k H k^T of keys, exact like those of an ``Assigner``.

    Args:
        step: Size of a grid step ``[H, 1, D]``.
        limit: Largest integer of a coordinate.
        factor: Cholesky factor of H on its grid ``[H, D, D]``.
        unit: Size of a step of the product ``[H, 1, 1]``.
    """

    step: mx.array
    limit: float
    factor: mx.array
    unit: mx.array

    def of(self, keys: mx.array) -> mx.array:
        """Energies ``[B, H, S, 1]`` of keys ``[B, H, S, D]`` fp32."""
        grid = mx.clip(mx.round(keys / self.step), -self.limit, self.limit)
        seen = (grid @ self.factor) * self.unit
        return (seen * seen).sum(axis=-1, keepdims=True)

    def arrays(self) -> list[mx.array]:
        """Every array held."""
        return [self.step, self.factor, self.unit]


def make_energy(factor: mx.array, reach: mx.array) -> Energy:
    """Make the tables for k H k^T = |k L|^2.

    Args:
        factor: Lower Cholesky factor L of H ``[H, D, D]``.
        reach: Largest size of a coordinate of a key ``[H, D]``.
    """
    x_bits, w_bits = _bits(factor.shape[-1])
    limit = float(2**x_bits - 1)
    step = _step(reach, limit)
    scaled = factor * step.swapaxes(1, 2)
    unit = mx.maximum(mx.abs(scaled).max(axis=(1, 2), keepdims=True), 1e-30) / (2**w_bits - 1)
    return Energy(step, limit, mx.round(scaled / unit), unit)
