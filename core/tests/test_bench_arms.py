"""Arms and the reference caches of the bench."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import QuantizedKVCache

from veloxquant import ConfigError
from veloxquant import UnknownMethodError
from veloxquant.attention import is_routed
from veloxquant.attention import unroute
from veloxquant.bench.arm_options import chosen_arms
from veloxquant.bench.arm_options import split_usable
from veloxquant.bench.arms import method_arm
from veloxquant.bench.arms import plain_arm
from veloxquant.bench.arms import quantized_arm
from veloxquant.bench.arms import recent_rows_arm
from veloxquant.bench.arms import top_rows_arm
from veloxquant.bench.held import held
from veloxquant.bench.quality import prefill
from veloxquant.bench.references import RecentRows
from veloxquant.bench.references import RecentRowsConfig
from veloxquant.bench.references import TopRows
from veloxquant.bench.references import TopRowsConfig
from veloxquant.routed import RoutedLayerCache
from veloxquant.testing.toys import tiny_gemma3
from veloxquant.testing.toys import tiny_llama
from veloxquant.types import LayerSpec

pytestmark = pytest.mark.usefixtures("packed_products")

PROMPT = [(7 * place) % 61 for place in range(40)]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(head_dim=32)


@pytest.fixture(autouse=True)
def _nothing_stays_routed(model):
    yield
    while is_routed(model):
        unroute(model)


def steps(model, caches, tokens):
    """Logits of a prompt's last token and of tokens fed one by one after it."""
    found = [prefill(model, caches, PROMPT)]
    found += [model(mx.array([[token]]), cache=caches)[0, -1] for token in tokens]
    mx.eval(found)
    return mx.stack(found)


# ------------------------------------------------------------------ references


def test_recent_rows_keeps_the_first_and_the_newest(rows):
    cache = RecentRows(RecentRowsConfig(rows=8, growth=0.5, sinks=2))
    keys, values = rows(30)
    cache.update_and_fetch(keys[:, :, :19], values[:, :, :19])
    assert cache.rows.count == 19  # the prompt is open
    whole, _ = cache.update_and_fetch(keys[:, :, 19:20], values[:, :, 19:20])
    assert mx.array_equal(whole, keys[:, :, :20])
    place = [0, 1, *range(14, 20)]
    assert mx.array_equal(cache.rows.keys_values()[0], keys[:, :, mx.array(place)])
    for count in range(20, 30):
        cache.update_and_fetch(keys[:, :, count : count + 1], values[:, :, count : count + 1])
    # 8 rows and half of those that 10 tokens brought.
    place = [0, 1, *range(30 - 11, 30)]
    assert mx.array_equal(cache.rows.keys_values()[1], values[:, :, mx.array(place)])
    assert cache.offset == 30


def test_recent_rows_with_room_is_plain(model):
    tokens = [3, 9, 27, 5]
    ours = steps(model, recent_rows_arm(100).make(model), tokens)
    np.testing.assert_allclose(np.array(ours), np.array(steps(model, plain_arm().make(model), tokens)), atol=1e-5)


def test_top_rows_reads_those_with_the_highest_weights():
    generator = np.random.default_rng(0)
    keys, values = (generator.standard_normal((1, 2, 25, 8)).astype(np.float32) for _ in range(2))
    query = generator.standard_normal((1, 4, 1, 8)).astype(np.float32)
    cache = TopRows(TopRowsConfig(rows=9, sinks=1, recent=2))
    for part in (slice(0, 23), slice(23, 24), slice(24, 25)):
        found = cache.update_and_fetch(mx.array(keys[:, :, part]), mx.array(values[:, :, part]))
    output = np.array(cache.attend(mx.array(query), *found, scale=0.5))
    for head in range(4):
        group = [2 * (head // 2), 2 * (head // 2) + 1]
        weights = 0.0
        for other in group:
            logits = 0.5 * keys[0, head // 2].astype(np.float64) @ query[0, other, 0]
            weights = weights + np.exp(logits) / np.exp(logits).sum()
        chosen = sorted(range(1, 23), key=lambda row: -weights[row])[:6]
        place = [0, 23, 24, *chosen]
        logits = 0.5 * keys[0, head // 2][place].astype(np.float64) @ query[0, head, 0]
        mixed = np.exp(logits) / np.exp(logits).sum() @ values[0, head // 2][place]
        np.testing.assert_allclose(output[0, head, 0], mixed, atol=1e-5)
    assert cache.held().rows_read == 9


def test_top_rows_of_all_rows_is_plain_and_of_few_is_not(model):
    tokens = [3, 9, 27, 5]
    plain = np.array(steps(model, plain_arm().make(model), tokens))
    np.testing.assert_allclose(np.array(steps(model, top_rows_arm(100).make(model), tokens)), plain, atol=1e-5)
    few = np.array(steps(model, top_rows_arm(6, sinks=1, recent=1).make(model), tokens))
    np.testing.assert_allclose(few[0], plain[0], atol=1e-5)  # the prompt's own last token sees all of it
    assert np.abs(few[1:] - plain[1:]).max() > 1e-3


@pytest.mark.parametrize("arm", [recent_rows_arm(10, growth=0.3), top_rows_arm(9, recent=2), plain_arm()])
def test_going_on_from_a_plain_prompt_is_the_same_as_reading_it(model, arm):
    tokens = [3, 9, 27, 5, 11, 2]
    expected = steps(model, arm.make(model), tokens)
    plain = plain_arm().make(model)
    model(mx.array([PROMPT[:-1]]), cache=plain)
    for _ in range(2):  # the plain caches stay as they are
        caches = arm.take(model, plain)
        found = [model(mx.array([[token]]), cache=caches)[0, -1] for token in [PROMPT[-1], *tokens]]
        np.testing.assert_allclose(np.array(mx.stack(found)), np.array(expected), atol=1e-4)
        assert plain[0].offset == len(PROMPT) - 1


# ------------------------------------------------------------------------ arms


def test_layers_with_windows_keep_their_own_caches():
    model = tiny_gemma3()
    kinds = [type(cache).__name__ for cache in recent_rows_arm(8).make(model)]
    assert kinds.count("RecentRows") == 1
    assert kinds.count("RotatingKVCache") == 5


def test_quantized(model):
    caches = quantized_arm(4, 32).make(model)
    assert {(type(cache), cache.bits, cache.group_size) for cache in caches} == {(QuantizedKVCache, 4, 32)}


def test_caches_of_one_layer(registry):
    layer = LayerSpec(query_heads=4, kv_heads=2, head_dim=32)
    assert isinstance(method_arm("noop_attend", registry=registry).make_layer(layer), RoutedLayerCache)
    assert isinstance(plain_arm().make_layer(layer), KVCache)
    assert isinstance(top_rows_arm(5).make_layer(layer), TopRows)


def test_held_bytes_are_those_of_the_arrays(model, registry):
    row = 2 * 2 * 2 * 32 * 4  # layers, keys and values, heads, channels, bytes
    for arm, total, read in [
        (plain_arm(), 256 * row, 41),
        (recent_rows_arm(10, growth=0.0), 10 * row, 10),
        (quantized_arm(8, 32), 256 * row * 10 // 32, 41),
        (method_arm("coarse", registry=registry), 41 * row // 4, 41),
    ]:
        caches = arm.make(model)
        steps(model, caches, [3])
        found = held(caches)
        assert found.total == total, arm.name
        assert found.rows_read == read, arm.name
        assert found.keys == found.values, arm.name
        if arm.method != "QuantizedKVCache":  # it does not show what its rows were
            assert found.plain == 41 * row, arm.name


# --------------------------------------------------------------------- options


def arms(registry, methods=None, settings=(), named=()):
    return chosen_arms(methods, settings, named, registry=registry)


def test_methods_and_their_settings(registry):
    found = arms(registry, ["coarse", "noop"], ["coarse.levels=7"])
    assert [(arm.name, arm.config) for arm in found] == [("coarse", {"levels": 7}), ("noop", {"window": 4})]


def test_every_installed_method_by_default(registry):
    assert [arm.name for arm in arms(registry)] == registry.names()


def test_several_arms_of_one_method(registry):
    found = arms(registry, named=["rough=coarse:levels=5", "fine=coarse:levels=90", "as it is=coarse"])
    assert [(arm.name, arm.method, arm.config["levels"]) for arm in found] == [
        ("rough", "coarse", 5),
        ("fine", "coarse", 90),
        ("as it is", "coarse", 100),
    ]


def test_options_of_an_arm_may_hold_commas_and_dots(registry):
    [arm] = arms(registry, named=["x=evictor:keep=3,storage=coarse,storage_config.levels=9"])
    assert arm.config["storage_config"] == {"levels": 9}
    assert arm.config["keep"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"methods": ["coarse"], "settings": ["levels=7"]}, "METHOD.KEY=VALUE"),
        ({"methods": ["coarse"], "settings": ["coarse.levels"]}, "METHOD.KEY=VALUE"),
        ({"methods": ["coarse"], "settings": ["course.levels=3"]}, "did you mean 'coarse'"),
        ({"methods": ["coarse"], "settings": ["coarse.level=3"]}, "did you mean 'levels'"),
        ({"methods": ["coarse"], "settings": ["coarse.levels=many"]}, "must be int"),
        ({"methods": ["coarse", "coarse"]}, "two arms are called 'coarse'"),
        ({"named": ["coarse"]}, "--arm NAME=METHOD"),
        ({"named": ["=coarse"]}, "--arm NAME=METHOD"),
    ],
)
def test_what_is_wrong_is_said(registry, words, message):
    with pytest.raises(ConfigError, match=message):
        arms(registry, **words)


def test_an_unknown_method(registry):
    with pytest.raises(UnknownMethodError, match="coarze"):
        arms(registry, ["coarze"])


def test_methods_that_cannot_be_used_are_left_out_unless_they_were_named(registry, model):
    chosen = arms(registry, ["coarse", "evictor"], ["evictor.storage=noop"])
    with pytest.raises(ConfigError):
        split_usable(chosen, model, tolerant=False)
    usable, skipped = split_usable(chosen, model, tolerant=True)
    assert [arm.name for arm in usable] == ["coarse"]
    assert [one.method for one in skipped] == ["evictor"]
    assert "noop offers no row store" in skipped[0].reason
