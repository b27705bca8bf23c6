"""The CUDA kernels against attention in mlx's own operations; skipped where there is no such GPU."""

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant import attend_rows
from veloxquant_turboquant_rvq import cuda

pytestmark = pytest.mark.skipif(not cuda.available(), reason="needs a CUDA GPU with tensor cores")

CASES = [{"bits": 1}, {"bits": 2}, {"bits": 2, "value_bits": 4}, {"bits": 3, "value_bits": 8}, {"bits": 4}]


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_kernels_equal_attention_in_parts(options, dim, length):
    layer = LayerSpec(query_mode="routed", query_heads=6, kv_heads=2, head_dim=dim)
    cache = veloxquant.get_cache("turboquant_rvq", options, layer=layer)
    for count in (3000, length):
        keys, values = (mx.random.normal((2, 2, count, dim)).astype(mx.bfloat16) for _ in range(2))
        returned = cache.update_and_fetch(keys, values)
        if count != length:
            cache.attend(mx.random.normal((2, 6, count, dim)).astype(mx.bfloat16), *returned, scale=0.1)
    state, queries = cache.method_state, mx.random.normal((2, 6, length, dim)).astype(mx.bfloat16)
    fresh, rows = state.fresh, state.rows.count
    first = state.leading(rows - fresh.count)
    got = cuda.attend(state.rows.stored(), queries, fresh, 0.1, "causal", None, first)
    assert got is not None
    pairs = [(exact.keys, state._values_of(exact, end)) for exact, end in ((fresh, rows), (first, first.count))]
    expected = attend_rows(state.rows, queries, pairs[0], 0.1, "causal", first=pairs[1])
    difference = np.array(got.astype(mx.float32)) - np.array(expected.astype(mx.float32))
    assert np.abs(difference).max() < 4e-3
