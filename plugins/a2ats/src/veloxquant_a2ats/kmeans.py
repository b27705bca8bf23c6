"""k-means for codebooks: k-means++ seeding, Lloyd iterations by faiss, and no dead centroids.

Of the implementations tried faiss was the fastest by far, see the method's page in the documentation.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["centroid_count", "kmeans", "seeds"]

Points = npt.NDArray[np.float32]

POINTS_PER_CENTROID = 16
"""Points that there must be for each centroid, at least."""

# Points that seeds are drawn from, for each centroid, and rounds of drawing.
_SEEDING_POINTS = 32
_SEEDING_ROUNDS = 64
_REPAIRS = 4

_THREADS = "OMP_NUM_THREADS"


@functools.cache
def _faiss() -> Any:
    """Import faiss, with one thread a call: callers run several calls at once, which share a busy machine better.

    Threads that wait for one another in calls of a millisecond made them forty times slower on a busy machine.
    """
    before = os.environ.get(_THREADS)
    # Read when the library is loaded.
    os.environ[_THREADS] = "1"
    try:
        import faiss
    finally:
        if before is None:
            os.environ.pop(_THREADS, None)
        else:
            os.environ[_THREADS] = before
    return faiss


def centroid_count(points: int, wanted: int) -> int:
    """How many centroids so many points allow, at most ``wanted``."""
    return max(1, min(wanted, points // POINTS_PER_CENTROID))


def seeds(points: Points, count: int, rng: np.random.Generator) -> Points:
    """Draw first centroids as k-means++ does: far points are likelier, by the square of their distance.

    For many centroids some are drawn at a time.

    Args:
        points: ``[N, d]``.
        count: Centroids to draw.
        rng: Source of chance.

    Returns:
        ``[count, d]``.
    """
    faiss = _faiss()
    sample = points[rng.choice(len(points), min(len(points), _SEEDING_POINTS * count), replace=False)]
    chosen = [int(rng.integers(len(sample)))]
    nearest = np.full(len(sample), np.inf, dtype=np.float32)
    new = chosen
    while True:
        distance, _ = faiss.knn(sample, sample[new], 1)
        nearest = np.minimum(nearest, distance[:, 0])
        nearest[chosen] = 0
        if len(chosen) == count:
            return sample[chosen]
        new = _draw(nearest, min(max(1, count // _SEEDING_ROUNDS), count - len(chosen)), chosen, rng)
        chosen = [*chosen, *new]


def _draw(weights: Points, count: int, taken: list[int], rng: np.random.Generator) -> list[int]:
    """Draw different places with probabilities proportional to their weights."""
    chance = rng.random(len(weights))
    # The largest of u^(1/w): a weighted draw without replacement. Where all points left are doubles of centroids, any
    # of them will do.
    order = np.where(weights > 0, np.log(chance) / np.maximum(weights, 1e-30), -1e32 * (1 + chance))
    order[taken] = -np.inf
    return [int(place) for place in np.argpartition(order, -count)[-count:]]


def kmeans(points: Points, count: int, *, seed: int, iterations: int) -> tuple[Points, list[float]]:
    """Find centroids.

    Args:
        points: ``[N, d]`` fp32.
        count: Centroids, at most N.
        seed: Seed of everything random.
        iterations: Lloyd iterations.

    Returns:
        Centroids ``[count, d]``, each the mean of at least one point's cluster, and the sum of squared distances
        in each iteration.
    """
    points = np.ascontiguousarray(points, dtype=np.float32)
    rng = np.random.default_rng(seed)
    trainer: Any = _faiss().Kmeans(
        points.shape[1],
        count,
        niter=iterations,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(points),
    )
    trainer.train(points, init_centroids=seeds(points, count, rng))
    return _revived(points, np.array(trainer.centroids)), [float(value) for value in trainer.obj]


def _revived(points: Points, centroids: Points) -> Points:
    """Move centroids without points to the points that are farthest from theirs."""
    for _ in range(_REPAIRS):
        distance, nearest = _faiss().knn(points, centroids, 1)
        dead = np.flatnonzero(np.bincount(nearest[:, 0], minlength=len(centroids)) == 0)
        far = np.argsort(-distance[:, 0], kind="stable")[: len(dead)]
        far = far[distance[far, 0] > 0]
        if len(far) == 0:
            break
        centroids[dead[: len(far)]] = points[far]
    return centroids
