import gc
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as plain_caches

import veloxquant
from veloxquant import RoutingError
from veloxquant import UnsupportedModelError
from veloxquant.attention import attention
from veloxquant.attention import causal_mask
from veloxquant.attention import is_routed
from veloxquant.attention import live_mask
from veloxquant.attention import route
from veloxquant.attention import unroute
from veloxquant.testing import toys as models

NAME = "scaled_dot_product_attention"
LLAMA = "mlx_lm.models.llama"
ROUTABLE = {
    "tiny_llama": LLAMA,
    "tiny_gemma3": "mlx_lm.models.gemma3_text",
    "tiny_hybrid": "mlx_lm.models.lfm2",
    "tiny_mla": "mlx_lm.models.deepseek_v3",
    "tiny_shared_kv": "mlx_lm.models.gemma4_text",
}


def bound(module):
    return getattr(sys.modules[module], NAME)


class Attending:
    """A cache that answers attention itself and notes what came."""

    def __init__(self):
        self.inner, self.calls = KVCache(), []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def attend(self, queries, keys, values, scale, mask=None, sinks=None):
        self.calls.append((queries.shape, keys.shape, scale, mask, sinks))
        return attention(queries, keys, values, scale, mask, sinks)


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize(("length", "rows"), [(1, 1), (1, 9), (4, 4), (4, 9)])
def test_the_causal_mask(length, rows):
    mask = causal_mask(length, rows)
    assert mask.dtype == mx.bool_
    expected = [[row <= rows - length + query for row in range(rows)] for query in range(length)]
    assert mask.tolist() == expected


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("group", [1, 3])
def test_the_live_mask_per_query_head(length, group):
    valid = np.random.default_rng(0).random((2, 2, 7)) < 0.5
    valid[..., -length:] = True
    mask = np.array(live_mask(mx.array(valid), 2 * group, length))
    assert mask.shape == (2, 2 * group, length, 7)
    for b, h, query, row in np.ndindex(mask.shape):
        assert mask[b, h, query, row] == (valid[b, h // group, row] and row <= 7 - length + query)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("kind", ["none", "causal", "array", "per head"])
def test_dense_attention_equals_numpy(rows, queries, attend_numpy, heads, kind):
    keys, values = rows(9, batch=3, key_dim=8, value_dim=8)
    length = 1 if kind == "none" else 4
    q = queries(length, batch=3, heads=heads)
    causal = np.tril(np.ones((length, 9), bool), 9 - length)
    mask, expected = {
        "none": (None, causal),
        "causal": ("causal", causal),
        "array": (mx.array(causal), causal),
        "per head": (mx.array(np.broadcast_to(causal, (3, heads, length, 9))), causal),
    }[kind]
    got = attention(q, keys, values, 0.3, mask)
    assert np.allclose(np.array(got), attend_numpy(q, keys, values, 0.3, expected), atol=1e-5)


def test_a_mask_of_another_width_is_refused(rows, queries):
    keys, values = rows(9)
    with pytest.raises(RoutingError, match="12 rows where the cache holds 9"):
        attention(queries(4), keys, values, 1.0, causal_mask(4, 12))


def test_a_mask_that_broadcasts_over_the_rows_is_fine(rows, queries):
    keys, values = rows(9)
    q = queries(2)
    everything = mx.ones((1, 1, 2, 1), dtype=mx.bool_)
    assert mx.allclose(attention(q, keys, values, 1.0, everything), attention(q, keys, values, 1.0, None)).item()


# ---------------------------------------------------------------- routing


@pytest.fixture(autouse=True)
def _nothing_stays_routed():
    yield
    for module in ROUTABLE.values():
        if module in sys.modules:
            assert bound(module) is base.scaled_dot_product_attention


@pytest.mark.parametrize("name", ROUTABLE)
def test_a_model_is_routed_in_its_own_module_and_restored_exactly(name):
    model = getattr(models, name)()
    original = bound(ROUTABLE[name])
    assert not is_routed(model)
    assert route(model) == [ROUTABLE[name]]
    assert is_routed(model)
    assert bound(ROUTABLE[name]) is not original
    assert base.scaled_dot_product_attention is original
    unroute(model)
    assert bound(ROUTABLE[name]) is original
    assert not is_routed(model)


def test_routes_are_counted():
    model, original = models.tiny_llama(), bound(LLAMA)
    route(model)
    dispatcher = bound(LLAMA)
    route(model)
    assert bound(LLAMA) is dispatcher
    unroute(model)
    assert bound(LLAMA) is dispatcher
    unroute(model)
    assert bound(LLAMA) is original
    unroute(model)
    assert bound(LLAMA) is original


def test_models_that_share_a_module_are_counted_apart():
    one, two, original = models.tiny_llama(), models.tiny_llama(seed=1), bound(LLAMA)
    route(one)
    assert not is_routed(two)
    unroute(two)  # was never routed, so this undoes nothing
    assert is_routed(one)
    assert bound(LLAMA) is not original
    route(two)
    unroute(one)
    assert is_routed(two)
    assert not is_routed(one)
    unroute(two)
    assert bound(LLAMA) is original


def test_a_model_that_computes_attention_itself_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"gemma2.*true_queries=False"):
        route(models.tiny_unroutable())


def test_an_object_without_layers_is_refused():
    with pytest.raises(UnsupportedModelError):
        route(object())


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma3", "tiny_hybrid"])
def test_caches_without_attend_are_served_as_before(name):
    model = getattr(models, name)()
    tokens = mx.arange(12)[None] % 64

    def logits():
        caches = plain_caches(model)
        return mx.concatenate([model(tokens[:, :11], cache=caches), model(tokens[:, 11:], cache=caches)], axis=1)

    expected, without_cache = logits(), model(tokens)
    route(model)
    try:
        assert mx.array_equal(logits(), expected).item()
        assert mx.array_equal(model(tokens), without_cache).item()
    finally:
        unroute(model)


def test_a_cache_with_attend_gets_the_queries_once_a_layer():
    model = models.tiny_llama(kv_heads=2, query_heads=4, layers=2, head_dim=16)
    tokens = mx.arange(7)[None]
    expected = model(tokens, cache=plain_caches(model))
    caches = [Attending(), Attending()]
    route(model)
    try:
        logits = model(tokens, cache=caches)
    finally:
        unroute(model)
    assert mx.array_equal(logits, expected).item()
    for cache in caches:
        assert cache.calls == [((1, 4, 7, 16), (1, 2, 7, 16), 16**-0.5, "causal", None)]


def test_sinks_reach_a_cache_that_attends_and_the_original_alike(rows, queries):
    model = models.tiny_llama()
    keys, values = rows(5)
    q, sinks, cache = queries(1), mx.array([0.5, 1.0, -1.0, 2.0]), Attending()
    expected = base.scaled_dot_product_attention(q, keys, values, cache=None, scale=0.5, mask=None, sinks=sinks)
    route(model)
    try:
        call = bound(LLAMA)
        plain = call(q, keys, values, cache=None, scale=0.5, mask=None, sinks=sinks)
        attended = call(q, keys, values, cache=cache, scale=0.5, mask=None, sinks=sinks)
    finally:
        unroute(model)
    assert mx.array_equal(plain, expected).item()
    assert mx.allclose(attended, expected).item()
    assert cache.calls[0][-1] is sinks


def test_the_public_names_are_these():
    assert (veloxquant.route, veloxquant.unroute) == (route, unroute)


def test_a_model_that_is_gone_leaves_no_route():
    model = models.tiny_llama()
    module = sys.modules[type(model).__module__]
    before = module.scaled_dot_product_attention
    route(model)
    assert module.scaled_dot_product_attention is not before
    del model
    gc.collect()
    assert module.scaled_dot_product_attention is before
