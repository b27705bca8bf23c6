"""Everything that looks inside a model: which layers can be compressed, and what is known of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import attrs
from mlx.nn.layers import distributed
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import rope_utils
from mlx_lm.models.cache import KVCache

from veloxquant.attention import parts
from veloxquant.attention import routable
from veloxquant.errors import ConfigError
from veloxquant.errors import UnsupportedModelError
from veloxquant.types import LayerSpec
from veloxquant.types import Rope

__all__ = ["describe_rope", "inspect", "refuse_without_layers"]

# Names that mlx-lm's models use for one thing.
_KV_HEADS = ("n_kv_heads", "num_key_value_heads", "num_kv_heads", "n_kv_head", "kv_heads")
_QUERY_HEADS = ("n_heads", "num_attention_heads", "num_heads", "n_head", "heads")
_SCALE = ("scale", "softmax_scale", "attn_scale")
_SHARDED = (
    distributed.AllToShardedLinear,
    distributed.QuantizedAllToShardedLinear,
    distributed.ShardedToAllLinear,
    distributed.QuantizedShardedToAllLinear,
)
_KV_SHARING = ("num_kv_shared_layers", "num_kv_reuse_layers")


def inspect(model: Any, native: list[Any], *, layers: Collection[int] | None, routed: bool) -> list[LayerSpec]:
    """Describe the layers of a model whose cache can be replaced.

    Args:
        model: An mlx-lm model.
        native: The caches that it makes by itself.
        layers: Indices of the caches to replace; by default every plain one.
        routed: Whether true queries will be routed.

    Returns:
        A spec for each cache that is to be replaced.

    Raises:
        UnsupportedModelError: MLA, shared KV, no full-attention layer, or attention that cannot be routed.
        ConfigError: ``layers`` names a layer that is absent or cannot be compressed.
    """
    name = type(model).__module__.rpartition(".")[2]
    _refuse_mla(model, name)
    _refuse_shared_kv(model, name)
    plain = [index for index, cache in enumerate(native) if type(cache) is KVCache]
    chosen = plain if layers is None else _chosen(layers, plain, native)
    if layers is not None and not chosen:
        raise ConfigError(f"layers names no layer; layers that can be compressed: {_ranges(plain)}")
    if not chosen:
        raise UnsupportedModelError(f"{name} has no layer with plain full attention, so there is nothing to compress")
    # Hybrid models may have fewer caches than layers; then which layer a cache serves is not known.
    blocks = list(model.layers) if len(native) == len(model.layers) else [None] * len(native)
    for index in chosen:
        _refuse_cut_heads(name, blocks[index])
    if routed:
        _refuse_unroutable(model, name, blocks, chosen)
    mixed = len(chosen) < len(plain)
    return [attrs.evolve(_spec(index, blocks[index], routed, mixed), layer_count=len(native)) for index in chosen]


def refuse_without_layers(model: Any) -> None:
    """Refuse what is no mlx-lm model."""
    if not hasattr(model, "layers"):
        name = type(model).__module__.rpartition(".")[2]
        raise UnsupportedModelError(f"{name} has no layers; pass a model that mlx_lm.load returned")


def describe_rope(module: Any) -> Rope | None:
    """Describe a rotary embedding, or return None for one whose rotation depends on more than the position.

    Args:
        module: The layer's ``rope`` module.
    """
    if type(module) is RoPE:
        return Rope(dims=module.dims, traditional=module.traditional, base=module.base, scale=module.scale)
    if isinstance(module, rope_utils.Llama3RoPE | rope_utils.ProportionalRoPE):
        return _with_frequencies(module, module.dims, module.traditional, 1.0)
    if isinstance(module, rope_utils.YarnRoPE):
        return _with_frequencies(module, module.dims, module.traditional, module.mscale)
    if isinstance(module, rope_utils.SuScaledRoPE):
        return _with_frequencies(module, module.dim, False, module._scale)
    return None


def _with_frequencies(module: Any, dims: int, traditional: bool, magnitude: float) -> Rope:
    return Rope(
        dims=dims,
        traditional=traditional,
        base=None,
        frequencies=tuple(module._freqs.tolist()),
        magnitude=float(magnitude),
    )


def _configs(model: Any) -> list[Any]:
    """The argument records of a model and of the language model inside it."""
    owners = [model, getattr(model, "language_model", None), getattr(model, "model", None)]
    found = [getattr(owner, name, None) for owner in owners for name in ("args", "config", "text_config")]
    return [record for record in found if record is not None]


def _refuse_mla(model: Any, name: str) -> None:
    configs = any(getattr(record, "kv_lora_rank", None) for record in _configs(model))
    latent = any(hasattr(part, "kv_lora_rank") for layer in model.layers for part in parts(layer))
    if configs or latent:
        raise UnsupportedModelError(
            f"{name} uses multi-head latent attention (kv_lora_rank), whose cache is compressed already and holds no "
            "keys and values per head; use mlx-lm's own cache"
        )


def _refuse_shared_kv(model: Any, name: str) -> None:
    configs = _configs(model)
    if any(getattr(record, field, 0) for record in configs for field in _KV_SHARING):
        raise UnsupportedModelError(
            f"layers of {name} read the keys and values of other layers, which a compressed cache does not serve; "
            "use mlx-lm's own cache"
        )


def _chosen(layers: Any, plain: list[int], native: list[Any]) -> list[int]:
    if isinstance(layers, str) or not isinstance(layers, Collection):
        raise ConfigError(f"layers takes a list of layer numbers, not {layers!r}; layers that can be: {_ranges(plain)}")
    for index in layers:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ConfigError(f"layers takes whole numbers, not {index!r}; layers that can be: {_ranges(plain)}")
        if index not in plain:
            kind = f"is a {type(native[index]).__name__}" if 0 <= index < len(native) else "does not exist"
            raise ConfigError(
                f"layer {index} cannot be compressed: its cache {kind}; layers that can be: {_ranges(plain)}"
            )
    return sorted(set(layers))


def _ranges(indices: list[int]) -> str:
    """Write 0, 1, 2, 5 as ``0-2, 5``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def _refuse_unroutable(model: Any, name: str, blocks: list[Any], chosen: list[int]) -> None:
    checked = [blocks[index] for index in chosen if blocks[index] is not None] or list(model.layers)
    all_known = all(blocks[index] is not None for index in chosen)
    served = [routable(block) for block in checked]
    if not (all(served) if all_known else any(served)):
        raise UnsupportedModelError(
            f"{name} does not call mlx-lm's scaled_dot_product_attention in every layer, so its true queries cannot be "
            "routed to the caches; pass true_queries=False for the proxy mode, if the method has one"
        )


def _refuse_cut_heads(name: str, block: Any) -> None:
    """Refuse a model that was sharded over processes among which its heads cannot be divided.

    mlx-lm rounds the number of heads down and cuts through one, which shows only as a wrong shape or not at all.
    """
    attention = None if block is None else _attention_module(block)
    weight = getattr(getattr(attention, "k_proj", None), "weight", None)
    heads, dim = _first_int(attention, _KV_HEADS), _first_int(attention, ("head_dim",))
    if _group(attention) is None or weight is None or heads is None or dim is None:
        return
    if weight.shape[0] != heads * dim:
        count = _group(attention).size()
        raise UnsupportedModelError(
            f"{name} was sharded over {count} processes, among which its KV heads cannot be divided; start a number of "
            "processes that divides num_key_value_heads of its config.json"
        )


def _group(attention: Any) -> Any:
    """The processes over which a layer's attention is sharded, or None when it is whole."""
    if attention is None:
        return None
    return next((part.group for part in parts(attention) if isinstance(part, _SHARDED)), None)


def _spec(index: int, block: Any, routed: bool, mixed: bool) -> LayerSpec:
    attention = None if block is None else _attention_module(block)
    group = _group(attention)
    return LayerSpec(
        index=index,
        query_mode="routed" if routed else "proxy",
        query_heads=_first_int(attention, _QUERY_HEADS),
        kv_heads=_first_int(attention, _KV_HEADS),
        head_dim=_first_int(attention, ("head_dim",)),
        scale=_first_float(attention, _SCALE),
        mixed=mixed,
        rope=describe_rope(getattr(attention, "rope", None)),
        shard_index=0 if group is None else group.rank(),
        shard_count=1 if group is None else group.size(),
    )


def _attention_module(block: Any) -> Any:
    """The part of a layer that holds the heads: the first with a head count and a rotary embedding or projection."""
    for part in parts(block):
        if _first_int(part, _QUERY_HEADS) is not None and (hasattr(part, "rope") or hasattr(part, "o_proj")):
            return part
    return None


def _first_int(owner: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(owner, name, None), int)), None)


def _first_float(owner: Any, names: tuple[str, ...]) -> float | None:
    return next((float(value) for name in names if isinstance(value := getattr(owner, name, None), int | float)), None)
