import mlx.core as mx
import numpy as np
import pytest

from veloxquant import DenseRows
from veloxquant import RoutingError
from veloxquant import attend_rows
from veloxquant import attend_selected
from veloxquant import halves

BATCH, KV_HEADS, GROUP, DIM, VALUE_DIM, ROWS = 2, 2, 3, 8, 6, 23
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


KEYS, VALUES = normal(BATCH, KV_HEADS, ROWS, DIM), normal(BATCH, KV_HEADS, ROWS, VALUE_DIM)


def reference(queries, keys, values, scale, mask=None, sinks=None):
    """Attention in float64; mask is added."""
    keys, values = (np.repeat(array.astype(np.float64), GROUP, axis=1) for array in (keys, values))
    logits = queries.astype(np.float64) @ keys.swapaxes(2, 3) * scale
    length, rows = logits.shape[2:]
    if mask is None:
        mask = np.where(np.arange(rows) <= np.arange(rows - length, rows)[:, None], 0, -np.inf)
    logits = logits + mask
    if sinks is not None:
        column = np.broadcast_to(sinks.reshape(1, -1, 1, 1), (*logits.shape[:3], 1))
        logits = np.concatenate([logits, column], axis=-1)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights[..., :rows] @ values


def exact(start, end, shift=0.0):
    return mx.array(KEYS[:, :, start:end] + shift), mx.array(VALUES[:, :, start:end] + shift)


def store():
    rows = DenseRows()
    rows.append(*exact(0, ROWS))
    return rows


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("last", [4, 9, ROWS - 5])
def test_rows_that_are_given_count_as_given(length, first, last):
    """The given rows differ from those in the store, so that it shows which of the two were read."""
    queries = normal(BATCH, KV_HEADS * GROUP, length, DIM)
    keys, values = KEYS.copy(), VALUES.copy()
    for array in (keys, values):
        array[:, :, ROWS - last :] += 1.0
        array[:, :, :first] -= 0.5
    output = attend_rows(
        store(),
        mx.array(queries),
        exact(ROWS - last, ROWS, 1.0),
        0.3,
        "causal",
        first=exact(0, first, -0.5) if first else None,
    )
    np.testing.assert_allclose(np.array(output), reference(queries, keys, values, 0.3), atol=2e-6)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("first", [0, 5])
def test_values_that_the_store_holds_as_they_came_need_not_be_given(length, first):
    queries = normal(BATCH, KV_HEADS * GROUP, length, DIM)
    keys = KEYS.copy()
    keys[:, :, ROWS - 9 :] += 1.0
    keys[:, :, :first] -= 0.5
    last = exact(ROWS - 9, ROWS, 1.0)[0], None
    before = (exact(0, first, -0.5)[0], None) if first else None
    output = attend_rows(store(), mx.array(queries), last, 0.3, "causal", first=before)
    np.testing.assert_allclose(np.array(output), reference(queries, keys, VALUES, 0.3), atol=2e-6)


@pytest.mark.parametrize("kind", ["bool", "added", "per head"])
def test_mask_arrays(kind):
    queries = normal(BATCH, KV_HEADS * GROUP, 3, DIM)
    visible = RNG.random((BATCH, KV_HEADS * GROUP, 3, ROWS) if kind == "per head" else (3, ROWS)) < 0.7
    visible[..., -1] = True
    added = np.where(visible, 0, -1e9).astype(np.float32)
    mask = mx.array(added if kind == "added" else visible)
    output = attend_rows(store(), mx.array(queries), exact(ROWS - 3, ROWS), 0.3, mask)
    np.testing.assert_allclose(np.array(output), reference(queries, KEYS, VALUES, 0.3, added), atol=2e-6)


def test_sink_logits_take_part_in_the_sum():
    queries, sinks = normal(BATCH, KV_HEADS * GROUP, 1, DIM), normal(KV_HEADS * GROUP)
    output = attend_rows(store(), mx.array(queries), exact(ROWS - 1, ROWS), 0.3, None, mx.array(sinks))
    expected = reference(queries, KEYS, VALUES, 0.3, sinks=sinks)
    np.testing.assert_allclose(np.array(output), expected, atol=2e-6)


@pytest.mark.parametrize("worth", [2**40, 0], ids=["one thread", "two threads"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 2])
def test_chosen_rows_alone_are_attended(monkeypatch, worth, length, masked, sinks):
    monkeypatch.setattr(halves, "_WORTH_A_STREAM", worth)
    queries, logits = normal(BATCH, KV_HEADS * GROUP, length, DIM), normal(KV_HEADS * GROUP)
    index = np.sort(np.stack([RNG.permutation(ROWS)[:7] for _ in range(BATCH * KV_HEADS)]).reshape(BATCH, KV_HEADS, 7))
    seen = RNG.random((BATCH, KV_HEADS * GROUP, length, 7)) < 0.7
    seen[..., 0] = True
    output = attend_selected(
        store(),
        mx.array(index.astype(np.int32)),
        mx.array(queries),
        0.3,
        mx.array(seen) if masked else None,
        mx.array(logits) if sinks else None,
    )
    keys, values = (np.take_along_axis(array, index[..., None], axis=2) for array in (KEYS, VALUES))
    added = np.where(seen, 0, -np.inf) if masked else 0
    expected = reference(queries, keys, values, 0.3, added, logits if sinks else None)
    np.testing.assert_allclose(np.array(output), expected, atol=2e-6)


def test_a_mask_for_other_rows_is_refused():
    queries = mx.array(normal(BATCH, KV_HEADS * GROUP, 1, DIM))
    with pytest.raises(RoutingError, match="covers 7 rows where the cache holds 23"):
        attend_rows(store(), queries, exact(ROWS - 1, ROWS), 0.3, mx.ones((1, 7), dtype=mx.bool_))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_output_has_the_dtype_of_the_queries(dtype):
    queries = mx.array(normal(BATCH, KV_HEADS * GROUP, 1, DIM)).astype(getattr(mx, dtype))
    assert attend_rows(store(), queries, exact(ROWS - 1, ROWS), 0.3, None).dtype == getattr(mx, dtype)
