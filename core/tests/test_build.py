import sys

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as plain_caches

from veloxquant import ConfigError
from veloxquant import LayerSpec
from veloxquant import RoutingError
from veloxquant import UnknownMethodError
from veloxquant import UnsupportedModelError
from veloxquant.attention import is_routed
from veloxquant.attention import unroute
from veloxquant.build import get_cache
from veloxquant.build import make_prompt_cache
from veloxquant.build import use
from veloxquant.cache import LayerCache
from veloxquant.registry import Registry
from veloxquant.testing import toys as models

MODULES = ["llama", "gemma3_text", "lfm2", "gemma2"]


def untouched(model):
    """Nothing of what routing or ``use`` changes is changed."""
    functions = [
        getattr(sys.modules.get(f"mlx_lm.models.{name}"), "scaled_dot_product_attention", None) for name in MODULES
    ]
    return "make_cache" not in vars(model) and all(f in (None, base.scaled_dot_product_attention) for f in functions)


@pytest.fixture
def llama():
    model = models.tiny_llama()
    yield model
    while is_routed(model):
        unroute(model)
    assert untouched(model)


def names(caches):
    return [cache.method.name if isinstance(cache, LayerCache) else type(cache).__name__ for cache in caches]


# ---------------------------------------------------------------- one layer


def test_a_cache_of_one_layer_is_in_proxy_mode(registry):
    cache = get_cache("evictor", {"keep": 9}, registry=registry)
    assert (cache.query_mode, cache.config.keep, cache.layer) == ("proxy", 9, LayerSpec())
    assert cache.empty()


@pytest.mark.parametrize("config", [{"keep": 9}, "keep=9", ["keep=9"]])
def test_options_in_every_form(registry, config):
    assert get_cache("evictor", config, registry=registry).config.keep == 9


def test_a_method_that_needs_queries_is_refused_without_a_model(registry):
    with pytest.raises(ConfigError, match=r"make_prompt_cache\(model, 'picky'\)"):
        get_cache("picky", registry=registry)
    assert get_cache("picky", layer=LayerSpec(query_mode="routed"), registry=registry).query_mode == "routed"


@pytest.mark.parametrize(
    ("name", "config", "error"),
    [("nothing", None, UnknownMethodError), ("noop", {"windw": 3}, ConfigError), ("noop", 5, ConfigError)],
)
def test_what_cannot_be_made_is_refused(registry, name, config, error):
    with pytest.raises(error):
        get_cache(name, config, registry=registry)


# ---------------------------------------------------------------- storage


def test_the_rows_of_one_method_can_be_kept_by_another(registry, plugins, rows):
    cache = get_cache("evictor", {"keep": 6, "storage": "coarse", "storage_config": {"levels": 50}}, registry=registry)
    store = cache.method_state.rows.store
    assert (type(store).__name__, store.levels) == ("CoarseRows", 50)
    keys, values = rows(20)
    assert mx.array_equal(cache.update_and_fetch(keys, values)[0], keys).item()
    cache.update_and_fetch(*rows(1))
    # One byte for each of 8 + 8 channels of 6 rows of 2 heads, and an int32 position for each.
    assert cache.nbytes == 6 * 2 * 16 + 6 * 2 * 4


def test_the_storage_learns_which_layer_it_serves(registry, plugins, llama):
    make_prompt_cache(llama, "evictor", {"storage": "coarse"}, registry=registry)
    assert [index for _, index in plugins["coarse"].layers] == [0, 1]
    assert {config.levels for config, _ in plugins["coarse"].layers} == {100}


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"storage": "noop"}, ConfigError, "noop offers no row store"),
        ({"storage": "nothing"}, UnknownMethodError, "'nothing'"),
        ({"storage": "coarse", "storage_config": {"level": 3}}, ConfigError, "coarse has no option 'level'"),
        ({"storage_config": {"levels": 3}}, ConfigError, "storage is not"),
    ],
)
def test_a_storage_that_cannot_serve_is_refused(registry, config, error, words):
    with pytest.raises(error, match=words):
        get_cache("evictor", config, registry=registry)


# ---------------------------------------------------------------- whole models


def test_every_plain_layer_gets_a_cache_and_the_model_is_routed_once(registry, llama):
    caches = make_prompt_cache(llama, "evictor", {"keep": 9}, registry=registry)
    again = make_prompt_cache(llama, "evictor", registry=registry)
    assert names(caches) == ["evictor"] * 2
    assert [cache.layer.index for cache in caches] == [0, 1]
    assert {cache.query_mode for cache in (*caches, *again)} == {"routed"}
    assert caches[0].layer.head_dim == 16
    assert is_routed(llama)
    unroute(llama)
    assert untouched(llama)


@pytest.mark.parametrize(("name", "true_queries"), [("evictor", False), ("noop", True), ("noop", False)])
def test_nothing_is_routed_where_no_queries_are_wanted(registry, llama, name, true_queries):
    caches = make_prompt_cache(llama, name, true_queries=true_queries, registry=registry)
    assert {cache.query_mode for cache in caches} == {"proxy" if name == "evictor" else None}
    assert untouched(llama)


def test_layers_can_be_chosen(registry, llama):
    assert names(make_prompt_cache(llama, "noop", layers=[1], registry=registry)) == ["KVCache", "noop"]


@pytest.mark.parametrize(
    ("build", "kinds"),
    [("tiny_gemma3", [RotatingKVCache] * 5 + [LayerCache]), ("tiny_hybrid", [ArraysCache, LayerCache] * 2)],
)
def test_other_layers_keep_what_the_model_built_and_the_model_runs(registry, build, kinds):
    model = getattr(models, build)()
    tokens = mx.arange(20)[None] % 64
    plain = plain_caches(model)
    expected = [model(tokens[:, :19], cache=plain), model(tokens[:, 19:], cache=plain)]
    caches = make_prompt_cache(model, "noop_attend", registry=registry)
    try:
        assert all(isinstance(cache, kind) for cache, kind in zip(caches, kinds, strict=True))
        got = [model(tokens[:, :19], cache=caches), model(tokens[:, 19:], cache=caches)]
    finally:
        unroute(model)
    assert untouched(model)
    assert all(mx.array_equal(a, b).item() for a, b in zip(got, expected, strict=True))
    assert {cache.offset for cache in caches if isinstance(cache, LayerCache)} == {20}


REFUSED = {
    "unknown method": ("tiny_llama", "nothing", {}, UnknownMethodError),
    "unknown option": ("tiny_llama", "evictor", {"config": {"kep": 3}}, ConfigError),
    "latent attention": ("tiny_mla", "evictor", {}, UnsupportedModelError),
    "shared keys": ("tiny_shared_kv", "evictor", {}, UnsupportedModelError),
    "unroutable": ("tiny_unroutable", "evictor", {}, UnsupportedModelError),
    "no such layer": ("tiny_llama", "evictor", {"layers": [7]}, ConfigError),
    "a sliding layer": ("tiny_gemma3", "evictor", {"layers": [0]}, ConfigError),
    "no storage": ("tiny_llama", "evictor", {"config": {"storage": "noop"}}, ConfigError),
    "needs queries": ("tiny_llama", "picky", {"true_queries": False}, ConfigError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_before_anything_changes(registry, case):
    build, name, options, error = REFUSED[case]
    model = getattr(models, build)()
    with pytest.raises(error):
        make_prompt_cache(model, name, registry=registry, **options)
    assert untouched(model)
    with pytest.raises(error), use(model, name, registry=registry, **options):
        pytest.fail("the block must not run")
    assert untouched(model)


def test_a_model_that_cannot_be_routed_is_served_without_queries(registry):
    model = models.tiny_unroutable()
    tokens = mx.arange(9)[None]
    expected = model(tokens, cache=plain_caches(model))
    for caches in (
        make_prompt_cache(model, "noop", registry=registry),
        make_prompt_cache(model, "noop_attend", true_queries=False, registry=registry),
    ):
        assert mx.array_equal(model(tokens, cache=caches), expected).item()
    assert untouched(model)


def test_options_can_need_queries_that_the_method_does_not(toys, llama):
    registry = Registry(entry_points=[], blocked=[])
    method = registry.register(toys.Choosy())
    assert method.query_modes == ("routed", "proxy")
    assert get_cache("choosy", registry=registry).query_mode == "proxy"
    with pytest.raises(ConfigError, match="make_prompt_cache"):
        get_cache("choosy", {"choose": True}, registry=registry)
    with pytest.raises(ConfigError, match="true_queries"):
        make_prompt_cache(llama, "choosy", {"choose": True}, true_queries=False, registry=registry)
    assert names(make_prompt_cache(llama, "choosy", {"choose": True}, registry=registry)) == ["choosy"] * 2


def test_a_method_that_reads_the_rotation_needs_one_that_can_be_described(registry, llama):
    assert names(make_prompt_cache(llama, "rope_reader", registry=registry)) == ["rope_reader"] * 2
    from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

    llama.layers[1].self_attn.rope = DynamicNTKScalingRoPE(16, 128, False, 10000.0, 2.0)
    with pytest.raises(UnsupportedModelError, match=r"rope_reader.*layer 1"):
        make_prompt_cache(llama, "rope_reader", registry=registry)
    assert names(make_prompt_cache(llama, "rope_reader", layers=[0], registry=registry)) == ["rope_reader", "KVCache"]


def test_a_model_that_is_no_longer_routed_is_not_used_in_silence(registry, llama):
    """Design 5.9."""
    caches = make_prompt_cache(llama, "evictor", registry=registry)
    unroute(llama)
    llama(mx.array([[1, 2, 3]]), cache=caches)
    with pytest.raises(RoutingError, match="layer 0"):
        llama(mx.array([[4]]), cache=caches)


def test_two_models_of_one_family_do_not_undo_each_other(registry, llama):
    other = models.tiny_llama(seed=1)
    with use(other, "evictor", registry=registry):
        caches = make_prompt_cache(llama, "evictor", registry=registry)
    for size in (5, 1, 1):
        llama(mx.ones((1, size), dtype=mx.int32), cache=caches)
    assert caches[0].offset == 7


# ---------------------------------------------------------------- use


def test_use_lets_the_model_make_compressed_caches_and_undoes_it(registry, llama):
    with use(llama, "evictor", {"keep": 9}, registry=registry):
        caches = plain_caches(llama)
        assert names(caches) == ["evictor"] * 2
        assert caches[0].config.keep == 9
        assert plain_caches(llama)[0] is not caches[0]
        assert is_routed(llama)
        for size in (5, 1, 1):
            llama(mx.ones((1, size), dtype=mx.int32), cache=caches)
    assert untouched(llama)
    assert names(plain_caches(llama)) == ["KVCache"] * 2


def test_use_in_proxy_mode_routes_nothing(registry, llama):
    with use(llama, "evictor", true_queries=False, registry=registry):
        assert not is_routed(llama)
        assert {cache.query_mode for cache in plain_caches(llama)} == {"proxy"}


def test_use_is_undone_when_the_block_fails(registry, llama):
    with pytest.raises(KeyError), use(llama, "evictor", registry=registry):
        raise KeyError("inside")
    assert untouched(llama)


def test_use_restores_a_make_cache_of_the_users_own(registry, llama):
    def own():
        return [KVCache() for _ in range(2)]

    object.__setattr__(llama, "make_cache", own)
    with use(llama, "noop", registry=registry):
        assert names(plain_caches(llama)) == ["noop"] * 2
    assert llama.make_cache is own
    object.__delattr__(llama, "make_cache")


def test_use_asks_the_model_class_for_its_caches(registry):
    model = models.tiny_gemma3()
    with use(model, "noop", layers=[5], registry=registry):
        assert names(plain_caches(model)) == ["RotatingKVCache"] * 5 + ["noop"]
    assert names(plain_caches(model)) == ["RotatingKVCache"] * 5 + ["KVCache"]
    assert untouched(model)


def test_the_inner_of_two_nested_blocks_counts(registry, llama):
    with use(llama, "evictor", registry=registry):
        with use(llama, "noop_attend", layers=[1], registry=registry):
            assert names(plain_caches(llama)) == ["KVCache", "noop_attend"]
        assert names(plain_caches(llama)) == ["evictor"] * 2
        assert is_routed(llama)
        with pytest.raises(ConfigError), use(llama, "noop", {"a": 1}, registry=registry):
            pytest.fail("the block must not run")
        assert names(plain_caches(llama)) == ["evictor"] * 2
        assert names(make_prompt_cache(llama, "noop", registry=registry)) == ["noop"] * 2
    assert untouched(llama)


def test_two_models_can_be_used_at_once(registry, llama):
    other = models.tiny_llama(seed=1)
    with use(llama, "evictor", registry=registry):
        with use(other, "noop_attend", registry=registry):
            assert (names(plain_caches(llama)), names(plain_caches(other))) == (["evictor"] * 2, ["noop_attend"] * 2)
        caches = plain_caches(llama)
        for size in (5, 1, 1):
            llama(mx.ones((1, size), dtype=mx.int32), cache=caches)
        assert not is_routed(other)


def test_blocks_that_are_left_in_the_order_in_which_they_were_entered_leave_nothing(registry, llama):
    before = vars(llama).get("make_cache")
    outer, inner = use(llama, "noop_attend", registry=registry), use(llama, "noop_attend", registry=registry)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert names(plain_caches(llama)) == ["noop_attend"] * len(llama.layers)
    inner.__exit__(None, None, None)
    assert vars(llama).get("make_cache") is before
    assert not is_routed(llama)


@pytest.mark.parametrize("layers", [1, "01", [True], [0.0], [None]])
def test_layers_are_whole_numbers_in_a_list(registry, llama, layers):
    with pytest.raises(ConfigError, match="layers takes"):
        make_prompt_cache(llama, "noop_attend", layers=layers, registry=registry)
