import numpy as np
import pytest

from veloxquant_a2ats.kmeans import centroid_count
from veloxquant_a2ats.kmeans import kmeans
from veloxquant_a2ats.kmeans import seeds


def cloud(points=3000, dim=8, seed=0):
    return np.random.default_rng(seed).standard_normal((points, dim)).astype(np.float32)


def nearest(points, centroids):
    distance = ((points[:, None].astype(np.float64) - centroids[None]) ** 2).sum(axis=2)
    return distance.argmin(axis=1), distance.min(axis=1)


@pytest.mark.parametrize(
    ("points", "wanted", "found"), [(4096, 256, 256), (4095, 256, 255), (10, 256, 1), (10**6, 8, 8)]
)
def test_sixteen_points_a_centroid(points, wanted, found):
    assert centroid_count(points, wanted) == found


def test_the_objective_falls_and_centroids_are_means():
    points = cloud()
    centroids, objective = kmeans(points, 40, seed=0, iterations=150)
    # It stops when nothing changes any more.
    assert 10 < len(objective) <= 150
    assert (np.diff(objective) <= 1e-4 * objective[0]).all()
    label, distance = nearest(points, centroids)
    means = np.stack([points[label == place].mean(axis=0) for place in range(40)])
    np.testing.assert_allclose(centroids, means, atol=2e-3)
    assert distance.sum() <= objective[0]


def test_the_same_seed_gives_the_same_centroids():
    points = cloud()
    first, again, other = (kmeans(points, 30, seed=seed, iterations=5)[0] for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_no_centroid_is_dead():
    # Most points lie in one place, so that centroids drawn there would have nothing.
    points = np.concatenate([cloud(2000) * 1e-3, cloud(100, seed=1) * 10])
    centroids, _ = kmeans(points, 64, seed=0, iterations=10)
    label, _ = nearest(points, centroids)
    assert (np.bincount(label, minlength=64) > 0).all()


def test_fewer_different_points_than_centroids():
    points = np.repeat(cloud(5), 100, axis=0)
    centroids, _ = kmeans(points, 16, seed=0, iterations=5)
    assert np.isfinite(centroids).all()
    assert nearest(points, centroids)[1].max() < 1e-6


@pytest.mark.parametrize("count", [10, 300])
def test_seeds_are_different_points_and_better_than_chance(count):
    blobs = np.concatenate([cloud(200, seed=n) * 0.05 + 10 * np.eye(8, dtype=np.float32)[n] for n in range(8)])
    chosen = seeds(blobs, count, np.random.default_rng(0))
    assert len(np.unique(chosen, axis=0)) == count
    # Every one of the eight blobs has a seed.
    assert len(np.unique(chosen.argmax(axis=1))) == 8
