"""Encoding and decoding, against theory and a plain reference in float64.

The tables of the literature are for vectors divided by their norm and scaled back with it. Here the scale is the one
of least squares for the codes chosen, so the error of a unit vector x with levels c is 1 - <x, c>^2 / |c|^2. Where
levels are means of their cells, and for the best uniform step, E<x, c> = E|c|^2 and both are the same but for a share
of 1 / d. For the Laplace variant, whose second stage does not fit its residual, least squares does better than the
tables; there, and in few dimensions, the mean over random vectors in numpy is the value to compare with.
"""

import copy
import functools
import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_turboquant_rvq.codebooks import key_codebook
from veloxquant_turboquant_rvq.quantizer import bit_weights
from veloxquant_turboquant_rvq.quantizer import quantizer

DIM = 128
DIMS = [32, 40, 56, 64, 80, 96, 112, 128, 192, 256]
KINDS = ["uniform", "matched", "laplace"]
BOOKS = [(kind, bits) for kind in KINDS for bits in (1, 2, 3, 4)]
# Errors in 128 dimensions: Lloyd-Max of 1 to 4 bits; two Laplace stages with the norm as scale. Max's uniform grids.
LLOYD_MAX = {1: 0.3609, 2: 0.1160, 3: 0.0340, 4: 0.0093}
LAPLACE = {1: 0.1317, 2: 0.0253, 3: 0.0025}
UNIFORM = {1: 0.1188, 2: 0.0115}


def keys_quantizer(kind="uniform", bits=1, dim=DIM, seed=42):
    return quantizer("keys", kind, bits, dim, seed)


@functools.cache
def unit_vectors(dim, count=2000, seed=0):
    rows = np.random.default_rng([seed, dim]).standard_normal((count, dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def rebuilt(book, rows):
    return np.array(book.decode(*book.encode(mx.array(rows)))).astype(np.float64)


def errors(rows, back):
    return ((rows - back) ** 2).sum(-1) / (rows**2).sum(-1)


def nearest(values, levels):
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values)


def chosen(coordinates, book):
    """Codes of coordinates of unit variance: the nearest level, stage by stage."""
    first = nearest(coordinates, book.first)
    if book.second is None:
        return first
    rest = coordinates - book.first[first]
    flip = book.folded & (book.first[first] < 0)
    second = nearest(np.where(flip, -rest, rest), book.second)
    return first * len(book.second) + np.where(flip, len(book.second) - 1 - second, second)


@functools.cache
def theory(kind, bits, dim):
    """Mean error with the scale of least squares, over random unit vectors, which need no rotation."""
    book = key_codebook(kind, bits, dim)
    rows = unit_vectors(dim, 2000, seed=99)
    levels = book.levels[chosen(rows * dim**0.5, book)]
    return (1 - (rows * levels).sum(1) ** 2 / (levels**2).sum(1)).mean()


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_codes_and_scales_equal_numpy(kind, bits):
    book = keys_quantizer(kind, bits)
    rows = (unit_vectors(DIM, 300) * np.random.default_rng(1).lognormal(0, 2, (300, 1))).astype(np.float32)
    codes, scales = book.encode(mx.array(rows))
    assert codes.dtype == mx.uint8
    assert scales.dtype == mx.bfloat16
    assert (codes.shape, scales.shape) == ((300, DIM), (300, 1))
    rotation = np.array(book.rotation.apply(mx.eye(DIM))).astype(np.float64)
    rotated = rows.astype(np.float64) @ rotation
    coordinates = rotated / np.linalg.norm(rotated, axis=1, keepdims=True) * DIM**0.5
    expected, found = chosen(coordinates, book.book), np.array(codes)
    # Rounding may decide between levels that are as near; hardly ever, and then the other one is as good.
    assert (expected != found).mean() < 1e-3
    levels = book.book.levels
    off = np.abs(coordinates - levels[found]) - np.abs(coordinates - levels[expected])
    if kind != "laplace" and not (kind == "matched" and bits > 1):
        assert off.max() < 1e-4
    fit = (rotated * levels[found]).sum(1) / (levels[found] ** 2).sum(1)
    np.testing.assert_allclose(np.array(scales.astype(mx.float32))[:, 0], fit, rtol=2**-8)
    back = np.array(book.decode(codes, scales))
    expected_rows = np.array(scales.astype(mx.float32)) * levels[found] @ rotation.T
    np.testing.assert_allclose(back, expected_rows, atol=1e-5 * np.abs(rows).max())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_one_stage_has_the_distortion_of_the_table(bits):
    book = quantizer("values", "matched", bits, DIM, 42)
    assert errors(unit_vectors(DIM), rebuilt(book, unit_vectors(DIM))).mean() == pytest.approx(
        LLOYD_MAX[bits], rel=0.03
    )


@pytest.mark.parametrize("bits", [1, 2])
def test_a_uniform_grid_has_the_distortion_of_the_table(bits):
    """Max's table is for a normal variable, so many dimensions are needed."""
    error = errors(unit_vectors(512), rebuilt(keys_quantizer("uniform", bits, 512), unit_vectors(512))).mean()
    assert error == pytest.approx(UNIFORM[bits], rel=0.03)


def test_one_matched_bit_on_top_of_one_has_the_distortion_of_two_bits():
    error = errors(unit_vectors(DIM), rebuilt(keys_quantizer("matched", 1), unit_vectors(DIM))).mean()
    assert error == pytest.approx(LLOYD_MAX[2], rel=0.03)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_laplace_with_a_fitted_scale_is_better_than_the_table_and_as_theory_says(bits):
    error = errors(unit_vectors(DIM), rebuilt(keys_quantizer("laplace", bits), unit_vectors(DIM))).mean()
    assert error == pytest.approx(theory("laplace", bits, DIM), rel=0.03)
    assert LLOYD_MAX[bits] / 200 < error < LAPLACE[bits] * 1.02


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_dimension_has_the_distortion_of_theory(kind, dim):
    for bits in (1, 2):
        error = errors(
            unit_vectors(dim, 1000), rebuilt(keys_quantizer(kind, bits, dim), unit_vectors(dim, 1000))
        ).mean()
        assert error == pytest.approx(theory(kind, bits, dim), rel=0.03)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_many_bits_have_the_distortion_of_theory(kind, bits):
    rows = unit_vectors(DIM) * 2 ** np.random.default_rng(0).uniform(0, 1, (2000, 1))
    # A scale in bf16 is off by up to half of 2^-7 of its binade, which counts against codes of 8 bits.
    rounding = 2.0**-14 / 12 * 0.75 / (2 * math.log(2))
    error = errors(rows, rebuilt(keys_quantizer(kind, bits), rows)).mean()
    # Of 4 Laplace bits the error is that of a few outliers, and the mean over them varies.
    assert error == pytest.approx(
        theory(kind, bits, DIM) + rounding, rel=0.2 if (kind, bits) == ("laplace", 4) else 0.03
    )


@pytest.mark.parametrize(("bits", "spread"), [(1, 0.030), (2, 0.015), (3, 0.006), (4, 0.002)])
def test_vectors_spread_around_the_distortion_as_theory_says(bits, spread):
    book = quantizer("values", "matched", bits, DIM, 42)
    assert errors(unit_vectors(DIM), rebuilt(book, unit_vectors(DIM))).std() == pytest.approx(spread, rel=0.35)


@pytest.mark.parametrize(("kind", "bits"), [*BOOKS[:2], *BOOKS[4:6], *BOOKS[8:10]])
def test_products_shrink_by_one_minus_the_distortion(kind, bits):
    rows = unit_vectors(DIM, 4000)
    random = np.random.default_rng(3)
    share = random.uniform(-1, 1, (4000, 1))
    others = share * rows + np.sqrt(1 - share**2) * unit_vectors(DIM, 4000, seed=1)
    back = rebuilt(keys_quantizer(kind, bits), rows)
    true, found = (rows * others).sum(1), (back * others).sum(1)
    error = theory(kind, bits, DIM)
    assert (true @ found) / (true @ true) == pytest.approx(1 - error, abs=0.01)
    assert (back**2).sum(1).mean() == pytest.approx(1 - error, abs=0.01)
    cosines = (rows * back).sum(1) / np.linalg.norm(back, axis=1)
    assert cosines.mean() == pytest.approx(math.sqrt(1 - error), abs=0.005)


@pytest.mark.parametrize(("kind", "bits"), [("uniform", 1), ("uniform", 2), ("matched", 2), ("laplace", 1)])
@pytest.mark.parametrize("dim", [128, 80])
def test_no_vector_is_bad_over_all_rotations(kind, bits, dim):
    """Vectors that are far from random, averaged over seeds."""
    worst = np.zeros((4, dim))
    worst[0, 3] = 1
    worst[1] = 1
    worst[2] = np.random.default_rng(0).standard_normal(dim)
    worst[2, 5] = 30
    worst[3, :2] = (3, -4)
    found = np.mean(
        [errors(worst, rebuilt(keys_quantizer(kind, bits, dim, seed), worst)) for seed in range(100)], axis=0
    )
    np.testing.assert_allclose(found[1:], theory(kind, bits, dim), rtol=0.06)
    # Two rounds turn a basis vector into multiples of 2 / dim, of which some fine grids make less error than theory.
    assert found[0] < 1.06 * theory(kind, bits, dim)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("kind", ["matched", "laplace"])
def test_no_vector_is_worse_in_two_stages_than_in_the_first_alone(kind, bits):
    rows = unit_vectors(DIM)
    both = errors(rows, rebuilt(keys_quantizer(kind, bits), rows))
    # Values of these codebooks have that one stage; another rotation is as good.
    first = errors(rows, rebuilt(quantizer("values", kind, bits, DIM, 42), rows))
    assert both.max() < first.min()


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_have_less_error(kind):
    found = [errors(unit_vectors(DIM), rebuilt(keys_quantizer(kind, bits), unit_vectors(DIM))) for bits in (1, 2, 3, 4)]
    for fewer, more in itertools.pairwise(found):
        assert more.mean() < fewer.mean() / 3


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_every_index_of_both_stages_is_used(kind, bits):
    codes = np.array(keys_quantizer(kind, bits).encode(mx.array(unit_vectors(DIM, 4000)))[0])
    assert set(np.unique(codes >> bits)) == set(range(2**bits))
    assert set(np.unique(codes & (2**bits - 1))) == set(range(2**bits))
    if kind == "uniform":
        assert np.unique(codes).size == 4**bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [128, 80])
def test_a_power_of_two_scales_the_scale_and_nothing_else(kind, dim):
    book = keys_quantizer(kind, 2, dim)
    rows = mx.array(unit_vectors(dim, 100).astype(np.float32))
    codes, scales = book.encode(rows)
    for power in (-60, -1, 1, 17, 100):
        other_codes, other_scales = book.encode(rows * 2.0**power)
        assert bool((codes == other_codes).all())
        assert bool((other_scales.astype(mx.float32) == scales.astype(mx.float32) * 2.0**power).all())


@pytest.mark.parametrize("factor", [0.003, 3.7, 12345.0])
def test_any_factor_scales_what_is_rebuilt(factor):
    rows = unit_vectors(DIM, 200)
    expected, found = rebuilt(keys_quantizer(), rows) * factor, rebuilt(keys_quantizer(), rows * factor)
    # Up to the rounding of both scales to bf16.
    assert (np.linalg.norm(found - expected, axis=1) <= 2**-7 * np.linalg.norm(expected, axis=1)).all()


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_the_opposite_vector_has_the_mirrored_codes(kind, bits):
    book = keys_quantizer(kind, bits)
    rows = mx.array(unit_vectors(DIM, 200).astype(np.float32))
    codes, scales = book.encode(rows)
    opposite, same_scales = book.encode(-rows)
    assert bool((opposite.astype(mx.int32) == 4**bits - 1 - codes.astype(mx.int32)).all())
    assert bool((scales == same_scales).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [160_000.0, 1e30, 3e-30])
def test_extreme_norms_in_bf16_are_as_good_as_others(kind, norm):
    rows = mx.array(unit_vectors(DIM, 500) * norm).astype(mx.bfloat16)
    exact = np.array(rows.astype(mx.float32)).astype(np.float64)
    back = np.array(keys_quantizer(kind, 1).decode(*keys_quantizer(kind, 1).encode(rows))).astype(np.float64)
    assert np.isfinite(back).all()
    assert errors(exact, back).mean() == pytest.approx(theory(kind, 1, DIM), rel=0.04)


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_zero_rows_come_back_as_zeros(kind, bits, dtype):
    book = keys_quantizer(kind, bits, 64)
    rows = mx.array(unit_vectors(64, 3)).astype(dtype)
    rows[1] = 0
    codes, scales = book.encode(rows)
    back = np.array(book.decode(codes, scales))
    assert (back[1] == 0).all()
    assert (np.abs(back[[0, 2]]).sum(1) > 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "bits"), [("uniform", 1), ("matched", 2), ("laplace", 1)])
@pytest.mark.parametrize("dim", [64, 80])
def test_what_is_not_a_number_stays_in_its_row(kind, bits, dim, bad):
    book = keys_quantizer(kind, bits, dim)
    rows = unit_vectors(dim, 5).astype(np.float32)
    clean = np.array(book.decode(*book.encode(mx.array(rows))))
    spoiled = rows.copy()
    spoiled[2, 7] = bad
    back = np.array(book.decode(*book.encode(mx.array(spoiled))))
    assert not np.isfinite(back[2]).any()
    assert (np.delete(back, 2, 0) == np.delete(clean, 2, 0)).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_quantized_as_the_numbers_it_holds(dtype):
    rows = mx.array(unit_vectors(DIM, 50)).astype(dtype)
    book = keys_quantizer()
    for found, expected in zip(book.encode(rows), book.encode(rows.astype(mx.float32)), strict=True):
        assert bool((found == expected).all())


@pytest.mark.parametrize("dim", [33, 40, 64, 80, 128])
@pytest.mark.parametrize(("kind", "bits"), [("uniform", 2), ("laplace", 1)])
def test_codes_of_a_row_do_not_depend_on_the_rows_beside_it(kind, bits, dim):
    book = keys_quantizer(kind, bits, dim)
    rows = mx.array(unit_vectors(dim, 600).astype(np.float32)).reshape(2, 3, 100, dim)
    whole = book.encode(rows)
    turned = book.encode(mx.contiguous(rows.swapaxes(1, 2)).swapaxes(1, 2))
    for found, expected in zip(turned, whole, strict=True):
        assert bool((found == expected).all())
    for start, size in ((0, 1), (1, 1), (50, 2), (3, 31), (36, 64), (99, 1)):
        for part in (slice(None), slice(1, 2)):
            for found, expected in zip(book.encode(rows[part, part, start : start + size]), whole, strict=True):
                assert bool((found == expected[part, part, start : start + size]).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 17])
def test_small_and_odd_dimensions_are_quantized_too(kind, dim):
    rows = unit_vectors(dim, 300)
    found = [errors(rows, rebuilt(keys_quantizer(kind, bits, dim), rows)).mean() for bits in (1, 2, 4)]
    assert found[0] < 0.2
    assert found[2] < found[1] / 3 or dim == 1
    if dim == 1:
        # One number is its scale.
        assert max(found) < 2.0**-16


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_weights_of_bits_add_up_to_the_levels(kind, bits):
    book = keys_quantizer(kind, bits)
    signs = np.array([[1.0 if code >> place & 1 else -1.0 for place in range(2 * bits)] for code in range(4**bits)])
    best, *_ = np.linalg.lstsq(signs, book.book.levels, rcond=None)
    weights = bit_weights(book.book)
    if weights is None:
        assert np.abs(signs @ best - book.book.levels).max() > 1e-4
        assert kind != "uniform"
        assert bits > 1
    else:
        np.testing.assert_allclose(signs @ np.array(weights), book.book.levels, atol=1e-9)


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_points_are_the_levels_of_the_codebook(kind, bits):
    book = keys_quantizer(kind, bits)
    codes = mx.arange(4**bits).astype(mx.uint8)
    np.testing.assert_allclose(np.array(book.points(codes)), book.book.levels, atol=1e-6)
    np.testing.assert_allclose(np.array(book.levels), book.book.levels, atol=1e-6)


def test_quantizers_are_shared_and_not_copied():
    book = keys_quantizer()
    assert keys_quantizer() is book
    assert copy.deepcopy({"book": book})["book"] is book
    assert keys_quantizer(seed=43) is not book
    assert book.nbytes > book.rotation.nbytes


def test_the_same_seed_gives_the_same_codes_after_everything_was_forgotten():
    rows = mx.array(unit_vectors(DIM, 20))
    before = keys_quantizer().encode(rows)
    quantizer.cache_clear()
    for found, expected in zip(keys_quantizer().encode(rows), before, strict=True):
        assert bool((found == expected).all())
    assert not bool((keys_quantizer(seed=1).encode(rows)[0] == before[0]).all())
