"""Attention in compress mode, against windowed RoPE written out in fp64."""

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant import RoutingError
from veloxquant_a2ats.scoring import rebuild_keys
from veloxquant_a2ats.scoring import rebuild_values

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 16, 24
SCALE = 0.3
ROPE = Rope(dims=DIM, base=1000.0)
OPTIONS = {"allow_uncalibrated": True, "sub_dim": 8, "window": 20, "sinks": 3, "far_position": 50}


def layer(mode="routed"):
    return LayerSpec(query_mode=mode, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=SCALE, rope=ROPE)


def data(tokens, seed=0, batch=1, dtype=mx.float32):
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    keys = mx.random.split(mx.random.key(seed), 3)
    return [mx.random.normal((batch, h, tokens, d), key=k).astype(dtype) for (h, d), k in zip(sizes, keys, strict=True)]


def feed(cache, rows, cuts, sinks=None):
    outputs, start = [], cache.offset
    for cut in cuts:
        queries, keys, values = (array[:, :, start : start + cut] for array in rows)
        found = cache.update_and_fetch(keys, values)
        outputs.append(cache.attend(queries, *found, scale=SCALE, mask=cache.make_mask(cut), sinks=sinks))
        start += cut
    return mx.concatenate(outputs, axis=2)


def turned(x, positions):
    """Rotate rows ``[..., S, D]`` at positions, in fp64."""
    angles = np.asarray(positions, dtype=np.float64)[:, None] * 1000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def reference(cache, rows, cuts, sinks=None, options=OPTIONS):
    """What every query is given: u_ij near = (q R_i).(k R_j), far = (q R_b).k^, with what the codes stand for."""
    state = cache.method_state
    book = state.model.codebook
    queries, keys, values = (np.array(array.astype(mx.float32), dtype=np.float64) for array in rows)
    total = sum(cuts)
    coded_keys = np.array(rebuild_keys(book.keys, state.codes.live("keys")), dtype=np.float64)
    coded_values = np.array(rebuild_values(book.values, state.codes.live("values")), dtype=np.float64)
    output = np.zeros((queries.shape[0], HEADS, total, VALUE_DIM))
    starts = np.repeat(np.cumsum([0, *cuts[:-1]]), cuts)
    for b in range(queries.shape[0]):
        for h in range(HEADS):
            g = h * KV_HEADS // HEADS
            for i in range(total):
                plain = turned(queries[b, h, i : i + 1], [-i])
                far = turned(plain, [options["far_position"]])[0]
                logits, mixed = np.empty(i + 1), np.empty((i + 1, VALUE_DIM))
                for j in range(i + 1):
                    exact = j < options["sinks"] or i - j < options["window"] or j >= starts[i]
                    key = keys[b, g, j] if exact else coded_keys[b, g, j]
                    logits[j] = SCALE * ((queries[b, h, i] if exact else far) @ key)
                    mixed[j] = values[b, g, j] if exact else coded_values[b, g, j]
                weights = np.exp(logits - logits.max())
                extra = 0.0 if sinks is None else np.exp(float(sinks[h]) - logits.max())
                output[b, h, i] = weights @ mixed / (weights.sum() + extra)
    return output


@pytest.mark.parametrize(
    "cuts", [[40, 1, 1, 1], [1] * 30, [10, 60, 1, 1], [30, 25, 5, 1, 4, 1], [2, 50, 1], [25, 1, 1, 30], [70, 3]]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_windowed_rope_query_by_query(cuts, batch):
    rows = data(sum(cuts), batch=batch)
    cache = veloxquant.get_cache("a2ats", OPTIONS, layer=layer())
    np.testing.assert_allclose(np.array(feed(cache, rows, cuts)), reference(cache, rows, cuts), atol=2e-5)


def test_values_rebuilt_for_a_single_token_give_the_same(monkeypatch):
    """What a GPU does."""
    monkeypatch.setattr("veloxquant_a2ats.compress_attention.codes_are_summed", lambda: False)
    rows, cuts = data(43, batch=2), [40, 1, 1, 1]
    cache = veloxquant.get_cache("a2ats", OPTIONS, layer=layer())
    np.testing.assert_allclose(np.array(feed(cache, rows, cuts)), reference(cache, rows, cuts), atol=2e-5)


@pytest.mark.parametrize("summed", [True, False])
def test_sequences_with_and_without_far_tokens_take_a_token_together(monkeypatch, summed):
    monkeypatch.setattr("veloxquant_a2ats.together.codes_are_summed", lambda: summed)
    lengths = [60, 17, 27]
    rows = [data(length + 3, seed=length) for length in lengths]
    caches = [veloxquant.get_cache("a2ats", OPTIONS, layer=layer()) for _ in lengths]
    for cache, own, length in zip(caches, rows, lengths, strict=True):
        feed(cache, own, [length])
    batch = type(caches[0]).merge(caches)
    for step in range(3):
        queries, keys, values = (
            mx.concatenate(
                [own[part][:, :, length + step][:, :, None] for own, length in zip(rows, lengths, strict=True)]
            )
            for part in range(3)
        )
        found = batch.attend(queries, *batch.update_and_fetch(keys, values), scale=SCALE, mask=None)
        for place, (own, length) in enumerate(zip(rows, lengths, strict=True)):
            seen = [array[:, :, : length + step + 1] for array in own]
            expected = reference(batch.extract(place), seen, [length, *[1] * (step + 1)])[:, :, -1:]
            np.testing.assert_allclose(np.array(found[place : place + 1]), expected, atol=2e-5)


def test_long_blocks_of_queries_are_cut_and_give_the_same(monkeypatch):
    rows, cuts = data(120), [50, 70]
    whole = feed(veloxquant.get_cache("a2ats", OPTIONS, layer=layer()), rows, cuts)
    monkeypatch.setattr("veloxquant_a2ats.compress_attention._LOGITS", HEADS * 120 * 9)
    cut = feed(veloxquant.get_cache("a2ats", OPTIONS, layer=layer()), rows, cuts)
    np.testing.assert_allclose(np.array(cut), np.array(whole), atol=1e-6)


def test_sink_logits_of_the_model_take_part():
    rows, cuts = data(50), [40, 5, 1, 1, 1, 1, 1]
    sinks = mx.array([0.5, -1.0, 2.0, 0.0, 3.0, -2.0])
    cache = veloxquant.get_cache("a2ats", OPTIONS, layer=layer())
    found = feed(cache, rows, cuts, sinks)
    np.testing.assert_allclose(np.array(found), reference(cache, rows, cuts, sinks.tolist()), atol=2e-5)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_token_turns_far_at_exactly_the_window(shift):
    """At i - j = window - 1 it is attended as it came, at i - j = window as its code."""
    tokens = 3 + 20 + shift
    rows = data(tokens)
    cache = veloxquant.get_cache("a2ats", OPTIONS, layer=layer())
    feed(cache, rows, [1] * (tokens - 1))
    # Token 3 is the first that is no sink; its value is made to stand out in what it came with.
    marked = cache.method_state.ring
    marked._values[:, :, 3:4] = mx.full((1, KV_HEADS, 1, VALUE_DIM), 1000.0)
    last = [array[:, :, tokens - 1 :] for array in rows]
    output = cache.attend(last[0], *cache.update_and_fetch(*last[1:]), scale=SCALE, mask=None)
    seen_as_it_came = bool((mx.abs(output) > 10).any())
    # The last token is at position tokens - 1 = 22 + shift, so i - j = 19 + shift.
    assert seen_as_it_came == (shift == 0)


def test_array_masks_are_honoured_or_refused():
    rows = data(60)
    cache = veloxquant.get_cache("a2ats", OPTIONS, layer=layer())
    feed(cache, rows, [58])
    queries, keys, values = (array[:, :, 58:] for array in rows)
    found = cache.update_and_fetch(keys, values)
    with pytest.raises(RoutingError, match="covers 7 rows"):
        cache.attend(queries, *found, scale=SCALE, mask=mx.ones((2, 7), dtype=mx.bool_))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_hidden_rows_have_no_weight(kind):
    rows = data(60)
    caches = [veloxquant.get_cache("a2ats", OPTIONS, layer=layer()) for _ in range(2)]
    outputs = []
    hidden = (mx.arange(60) >= 5) & (mx.arange(60) < 45)
    for number, cache in enumerate(caches):
        feed(cache, rows, [57, 1])
        queries, keys, values = (array[:, :, 58:] for array in rows)
        found = cache.update_and_fetch(keys, values)
        if number:  # what is hidden is changed
            state = cache.method_state
            state.codes._buffers["values"] = mx.where(hidden[: state.coded, None], 0, state.codes.live("values"))
            start, (near_keys, near_values) = state.block
            place = mx.arange(start, 60)[:, None]
            state.block = start, (near_keys, mx.where(hidden[start:, None], place * 9.0, near_values))
        mask = ~hidden & veloxquant.attention.causal_mask(2, 60)
        if kind == "additive":
            mask = mx.where(mask, 0.0, -1e9)
        outputs.append(np.array(cache.attend(queries, *found, scale=SCALE, mask=mask)))
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-6)


def test_proxy_rows_give_the_logits_of_routed_mode():
    """Far keys come back at position i - b: dense attention over them is windowed RoPE."""
    rows = data(61)
    routed, proxy = (veloxquant.get_cache("a2ats", OPTIONS, layer=layer(mode)) for mode in ("routed", "proxy"))
    feed(routed, rows, [59, 1])
    for cut in (59, 1):
        proxy.update_and_fetch(*(array[:, :, proxy.offset : proxy.offset + cut] for array in rows[1:]))
    queries, keys, values = (array[:, :, 60:] for array in rows)
    expected = routed.attend(queries, *routed.update_and_fetch(keys, values), scale=SCALE, mask=None)
    found = mx.fast.scaled_dot_product_attention(queries, *proxy.update_and_fetch(keys, values), scale=SCALE)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-5)


def test_far_query_rope_of_a_state():
    cache = veloxquant.get_cache("a2ats", OPTIONS, layer=layer())
    rows = data(4)
    cache.update_and_fetch(*rows[1:])
    found = cache.method_state.far_query_rope(rows[0])
    expected = turned(np.array(rows[0], dtype=np.float64), [50] * 4)
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)
