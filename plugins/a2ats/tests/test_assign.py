"""Choosing centroids, against brute force in fp64."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_a2ats.assign import make_assigner
from veloxquant_a2ats.assign import make_energy


def setting(groups=3, centroids=50, dim=8, seed=0, condition=30.0):
    rng = np.random.default_rng(seed)
    book = rng.standard_normal((groups, centroids, dim))
    center = rng.standard_normal((groups, dim))
    basis = rng.standard_normal((groups, dim, dim)) * np.linspace(1, condition**0.5, dim)
    metric = basis @ basis.swapaxes(1, 2) + 0.1 * np.eye(dim)
    metric /= np.diagonal(metric, axis1=1, axis2=2).mean(axis=1)[:, None, None]
    return [array.astype(np.float32) for array in (book + center[:, None], center, metric)]


def distances(vectors, book, metric=None):
    """[B, H, S, K]: (v - c) A (v - c)^T."""
    difference = vectors[:, :, :, None].astype(np.float64) - book[None, :, None]
    metric = (
        np.broadcast_to(np.eye(book.shape[2]), (book.shape[0],) + (book.shape[2],) * 2) if metric is None else metric
    )
    return np.einsum("bhskd,hde,bhske->bhsk", difference, metric, difference)


def made(book, center, metric, reach=5.0, **options):
    wide = np.full(center.shape, reach, dtype=np.float32)
    return make_assigner(
        mx.array(book), mx.array(center), mx.array(wide), None if metric is None else mx.array(metric), **options
    )


def assert_nearest(codes, all_distances):
    """Nearly always it is the nearest centroid; where the grid cannot tell, one as near."""
    codes = np.array(codes)
    chosen = np.take_along_axis(all_distances, codes[..., None].astype(int), axis=-1)[..., 0]
    best = all_distances.min(axis=-1)
    assert (chosen - best).mean() <= 0.01 * best.mean()
    assert (codes == all_distances.argmin(axis=-1)).mean() > 0.96


def vectors(groups=3, rows=400, dim=8, seed=1, batch=2):
    return np.random.default_rng(seed).standard_normal((batch, groups, rows, dim)).astype(np.float32)


def test_the_nearest_centroid():
    book, center, _ = setting()
    x = vectors() + center[:, None]
    assert_nearest(made(book, center, None).codes(mx.array(x)), distances(x, book))


@pytest.mark.parametrize("dim", [2, 8, 16])
def test_the_nearest_centroid_in_a_metric(dim):
    book, center, metric = setting(dim=dim)
    x = vectors(dim=dim) + center[:, None]
    coder = made(book, center, metric)
    assert_nearest(coder.codes(mx.array(x), True), distances(x, book, metric))
    assert_nearest(coder.codes(mx.array(x), False), distances(x, book))


def test_each_vector_by_its_own_rule():
    book, center, metric = setting()
    x = vectors() + center[:, None]
    coder, rule = made(book, center, metric), np.arange(400)[None, None, :, None] % 3 == 0
    both = coder.codes(mx.array(x), mx.array(np.broadcast_to(rule, (2, 3, 400, 1))))
    aware, plain = coder.codes(mx.array(x), True), coder.codes(mx.array(x), False)
    assert (np.array(both) == np.where(rule[..., 0], np.array(aware), np.array(plain))).all()
    assert (np.array(aware) != np.array(plain)).any()


def test_a_metric_like_the_identity_changes_nothing():
    book, center, _ = setting()
    x = mx.array(vectors() + center[:, None])
    same = np.broadcast_to(np.eye(8, dtype=np.float32), (3, 8, 8))
    coder = made(book, center, same)
    assert (np.array(coder.codes(x, True)) == np.array(coder.codes(x, False))).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_a_full_metric_always(dim):
    book, center, metric = setting(groups=2, centroids=300, dim=dim, condition=1e3)
    x = vectors(groups=2, dim=dim, batch=1) + center[:, None]
    codes = np.array(made(book, center, metric, always=True).codes(mx.array(x)))
    found = distances(x, book, metric)
    chosen = np.take_along_axis(found, codes[..., None].astype(int), axis=-1)[..., 0]
    assert (chosen <= 1.02 * found.min(axis=-1)).all()


def test_the_cholesky_identity():
    """(k - c) H (k - c)^T = |k L - c L|^2, with k L and not k L^T."""
    book, _, metric = setting()
    x = vectors(rows=20)
    factor = np.linalg.cholesky(metric.astype(np.float64))
    turned = np.einsum("bhsd,hde->bhse", x, factor), np.einsum("hkd,hde->hke", book, factor)
    np.testing.assert_allclose(distances(*turned), distances(x, book, metric), rtol=1e-6)


@pytest.mark.parametrize("always", [False, True])
def test_a_code_does_not_depend_on_what_comes_with_the_vector(always):
    book, center, metric = setting(centroids=256)
    x = mx.array(vectors(rows=700, batch=3))
    coder, aware = made(book, center, metric, always=always), mx.random.uniform(shape=(3, 3, 700, 1)) < 0.5
    rule = True if always else aware
    whole = np.array(coder.codes(x, rule))
    for size in (1, 2, 3, 7, 64, 333):
        for start in (0, 1, 350):
            part = rule if always else aware[1:2, :, start : start + size]
            alone = np.array(coder.codes(x[1:2, :, start : start + size], part))
            assert (alone == whole[1:2, :, start : start + size]).all()


def test_every_score_is_exact_in_fp32():
    """The grids are such that no order of additions can change a sum."""
    for dim in (2, 8, 64, 128, 256):
        book, center, _ = setting(groups=1, centroids=64, dim=dim)
        coder = made(book, center, None)
        weights = np.array(coder.weights, dtype=np.float64)
        assert (weights == np.round(weights)).all()
        assert np.abs(weights).max() * coder.limit * dim <= 2**24


def test_far_out_rows_get_some_centroid_and_spoil_no_other():
    book, center, metric = setting()
    x = vectors(rows=10)
    x[0, 0, 3], x[0, 0, 4], x[0, 1, 5] = 6e4, 0.0, np.nan
    codes = np.array(made(book, center, metric).codes(mx.array(x), True))
    assert (codes < 50).all()
    clean = vectors(rows=10)
    expected = np.array(made(book, center, metric).codes(mx.array(clean), True))
    same = np.ones(codes.shape, dtype=bool)
    same[0, 0, 3:5] = same[0, 1, 5] = False
    assert (codes[same] == expected[same]).all()


def test_energy():
    _, _, metric = setting(dim=32)
    keys = vectors(dim=32)
    energy = make_energy(mx.array(np.linalg.cholesky(metric)), mx.array(np.full((3, 32), 5.0, dtype=np.float32)))
    expected = np.einsum("bhsd,hde,bhse->bhs", keys.astype(np.float64), metric, keys)
    found = np.array(energy.of(mx.array(keys)))[..., 0]
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02 * expected.mean())
    alone = np.array(energy.of(mx.array(keys[1:, :, 17:18])))[..., 0]
    assert (alone == found[1:, :, 17:18]).all()
