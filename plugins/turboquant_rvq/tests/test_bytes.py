"""What is held after a long prompt, in rows of the sample model's shape and fp16."""

import mlx.core as mx
import pytest

import veloxquant
from veloxquant import LayerSpec

KV_HEADS, DIM = 3, 64


def used(**options):
    layer = LayerSpec(query_mode="routed", query_heads=9, kv_heads=KV_HEADS, head_dim=DIM)
    cache = veloxquant.get_cache("turboquant_rvq", options, layer=layer)
    for count in [2048, 1951, 1] + [1] * 100:
        keys = mx.random.normal((1, KV_HEADS, count, DIM)).astype(mx.float16)
        returned = cache.update_and_fetch(keys, keys)
        cache.attend(mx.random.normal((1, 9, count, DIM)).astype(mx.float16), *returned, scale=0.125)
        del returned
        mx.eval(cache.state)
    return cache


@pytest.mark.parametrize(("options", "most"), [({}, 0.20), ({"recent": 0}, 0.15)], ids=str)
def test_keys_of_two_bits(options, most):
    cache = used(**options)
    assert cache.offset == 4100
    assert cache.account().keys <= most * cache.plain_nbytes / 2


@pytest.mark.parametrize(("options", "most"), [({}, 0.32), ({"recent": 0}, 0.28)], ids=str)
def test_keys_and_values_of_four_bits(options, most):
    cache = used(bits=2, value_bits=4, **options)
    assert cache.nbytes <= most * cache.plain_nbytes
