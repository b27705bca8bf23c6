"""Retrieve mode: which rows are ranked first, that they are attended exactly, and what is counted."""

import copy

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant.attention import attention
from veloxquant_a2ats.retrieval import centroid_shares
from veloxquant_a2ats.retrieval import choose_rows
from veloxquant_a2ats.retrieval import count_codes
from veloxquant_a2ats.retrieval import union_of_heads
from veloxquant_a2ats.rotation import derotate
from veloxquant_a2ats.rotation import far_query_rope

HEADS, KV_HEADS, DIM = 6, 2, 32
SCALE = DIM**-0.5
ROPE = Rope(dims=DIM)
OPTIONS = {"mode": "retrieve", "allow_uncalibrated": True, "window": 16, "sinks": 3, "retrieval_fraction": 0.1}
LAYER = LayerSpec(query_mode="routed", query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, rope=ROPE)


def routed(**options):
    return veloxquant.get_cache("a2ats", {**OPTIONS, **options}, layer=LAYER)


def data(tokens, seed=0, batch=1, dtype=mx.float32):
    keys = mx.random.split(mx.random.key(seed), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [mx.random.normal((batch, h, tokens, DIM), key=k).astype(dtype) for h, k in zip(heads, keys, strict=True)]


def feed(cache, rows, cuts):
    start, outputs = cache.offset, []
    for cut in cuts:
        queries, keys, values = (array[:, :, start : start + cut] for array in rows)
        found = cache.update_and_fetch(keys, values)
        outputs.append(cache.attend(queries, *found, scale=SCALE, mask=cache.make_mask(cut)))
        mx.eval(outputs[-1])
        start += cut
    return mx.concatenate(outputs, axis=2)


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def shares(cache, query, count):
    """Softmax over the rows that may be chosen, by their codes' centroids, in fp64: [B, Hkv, G, rows]."""
    state = cache.method_state
    first, last = min(3, count), count - 16
    book = np.array(state.model.codebook.keys[:, 0], dtype=np.float64)
    codes = np.array(state.codes.live("keys")[..., 0])[:, :, first:last].astype(int)
    far = np.array(far_query_rope(derotate(query, ROPE, count - 1), ROPE, 2048), dtype=np.float64)
    far = far.reshape(far.shape[0], KV_HEADS, -1, DIM)
    table = np.einsum("bhgd,hkd->bhgk", far, book) * SCALE
    logits = np.take_along_axis(table, np.broadcast_to(codes[:, :, None], (*table.shape[:3], codes.shape[2])), axis=3)
    return softmax(logits)


def masked(rows, kept, step):
    """Exact attention of one query over the rows kept, [B, Hq, rows] bool."""
    queries, keys, values = rows
    return attention(
        queries[:, :, step : step + 1],
        keys[:, :, : step + 1],
        values[:, :, : step + 1],
        SCALE,
        mx.array(kept)[:, :, None],
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_step_is_exact_attention_over_the_rows_ranked_best(batch, per_head):
    rows = data(202, batch=batch)
    cache = routed(per_head=per_head)
    feed(cache, rows, [199, 1, 1])
    output = feed(cache, rows, [1])
    count, chosen = 202, 21
    ranked = shares(cache, rows[0][:, :, 201:], count)
    if not per_head:
        ranked = np.broadcast_to(ranked.sum(axis=2, keepdims=True), ranked.shape)
    # Rows with one code tie: those above and those at the last place are compared by their share.
    least = -np.sort(-ranked, axis=-1)[..., chosen - 1 : chosen]
    kept = np.zeros((batch, KV_HEADS, 3, count), dtype=bool)
    index, doubled = cache.method_state._chosen(rows[0][:, :, 201:], SCALE, chosen, 3, count - 16)
    index = np.array(index)
    for b in range(batch):
        for h in range(KV_HEADS):
            kept[b, h, :, index[b, h]] = True
            middle = kept[b, h, 0, 3 : count - 16]
            must = (ranked[b, h] > least[b, h] * (1 + 1e-5)).any(axis=0)
            may = (ranked[b, h] >= least[b, h] * (1 - 1e-5)).any(axis=0)
            assert (middle >= must).all()
            assert (middle <= may).all()
            if not per_head:
                assert middle.sum() == chosen
    assert kept[..., :3].all()
    assert kept[..., count - 16 :].all()
    expected = masked(rows, kept.reshape(batch, HEADS, count), 201)
    np.testing.assert_allclose(np.array(output), np.array(expected), atol=2e-6)
    assert (np.diff(index, axis=2) >= 0).all()
    if doubled is not None:
        assert (np.array(doubled)[..., 1:] == (np.diff(index, axis=2) == 0)).all()


def test_the_softmax_over_codes_is_the_softmax_over_rows():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 40, (2, KV_HEADS, 300))
    queries, book = rng.standard_normal((2, KV_HEADS, 3, DIM)), rng.standard_normal((KV_HEADS, 50, DIM))
    counts = count_codes(mx.array(codes), 50)
    assert (np.array(counts).sum(axis=-1) == 300).all()
    assert (np.array(counts)[0, 0] == np.bincount(codes[0, 0], minlength=50)).all()
    found = centroid_shares(mx.array(queries.astype(np.float32)), mx.array(book.astype(np.float32)), counts, 0.4)
    table = np.einsum("bhgd,hkd->bhgk", queries, book) * 0.4
    spread = np.broadcast_to(codes[:, :, None], (2, KV_HEADS, 3, 300))
    expected = softmax(np.take_along_axis(table, spread, axis=3))
    np.testing.assert_allclose(np.take_along_axis(np.array(found), spread, axis=3), expected, rtol=1e-4)


def test_choosing_rows():
    codes = mx.array([[[0, 1, 2, 3, 1, 0]]])
    share = mx.array([[[[0.1, 0.4, 0.2, 0.3], [0.9, 0.1, 0.3, 0.2]]]])
    assert choose_rows(share, codes, 3).tolist() == [[[[1, 3, 4], [0, 2, 5]]]]
    joined, again = union_of_heads(share, codes, 3)
    assert joined.tolist() == [[[0, 1, 2, 3, 4, 5]]]
    assert not again.any()
    joined, again = union_of_heads(share, codes, 4)
    assert joined.tolist() == [[[0, 1, 2, 2, 3, 3, 4, 5]]]
    assert again.tolist() == [[[False, False, False, True, False, True, False, False]]]
    assert choose_rows(share, codes, 0).shape == (1, 1, 2, 0)


def test_a_codebook_that_holds_every_key_ranks_by_the_exact_far_logits():
    """Recall of the true far top-k is 1."""
    rows = data(200)
    cache = routed()
    feed(cache, rows, [199])
    state = cache.method_state
    plain = derotate(rows[1], ROPE, 0)
    book = plain[0][:, None, :199]
    codes = mx.broadcast_to(mx.arange(199, dtype=mx.uint32), (1, KV_HEADS, 199))
    counts = count_codes(codes[:, :, 3:183], 199)
    far = far_query_rope(derotate(rows[0][:, :, 199:], ROPE, 199), ROPE, 2048).reshape(1, KV_HEADS, 3, DIM)
    share = centroid_shares(far, book[:, 0], counts, SCALE).sum(axis=2, keepdims=True)
    found = np.array(choose_rows(share, codes[:, :, 3:183], 20))[0, :, 0]
    logits = np.einsum("hgd,hkd->hgk", np.array(far[0], dtype=np.float64), np.array(plain[0, :, 3:183])) * SCALE
    exact = softmax(logits).sum(axis=1)
    for head in range(KV_HEADS):
        assert set(found[head]) == set(np.argsort(-exact[head])[:20])
    assert state.count == 199


@pytest.mark.parametrize("options", [{"retrieval_fraction": 1.0}, {"window": 500}, {"retrieval_fraction": 0.93}])
def test_reading_everything_is_dense_attention(options):
    rows = data(230)
    found = feed(routed(**options), rows, [199, 1] + [1] * 30)
    expected = attention(*rows, SCALE, "causal")
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-6)


def test_the_prompt_is_attended_whole_and_exactly():
    rows = data(300)
    found = feed(routed(), rows, [100, 150, 49, 1])
    np.testing.assert_allclose(np.array(found), np.array(attention(*rows, SCALE, "causal")), atol=2e-6)


def test_with_no_share_the_window_and_the_sinks_are_left():
    rows = data(201)
    cache = routed(retrieval_fraction=0.0)
    feed(cache, rows, [199, 1])
    kept = np.zeros((1, HEADS, 201), dtype=bool)
    kept[..., :3] = kept[..., 185:] = True
    np.testing.assert_allclose(np.array(feed(cache, rows, [1])), np.array(masked(rows, kept, 200)), atol=2e-6)
    assert cache.account().details["tokens_retrieved"] == 19


def test_counts_follow_rows_in_and_out():
    rows = data(400)
    cache = routed()
    for change in (5, 14, 1, 1, 200, -1, -60, 3, 40, -150, -40, -8, 90):
        if change > 0:
            feed(cache, rows, [change])
        else:
            cache.trim(-change)
        state, count = cache.method_state, cache.offset
        codes = state.codes.live("keys")[:, :, min(3, count) : max(min(3, count), count - 16), 0]
        if codes.shape[2]:
            assert (np.array(state.counts) == np.array(count_codes(codes, 256))).all()
        else:
            assert state.counts is None


@pytest.mark.parametrize("cuts", [[1] * 100, [99, 1], [40, 59, 1]])
def test_codes_do_not_depend_on_the_chunks(cuts):
    rows = data(100)
    whole, chunked = routed(), routed()
    feed(whole, rows, [100])
    feed(chunked, rows, cuts)
    one, other = (c.method_state for c in (whole, chunked))
    assert (np.array(one.codes.live("keys")) == np.array(other.codes.live("keys"))).all()
    assert (np.array(one.counts) == np.array(other.counts)).all()
    assert whole.nbytes == chunked.nbytes


@pytest.mark.parametrize("count", [1, 30, 150])
def test_every_trim_is_exact(count):
    rows, other = data(400), data(400, seed=9)
    trimmed, plain = routed(), routed()
    feed(plain, rows, [200, 1])
    feed(trimmed, rows, [200, 1])
    feed(trimmed, other, [1] * count)
    assert trimmed.trim(count) == count
    assert trimmed.nbytes == plain.nbytes
    assert (np.array(feed(trimmed, rows, [1] * 5)) == np.array(feed(plain, rows, [1] * 5))).all()


def test_restored_and_copied_states_go_on_alike():
    rows = data(300)
    cache = routed()
    feed(cache, rows, [200, 1, 1])
    twins = [type(cache).from_state(cache.state), copy.deepcopy(cache)]
    outputs = [np.array(feed(one, rows, [1, 1, 4, 1])) for one in (cache, *twins)]
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] == outputs[2]).all()


def test_report():
    rows = data(301)
    cache = routed()
    feed(cache, rows, [299, 1, 1])
    count = cache.account()
    assert count.keys + count.values >= cache.plain_nbytes
    assert count.details["tokens_retrieved"] == 31 + 16 + 3
    assert count.details["tokens_seen"] == 301
    assert count.details["centroids"] == 256
    assert 0.8 < count.details["ratio"] <= 1
    assert count.details["codebook"] == "uncalibrated"
    assert count.static == count.details["codebook_bytes"] > 0
