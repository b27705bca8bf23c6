"""Methods that choose rows over the stores of methods that pack them."""

from typing import Any
from typing import ClassVar

import mlx.core as mx
import pytest

import veloxquant
from veloxquant import LayerSpec
from veloxquant.testing import MethodTests

PACKED: dict[str, Any] = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}}


class TestSnapKVOverPackedRows(MethodTests):
    """SnapKV that packs what it keeps."""

    method = "snapkv"
    config: ClassVar = {"budget": 48, "window": 16, **PACKED}
    expected_failures: ClassVar = {
        "prompt_attended_whole": "later chunks of a prompt attend to earlier ones as they are packed"
    }


def test_kept_rows_are_packed():
    keys, values = mx.random.normal((1, 2, 1000, 64)), mx.random.normal((1, 2, 1000, 64))
    sizes = {}
    for name, options in {"plain": {}, "packed": PACKED}.items():
        layer = LayerSpec(query_mode="routed", query_heads=4, kv_heads=2, head_dim=64)
        cache = veloxquant.get_cache("snapkv", {"budget": 500, **options}, layer=layer)
        for start, end in ((0, 999), (999, 1000)):
            returned = cache.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
            cache.attend(mx.random.normal((1, 4, end - start, 64)), *returned, scale=0.125)
        assert cache.rows == 500
        count = cache.account()
        sizes[name] = count.keys + count.values
    # 34 bytes a packed vector of 64, of 256 in fp32, and spare rows.
    assert sizes["packed"] <= 1.1 * sizes["plain"] * 34 / 256


def test_a_method_without_a_store_is_refused():
    with pytest.raises(veloxquant.ConfigError, match="snapkv offers no row store"):
        veloxquant.get_cache("snapkv", {"storage": "snapkv"})
