from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from veloxquant import DenseRows
from veloxquant import PositionedRows
from veloxquant import RowStore
from veloxquant import UnsupportedShapeError
from veloxquant import halves

DTYPES = ["float32", "float16", "bfloat16"]
PATTERNS = [[1], [40], [16, 1], [1, 16], [17, 1, 1, 30], [15, 1, 1], [128, 20, 1], [1] * 20, [300, 1]]
SHAPES = [
    {"batch": 1, "heads": 2, "key_dim": 8, "value_dim": 8},
    {"batch": 3, "heads": 1, "key_dim": 16, "value_dim": 8},
    {"batch": 3, "heads": 2, "key_dim": 4, "value_dim": 12},
]


def filled(rows, pattern, **shape):
    """A store that was fed in pieces, and what it was fed as one array each."""
    store, fed = DenseRows(), [rows(size, **shape) for size in pattern]
    for keys, values in fed:
        store.append(keys, values)
    return store, mx.concatenate([k for k, _ in fed], axis=2), mx.concatenate([v for _, v in fed], axis=2)


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and mx.array_equal(left, right).item()


def ascending(generator, batch, heads, rows, count):
    picked = [[sorted(generator.choice(rows, count, replace=False)) for _ in range(heads)] for _ in range(batch)]
    return mx.array(np.array(picked, dtype=np.int32))


def taken(array, index):
    return np.take_along_axis(array, np.array(index)[..., None], axis=2)


# ---------------------------------------------------------------- DenseRows


def test_dense_rows_keep_the_protocol():
    assert isinstance(DenseRows(), RowStore)
    assert DenseRows().lossless


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_come_back_in_order(rows, pattern, shape):
    store, keys, values = filled(rows, pattern, **shape)
    assert store.count == sum(pattern)
    assert all(map(same, store.keys_values(), (keys, values)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_dtype(rows, dtype):
    store, keys, values = filled(rows, [5, 1, 20], dtype=dtype)
    index = mx.array([[[0, 5], [1, 25]]], dtype=mx.int32)
    for got in (*store.keys_values(), *store.gather(index)):
        assert got.dtype == getattr(mx, dtype)
    assert all(map(same, store.keys_values(), (keys, values)))


def test_extreme_values_stay_in_their_rows(rows):
    store = DenseRows()
    keys = mx.array([[60000.0, -60000.0], [np.inf, np.nan], [6e-8, 0.0]], dtype=mx.float16).reshape(1, 1, 3, 2)
    store.append(keys, keys)
    store.append(keys[:, :, :1], keys[:, :, :1])
    got = np.array(store.keys_values()[0])[0, 0]
    assert np.array_equal(got[:3], np.array(keys)[0, 0], equal_nan=True)
    assert np.array_equal(got[3], got[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_takes_other_rows_for_every_batch_row_and_head(rows, as_numpy, shape):
    store, keys, values = filled(rows, [30, 1, 2], **shape)
    index = ascending(np.random.default_rng(0), shape["batch"], shape["heads"], 33, 7)
    got = store.gather(index)
    assert np.array_equal(as_numpy(got[0]), taken(as_numpy(keys), index))
    assert np.array_equal(as_numpy(got[1]), taken(as_numpy(values), index))
    assert store.count == 33


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_and_mixes_are_products_in_fp32(rows, queries, as_numpy, shape, group, dtype):
    store, keys, values = filled(rows, [20, 3], dtype=dtype, **shape)
    heads = shape["heads"] * group
    q = queries(5, batch=shape["batch"], heads=heads, dim=shape["key_dim"]).astype(getattr(mx, dtype))
    scores = store.scores(q)
    expected = np.einsum("bhld,bhnd->bhln", as_numpy(q), np.repeat(as_numpy(keys), group, axis=1))
    assert scores.dtype == mx.float32
    assert scores.shape == (shape["batch"], heads, 5, 23)
    assert np.allclose(np.array(scores), expected, atol=1e-4)

    weights = mx.softmax(scores, axis=-1)
    mixed = store.mix(weights)
    expected = np.einsum("bhln,bhnd->bhld", np.array(weights), np.repeat(as_numpy(values), group, axis=1))
    assert mixed.dtype == mx.float32
    assert mixed.shape == (shape["batch"], heads, 5, shape["value_dim"])
    # On a GPU weights are rounded to the dtype of the values.
    rounded = mx.default_device() == mx.gpu and dtype != "float32"
    assert np.allclose(np.array(mixed), expected, atol=1e-2 if rounded else 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_select_is_a_store_of_the_chosen_rows(rows, queries, as_numpy, shape):
    store, keys, values = filled(rows, [30, 1, 2], **shape)
    index = ascending(np.random.default_rng(0), shape["batch"], shape["heads"], 33, 7)
    chosen = store.select(index)
    assert chosen.count == 7
    assert np.array_equal(as_numpy(chosen.keys_values()[1]), taken(as_numpy(values), index))
    q = queries(2, batch=shape["batch"], heads=shape["heads"], dim=shape["key_dim"])
    expected = np.einsum("bhld,bhnd->bhln", as_numpy(q), taken(as_numpy(keys), index))
    assert np.allclose(np.array(chosen.scores(q)), expected, atol=1e-4)
    chosen.append(*rows(1, **shape))
    assert store.count == 33
    assert same(store.keys_values()[0], keys)


def test_weights_of_fewer_rows_are_those_of_the_first(rows, as_numpy):
    store, _, values = filled(rows, [20, 3])
    weights = mx.softmax(mx.random.normal((1, 2, 4, 9)), axis=-1)
    expected = np.einsum("bhln,bhnd->bhld", np.array(weights), as_numpy(values)[:, :, :9])
    assert np.allclose(np.array(store.mix(weights)), expected, atol=1e-5)


def test_keep_drops_all_others_for_good_and_holds_nothing_more(rows, as_numpy):
    store, keys, _ = filled(rows, [200], batch=3, heads=2)
    index = ascending(np.random.default_rng(1), 3, 2, 200, 50)
    store.keep(index)
    assert store.count == 50
    assert np.array_equal(as_numpy(store.keys_values()[0]), taken(as_numpy(keys), index))
    assert store.account().held == 2 * 3 * 2 * 50 * 8 * 4
    more = rows(2, batch=3, heads=2)
    store.append(*more)
    assert same(store.keys_values()[1][:, :, 50:], more[1])


@pytest.mark.parametrize("dropped", [0, 1, 24, 40, 41])
def test_drop_last_forgets_the_newest(rows, dropped):
    store, keys, values = filled(rows, [40, 1])
    store.drop_last(dropped)
    assert store.count == 41 - dropped
    if dropped < 41:
        assert all(map(same, store.keys_values(), (keys[:, :, : 41 - dropped], values[:, :, : 41 - dropped])))
    again = rows(3)
    store.append(*again)
    assert same(store.keys_values()[0], mx.concatenate([keys[:, :, : 41 - dropped], again[0]], axis=2))


def test_an_empty_store_holds_nothing_and_says_so(rows):
    store, *_ = filled(rows, [5])
    store.drop_last(5)
    for empty in (DenseRows(), store):
        assert (empty.count, empty.account().held, empty.arrays()) == (0, 0, {})
        with pytest.raises(UnsupportedShapeError, match="no rows"):
            empty.keys_values()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_arrays_are_the_live_rows_and_load_rebuilds_them(rows, pattern):
    store, keys, values = filled(rows, pattern, key_dim=16)
    arrays = store.arrays()
    assert set(arrays) == {"keys", "values"}
    assert same(arrays["keys"], keys)
    other = DenseRows()
    other.load(arrays)
    step = rows(1, key_dim=16)
    other.append(*step)
    store.append(*step)
    assert all(map(same, other.keys_values(), store.keys_values()))
    # What was taken before is not written to afterwards.
    assert same(arrays["keys"], keys)
    assert same(arrays["values"], values)


@pytest.mark.parametrize("count", [15, 16, 17, 32])
def test_what_was_handed_out_is_never_written_to(rows, count):
    """The newest rows are dropped and written anew, once in a full buffer and once in one with room."""
    store, keys, _ = filled(rows, [count])
    handed, taken_before = store.keys_values()[0], store.arrays()["keys"]
    store.drop_last(1)
    store.append(*rows(1))
    assert same(handed, keys)
    assert same(taken_before, keys)


def test_an_empty_load_is_an_empty_store():
    store = DenseRows()
    store.load({})
    assert store.count == 0


# ---------------------------------------------------------------- capacity


def capacity(store):
    count = store.account()
    return count.keys // (2 * 8 * 4) if count.keys else 0


@pytest.mark.parametrize("start", [0, 1, 16, 64, 100, 1000, 5000])
def test_slack_is_bounded_by_an_eighth_or_16_rows_and_never_more_than_256(rows, start):
    """Design 5.8: a bounded cache does not hold 256 rows of slack for a budget of 64."""
    store = DenseRows()
    if start:
        store.append(*rows(start))
        store.keep(mx.broadcast_to(mx.arange(start, dtype=mx.int32), (1, 2, start)))
        assert capacity(store) == start
    for _ in range(40):
        store.append(*rows(1))
        slack = capacity(store) - store.count
        assert 0 <= slack < min(256, max(16, store.count / 8 + 1))


def test_a_long_block_has_bounded_slack_too(rows):
    store, *_ = filled(rows, [3000])
    assert capacity(store) - 3000 < 256


@pytest.mark.parametrize("kept", [None, 1000])
def test_rows_that_were_dropped_give_their_memory_back(rows, kept):
    store, *_ = filled(rows, [3000])
    if kept:
        store.keep(mx.broadcast_to(mx.arange(kept, dtype=mx.int32), (1, 2, kept)))
    store.drop_last(store.count - 40)
    assert capacity(store) - 40 < 16


def test_capacity_does_not_depend_on_the_pieces(rows):
    stores = [filled(rows, pattern)[0] for pattern in ([90], [1] * 90, [64, 26], [16, 74])]
    assert len({capacity(store) for store in stores}) == 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    kept=st.sampled_from([None, 5, 60, 64, 300]),
    base=st.integers(0, 300),
    steps=st.lists(st.integers(1, 150), max_size=4),
)
def test_rows_that_were_appended_and_dropped_leave_no_trace_in_the_bytes(kept, base, steps):
    def fresh():
        store = DenseRows()
        if kept:
            store.append(mx.zeros((1, 2, kept + 9, 8)), mx.zeros((1, 2, kept + 9, 8)))
            store.keep(mx.broadcast_to(mx.arange(kept, dtype=mx.int32), (1, 2, kept)))
        if base:
            store.append(mx.zeros((1, 2, base, 8)), mx.zeros((1, 2, base, 8)))
        return store

    never, store = fresh(), fresh()
    for size in steps:
        store.append(mx.ones((1, 2, size, 8)), mx.ones((1, 2, size, 8)))
    store.drop_last(sum(steps))
    assert (store.count, store.account()) == (never.count, never.account())
    for one in (never, store):
        one.append(mx.zeros((1, 2, 20, 8)), mx.zeros((1, 2, 20, 8)))
    assert store.account() == never.account()
    assert not store.keys_values()[0].any().item()


# ---------------------------------------------------------------- PositionedRows


class Model:
    """What PositionedRows should hold: per batch row and KV head a list of (position, live)."""

    def __init__(self, batch, heads):
        self.rows = [[[] for _ in range(heads)] for _ in range(batch)]
        self.end = 0

    def _each(self):
        return (head for row in self.rows for head in row)

    @property
    def count(self):
        return len(self.rows[0][0])

    def append(self, count):
        for head in self._each():
            head += range(self.end, self.end + count)
        self.end += count

    def keep(self, index):
        for row, picks in zip(self.rows, index, strict=True):
            row[:] = [[head[i] for i in pick] for head, pick in zip(row, picks, strict=True)]

    def rewind(self, length):
        for row in self.rows:
            row[:] = [[p if p is not None and p < length else None for p in head] for head in row]
        live = max((i + 1 for head in self._each() for i, p in enumerate(head) if p is not None), default=0)
        for row in self.rows:
            row[:] = [head[:live] for head in row]
        self.end = length


def feed(rows, model, count):
    """Append rows that say which position, batch row and head they are for."""
    batch, heads = len(model.rows), len(model.rows[0])
    stamp = np.zeros((batch, heads, count, 3), dtype=np.float32)
    stamp[..., 0] = np.arange(model.end, model.end + count)
    stamp[..., 1] = np.arange(batch)[:, None, None]
    stamp[..., 2] = np.arange(heads)[None, :, None]
    block = mx.array(stamp)
    old = rows.count
    keys, values = rows.append(block, -block)
    model.append(count)
    assert keys.shape[2] == old + count
    assert mx.array_equal(keys[:, :, old:], block).item()
    assert mx.array_equal(values[:, :, old:], -block).item()


def agree(rows, model):
    assert (rows.count, rows.end) == (model.count, model.end)
    batch, heads = len(model.rows), len(model.rows[0])
    account = rows.account()
    assert account.rows == model.count
    if not model.count:
        assert account.held == 0
        return
    positions = np.broadcast_to(np.array(rows.positions()), (batch, heads, model.count))
    valid = rows.valid()
    live = np.ones(positions.shape, bool) if valid is None else np.array(valid)
    stored = [np.array(array) for array in rows.store.keys_values()]
    for b, row in enumerate(model.rows):
        for h, head in enumerate(row):
            expected = np.array([p is not None for p in head])
            assert (live[b, h] == expected).all()
            alive = np.array([p for p in head if p is not None])
            assert (positions[b, h][expected] == alive).all()
            for array, sign in zip(stored, (1, -1), strict=True):
                stamps = np.array([(p, b, h) for p in alive]).reshape(-1, 3)
                assert np.array_equal(sign * array[b, h][expected], stamps)


def restored(rows, store):
    other = PositionedRows(store)
    other.load({name: mx.array(array) for name, array in rows.arrays().items()}, **rows.values())
    return other


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), batch=st.sampled_from([1, 3]), heads=st.sampled_from([1, 2]))
def test_rows_and_positions_follow_a_list_model_through_any_history(data, batch, heads):
    rows, model = PositionedRows(DenseRows()), Model(batch, heads)
    for _ in range(data.draw(st.integers(1, 9))):
        action = data.draw(st.sampled_from(["append", "append", "keep", "rewind", "restore"]))
        if action == "append" or not model.count:
            feed(rows, model, data.draw(st.integers(1, 20)))
        elif action == "keep":
            size = data.draw(st.integers(1, model.count))
            seed = data.draw(st.integers(0, 99))
            index = ascending(np.random.default_rng(seed), batch, heads, model.count, size)
            rows.keep(index)
            model.keep(index.tolist())
        elif action == "rewind":
            length = data.draw(st.integers(1, model.end))
            rows.rewind(length)
            model.rewind(length)
        else:
            rows = restored(rows, DenseRows())
        agree(rows, model)


def test_positions_without_an_eviction_cost_nothing(rows):
    held = PositionedRows(DenseRows())
    held.append(*rows(20))
    assert held.positions().tolist() == [[list(range(20))]]
    assert not held.evicted
    assert held.account().auxiliary == 0
    assert set(held.arrays()) == {"keys", "values"}


def test_positions_are_never_made_of_an_empty_range(rows, monkeypatch):
    """An array whose memory MLX's CUDA back end never makes: reading it there ends the process."""
    arange = mx.arange

    def filled(*arguments, **options):
        made = arange(*arguments, **options)
        assert made.size
        return made

    monkeypatch.setattr(mx, "arange", filled)
    held = PositionedRows(DenseRows())
    assert held.positions().shape == (1, 1, 0)
    assert held.positions().dtype == mx.int32
    held.append(*rows(9))
    held.keep(mx.array([[[0, 4, 8], [1, 5, 7]]], mx.int32))
    assert held.positions().tolist() == [[[0, 4, 8], [1, 5, 7]]]
    held.append(*rows(1))
    held.rewind(0)
    assert held.positions().shape == (1, 1, 0)


def test_kept_positions_are_counted_as_auxiliary_bytes(rows):
    held = PositionedRows(DenseRows())
    held.append(*rows(20, batch=3))
    held.keep(mx.broadcast_to(mx.arange(4, dtype=mx.int32), (3, 2, 4)))
    assert held.evicted
    assert held.account().auxiliary == 3 * 2 * 4 * 4
    assert held.end == 20


def test_a_rewind_that_leaves_the_heads_alike_needs_no_mask(rows):
    held = PositionedRows(DenseRows())
    held.append(*rows(20))
    held.keep(mx.array([[[0, 5, 18, 19], [1, 6, 18, 19]]], dtype=mx.int32))
    held.append(*rows(3))
    assert held.valid() is None
    held.rewind(18)
    assert held.valid() is None
    assert held.positions().tolist() == [[[0, 5], [1, 6]]]


def test_a_deep_rewind_masks_only_the_heads_that_lost_more(rows):
    held = PositionedRows(DenseRows())
    held.append(*rows(20))
    held.keep(mx.array([[[0, 5, 18], [1, 2, 3]]], dtype=mx.int32))
    held.rewind(10)
    assert held.valid().tolist() == [[[True, True, False], [True, True, True]]]
    held.append(*rows(2))
    assert held.valid().tolist() == [[[True, True, False, True, True], [True] * 5]]
    assert held.positions()[0, 1].tolist() == [1, 2, 3, 10, 11]


def test_a_rewind_before_every_kept_row_empties_the_store(rows):
    held = PositionedRows(DenseRows())
    held.append(*rows(20))
    held.keep(mx.array([[[8, 9], [8, 9]]], dtype=mx.int32))
    held.rewind(5)
    assert (held.count, held.end, held.valid(), held.account().held) == (0, 5, None, 0)
    held.append(*rows(2))
    assert held.positions().tolist() == [[[5, 6]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lossy_store_still_returns_the_new_rows_exactly(toys, rows, dtype):
    held = PositionedRows(toys.CoarseRows(10))
    first, second = rows(5, dtype=dtype), rows(3, dtype=dtype)
    assert all(map(same, held.append(*first), first))
    keys, values = held.append(*second)
    assert same(keys[:, :, 5:], second[0])
    assert same(values[:, :, 5:], second[1])
    stored = mx.round(first[0].astype(mx.float32) / 0.4) * 0.4
    assert mx.allclose(keys[:, :, :5].astype(mx.float32), stored, atol=0.02).item()
    assert not mx.array_equal(keys[:, :, :5], first[0]).item()


def test_many_rows_are_read_on_two_streams_in_any_thread(rows, as_numpy):
    store, keys, values = filled(rows, [600], heads=2, key_dim=256, value_dim=256)
    index = ascending(np.random.default_rng(1), 1, 2, 600, 550)

    def read():
        return [as_numpy(array) for array in store.gather(index)]

    with ThreadPoolExecutor(1) as pool:
        for found in (read(), pool.submit(read).result()):
            assert np.array_equal(found[0], taken(as_numpy(keys), index))
            assert np.array_equal(found[1], taken(as_numpy(values), index))


def test_half_of_the_heads_are_computed_by_another_thread(monkeypatch):
    monkeypatch.setattr(halves, "_WORTH_A_STREAM", 1000)
    data, asked = mx.arange(10).reshape(1, 5, 2), []

    def double(heads):
        asked.append((heads, mx.default_stream(mx.default_device())))
        return data[:, heads] * 2

    def run(size, heads):
        asked.clear()
        found = halves.by_halves(double, heads, size)
        return np.array(found).tolist(), [heads for heads, _ in asked], len({str(stream) for _, stream in asked})

    doubled = (np.arange(10).reshape(1, 5, 2) * 2).tolist()
    assert run(999, 5) == (doubled, [slice(None)], 1)
    assert run(1000, 5) == (doubled, [slice(0, 3), slice(3, 5)], 2)
    assert run(1000, 1)[1:] == ([slice(None)], 1)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, 1000, 5).result() == (doubled, [slice(0, 3), slice(3, 5)], 2)
