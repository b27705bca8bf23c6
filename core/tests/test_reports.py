import json

import attrs
import mlx.core as mx
import pytest
from core_test_helpers import facts
from core_test_helpers import feed
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import RotatingKVCache

from veloxquant import VeloxQuantError
from veloxquant import hookimpl
from veloxquant.attention import unroute
from veloxquant.build import make_prompt_cache
from veloxquant.registry import Registry
from veloxquant.reports import report
from veloxquant.testing import toys as models

ROW = 2 * (8 + 8) * 4  # bytes of one row of the random rows: 2 heads, 8 + 8 channels, fp32


def run(model, name, registry, *sizes, batch=1, **options):
    caches = make_prompt_cache(model, name, registry=registry, **options)
    try:
        for size in sizes:
            model(mx.ones((batch, size), dtype=mx.int32), cache=caches)
    finally:
        unroute(model)
    return caches


@pytest.mark.parametrize("name", ["noop", "evictor", "coarse"])
@pytest.mark.parametrize("sizes", [[], [20], [20, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_held_are_those_of_the_arrays(registry, reachable_bytes, name, sizes, batch):
    """Case 79: a sum over everything that can be reached, found without the method's help."""
    caches = run(models.tiny_llama(kv_heads=2, head_dim=16), name, registry, *sizes, batch=batch)
    got = report(caches)
    for layer, cache in zip(got.layers, caches, strict=True):
        assert layer.bytes_held == reachable_bytes(cache.method_state)
    assert got.bytes_held == sum(reachable_bytes(cache.method_state) for cache in caches)
    seen = sum(sizes)
    assert got.tokens_seen == seen
    assert got.bytes_plain == 2 * (batch * 2 * seen * (16 + 16) * 4)
    assert got.ratio == (1.0 if not sizes else got.bytes_plain / got.bytes_held)


def test_an_evictor_is_told_as_it_is(registry):
    caches = run(models.tiny_llama(layers=3), "evictor", registry, 40, 1, 1, 1, config={"keep": 8})
    got = report(caches)
    assert [layer.index for layer in got.layers] == [0, 1, 2]
    for layer in got.layers:
        assert (layer.method, layer.query_mode, layer.trim) == ("evictor", "routed", "approximate")
        # Case 88b: tokens are not multiplied by heads or layers.
        assert (layer.tokens_seen, layer.tokens_kept) == (43, 10)
        assert layer.details["keys"] + layer.details["values"] + layer.details["auxiliary"] == layer.bytes_held
        assert layer.step_bytes is None
    assert (got.tokens_seen, got.tokens_kept, got.query_mode, got.step_bytes) == (43, 10.0, "routed", None)
    assert got.ratio > 1.0


@pytest.mark.parametrize(
    ("name", "true_queries", "mode", "trim"),
    [
        ("evictor", False, "proxy", "refused"),
        ("evictor", True, "routed", "approximate"),
        ("noop", True, "none", "exact"),
        ("coarse", True, "none", "exact"),
        ("rigid", True, "none", "refused"),
    ],
)
def test_modes_and_trimming(registry, name, true_queries, mode, trim):
    caches = make_prompt_cache(model := models.tiny_llama(), name, true_queries=true_queries, registry=registry)
    unroute(model)
    got = report(caches)
    assert got.query_mode == mode
    assert {layer.trim for layer in got.layers} == {trim}


@attrs.frozen(kw_only=True)
class RingedConfig:
    """The number of exact rows follows from other options, as does whether prompt rows are dropped."""

    levels: int = 8
    drop: bool = False

    @property
    def ring(self):
        return self.levels // 2

    @property
    def evicts(self):
        return self.drop


@pytest.mark.parametrize("name", ["levels", "ring"])
@pytest.mark.parametrize(("levels", "trim"), [(0, "exact"), (8, "approximate")])
def test_a_codec_that_keeps_newest_rows_exact_rewinds_approximately(toys, name, levels, trim):
    class Ringed(toys.Coarse):
        @hookimpl
        def veloxquant_method(self):
            return attrs.evolve(super().veloxquant_method(), config=RingedConfig, exact_rows=name)

    registry = Registry(entry_points=[])
    registry.register(Ringed())
    caches = make_prompt_cache(models.tiny_llama(), "coarse", {"levels": levels}, registry=registry)
    assert {layer.trim for layer in report(caches).layers} == {trim}


@pytest.mark.parametrize(("drop", "proxy", "routed"), [(False, "exact", "exact"), (True, "refused", "approximate")])
def test_options_may_say_that_nothing_is_evicted(toys, drop, proxy, routed):
    class Sometimes(toys.NoOpAttend):
        @hookimpl
        def veloxquant_method(self):
            return attrs.evolve(super().veloxquant_method(), config=RingedConfig, prompt_window=None, evicts=True)

    registry = Registry(entry_points=[])
    registry.register(Sometimes())
    for true_queries, trim in ((False, proxy), (True, routed)):
        model = models.tiny_llama()
        caches = make_prompt_cache(model, "noop_attend", {"drop": drop}, true_queries=true_queries, registry=registry)
        unroute(model)
        assert {layer.trim for layer in report(caches).layers} == {trim}


def test_query_modes_that_differ_are_mixed(proxy, routed):
    assert report([proxy("evictor"), routed("evictor")]).query_mode == "mixed"
    assert report([proxy("evictor"), proxy("noop")]).query_mode == "mixed"
    assert report([KVCache()]).query_mode == "none"


def test_layers_that_the_model_built_are_told_and_not_counted_as_compressed(registry):
    model = models.tiny_gemma3(window=8)
    caches = run(model, "evictor", registry, 30, 1, 1, config={"keep": 8})
    got = report(caches)
    assert [layer.method for layer in got.layers] == ["RotatingKVCache"] * 5 + ["evictor"]
    assert [layer.index for layer in got.compressed] == [5]
    for layer, cache in zip(got.layers[:5], caches[:5], strict=True):
        assert (layer.query_mode, layer.trim) == (None, "native")
        assert layer.bytes_held == layer.bytes_plain == cache.keys.nbytes + cache.values.nbytes
        assert layer.tokens_seen == 32
        assert layer.tokens_kept == cache.keys.shape[2] < 32
    assert got.tokens_kept == 9.0
    assert got.query_mode == "routed"
    assert got.bytes_held == sum(layer.bytes_held for layer in got.layers)


def test_state_layers_are_told(registry, reachable_bytes):
    caches = run(models.tiny_hybrid(), "noop", registry, 9, 1)
    got = report(caches)
    assert [layer.method for layer in got.layers] == ["ArraysCache", "noop"] * 2
    assert got.layers[0].bytes_held == reachable_bytes(caches[0]) > 0
    assert got.tokens_seen == 10


def test_empty_native_caches_hold_nothing():
    got = report([KVCache(), RotatingKVCache(max_size=8)])
    assert (got.bytes_held, got.bytes_plain, got.tokens_seen, got.tokens_kept, got.ratio) == (0, 0, 0, 0.0, 1.0)


def test_one_cache_and_none(proxy, rows):
    cache = proxy("noop")
    feed(cache, rows, 16)
    assert report(cache).bytes_held == 16 * ROW
    nothing = report([])
    assert (nothing.tokens_seen, nothing.bytes_held, nothing.ratio, nothing.query_mode) == (0, 0, 1.0, "none")


@pytest.mark.parametrize("mode", ["proxy", "routed"])
@pytest.mark.parametrize("name", ["noop", "noop_attend", "evictor", "coarse"])
@pytest.mark.parametrize("sizes", [[20], [20, 1], [20, 1, 1, 2]], ids=str)
def test_measuring_a_step_leaves_the_cache_as_it_was(request, plugins, rows, mode, name, sizes):
    cache = request.getfixturevalue(mode)(name)
    feed(cache, rows, *sizes)
    before, state = facts(cache), cache.method_state
    got = report(cache, measure_step=True)
    assert facts(cache) == before
    assert cache.method_state is state
    assert type(got.step_bytes) is int
    assert got.step_bytes >= 0
    step = rows(1)
    keys, _ = cache.update_and_fetch(*step)
    assert mx.array_equal(keys[:, :, -1:], step[0]).item()


def test_a_step_of_a_codec_that_rebuilds_all_rows_allocates_them(proxy, rows):
    cache = proxy("coarse")
    feed(cache, rows, 4000, 1)
    # At least the rebuilt keys and values of all rows.
    assert report(cache, measure_step=True).step_bytes >= 4000 * ROW


def test_an_empty_cache_has_no_step_to_measure(proxy):
    assert report(proxy("noop"), measure_step=True).step_bytes is None


def test_a_report_is_plain_values(registry):
    caches = run(models.tiny_gemma3(), "evictor", registry, 30, 1)
    got = report(caches, measure_step=True)
    plain = json.loads(json.dumps(got.to_dict()))
    assert plain["bytes_held"] == got.bytes_held
    assert plain["ratio"] == got.ratio
    assert plain["query_mode"] == "routed"
    assert plain["step_bytes"] == got.step_bytes
    assert [layer["method"] for layer in plain["layers"]] == ["RotatingKVCache"] * 5 + ["evictor"]
    assert plain["layers"][5]["tokens_seen"] == 31


def test_a_model_in_the_place_of_its_caches_is_refused():
    with pytest.raises(VeloxQuantError, match="report takes the caches that make_prompt_cache gave, not "):
        report(models.tiny_llama())
