"""The packed row store, in both layouts, against numpy in float64."""

import copy
import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant import UnsupportedShapeError
from veloxquant.rows import RowStore
from veloxquant_turboquant_rvq import TurboQuantRows
from veloxquant_turboquant_rvq import TurboQuantRVQConfig
from veloxquant_turboquant_rvq.blocks import BlockCodes
from veloxquant_turboquant_rvq.quantizer import quantizer

BATCH, HEADS, GROUP = 2, 2, 3
KEY_DIM, VALUE_DIM = 40, 24
CONFIGS = {
    "default": TurboQuantRVQConfig(),
    "values": TurboQuantRVQConfig(bits=2, value_bits=4),
    "laplace": TurboQuantRVQConfig(codebook="laplace", value_bits=2),
    "matched": TurboQuantRVQConfig(codebook="matched", bits=2, value_bits=3),
    "wide": TurboQuantRVQConfig(bits=4, value_bits=8),
}
DTYPES = [mx.float32, mx.float16, mx.bfloat16]

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
both_layouts = pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])


def rows(count, dtype=mx.float32, seed=0, key_dim=KEY_DIM, value_dim=VALUE_DIM):
    random = np.random.default_rng(seed)
    keys, values = (random.standard_normal((count, BATCH, HEADS, dim)) for dim in (key_dim, value_dim))
    return tuple(mx.array(array.transpose(1, 2, 0, 3).astype(np.float32)).astype(dtype) for array in (keys, values))


def filled(config, blocked, new, cuts):
    store, start = TurboQuantRows(config, blocked=blocked), 0
    for size in cuts:
        store.append(*(array[:, :, start : start + size] for array in new))
        start += size
    assert store.count == start == sum(cuts)
    return store


def numbers(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def held(store):
    return {name: (str(array.dtype), numbers(array)) for name, array in store.arrays().items()}


def assert_same(one, other):
    first, second = held(one), held(other)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name][0] == second[name][0]
        np.testing.assert_array_equal(first[name][1], second[name][1], err_msg=name)


def assert_equal_rows(found, expected):
    """Bit for bit; on a GPU a product of another number of rows is another kernel, which rounds in another order."""
    if mx.default_device() == mx.gpu:
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, expected)


def assert_same_but_for_rounding(one, other):
    """Bit for bit; on a GPU a coordinate between two levels may fall to either, see ``assert_equal_rows``."""
    if mx.default_device() != mx.gpu:
        assert_same(one, other)
        return
    first, second = one.arrays(), other.arrays()
    assert {name: (array.dtype, array.shape) for name, array in first.items()} == {
        name: (array.dtype, array.shape) for name, array in second.items()
    }
    for name, array in first.items():
        found, expected = numbers(array), numbers(second[name])
        assert (found != expected).mean() < 2e-3
        if "codes" not in name and "blocks" not in name:
            np.testing.assert_allclose(found, expected, rtol=2**-7)


def requantized(config, keys, values):
    """Keys and values as one quantizer call each rebuilds them, in fp32."""
    back = []
    for part, array, bits in (("keys", keys, config.bits), ("values", values, config.value_bits)):
        if bits is None:
            back.append(numbers(array))
            continue
        book = quantizer(part, config.codebook, bits, array.shape[-1], config.seed)
        rotation = np.array(book.rotation.apply(mx.eye(book.dim))).astype(np.float64)
        codes, scales = book.encode(array)
        back.append(numbers(scales) * book.book.levels[np.array(codes)] @ rotation.T)
    return back


def some_index(count, kept, seed=3):
    random = np.random.default_rng(seed)
    index = random.permuted(np.tile(np.arange(count), (BATCH, HEADS, 1)), axis=2)[..., :kept]
    return np.sort(index, axis=2).astype(np.int32)


def taken(array, index):
    return np.take_along_axis(array, index[..., None], axis=2)


@every_config
@both_layouts
def test_rows_come_back_as_the_quantizer_rebuilds_them(config, blocked):
    new = rows(150)
    store = filled(config, blocked, new, [150])
    assert isinstance(store, RowStore)
    assert not store.lossless
    for found, expected, came in zip(store.keys_values(), requantized(config, *new), new, strict=True):
        assert (found.dtype, found.shape) == (came.dtype, came.shape)
        np.testing.assert_allclose(numbers(found), expected, atol=2e-5)
    for found, came, bits in zip(store.keys_values(), new, (config.bits, config.value_bits), strict=True):
        error = ((numbers(found) - numbers(came)) ** 2).sum() / (numbers(came) ** 2).sum()
        # 0.1188 is what two bits leave over.
        assert error < 0.13 if bits else error == 0


@every_config
@both_layouts
@pytest.mark.parametrize("cuts", [[1] * 150, [127, 1, 22], [64, 64, 1, 21]])
def test_what_is_held_does_not_depend_on_the_chunks(config, blocked, cuts):
    new = rows(150)
    whole, store = filled(config, blocked, new, [150]), filled(config, blocked, new, cuts)
    assert_same(store, whole)
    assert store.account() == whole.account()


@every_config
@both_layouts
@pytest.mark.parametrize("count", [20, 128, 150])
def test_scores_and_sums_are_those_of_the_rows_rebuilt(config, blocked, count):
    new = rows(count)
    store = filled(config, blocked, new, [count])
    keys, values = requantized(config, *new)
    queries = np.random.default_rng(1).standard_normal((BATCH, HEADS * GROUP, 3, KEY_DIM)).astype(np.float32)
    scores = store.scores(mx.array(queries))
    assert scores.dtype == mx.float32
    expected = queries.astype(np.float64) @ keys.repeat(GROUP, axis=1).swapaxes(2, 3)
    np.testing.assert_allclose(np.array(scores), expected, atol=1e-4)
    for part in (count, count // 2, 1):
        weights = np.random.default_rng(2).random((BATCH, HEADS * GROUP, 3, part)).astype(np.float32)
        mixed = store.mix(mx.array(weights))
        assert (mixed.dtype, mixed.shape) == (mx.float32, (BATCH, HEADS * GROUP, 3, VALUE_DIM))
        expected = weights.astype(np.float64) @ values.repeat(GROUP, axis=1)[:, :, :part]
        np.testing.assert_allclose(np.array(mixed), expected, atol=1e-4)


@every_config
def test_both_layouts_hold_the_same_rows(config):
    new = rows(300)
    by_rows, by_blocks = (filled(config, blocked, new, [300]) for blocked in (False, True))
    for found, expected in zip(by_blocks.keys_values(), by_rows.keys_values(), strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(expected))
    queries = mx.random.normal((BATCH, HEADS, 2, KEY_DIM), key=mx.random.key(1))
    np.testing.assert_allclose(np.array(by_blocks.scores(queries)), np.array(by_rows.scores(queries)), atol=1e-4)


@pytest.mark.parametrize(
    ("config", "served"),
    [
        (TurboQuantRVQConfig(), True),
        (TurboQuantRVQConfig(bits=4), True),
        (TurboQuantRVQConfig(codebook="laplace"), True),
        (TurboQuantRVQConfig(codebook="laplace", bits=2), True),
        (TurboQuantRVQConfig(codebook="matched"), True),
        (TurboQuantRVQConfig(codebook="matched", bits=2), False),
        (TurboQuantRVQConfig(codebook="laplace", bits=3), False),
    ],
)
def test_blocks_are_used_where_their_products_need_no_expansion(config, served):
    arrays = filled(config, True, rows(130), [130]).arrays()
    assert ("key_blocks" in arrays) == served
    assert "key_blocks" not in filled(config, False, rows(130), [130]).arrays()


@every_config
@both_layouts
@pytest.mark.parametrize("count", [30, 150])
def test_gathered_selected_and_kept_rows_are_those_of_each_head(config, blocked, count):
    new = rows(count)
    store = filled(config, blocked, new, [count])
    before = [np.array(array) for array in store.keys_values()]
    index = some_index(count, 17)
    chosen = store.select(mx.array(index))
    for gathered, selected, whole in zip(store.gather(mx.array(index)), chosen.keys_values(), before, strict=True):
        assert_equal_rows(np.array(gathered), taken(whole, index))
        assert_equal_rows(np.array(selected), taken(whole, index))
    later = rows(120, seed=8)
    expected = [
        np.concatenate([taken(old, index), new], axis=2)
        for old, new in zip(before, requantized(config, *later), strict=True)
    ]
    chosen.append(*later)
    assert store.count == count
    for found, whole in zip(store.keys_values(), before, strict=True):
        np.testing.assert_array_equal(np.array(found), whole)
    store.keep(mx.array(index))
    assert store.count == 17
    store.append(*later)
    for one in (store, chosen):
        for found, wanted in zip(one.keys_values(), expected, strict=True):
            np.testing.assert_allclose(np.array(found), wanted, atol=2e-5)
        queries = mx.random.normal((BATCH, HEADS, 2, KEY_DIM), key=mx.random.key(1))
        scores = numbers(queries) @ expected[0].swapaxes(2, 3)
        np.testing.assert_allclose(np.array(one.scores(queries)), scores, atol=1e-4)


@both_layouts
@pytest.mark.parametrize("config", [CONFIGS["values"], CONFIGS["laplace"], CONFIGS["matched"]])
def test_kept_rows_stay_in_their_layout(config, blocked):
    store = filled(config, blocked, rows(300), [300])
    kind = type(store._keys)
    store.keep(mx.array(some_index(300, 140)))
    assert type(store._keys) is kind
    assert ("key_blocks" in store.arrays()) == (kind is BlockCodes)


@every_config
@both_layouts
@pytest.mark.parametrize("dropped", [1, 22, 23, 149])
def test_dropped_rows_leave_no_trace(config, blocked, dropped):
    new = rows(150)
    store, plain = filled(config, blocked, new, [150]), filled(config, blocked, new, [150 - dropped])
    store.drop_last(dropped)
    assert_same(store, plain)
    assert store.account() == plain.account()
    later = rows(30, seed=4)
    for one in (store, plain):
        one.append(*later)
    assert_same(store, plain)


@every_config
@both_layouts
def test_without_rows_a_store_is_as_new(config, blocked):
    store = filled(config, blocked, rows(140), [140])
    store.drop_last(140)
    assert (store.count, store.arrays(), store.account().held) == (0, {}, 0)
    other = rows(20, mx.bfloat16, key_dim=16, value_dim=8)
    store.append(*other)
    assert_same(store, filled(config, blocked, other, [20]))
    assert store.keys_values()[0].dtype == mx.bfloat16


@every_config
@both_layouts
@pytest.mark.parametrize("count", [1, 128, 150])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_loaded_store_goes_on_in_either_layout(config, blocked, count, dtype):
    new, later = rows(count, dtype), rows(131, dtype, seed=5)
    store = filled(config, blocked, new, [count])
    for other in (False, True):
        loaded = TurboQuantRows(config, blocked=other)
        loaded.load(store.arrays())
        assert_same(loaded, filled(config, other, new, [count]))
        loaded.append(*later)
        both = tuple(mx.concatenate(pair, axis=2) for pair in zip(new, later, strict=True))
        assert_same_but_for_rounding(loaded, filled(config, other, both, [count + 131]))
        assert loaded.keys_values()[0].dtype == loaded.keys_values()[1].dtype == dtype
    assert_same(store, filled(config, blocked, new, [count]))


@both_layouts
def test_loading_nothing_is_an_empty_store(blocked):
    store = TurboQuantRows(CONFIGS["values"], blocked=blocked)
    store.load(TurboQuantRows(CONFIGS["values"]).arrays())
    assert store.count == 0
    with pytest.raises(UnsupportedShapeError, match="append"):
        store.keys_values()


@every_config
@both_layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_as_it_came(config, blocked, dtype):
    new = rows(130, dtype)
    store = filled(config, blocked, new, [130])
    for found, expected in zip(store.keys_values(), requantized(config, *new), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(numbers(found), expected, rtol=2**-8, atol=1e-4)
    # What is stored is the numbers, not their dtype.
    plain = filled(config, blocked, tuple(array.astype(mx.float32) for array in new), [130]).arrays()
    arrays = store.arrays()
    for name in ("key_codes", "key_blocks", "key_scales", "value_codes", "value_scales"):
        assert (name in arrays) == (name in plain)
        if name in arrays:
            np.testing.assert_array_equal(numbers(arrays[name]), numbers(plain[name]))


@both_layouts
def test_keys_and_values_of_different_dtypes(blocked):
    keys, values = rows(10)
    store = filled(CONFIGS["values"], blocked, (keys.astype(mx.bfloat16), values.astype(mx.float16)), [10])
    assert [array.dtype for array in store.keys_values()] == [mx.bfloat16, mx.float16]
    loaded = TurboQuantRows(CONFIGS["values"], blocked=blocked)
    loaded.load(store.arrays())
    assert [array.dtype for array in loaded.keys_values()] == [mx.bfloat16, mx.float16]


@both_layouts
@pytest.mark.parametrize("config", [CONFIGS["default"], CONFIGS["values"]])
def test_numbers_near_the_limit_of_fp16_stay_finite_and_nan_stays_nan(config, blocked):
    keys, values = rows(10)
    keys = mx.clip(keys * 6e4, -65504, 65504).astype(mx.float16)
    keys[:, :, 4, 2] = mx.nan
    store = filled(config, blocked, (keys, values.astype(mx.float16)), [10])
    found = numbers(store.keys_values()[0])
    assert np.isnan(found[:, :, 4]).all()
    assert np.isfinite(np.delete(found, 4, axis=2)).all()
    assert np.abs(np.delete(found, 4, axis=2)).max() > 4e4


@both_layouts
@pytest.mark.parametrize("config", [CONFIGS["default"], CONFIGS["laplace"]])
def test_keys_of_norm_160000_in_bf16(config, blocked):
    keys, values = rows(140)
    keys = (keys / mx.linalg.norm(keys, axis=-1, keepdims=True) * 160_000).astype(mx.bfloat16)
    store = filled(config, blocked, (keys, values.astype(mx.bfloat16)), [140])
    back, exact = numbers(store.keys_values()[0]), numbers(keys)
    assert 0.08 < (((back - exact) ** 2).sum(-1) / (exact**2).sum(-1)).mean() < 0.13
    queries = mx.random.normal((BATCH, HEADS, 1, KEY_DIM), key=mx.random.key(0))
    np.testing.assert_allclose(
        np.array(store.scores(queries)), numbers(queries) @ back.swapaxes(2, 3), atol=160_000 / 50
    )


@both_layouts
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(32, 40), (40, 56), (64, 80), (96, 112), (128, 192), (256, 128), (33, 7)]
)
@pytest.mark.parametrize("config", [CONFIGS["values"], CONFIGS["laplace"]], ids=["uniform", "laplace"])
def test_keys_and_values_of_different_dimensions(config, blocked, key_dim, value_dim):
    new = rows(131, key_dim=key_dim, value_dim=value_dim)
    store = filled(config, blocked, new, [131])
    keys, values = requantized(config, *new)
    queries = mx.random.normal((BATCH, HEADS, 1, key_dim), key=mx.random.key(0))
    np.testing.assert_allclose(np.array(store.scores(queries)), numbers(queries) @ keys.swapaxes(2, 3), atol=2e-4)
    weights = mx.random.uniform(shape=(BATCH, HEADS, 1, 131), key=mx.random.key(1))
    np.testing.assert_allclose(np.array(store.mix(weights)), numbers(weights) @ values, atol=2e-4)


@pytest.mark.parametrize("kind", ["laplace", "uniform", "matched"])
@pytest.mark.parametrize(("bits", "size"), [(1, 34), (2, 66)])
@both_layouts
def test_a_key_of_128_coordinates_takes_34_or_66_bytes(kind, bits, size, blocked):
    config = TurboQuantRVQConfig(codebook=kind, bits=bits)
    new = rows(128, key_dim=128)
    store = filled(config, blocked, new, [128])
    arrays = store.arrays()
    assert sum(arrays[name].nbytes for name in arrays if name in ("key_codes", "key_blocks", "key_scales")) == (
        BATCH * HEADS * 128 * size
    )
    assert arrays["key_scales"].dtype == mx.bfloat16


@pytest.mark.parametrize("dim", [40, 56, 80, 112, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_rows_of_two_streams_are_padded_each(dim, bits):
    config = TurboQuantRVQConfig(codebook="laplace", bits=bits)
    arrays = filled(config, False, rows(16, key_dim=dim), [16]).arrays()
    size = arrays["key_codes"].nbytes + arrays["key_scales"].nbytes
    assert size == BATCH * HEADS * 16 * (2 * math.ceil(dim * bits / 32) * 4 + 2)


@every_config
@both_layouts
@pytest.mark.parametrize("count", [1, 16, 128, 150])
def test_bytes_are_those_of_the_arrays(config, blocked, count):
    new = rows(count, mx.float16)
    store = filled(config, blocked, new, [count])
    keep = TurboQuantRows(config, blocked=blocked)
    keep.load(store.arrays())
    live = {name: array.nbytes for name, array in store.arrays().items() if not name.endswith("_like")}
    keys = sum(size for name, size in live.items() if name.startswith("key"))
    account = store.account()
    # Spare rows behind the live ones: at most an eighth or 16.
    assert keys <= account.keys <= keys / count * (count + max(16, count / 8))
    assert (
        sum(live.values()) - keys
        <= account.values
        <= (sum(live.values()) - keys) / count * (count + max(16, count / 8))
    )
    assert account.rows == count
    assert account.details["compressed_key_bytes"] == account.keys
    assert account.details["dense_key_bytes"] == new[0].nbytes
    assert account.details["assigned_bits"] == pytest.approx(
        8 * account.keys / (BATCH * HEADS * count * KEY_DIM), abs=1e-3
    )
    assert account.static == sum(book.nbytes for book in store.quantizers())


@both_layouts
def test_a_copy_goes_its_own_way(blocked):
    store = filled(CONFIGS["values"], blocked, rows(140), [140])
    twin = copy.deepcopy(store)
    twin.append(*rows(3, seed=1))
    twin.drop_last(2)
    twin.append(*rows(7, seed=2))
    assert_same(store, filled(CONFIGS["values"], blocked, rows(140), [140]))
    assert (store.count, twin.count) == (140, 148)


@every_config
@both_layouts
def test_what_is_held_does_not_depend_on_the_batch(config, blocked):
    new = rows(140)
    together = filled(config, blocked, new, [140]).arrays()
    for row in range(BATCH):
        alone = filled(config, blocked, tuple(array[row : row + 1] for array in new), [140]).arrays()
        for name, array in alone.items():
            if not name.endswith("_like"):
                np.testing.assert_array_equal(numbers(array)[0], numbers(together[name])[row])


def test_another_seed_is_another_rotation_of_keys_and_values():
    stores = [filled(TurboQuantRVQConfig(value_bits=4, seed=seed), False, rows(20), [20]).arrays() for seed in (1, 2)]
    for name in ("key_codes", "value_codes"):
        assert (numbers(stores[0][name]) != numbers(stores[1][name])).mean() > 0.5
