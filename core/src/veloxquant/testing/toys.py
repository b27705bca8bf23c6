"""Tiny random models of mlx-lm's own classes, one for each way in which a model can use its cache.

All are float32, the same for the same seed, and leave MLX's global random state as it was. Their weights mean nothing:
use them where shapes, positions and hand-overs are tested.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

__all__ = [
    "tiny_gemma3",
    "tiny_hybrid",
    "tiny_llama",
    "tiny_mla",
    "tiny_shared_kv",
    "tiny_unroutable",
]


def tiny_llama(
    kv_heads: int = 2, query_heads: int = 4, layers: int = 2, head_dim: int = 16, vocab: int = 64, seed: int = 0
) -> Module:
    """A llama with full attention in every layer; its caches are KVCache.

    Args:
        kv_heads (int): Heads of the cached keys and values; must divide ``query_heads``.
        query_heads (int): Heads of the queries.
        layers (int): The number of layers.
        head_dim (int): The width of a head.
        vocab (int): The number of token ids.
        seed (int): Seed of the weights.

    Returns:
        Module: The model.
    """
    return _build("llama", seed, **_shape(kv_heads, query_heads, layers, head_dim, vocab))


def tiny_gemma3(
    kv_heads: int = 1, query_heads: int = 2, head_dim: int = 16, vocab: int = 64, window: int = 8, seed: int = 0
) -> Module:
    """A gemma3 with five sliding layers and a full one; its caches are five RotatingKVCache and one KVCache."""
    return _build(
        "gemma3_text",
        seed,
        **_shape(kv_heads, query_heads, 6, head_dim, vocab),
        query_pre_attn_scalar=head_dim,
        sliding_window=window,
        sliding_window_pattern=6,
    )


def tiny_mla(layers: int = 2, vocab: int = 64, seed: int = 0) -> Module:
    """A deepseek_v3 (multi-head latent attention): each KVCache holds one latent head of 32 and a rotary one of 8."""
    return _build(
        "deepseek_v3",
        seed,
        **_shape(2, 2, layers, 16, vocab),
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )


def tiny_shared_kv(window: int = 8, vocab: int = 64, seed: int = 0) -> Module:
    """A gemma4 whose layers 2 and 3 read the keys and values of layers 0 and 1.

    It has four layers and two caches, a RotatingKVCache and a KVCache.
    """
    return _build(
        "gemma4_text",
        seed,
        **_shape(1, 2, 4, 16, vocab),
        global_head_dim=16,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=vocab,
        hidden_size_per_layer_input=8,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def tiny_unroutable(kv_heads: int = 2, query_heads: int = 4, layers: int = 2, vocab: int = 64, seed: int = 0) -> Module:
    """A gemma2, which computes its attention itself instead of calling mlx-lm's function; its caches are KVCache."""
    return _build(
        "gemma2",
        seed,
        **_shape(kv_heads, query_heads, layers, 16, vocab),
        query_pre_attn_scalar=16,
    )


def tiny_hybrid(kv_heads: int = 2, query_heads: int = 4, vocab: int = 64, seed: int = 0) -> Module:
    """An lfm2 of convolution and full attention layers in turn; its caches are ArraysCache and KVCache, twice."""
    shape = _shape(kv_heads, query_heads, 4, 16, vocab)
    return _build(
        "lfm2",
        seed,
        **shape,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=shape["hidden_size"],
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"] * 2,
    )


def _shape(kv_heads: int, query_heads: int, layers: int, head_dim: int, vocab: int) -> dict[str, Any]:
    hidden_size = query_heads * head_dim
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }


def _build(model_type: str, seed: int, **config: Any) -> Module:
    # By name, so that a class which mlx-lm moves takes only its own toy with it.
    module = import_module(f"mlx_lm.models.{model_type}")
    with _seeded(seed):
        model = module.Model(module.ModelArgs.from_dict({"model_type": model_type, **config}))
        mx.eval(model.parameters())
    return cast("Module", model.eval())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # The state can be read but not assigned; it is a 64-bit seed in two halves.
    state: Any = mx.random.state
    high, low = state[0].tolist()
    mx.random.seed(seed)
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)
