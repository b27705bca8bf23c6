"""Row stores that a codec lends to other methods."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from veloxquant.rows import RowStore
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import require_equal
from veloxquant.testing.driver import require_like
from veloxquant.testing.failures import require
from veloxquant.testing.rules.account import reachable
from veloxquant.testing.rules.applies import once
from veloxquant.testing.rules.applies import storing
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject

_COUNT = 70


def _store(subject: Subject) -> RowStore:
    assert subject.method.ops.rows is not None  # the rules apply only then
    store: RowStore = subject.method.ops.rows(subject.config, subject.layer())
    return store


def _filled(subject: Subject, rows: Rows, cuts: list[int]) -> RowStore:
    store, start = _store(subject), 0
    for size in cuts:
        part = rows.part(start, start + size)
        store.append(part.keys, part.values)
        start += size
    return store


def _held(store: RowStore) -> dict[str, Any]:
    arrays = {name: numbers(array) for name, array in store.arrays().items()}
    return {**arrays, "count": store.count}


def _index(subject: Subject) -> mx.array:
    """Every third row, shifted from head to head."""
    heads = [[(3 * place + head) for place in range(_COUNT // 3 - 1)] for head in range(subject.shape.kv_heads)]
    return mx.array([heads] * subject.shape.batch, dtype=mx.int32)


@when(storing, once)
def check_store_reads(subject: Subject) -> None:
    """What a row store gathers, selects, scores and mixes agrees with the rows that ``keys_values`` gives."""
    rows = subject.rows(_COUNT)
    store = _filled(subject, rows, [_COUNT])
    require(isinstance(store, RowStore), f"veloxquant_rows made a {type(store).__name__}, which is no RowStore")
    keys, values = store.keys_values()
    require(keys.dtype == rows.keys.dtype and keys.shape == rows.keys.shape, f"keys come back as {keys.shape}")
    if store.lossless:
        require_equal(keys, rows.keys, "keys of a store that says it is lossless")
        require_equal(values, rows.values, "values of a store that says it is lossless")
    index = _index(subject)
    for name, got, whole in zip(("keys", "values"), store.gather(index), (keys, values), strict=True):
        require_equal(got, mx.take_along_axis(whole, index[..., None], axis=2), f"gathered {name}")
    group = subject.shape.query_heads // subject.shape.kv_heads
    queries = rows.queries[:, :, :3]
    scores = store.scores(queries)
    require(scores.dtype == mx.float32, f"scores are {scores.dtype}")
    require_like(scores, queries @ mx.repeat(keys, group, axis=1).swapaxes(2, 3), "scores", 1e-2)
    weights = mx.softmax(scores * subject.shape.key_dim**-0.5, axis=-1)
    repeated = mx.repeat(values, group, axis=1)
    require_like(store.mix(weights), weights @ repeated, "mixed values", 1e-2)
    part = weights[..., : _COUNT // 2]
    require_like(store.mix(part), part @ repeated[:, :, : _COUNT // 2], "mixed values of the first rows", 1e-2)
    chosen = store.select(index)
    for name, got, gathered in zip(("keys", "values"), chosen.keys_values(), store.gather(index), strict=True):
        require_equal(got, gathered, f"selected {name}")
    places = mx.repeat(index, group, axis=1)[:, :, None]
    expected = mx.take_along_axis(scores, mx.broadcast_to(places, (*scores.shape[:3], index.shape[2])), axis=3)
    require_like(chosen.scores(queries), expected, "scores of selected rows", 1e-4)
    require(store.count == _COUNT, "selecting rows changed the store")


@when(storing, once)
def check_store_writes(subject: Subject) -> None:
    """Rows of a store do not depend on the blocks in which they came; kept and dropped rows are what is left."""
    rows = subject.rows(_COUNT)
    one = _filled(subject, rows, [_COUNT])
    for cuts in ([1, _COUNT - 1], [32, 33, 5], [1] * _COUNT):
        require_equal(_held(_filled(subject, rows, cuts)), _held(one), f"rows appended in {len(cuts)} blocks")
    for dropped in (1, 5, 64):
        store = _filled(subject, rows, [_COUNT])
        store.drop_last(dropped)
        expected = _filled(subject, rows.part(0, _COUNT - dropped), [_COUNT - dropped])
        require_equal(_held(store), _held(expected), f"after drop_last({dropped})")
    store, index = _filled(subject, rows, [_COUNT]), _index(subject)
    before = store.gather(index)
    store.keep(index)
    require(store.count == index.shape[2], f"{store.count} rows are left of {index.shape[2]} kept")
    store.append(rows.keys[:, :, :1], rows.values[:, :, :1])
    for name, got, kept in zip(("keys", "values"), store.keys_values(), before, strict=True):
        require_equal(got[:, :, : index.shape[2]], kept, f"kept {name}")


@when(storing, once)
def check_store_round_trip(subject: Subject) -> None:
    """A store loaded from the arrays of another is equal and independent; stores share nothing."""
    rows = subject.rows(_COUNT)
    store, loaded = _filled(subject, rows, [_COUNT]), _store(subject)
    require(_held(loaded) == {"count": 0}, f"an empty store holds {sorted(_held(loaded))}")
    arrays = store.arrays()
    before = {name: numbers(array) for name, array in arrays.items()}
    loaded.load(arrays)
    require_equal(_held(loaded), _held(store), "a loaded store")
    loaded.append(rows.keys[:, :, :3], rows.values[:, :, :3])
    require_equal({name: numbers(a) for name, a in arrays.items()}, before, "arrays, after the loaded store went on")
    require(store.count == _COUNT, "appending to a loaded store changed the first one")


@when(storing, once)
def check_store_bytes(subject: Subject) -> None:
    """A store reports the bytes of the arrays that it holds."""
    rows = subject.rows(_COUNT)
    shared = reachable(_filled(subject, rows, [_COUNT]))
    for count in (0, 1, _COUNT):
        store = _filled(subject, rows.part(0, count), [count] if count else [])
        held = sum(array.nbytes for key, array in reachable(store).items() if key not in shared)
        require(store.account().held == held, f"{store.account().held} bytes are reported for {count} rows, not {held}")
