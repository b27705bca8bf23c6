"""Rotations: orthogonal in every dimension, spreading, seeded."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_turboquant_rvq.rotation import rotation

DIMS = [32, 40, 56, 64, 80, 96, 112, 128, 192, 256]
OTHER_DIMS = [1, 2, 3, 5, 7, 12, 20, 24, 28, 33, 36, 60, 100, 160, 224, 384, 512]
PARTS = ["keys", "values"]
# Lloyd-Max levels of two bits for coordinates of random unit vectors in 128 dimensions, and their distortion.
LEVELS = np.array([-1.50519, -0.45245, 0.45245, 1.50519])
DISTORTION = 0.1160


def matrix(dim, seed=42, part="keys"):
    return np.array(rotation(dim, seed, part).apply(mx.eye(dim)), dtype=np.float64)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dim", DIMS + OTHER_DIMS)
def test_a_rotation_is_orthogonal(dim, part):
    found = matrix(dim, part=part)
    assert found.shape == (dim, dim)
    np.testing.assert_allclose(found @ found.T, np.eye(dim), atol=1e-5)
    np.testing.assert_allclose(found.T @ found, np.eye(dim), atol=1e-5)


@pytest.mark.parametrize("dim", DIMS + OTHER_DIMS)
def test_it_is_linear_and_undone(dim):
    turn = rotation(dim, 7)
    rows = np.random.default_rng(dim).standard_normal((2, 3, 5, dim)).astype(np.float32)
    rotated = turn.apply(mx.array(rows))
    assert rotated.shape == rows.shape
    np.testing.assert_allclose(np.array(rotated), rows.astype(np.float64) @ matrix(dim, 7), atol=1e-5)
    np.testing.assert_allclose(np.array(turn.undo(rotated)), rows, atol=1e-5)
    back = np.array(turn.undo(mx.array(rows)))
    np.testing.assert_allclose(back, rows.astype(np.float64) @ matrix(dim, 7).T, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("dim", [64, 80])
def test_it_computes_in_fp32_whatever_comes(dim, dtype):
    turn = rotation(dim, 42)
    rows = mx.random.normal((4, dim), key=mx.random.key(0)).astype(dtype)
    for move in (turn.apply, turn.undo):
        assert move(rows).dtype == mx.float32
        assert bool((move(rows) == move(rows.astype(mx.float32))).all())


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 40, 80])
@pytest.mark.parametrize("part", PARTS)
def test_no_coordinate_of_a_rotated_basis_vector_is_large(dim, part):
    """Of the n^2 coordinates, about normal with variance 1/n, none is beyond seven deviations."""
    assert np.abs(matrix(dim, part=part)).max() < 7 / dim**0.5


@pytest.mark.parametrize("part", PARTS)
def test_two_rounds_restore_theory_for_basis_vectors(part):
    """After one round all coordinates are alike in size and the distortion is 0.2605 in place of 0.1160."""
    coordinates = np.concatenate([matrix(128, seed, part) for seed in range(40)]) * 128**0.5
    error = (LEVELS[np.abs(coordinates[..., None] - LEVELS).argmin(-1)] - coordinates) ** 2
    assert error.mean() == pytest.approx(DISTORTION, rel=0.05)


@pytest.mark.parametrize("dim", [32, 40, 96, 128])
def test_the_seed_decides_and_nothing_else(dim):
    before = matrix(dim, 5)
    rotation.cache_clear()
    np.random.seed(1)
    mx.random.seed(1)
    assert (matrix(dim, 5) == before).all()
    assert np.abs(matrix(dim, 6) - before).max() > 0.1


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_seeds_and_parts_are_independent(dim):
    """The product of independent rotations is one more: its entries are small."""
    matrices = [matrix(dim, 42), matrix(dim, 42, "values"), matrix(dim, 43), matrix(dim, 43, "values")]
    for place, one in enumerate(matrices):
        for other in matrices[place + 1 :]:
            assert np.abs(one @ other.T).max() < 7 / dim**0.5
            assert np.abs(one.T @ other).max() < 7 / dim**0.5


def test_layers_share_one_rotation_and_copies_do_too():
    turn = rotation(128, 42, "keys")
    assert rotation(128, 42, "keys") is turn
    assert copy.deepcopy(turn) is turn


@pytest.mark.parametrize("dim", DIMS)
def test_bytes_are_those_of_the_arrays(dim):
    turn = rotation(dim, 42)
    arrays = [array for array in (turn.signs, turn.matrix, *turn._rounds) if array is not None]
    assert turn.nbytes == sum(array.nbytes for array in arrays)
    assert turn.nbytes in (4 * dim * 4, dim * dim * 4)


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_any_seed_is_a_rotation(seed):
    found = matrix(64, seed)
    np.testing.assert_allclose(found @ found.T, np.eye(64), atol=1e-5)
