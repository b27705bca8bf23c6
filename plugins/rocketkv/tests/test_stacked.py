"""RocketKV over the packed rows of a codec."""

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant.testing import MethodTests
from veloxquant_rocketkv import RocketKVConfig
from veloxquant_rocketkv import select_indices

pytest.importorskip("veloxquant_turboquant_rvq")

PACKED = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}}
HEADS, KV_HEADS, DIM = 4, 2, 64


def routed(**options):
    layer = LayerSpec(query_mode="routed", query_heads=HEADS)
    return veloxquant.get_cache("rocketkv", {**PACKED, **options}, layer=layer)


def feed(cache, rows, cuts):
    outputs = []
    for cut in cuts:
        start = cache.offset
        queries, keys, values = (array[:, :, start : start + cut] for array in rows)
        mask = cache.make_mask(cut)
        result = cache.update_and_fetch(keys, values)
        outputs.append(cache.attend(queries, *result, scale=DIM**-0.5, mask=mask))
        mx.eval(outputs[-1])
    return np.array(mx.concatenate(outputs, axis=2))


def data(tokens, seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    return [
        mx.random.normal((1, h, tokens, DIM), key=key) for h, key in zip((HEADS, KV_HEADS, KV_HEADS), keys, strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"topk": 40, "ranking": "rows"},
        {"topk": 40},
        {"topk": 40, "summary_bits": 4, "page_size": 4},
        {"topk": 10**6},
        {"topk": 41, "page_size": 3, "multi_turn": True},
    ],
)
@pytest.mark.parametrize("stage1", [True, False])
def test_attention_is_over_the_stored_form_with_sinks_and_own_row_as_they_came(options, stage1):
    if not stage1 and options.get("multi_turn"):
        pytest.skip("multi_turn is stage 1 at every turn")
    rows = data(310)
    cache = routed(stage1=stage1, **options)
    feed(cache, rows, [299, 1, 1, 1])
    output = feed(cache, rows, [1])[0]
    state = cache.method_state
    stored = [np.array(array, np.float64) for array in state.rows.store.keys_values()]
    exact = [np.array(array, np.float64) for array in rows[1:]]
    for head in range(HEADS):
        group = rows[0][0, head // 2 * 2 : head // 2 * 2 + 2, 302]
        index = np.array(select_indices(state, group, 0, head // 2, keep_recent=1))
        assert set(range(4)) <= set(index.tolist())
        keys, values = (array[0, head // 2, index] for array in stored)
        for array, came in ((keys, exact[0]), (values, exact[1])):
            array[:4], array[-1] = came[0, head // 2, :4], came[0, head // 2, 302]
        logits = keys @ np.array(rows[0], np.float64)[0, head, 302] * DIM**-0.5
        weights = np.exp(logits - logits.max())
        np.testing.assert_allclose(output[head, 0], weights @ values / weights.sum(), atol=2e-4)


def test_what_is_held_is_itemised():
    cache = routed(stage1=False, topk=64)
    feed(cache, data(512), [511, 1])
    details = cache.account().details
    assert details["exact_bytes"] == 4 * KV_HEADS * 2 * DIM * 4
    assert cache.nbytes == details["stage1_bytes"] + details["stage2_aux_bytes"] + details["exact_bytes"]


LOSSY = {"prompt_attended_whole": "a later block of a prompt reads the earlier ones as the codec holds them"}


class TestPackedRows(MethodTests):
    """Rows ranked on their packed keys."""

    method = "rocketkv"
    config = RocketKVConfig(ranking="rows", topk=30, **PACKED)
    expected_failures = LOSSY


class TestPackedRowsCompactSummary(MethodTests):
    """Packed rows under a summary in 4 bits."""

    method = "rocketkv"
    config = RocketKVConfig(summary_bits=4, topk=30, **PACKED)
    expected_failures = LOSSY
