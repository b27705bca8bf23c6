"""Codes packed row by row, against numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant import UnsupportedShapeError
from veloxquant_turboquant_rvq.codes import RowCodes
from veloxquant_turboquant_rvq.codes import pack_rows
from veloxquant_turboquant_rvq.codes import unpack_rows
from veloxquant_turboquant_rvq.quantizer import quantizer

KEYS = [(kind, bits) for kind in ("uniform", "matched", "laplace") for bits in (1, 2, 3, 4)]
BOOKS = [("keys", *book) for book in KEYS] + [
    ("values", kind, bits) for kind in ("uniform", "matched") for bits in (2, 3, 4, 8)
]
SOME = [
    ("keys", "uniform", 1),
    ("keys", "uniform", 3),
    ("keys", "matched", 2),
    ("keys", "laplace", 1),
    ("keys", "laplace", 3),
    ("values", "uniform", 3),
    ("values", "matched", 8),
]
DIMS = [32, 40, 64, 80, 96, 128, 33]
BATCH, HEADS = 2, 3


def random_codes(book, rows, seed=0):
    return np.random.default_rng([seed, rows]).integers(0, 2**book.width, (BATCH, HEADS, rows, book.dim))


def filled(book, codes, cuts):
    store, start = RowCodes(book), 0
    for size in cuts:
        store.append(mx.array(codes[:, :, start : start + size].astype(np.uint8)))
        start += size
    assert start == codes.shape[2]
    return store


def levels_of(book, codes):
    return book.book.levels[codes]


def random_rows(*shape, seed=5):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_products(store, book, codes):
    """Products with rows, and sums of levels of the first rows, as numpy has them."""
    levels, rows = levels_of(book, codes), random_rows(BATCH, HEADS, 4, book.dim)
    product = store.product(mx.array(rows))
    assert (product.dtype, product.shape) == (mx.float32, (BATCH, HEADS, 4, codes.shape[2]))
    np.testing.assert_allclose(np.array(product), rows.astype(np.float64) @ levels.swapaxes(2, 3), rtol=1e-5, atol=2e-4)
    for count in {1, codes.shape[2] // 2 + 1, codes.shape[2]}:
        weights = random_rows(BATCH, HEADS, 4, count, seed=6)
        mixed = store.mix(mx.array(weights))
        assert (mixed.dtype, mixed.shape) == (mx.float32, (BATCH, HEADS, 4, book.dim))
        expected = weights.astype(np.float64) @ levels[:, :, :count]
        np.testing.assert_allclose(np.array(mixed), expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("part", "kind", "bits"), BOOKS)
@pytest.mark.parametrize("dim", [64, 80])
def test_products_and_sums_are_those_of_the_levels(part, kind, bits, dim):
    book = quantizer(part, kind, bits, dim, 42)
    codes = random_codes(book, 37)
    store = filled(book, codes, [37])
    assert store.count == 37
    assert (np.array(store.codes()) == codes).all()
    assert store.codes().dtype == mx.uint8
    assert_products(store, book, codes)


@pytest.mark.parametrize(("part", "kind", "bits"), BOOKS)
@pytest.mark.parametrize("dim", [64, 128])
def test_products_are_right_where_those_of_mlx_do_not_serve(part, kind, bits, dim, monkeypatch):
    """As on CUDA, where some of them are wrong."""
    monkeypatch.setattr("veloxquant_turboquant_rvq.codes.products_serve", lambda: False)
    book = quantizer(part, kind, bits, dim, 42)
    codes = random_codes(book, 37)
    assert_products(filled(book, codes, [37]), book, codes)


@pytest.mark.parametrize(("part", "kind", "bits"), SOME)
@pytest.mark.parametrize("dim", DIMS)
def test_any_dimension_serves(part, kind, bits, dim):
    book = quantizer(part, kind, bits, dim, 42)
    codes = random_codes(book, 21)
    assert_products(filled(book, codes, [20, 1]), book, codes)


@pytest.mark.parametrize(("part", "kind", "bits"), SOME)
def test_rows_do_not_depend_on_the_blocks_in_which_they_came(part, kind, bits):
    book = quantizer(part, kind, bits, 40, 42)
    codes = random_codes(book, 150)
    whole = filled(book, codes, [150])
    for cuts in ([1] * 150, [127, 1, 22], [16, 16, 118], [149, 1]):
        store = filled(book, codes, cuts)
        assert (np.array(store.arrays()["codes"]) == np.array(whole.arrays()["codes"])).all()
        assert store.nbytes == whole.nbytes


@pytest.mark.parametrize(("part", "kind", "bits"), SOME)
@pytest.mark.parametrize("dropped", [1, 5, 70, 99])
def test_dropped_rows_leave_no_trace(part, kind, bits, dropped):
    book = quantizer(part, kind, bits, 64, 42)
    codes, later = random_codes(book, 100), random_codes(book, 9, seed=1)
    store, plain = filled(book, codes, [100]), filled(book, codes[:, :, : 100 - dropped], [100 - dropped])
    store.drop_last(dropped)
    assert (store.count, store.nbytes) == (plain.count, plain.nbytes)
    for one in (store, plain):
        one.append(mx.array(later.astype(np.uint8)))
    left = np.concatenate([codes[:, :, : 100 - dropped], later], axis=2)
    assert (np.array(store.codes()) == left).all()
    assert (np.array(store.arrays()["codes"]) == np.array(plain.arrays()["codes"])).all()
    assert_products(store, book, left)


@pytest.mark.parametrize(("part", "kind", "bits"), SOME)
def test_selected_rows_are_those_of_each_head(part, kind, bits):
    book = quantizer(part, kind, bits, 80, 42)
    codes = random_codes(book, 60)
    store = filled(book, codes, [60])
    index = np.sort(
        np.random.default_rng(2).permuted(np.tile(np.arange(60), (BATCH, HEADS, 1)), axis=2)[..., :11], axis=2
    )
    chosen = store.select(mx.array(index.astype(np.int32)))
    expected = np.take_along_axis(codes, index[..., None], axis=2)
    assert (np.array(chosen.codes()) == expected).all()
    assert_products(chosen, book, expected)
    chosen.append(mx.array(codes[:, :, :3].astype(np.uint8)))
    assert (np.array(store.codes()) == codes).all()
    assert (np.array(chosen.codes()) == np.concatenate([expected, codes[:, :, :3]], axis=2)).all()


@pytest.mark.parametrize(("part", "kind", "bits"), SOME)
def test_arrays_hold_live_rows_and_load_takes_them_over(part, kind, bits):
    book = quantizer(part, kind, bits, 64, 42)
    codes = random_codes(book, 19)
    store, loaded = filled(book, codes, [19]), RowCodes(book)
    arrays = store.arrays()
    assert {name: array.shape[:3] for name, array in arrays.items()} == {"codes": (BATCH, HEADS, 19)}
    loaded.load(arrays)
    loaded.append(mx.array(codes[:, :, :2].astype(np.uint8)))
    assert (np.array(store.codes()) == codes).all()
    assert (np.array(loaded.codes()) == np.concatenate([codes, codes[:, :, :2]], axis=2)).all()


@pytest.mark.parametrize(("part", "kind", "bits"), BOOKS)
@pytest.mark.parametrize("dim", [40, 80, 128])
def test_rows_are_streams_of_whole_words_lowest_bit_first(part, kind, bits, dim):
    book = quantizer(part, kind, bits, dim, 42)
    codes = np.random.default_rng(0).integers(0, 2**book.width, (4, dim))
    streams = [(codes, book.width)]
    if part == "keys" and kind == "laplace":
        # The named method: indices of stage 1, then those of stage 2.
        streams = [(codes >> bits, bits), (codes & (2**bits - 1), bits)]
    expected = []
    for row in range(4):
        words = []
        for stream, width in streams:
            whole = sum(int(code) << (place * width) for place, code in enumerate(stream[row]))
            words += [whole >> (32 * word) & 0xFFFFFFFF for word in range(math.ceil(dim * width / 32))]
        expected.append(words)
    packed = pack_rows(mx.array(codes.astype(np.uint8)), book)
    assert np.array(packed).tolist() == expected
    assert (np.array(unpack_rows(packed, book)) == codes).all()


@pytest.mark.parametrize("kind", ["uniform", "matched", "laplace"])
@pytest.mark.parametrize(("bits", "size"), [(1, 32), (2, 64), (3, 96), (4, 128)])
def test_bytes_of_a_row_in_128_dimensions(kind, bits, size):
    book = quantizer("keys", kind, bits, 128, 42)
    store = filled(book, random_codes(book, 16), [16])
    assert store.arrays()["codes"].nbytes == BATCH * HEADS * 16 * size
    assert store.nbytes == BATCH * HEADS * 16 * size


def test_an_empty_store_says_so():
    store = RowCodes(quantizer("keys", "uniform", 1, 64, 42))
    assert (store.count, store.nbytes, store.arrays()) == (0, 0, {})
    with pytest.raises(UnsupportedShapeError, match="append"):
        store.codes()
