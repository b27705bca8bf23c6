"""Codes packed in blocks of rows: the same rows and products as row by row, whatever is done to them."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_turboquant_rvq.blocks import BLOCK
from veloxquant_turboquant_rvq.blocks import BlockCodes
from veloxquant_turboquant_rvq.blocks import serves
from veloxquant_turboquant_rvq.codes import RowCodes
from veloxquant_turboquant_rvq.quantizer import quantizer

BOOKS = [
    *(("uniform", bits) for bits in (1, 2, 3, 4)),
    ("matched", 1),
    ("laplace", 1),
    ("laplace", 2),
]
SOME = [("uniform", 1), ("uniform", 3), ("matched", 1), ("laplace", 2)]
BATCH, HEADS = 2, 3
COUNTS = [1, 127, 128, 129, 255, 256, 257, 300]


def book_of(kind, bits, dim=64):
    return quantizer("keys", kind, bits, dim, 42)


def random_codes(book, rows, seed=0):
    return (
        np.random.default_rng([seed, rows]).integers(0, 2**book.width, (BATCH, HEADS, rows, book.dim)).astype(np.uint8)
    )


def filled(kind, book, codes, cuts):
    store, start = kind(book), 0
    for size in cuts:
        store.append(mx.array(codes[:, :, start : start + size]))
        start += size
    assert start == codes.shape[2]
    return store


def held(store):
    return {name: np.array(array) for name, array in store.arrays().items()}


def same(one, other):
    first, second = held(one), held(other)
    assert first.keys() == second.keys()
    return all((first[name] == second[name]).all() for name in first)


def assert_rows(store, codes):
    """Codes and products are those of numpy, and of rows packed row by row."""
    book = store.quantizer
    assert store.count == codes.shape[2]
    assert store.codes().dtype == mx.uint8
    assert (np.array(store.codes()) == codes).all()
    rows = np.random.default_rng(9).standard_normal((BATCH, HEADS, 5, book.dim)).astype(np.float32)
    product = store.product(mx.array(rows))
    assert (product.dtype, product.shape) == (mx.float32, (BATCH, HEADS, 5, codes.shape[2]))
    expected = rows.astype(np.float64) @ book.book.levels[codes].swapaxes(2, 3)
    np.testing.assert_allclose(np.array(product), expected, rtol=1e-5, atol=2e-4)
    by_rows = filled(RowCodes, book, codes, [codes.shape[2]]).product(mx.array(rows))
    np.testing.assert_allclose(np.array(product), np.array(by_rows), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
@pytest.mark.parametrize("count", [5, 128, 300])
def test_products_are_those_of_the_levels(kind, bits, count):
    book = book_of(kind, bits)
    assert serves(book)
    codes = random_codes(book, count)
    assert_rows(filled(BlockCodes, book, codes, [count]), codes)


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_products_are_right_where_those_of_mlx_do_not_serve(kind, bits, monkeypatch):
    """As on CUDA, where there are none for single bits."""

    def refused(*_, **__):
        raise AssertionError("a product of mlx was asked for")

    for module in ("codes", "blocks"):
        monkeypatch.setattr(f"veloxquant_turboquant_rvq.{module}.products_serve", lambda: False)
    monkeypatch.setattr(mx, "quantized_matmul", refused)
    book = book_of(kind, bits)
    codes = random_codes(book, 300)
    assert_rows(filled(BlockCodes, book, codes, [300]), codes)


@pytest.mark.parametrize("dim", [32, 40, 56, 80, 96, 112, 128, 33, 7])
@pytest.mark.parametrize(("kind", "bits"), [("uniform", 1), ("uniform", 2), ("laplace", 1)])
def test_any_dimension_serves(kind, bits, dim):
    book = book_of(kind, bits, dim)
    codes = random_codes(book, 150)
    assert_rows(filled(BlockCodes, book, codes, [150]), codes)


@pytest.mark.parametrize(("kind", "bits"), [("matched", 2), ("matched", 3), ("laplace", 3), ("laplace", 4)])
def test_levels_that_are_no_sum_over_bits_are_not_served(kind, bits):
    assert not serves(book_of(kind, bits))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("kind", "bits"), SOME)
def test_what_is_held_does_not_depend_on_the_blocks_in_which_it_came(kind, bits, count):
    book = book_of(kind, bits, 40)
    codes = random_codes(book, count)
    whole = filled(BlockCodes, book, codes, [count])
    assert (np.array(whole.codes()) == codes).all()
    patterns = [[1] * count if count <= 130 else [100, *[1] * 60, count - 160], [count // 2, count - count // 2]]
    patterns += [[127, 1, count - 128]] if count > 128 else []
    for cuts in patterns:
        store = filled(BlockCodes, book, codes, [size for size in cuts if size])
        assert same(store, whole)
        assert store.nbytes == whole.nbytes


@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize(("kind", "bits"), SOME)
def test_dropped_rows_leave_no_trace(kind, bits, count):
    """Across the borders of blocks and within them, and rows can follow."""
    book = book_of(kind, bits, 32)
    codes, later = random_codes(book, count), random_codes(book, 131, seed=1)
    for left in sorted({left for left in (1, 44, 126, 127, 128, 129, 256, count - 1) if left < count}):
        store = filled(BlockCodes, book, codes, [count])
        store.drop_last(count - left)
        plain = filled(BlockCodes, book, codes[:, :, :left], [left])
        assert same(store, plain)
        assert store.nbytes == plain.nbytes
        store.append(mx.array(later))
        assert (np.array(store.codes()) == np.concatenate([codes[:, :, :left], later], axis=2)).all()


@pytest.mark.parametrize(("kind", "bits"), SOME)
def test_rows_that_follow_a_drop_are_multiplied_right(kind, bits):
    book = book_of(kind, bits)
    codes, later = random_codes(book, 260), random_codes(book, 131, seed=1)
    store = filled(BlockCodes, book, codes, [260])
    store.drop_last(70)
    assert_rows(store, codes[:, :, :190])
    store.append(mx.array(later))
    assert_rows(store, np.concatenate([codes[:, :, :190], later], axis=2))


@pytest.mark.parametrize(("kind", "bits"), SOME)
@pytest.mark.parametrize("count", [90, 128, 300])
def test_selected_rows_are_those_of_each_head(kind, bits, count):
    book = book_of(kind, bits)
    codes = random_codes(book, count)
    store = filled(BlockCodes, book, codes, [count])
    random = np.random.default_rng(2)
    index = np.sort(random.permuted(np.tile(np.arange(count), (BATCH, HEADS, 1)), axis=2)[..., :50], axis=2)
    chosen = store.select(mx.array(index.astype(np.int32)))
    assert chosen.count == 50
    assert (np.array(chosen.codes()) == np.take_along_axis(codes, index[..., None], axis=2)).all()
    assert (np.array(store.codes()) == codes).all()


@pytest.mark.parametrize(("kind", "bits"), SOME)
@pytest.mark.parametrize("count", COUNTS)
def test_arrays_are_live_rows_and_load_takes_them_over(kind, bits, count):
    book = book_of(kind, bits, 32)
    codes, later = random_codes(book, count), random_codes(book, 3, seed=1)
    store, loaded = filled(BlockCodes, book, codes, [count]), BlockCodes(book)
    before = held(store)
    sizes = {name: array.shape[2] for name, array in before.items()}
    assert sizes.get("blocks", 0) * BLOCK + sizes.get("codes", 0) == count
    loaded.load(store.arrays())
    assert same(loaded, store)
    assert loaded.nbytes == store.nbytes
    loaded.append(mx.array(later))
    assert (np.array(loaded.codes()) == np.concatenate([codes, later], axis=2)).all()
    assert (np.array(store.codes()) == codes).all()
    assert all((before[name] == array).all() for name, array in held(store).items())


@pytest.mark.parametrize(
    ("kind", "bits"), [("uniform", 1), ("uniform", 2), ("uniform", 3), ("laplace", 1), ("laplace", 2)]
)
def test_a_block_takes_the_bytes_of_its_rows(kind, bits):
    """And is in the affine layout of mlx, channel by channel, one group a channel; stages in planes of single bits."""
    book = book_of(kind, bits, 128)
    codes = random_codes(book, BLOCK)
    store = filled(BlockCodes, book, codes, [BLOCK])
    assert store.nbytes == store.arrays()["blocks"].nbytes == BATCH * HEADS * BLOCK * 128 * 2 * bits // 8
    blocks, columns = store.arrays()["blocks"], codes.swapaxes(2, 3)[:, :, None]
    if kind == "laplace":
        assert blocks.shape == (BATCH, HEADS, 1, 2 * bits * 128, 4)
        planes = np.concatenate([columns >> place & 1 for place in range(2 * bits)], axis=3)
        words = np.packbits(planes, axis=-1, bitorder="little").view(np.uint32)
        assert (np.array(blocks) == words).all()
        return
    ones, zeros = mx.ones((BATCH, HEADS, 1, 128, 1)), mx.zeros((BATCH, HEADS, 1, 128, 1))
    assert (np.array(mx.dequantize(blocks, ones, zeros, group_size=128, bits=2 * bits)) == columns).all()


@pytest.mark.parametrize(("kind", "bits"), SOME)
def test_random_histories_hold_the_rows_that_are_left(kind, bits):
    book = book_of(kind, bits, 32)
    random = np.random.default_rng(bits)
    for _ in range(3):
        store, codes = BlockCodes(book), np.zeros((BATCH, HEADS, 0, 32), dtype=np.uint8)
        for step in range(25):
            if codes.shape[2] > 1 and random.random() < 0.4:
                count = int(random.integers(1, min(codes.shape[2], 200)))
                store.drop_last(count)
                codes = codes[:, :, :-count]
            else:
                new = random_codes(book, int(random.choice([1, 3, 60, 127, 128, 129, 200])), seed=step)
                store.append(mx.array(new))
                codes = np.concatenate([codes, new], axis=2)
            assert store.count == codes.shape[2]
            assert (np.array(store.codes()) == codes).all()
