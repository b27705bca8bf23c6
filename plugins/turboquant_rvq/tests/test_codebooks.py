"""Codebooks against published tables, and against integrals that are known in closed form."""

import itertools
import math

import numpy as np
import pytest

from veloxquant_turboquant_rvq.codebooks import Codebook
from veloxquant_turboquant_rvq.codebooks import distortion
from veloxquant_turboquant_rvq.codebooks import gaussian_levels
from veloxquant_turboquant_rvq.codebooks import key_codebook
from veloxquant_turboquant_rvq.codebooks import laplace_levels
from veloxquant_turboquant_rvq.codebooks import matched_levels
from veloxquant_turboquant_rvq.codebooks import uniform_codebook
from veloxquant_turboquant_rvq.codebooks import uniform_step
from veloxquant_turboquant_rvq.codebooks import value_codebook

# Max, Quantizing for minimum distortion, 1960, table I: positive levels for a normal variable.
NORMAL = {
    1: [0.797885],
    2: [0.452780, 1.510418],
    3: [0.245094, 0.756005, 1.343909, 2.151946],
    4: [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590],
}
THRESHOLDS = {
    1: [],
    2: [0.981599],
    3: [0.500550, 1.049957, 1.747927],
    4: [0.258222, 0.522404, 0.799550, 1.099286, 1.437139, 1.843532, 2.400803],
}
NORMAL_ERROR = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}
# For a coordinate of a random unit vector in 128 dimensions, times sqrt(128).
IN_128 = {
    1: [0.79944],
    2: [0.45245, 1.50519],
    3: [0.24442, 0.75333, 1.33660, 2.13147],
    4: [0.12787, 0.38638, 0.65362, 0.93710, 1.24777, 1.60434, 2.04593, 2.68886],
}
FINITE_ERROR = {
    64: [0.35839, 0.11453, 0.03339, 0.00913],
    128: [0.36089, 0.11600, 0.03397, 0.00932],
    256: [0.36214, 0.11674, 0.03426, 0.00941],
}
LAPLACE = {
    1: [0.70711],
    2: [0.41976, 1.83397],
    3: [0.23340, 0.83296, 1.67247, 3.08669],
    4: [0.12399, 0.40484, 0.72865, 1.11098, 1.57779, 2.17735, 3.01686, 4.43107],
}
# Two stages of b bits: the optimum of 2b bits, the Laplace variant, the best shared second stage, a second stage for
# every cell.
DIRECT = {1: 0.11748, 2: 0.00950, 3: 0.00064}
LAPLACE_ERROR = {1: 0.13363, 2: 0.02592, 3: 0.00271}
SHARED = {1: 0.13045, 2: 0.01965, 3: 0.00194}
PER_CELL = {1: 0.11748, 2: 0.00973, 3: 0.00067}
BITS = [1, 2, 3, 4]
MANY = 10**7
"""Dimensions that make a coordinate normal to seven places."""


def both_halves(positive):
    return np.array([-level for level in positive[::-1]] + list(positive))


def midpoints(levels):
    return (levels[1:] + levels[:-1]) / 2


def edges_of(levels):
    return np.concatenate([[-np.inf], midpoints(np.asarray(levels)), [np.inf]])


def normal_cells(edges):
    """Mass and first moment of a standard normal between edges."""
    below = np.array([0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges])
    density = np.array([math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) for edge in edges])
    return np.diff(below), -np.diff(density)


def laplace_cells(edges):
    """The same for x >= 0 of a Laplace variable of unit variance, up to a common factor."""
    root = math.sqrt(2)
    mass = np.array([1.0 if math.isinf(edge) else 1 - math.exp(-root * edge) for edge in edges])
    moment = np.array([1 / root if math.isinf(e) else 1 / root - (e + 1 / root) * math.exp(-root * e) for e in edges])
    return np.diff(mass), np.diff(moment)


def sphere(dim, count=400_000):
    """A coordinate of a random unit vector times sqrt(dim), by its angle, whose density is cos^(dim - 2)."""
    angles = (np.arange(count) + 0.5) / count * math.pi - math.pi / 2
    weights = np.cos(angles) ** (dim - 2)
    return math.sqrt(dim) * np.sin(angles), weights / weights.sum()


def sphere_error(levels, dim):
    points, weights = sphere(dim)
    return float(weights @ (points - levels[np.searchsorted(midpoints(levels), points)]) ** 2)


def normal_error(levels):
    mass, moment = normal_cells(edges_of(levels))
    return 1 - 2 * float(levels @ moment) + float(levels**2 @ mass)


def folded_cells(first, second):
    """Mass and residual moment [stage 1, stage 2] of a positive normal in two stages."""
    lower, upper = np.concatenate([[0.0], midpoints(first)]), np.concatenate([midpoints(first), [np.inf]])
    cuts = edges_of(second)
    mass, moment = np.zeros((len(first), len(second))), np.zeros((len(first), len(second)))
    for i, centre in enumerate(first):
        for j in range(len(second)):
            start, end = max(lower[i], centre + cuts[j]), min(upper[i], centre + cuts[j + 1])
            if start < end:
                (mass[i, j],), (first_moment,) = normal_cells([start, end])
                moment[i, j] = first_moment - centre * mass[i, j]
    return mass, moment


def folded_error(first, second):
    """Mean squared error of a normal variable in two stages; both halves are alike."""
    mass, moment = folded_cells(first, second)
    power = 1 - 2 * both_halves(first) @ normal_cells(edges_of(both_halves(first)))[1]
    power += both_halves(first) ** 2 @ normal_cells(edges_of(both_halves(first)))[0]
    return float(power + 2 * (mass @ second**2 - 2 * moment @ second).sum())


@pytest.mark.parametrize("bits", BITS)
def test_levels_and_thresholds_are_those_of_the_table(bits):
    levels = gaussian_levels(bits)
    np.testing.assert_allclose(levels, both_halves(NORMAL[bits]), atol=1e-4)
    expected = np.concatenate([both_halves(THRESHOLDS[bits])[: len(THRESHOLDS[bits])], [0.0], THRESHOLDS[bits]])
    np.testing.assert_allclose(midpoints(levels), expected, atol=1e-4)
    assert distortion(Codebook(levels)) == pytest.approx(NORMAL_ERROR[bits], rel=1e-3)


@pytest.mark.parametrize(("bits", "error"), [(5, 0.002505), (6, 0.000644)])
def test_more_levels_have_the_distortion_of_the_table(bits, error):
    assert distortion(Codebook(gaussian_levels(bits))) == pytest.approx(error, rel=2e-3)
    assert normal_error(gaussian_levels(bits)) == pytest.approx(error, rel=2e-3)


@pytest.mark.parametrize("bits", BITS)
def test_levels_on_the_sphere_are_those_of_the_table(bits):
    np.testing.assert_allclose(gaussian_levels(bits, 128), both_halves(IN_128[bits]), atol=1e-4)


@pytest.mark.parametrize("dim", FINITE_ERROR)
@pytest.mark.parametrize("bits", BITS)
def test_distortions_on_the_sphere_are_those_of_the_table(bits, dim):
    levels = gaussian_levels(bits, dim)
    assert distortion(Codebook(levels), dim) == pytest.approx(FINITE_ERROR[dim][bits - 1], rel=1e-3)
    assert sphere_error(levels, dim) == pytest.approx(FINITE_ERROR[dim][bits - 1], rel=1e-3)


@pytest.mark.parametrize("bits", BITS)
def test_every_level_is_the_mean_of_its_cell(bits):
    levels = gaussian_levels(bits)
    mass, moment = normal_cells(edges_of(levels))
    np.testing.assert_allclose(levels, moment / mass, atol=1e-4)


@pytest.mark.parametrize("dim", [4, 5, 8, 33, 64, 128, 256])
@pytest.mark.parametrize("bits", BITS)
def test_every_level_on_the_sphere_is_the_mean_of_its_cell(bits, dim):
    levels = gaussian_levels(bits, dim)
    points, weights = sphere(dim)
    cells = np.searchsorted(midpoints(levels), points)
    means = np.bincount(cells, weights * points) / np.bincount(cells, weights)
    np.testing.assert_allclose(levels, means, atol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_in_three_dimensions_a_coordinate_is_uniform_and_so_are_the_levels(bits):
    """Archimedes: the levels are midpoints of equal cells and the error is 4^-bits."""
    expected = math.sqrt(3) * (2 * np.arange(2**bits) + 1 - 2**bits) / 2**bits
    np.testing.assert_allclose(gaussian_levels(bits, 3), expected, atol=1e-4)
    assert distortion(Codebook(gaussian_levels(bits, 3)), 3) == pytest.approx(4.0**-bits, rel=1e-3)
    assert uniform_step(bits, 3) == pytest.approx(2 * math.sqrt(3) / 2**bits, rel=1e-3)


@pytest.mark.parametrize("bits", BITS)
def test_laplace_levels_are_those_of_the_table_and_means_of_their_cells(bits):
    levels = laplace_levels(bits)
    np.testing.assert_allclose(levels, both_halves(LAPLACE[bits]), atol=1e-4)
    half = levels[2 ** (bits - 1) :]
    mass, moment = laplace_cells(np.concatenate([[0.0], midpoints(half), [np.inf]]))
    np.testing.assert_allclose(half, moment / mass, atol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_matched_levels_are_the_means_of_the_folded_residual(bits):
    first = gaussian_levels(bits)[2 ** (bits - 1) :]
    levels = matched_levels(bits)
    mass, moment = folded_cells(first, levels)
    assert (np.diff(levels) > 0).all()
    np.testing.assert_allclose(levels, moment.sum(axis=0) / mass.sum(axis=0), atol=1e-4)


def test_one_matched_bit_on_top_of_one_is_the_best_of_two_bits():
    np.testing.assert_allclose(key_codebook("matched", 1, MANY).levels, both_halves(NORMAL[2]), atol=1e-4)
    np.testing.assert_allclose(key_codebook("matched", 1, 128).levels, both_halves(IN_128[2]), atol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_matched_second_stage_lies_between_the_shared_and_the_best(bits):
    book = key_codebook("matched", bits, MANY)
    error = distortion(book, MANY)
    assert error == pytest.approx(folded_error(book.first[2 ** (bits - 1) :], book.second), rel=1e-3)
    assert PER_CELL[bits] * 0.995 <= error < SHARED[bits]


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_laplace_second_stage_has_the_distortion_of_the_table(bits):
    book = key_codebook("laplace", bits, MANY)
    assert distortion(book, MANY) == pytest.approx(LAPLACE_ERROR[bits], rel=3e-3)
    assert folded_error(book.first[2 ** (bits - 1) :], book.second) == pytest.approx(LAPLACE_ERROR[bits], rel=3e-3)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_laplace_second_stage_has_the_variance_of_the_residual(bits):
    second = key_codebook("laplace", bits, MANY).second
    np.testing.assert_allclose(second, both_halves(LAPLACE[bits]) * math.sqrt(NORMAL_ERROR[bits]), atol=1e-4)


@pytest.mark.parametrize(("bits", "step", "error"), [(2, 0.9957, 0.1188), (4, 0.3352, 0.0115)])
def test_uniform_steps_are_those_of_the_table(bits, step, error):
    """Max 1960, table II."""
    assert uniform_step(bits) == pytest.approx(step, abs=1e-4)
    book = uniform_codebook(bits, MANY)
    assert book.step == pytest.approx(step, abs=1e-4)
    assert distortion(book, MANY) == pytest.approx(error, abs=6e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_no_other_step_is_better(bits):
    best = uniform_step(bits)
    places = np.arange(2**bits) - (2**bits - 1) / 2
    error = normal_error(best * places)
    for factor in (0.97, 0.99, 1.01, 1.03):
        assert normal_error(factor * best * places) > error


@pytest.mark.parametrize("dim", [1, 2, 3, 40, 128])
@pytest.mark.parametrize("kind", ["uniform", "matched", "laplace"])
@pytest.mark.parametrize("bits", BITS)
def test_codebooks_of_keys_are_symmetric_and_have_a_level_for_every_code(kind, bits, dim):
    book = key_codebook(kind, bits, dim)
    levels = book.levels
    assert levels.shape == (4**bits,)
    assert np.unique(levels).size == 4**bits
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-9)
    if kind == "uniform":
        np.testing.assert_allclose(np.diff(levels), book.step)
        return
    for code, level in enumerate(levels):
        high, low = divmod(code, 2**bits)
        second = book.second if book.first[high] > 0 or kind == "laplace" else -book.second[::-1]
        assert level == pytest.approx(book.first[high] + second[low])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codebooks_of_values_have_one_stage(bits):
    for kind in ("matched", "laplace"):
        book = value_codebook(kind, bits, 128)
        assert book.second is None
        if bits <= 4:
            np.testing.assert_allclose(book.levels, both_halves(IN_128[bits]), atol=1e-4)
    uniform = value_codebook("uniform", bits, MANY)
    np.testing.assert_allclose(np.diff(uniform.levels), uniform_step(bits), rtol=1e-4)


@pytest.mark.parametrize("kind", ["uniform", "matched", "laplace"])
def test_more_bits_are_better(kind):
    errors = [distortion(key_codebook(kind, bits, 128), 128) for bits in BITS]
    assert all(later < earlier / 3 for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize("bits", BITS)
def test_the_distortion_lies_between_the_bounds_of_the_paper(bits):
    """arXiv:2504.19874, theorems 1 and 3."""
    error = distortion(Codebook(gaussian_levels(bits, 128)), 128)
    assert 4.0**-bits <= error <= math.sqrt(3) * math.pi / 2 * 4.0**-bits


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("kind", ["matched", "laplace"])
def test_two_stages_are_better_than_one_and_not_better_than_the_best(kind, bits):
    error = distortion(key_codebook(kind, bits, MANY), MANY)
    assert DIRECT[bits] * 0.995 < error < 0.5 * NORMAL_ERROR[bits]
