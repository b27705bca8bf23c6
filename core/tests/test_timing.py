"""The observer that times hooks."""

import copy
import gc
import threading
import time
import weakref

import mlx.core as mx
import pytest

from veloxquant import Snapshot
from veloxquant import hookimpl
from veloxquant import layers
from veloxquant import timing
from veloxquant.build import get_cache
from veloxquant.build import make_prompt_cache
from veloxquant.testing.toys import tiny_llama
from veloxquant.timing import HookTime
from veloxquant.timing import TimingObserver
from veloxquant.timing import total_by_hook
from veloxquant.types import LayerSpec

PAUSE = 0.02


@pytest.fixture(params=[False, True], ids=["lazy", "synchronized"])
def observer(request, registry):
    """An observer of the toy methods."""
    observer = TimingObserver(synchronize=request.param)
    registry.observe(observer)
    return observer


def counts(observer):
    return {(row.hook, row.layer): row.calls for row in observer.rows()}


def feed(cache, rows, *sizes):
    for size in sizes:
        keys, values = rows(size)
        got = cache.update_and_fetch(keys, values)
        if hasattr(cache, "attend"):
            cache.attend(keys, *got, 1.0, None if size == 1 else "causal")


def test_calls_are_counted_by_hook_and_layer(observer, registry, rows):
    for index in (3, 7):
        layer = LayerSpec(index=index, query_mode="routed")
        cache = get_cache("evictor", layer=layer, registry=registry)
        feed(cache, rows, 40, 1, *[1] * index)
        cache.trim(2)
        cache.account()
        _ = cache.state
    found = counts(observer)
    for index in (3, 7):
        assert {hook: calls for (hook, layer), calls in found.items() if layer == index} == {
            "create": 1,
            "prefill": 2,
            "attend": 2 + index,
            "finish_prompt": 1,
            "decode": index,
            "trim": 1,
            "account": 1,
            # After every call, for what it may have left uncomputed; after the rewind; and for the state.
            "serialize": 4 + index,
        }
    assert {layer for _, layer in found} == {3, 7}


def test_results_are_the_same_under_observation(registry, plugins, rows):
    keys, values = rows(50)
    cuts = [30, 19, 1]
    caches = {}
    for synchronize in (None, False, True):
        observer = None if synchronize is None else TimingObserver(synchronize=synchronize)
        if observer is not None:
            registry.observe(observer)
        for name in ("evictor", "coarse", "noop"):
            cache = get_cache(name, layer=LayerSpec(query_mode="routed"), registry=registry)
            start = 0
            for size in cuts:
                part = (keys[:, :, start : start + size], values[:, :, start : start + size])
                got = cache.update_and_fetch(*part)
                if hasattr(cache, "attend"):
                    cache.attend(part[0], *got, 1.0, cache.make_mask(size))
                start += size
            caches.setdefault(name, []).append(cache.state)
        if observer is not None:
            assert observer.rows()
            registry.unobserve(observer)
    for states in caches.values():
        for state in states[1:]:
            assert state[0] == states[0][0]
            assert all(mx.array_equal(a, b).item() for a, b in zip(state[1:], states[0][1:], strict=True))


def test_times_are_those_of_the_calls(registry, toys, rows):
    pauses = iter([PAUSE, 3 * PAUSE, 0])

    class Slow(toys.NoOp):
        name = "slow"

        @hookimpl
        def veloxquant_decode(self, state, keys, values):
            time.sleep(next(pauses))
            return keys, values

    registry.register(Slow())
    observer = TimingObserver()
    registry.observe(observer)
    feed(get_cache("slow", registry=registry), rows, 40, 1, 1, 1, 1)
    (decode,) = [row for row in observer.rows() if row.hook == "decode"]
    assert decode.calls == 3
    assert 4 * PAUSE <= decode.total < 8 * PAUSE
    assert 3 * PAUSE <= decode.worst < 6 * PAUSE
    assert decode.mean == pytest.approx(decode.total / 3)


def test_work_is_timed_only_when_synchronized(registry, toys, rows):
    """A product that takes a while: said at once, computed when it is asked for."""
    big = mx.random.normal((400, 400))
    mx.eval(big)

    class Worker(toys.NoOpAttend):
        name = "worker"

        @hookimpl
        def veloxquant_create(self):
            return {"sum": None}

        @hookimpl
        def veloxquant_serialize(self):
            return Snapshot({})

        @hookimpl
        def veloxquant_finish_prompt(self): ...

        @hookimpl
        def veloxquant_prefill(self, state, keys, values):
            return keys, values

        @hookimpl
        def veloxquant_decode(self, state, keys, values):
            # A dict cannot be referred to weakly, so the layer is not known, and what is returned is computed.
            state["sum"] = sum((big + i) @ big for i in range(4))
            return keys, values

    registry.register(Worker())
    times = {}
    for synchronize in (False, True):
        observer = TimingObserver(synchronize=synchronize)
        registry.observe(observer)
        feed(get_cache("worker", registry=registry), rows, 1, 1, 1)
        registry.unobserve(observer)
        (times[synchronize],) = [row for row in observer.rows() if row.hook == "decode"]
    assert times[True].layer is None
    assert times[True].total > 5 * times[False].total


def test_rows_returned_to_attend_stay_lazy(registry, rows, monkeypatch):
    """Of what prefill and decode give to ``attend``, only what attend reads may be computed."""
    computed, evaluate = [], mx.eval
    monkeypatch.setattr(timing.mx, "eval", lambda arrays: (computed.append([id(a) for a in arrays]), evaluate(arrays)))
    observer = TimingObserver(synchronize=True)
    registry.observe(observer)
    for mode in ("routed", "proxy"):
        cache = get_cache("noop_attend", layer=LayerSpec(query_mode=mode), registry=registry)
        computed.clear()
        keys, values = cache.update_and_fetch(*rows(5))
        lazy = not any(id(keys) in ids or id(values) in ids for ids in computed)
        assert lazy is (mode == "routed")
        if mode == "routed":
            cache.attend(keys, keys, values, 1.0, "causal")
            assert any(id(keys) in ids and id(values) in ids for ids in computed)


def test_reset_forgets_figures_and_not_layers(observer, registry, rows):
    cache = get_cache("noop", layer=LayerSpec(index=5), registry=registry)
    feed(cache, rows, 40)
    observer.reset()
    assert observer.rows() == []
    feed(cache, rows, 40)
    assert counts(observer) == {("prefill", 5): 1, ("serialize", 5): 1}


def test_only_caches_made_under_observation_are_timed(registry, rows):
    before = get_cache("noop", registry=registry)
    observer = TimingObserver()
    registry.observe(observer)
    during = get_cache("noop", registry=registry)
    registry.unobserve(observer)
    after = get_cache("noop", registry=registry)
    feed(before, rows, 3)
    feed(after, rows, 3)
    assert counts(observer) == {("create", 0): 1}
    feed(during, rows, 3)
    assert counts(observer) == {("create", 0): 1, ("prefill", 0): 1, ("serialize", 0): 1}


def test_copies_and_restored_states_are_counted_under_their_layer(observer, registry, rows):
    cache = get_cache("noop", layer=LayerSpec(index=4), registry=registry)
    feed(cache, rows, 3)
    observer.reset()
    feed(copy.deepcopy(cache), rows, 3)
    assert counts(observer) == {("prefill", 4): 1, ("serialize", 4): 1}
    ops = cache.method.ops
    state = ops.restore(cache.config, cache.layer, ops.serialize(cache.method_state))
    ops.account(state)
    assert counts(observer)["account", 4] == 1


def test_an_id_that_is_used_again_brings_no_wrong_layer(registry):
    observer = TimingObserver()
    registry.observe(observer)
    ops = registry.get("noop").ops
    config = get_cache("noop", registry=registry).config
    for index in range(200):
        ops.create(config, LayerSpec(index=index))
    gc.collect()
    assert not [layer for _, layer in layers._layers.values() if layer.index > 100]
    ops.account(registry.get("noop").ops.create(config, LayerSpec(index=9)))
    assert counts(observer)["account", 9] == 1


def test_a_state_is_not_kept_alive(observer, registry):
    cache = get_cache("noop", registry=registry)
    reference = weakref.ref(cache.method_state)
    del cache
    gc.collect()
    assert reference() is None


def test_a_hook_that_fails_fails_as_without_it(observer, registry, rows):
    cache = get_cache("refuser", registry=registry)
    with pytest.raises(Exception, match="multiple of 8"):
        cache.update_and_fetch(*rows(4, key_dim=7, value_dim=7))
    assert "prefill" not in {row.hook for row in observer.rows()}


def test_threads(registry, rows):
    observer = TimingObserver()
    registry.observe(observer)
    drawn = [rows(1) for _ in range(50)]

    def work(index):
        cache = get_cache("noop", layer=LayerSpec(index=index), registry=registry)
        for pair in drawn:
            cache.update_and_fetch(*pair)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = counts(observer)
    for index in range(4):
        assert found["prefill", index] + found["decode", index] == 50


def test_a_whole_model(observer, registry):
    model = tiny_llama(layers=3)
    caches = make_prompt_cache(model, "noop_attend", registry=registry)
    model(mx.arange(40)[None], cache=caches)
    model(mx.array([[1]]), cache=caches)
    expected = {"create": 1, "prefill": 2, "attend": 2, "finish_prompt": 1, "serialize": 2}
    assert counts(observer) == {(hook, layer): n for hook, n in expected.items() for layer in range(3)}


# --------------------------------------------------------------------- figures


def test_rows_come_in_the_order_of_hooks_and_layers(observer, registry, rows):
    for index in (2, 0, 1):
        feed(get_cache("noop", layer=LayerSpec(index=index), registry=registry), rows, 3)
    assert [(row.hook, row.layer) for row in observer.rows()] == [
        (hook, layer) for hook in ("create", "prefill", "serialize") for layer in (0, 1, 2)
    ]


def test_rows_are_copies(observer, registry):
    get_cache("noop", registry=registry)
    observer.rows()[0].calls = 100
    assert observer.rows()[0].calls == 1


def test_sums_over_layers():
    rows = [
        HookTime("prefill", 0, calls=2, total=3.0, worst=2.0),
        HookTime("prefill", 1, calls=1, total=5.0, worst=5.0),
        HookTime("prefill", None, calls=1, total=1.0, worst=1.0),
        HookTime("trim", 1, calls=4, total=2.0, worst=1.5),
    ]
    prefill, trim = total_by_hook(rows)
    assert prefill == HookTime("prefill", 1, calls=4, total=9.0, worst=5.0)
    assert prefill.to_dict() == {"hook": "prefill", "layer": 1, "calls": 4, "total": 9.0, "worst": 5.0, "mean": 2.25}
    assert trim == rows[3]
    assert trim is not rows[3]
    assert total_by_hook([]) == []
    assert HookTime("trim", 0).mean == 0.0
