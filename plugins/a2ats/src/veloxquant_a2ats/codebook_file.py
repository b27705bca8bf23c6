"""Codebook files: safetensors with the centroids of every layer, bound to the model that they were learned from."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from veloxquant import ConfigError
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant_a2ats.codebook import Codebook
from veloxquant_a2ats.codebook import compress_codebook
from veloxquant_a2ats.codebook import retrieve_codebook
from veloxquant_a2ats.config import A2ATSConfig
from veloxquant_a2ats.rotation import rope_from_options

__all__ = ["FORMAT", "Header", "LayerShape", "load_codebook", "write_codebook"]

FORMAT = 1
_KEY = "veloxquant_a2ats"


@attrs.frozen(kw_only=True)
class LayerShape:
    """What a layer of the model must be like for its codebook to fit.

    Args:
        query_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Channels of a key.
        value_dim: Channels of a value.
        rope: Its rotation.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope


@attrs.frozen(kw_only=True)
class Header:
    """What a codebook file says of itself.

    Args:
        mode: The mode that it serves.
        layer_count: Caches of the model.
        layers: Shape of each layer that has a codebook, by the index of its cache.
        sub_dim: Channels of a sub-vector.
        centroids: Centroids of a sub-vector; fewer than asked for when the data were few.
        bits: Bits of a code that were asked for.
        far_position: Distance at which queries were collected.
        beta: Weight of the queries in the metric that the centroids were learned in.
        seed: Seed of everything random.
        tokens: Tokens learned from.
        held_out: Tokens that the errors were measured on.
        errors: Mean squared errors of the logits on held-out text, by name.
    """

    mode: str
    layer_count: int
    layers: dict[int, LayerShape]
    sub_dim: int
    centroids: int
    bits: int
    far_position: int
    beta: float
    seed: int
    tokens: int
    held_out: int
    errors: dict[str, float]


def write_codebook(path: Path, header: Header, arrays: dict[int, dict[str, mx.array]]) -> None:
    """Write a codebook file, whole or not at all.

    Args:
        path: Where to; an existing file is replaced.
        header: What it says of itself.
        arrays: For each layer the arrays that ``compress_codebook`` or ``retrieve_codebook`` takes.
    """
    flat = {f"{index}.{name}": array for index, layer in arrays.items() for name, array in layer.items()}
    text = json.dumps({"format": FORMAT, **attrs.asdict(header)})
    temporary = path.with_name(f".{path.name}.part.safetensors")
    try:
        mx.save_safetensors(str(temporary), flat, {_KEY: text})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_codebook(config: A2ATSConfig, layer: LayerSpec, rope: Rope | None) -> Codebook:
    """Read the codebook of a layer and refuse one that is not for it.

    Args:
        config: Options, with ``codebook`` given.
        layer: The layer.
        rope: Its rotation, or None while it is not known.

    Returns:
        The codebook, shared by all who ask for the same layer of the same file with the same options.

    Raises:
        ConfigError: The file cannot be read, or is for another model, layer or mode.
    """
    path = Path(str(config.codebook)).expanduser()
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(
            f"a2ats: the codebook file '{path}' cannot be read ({error.strerror}); make it with "
            f"'veloxquant calibrate a2ats --mode {config.mode} --model MODEL -o {path}'"
        ) from error
    version = (str(path.resolve()), stat.st_mtime_ns, stat.st_size)
    header, _ = _read(*version)
    _check(header, config, layer, rope, path)
    heads = own_heads(header.layers[layer.index].kv_heads, layer)
    return _codebook(*version, layer.index, heads, config.beta, config.retrieval_fraction, config.use_query_aware)


@functools.lru_cache(maxsize=8)
def _read(path: str, modified: int, size: int) -> tuple[Header, dict[str, mx.array]]:
    """Header and arrays of a file; MLX reads an array from it when it is first used."""
    try:
        loaded: Any = mx.load(path, format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        record = json.loads(metadata[_KEY])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"a2ats: '{path}' is not a codebook, or is damaged; make one with 'veloxquant calibrate a2ats'"
        ) from error
    if record.get("format") != FORMAT:
        raise ConfigError(
            f"a2ats: the codebook '{path}' has format {record.get('format')}, and this veloxquant-a2ats reads "
            f"{FORMAT}; update veloxquant-a2ats or calibrate again"
        )
    return _header(record), arrays


def _header(record: dict[str, Any]) -> Header:
    del record["format"]
    layers = {int(index): _shape(values) for index, values in record.pop("layers").items()}
    return Header(layers=layers, **record)


def _shape(values: dict[str, Any]) -> LayerShape:
    rope = values["rope"]
    waves = rope["frequencies"]
    return LayerShape(**{**values, "rope": Rope(**{**rope, "frequencies": None if waves is None else tuple(waves)})})


def own_heads(kv_heads: int, layer: LayerSpec) -> tuple[int, ...] | None:
    """Which heads of a codebook a process of a sharded model needs, or None for all of them.

    Where there are more processes than KV heads, models hold each head in several.

    Args:
        kv_heads: KV heads of the codebook.
        layer: The layer.
    """
    if layer.shard_count == 1 or layer.kv_heads is None:
        return None
    together = layer.kv_heads * layer.shard_count
    first = layer.kv_heads * layer.shard_index
    return tuple(head * kv_heads // together for head in range(first, first + layer.kv_heads))


@functools.lru_cache(maxsize=512)
def _codebook(
    path: str,
    modified: int,
    size: int,
    index: int,
    heads: tuple[int, ...] | None,
    beta: float,
    fraction: float,
    aware: bool,
) -> Codebook:
    header, arrays = _read(path, modified, size)
    own = {name.partition(".")[2]: array for name, array in arrays.items() if name.partition(".")[0] == str(index)}
    if heads is not None:
        own = {name: array[mx.array(heads)] for name, array in own.items()}
    if header.mode == "retrieve":
        return retrieve_codebook(own, aware=aware)
    return compress_codebook(own, beta=beta, fraction=fraction, aware=aware)


def _check(header: Header, config: A2ATSConfig, layer: LayerSpec, rope: Rope | None, path: Path) -> None:
    again = f"make another with 'veloxquant calibrate a2ats --mode {config.mode} --model MODEL -o FILE'"
    if header.mode != config.mode:
        raise ConfigError(f"a2ats: the codebook '{path}' is for mode='{header.mode}', not '{config.mode}'; {again}")
    if layer.layer_count is not None and layer.layer_count != header.layer_count:
        raise ConfigError(
            f"a2ats: the codebook '{path}' is of a model with {header.layer_count} layers, and this one has "
            f"{layer.layer_count}; {again}"
        )
    own = header.layers.get(layer.index)
    if own is None:
        raise ConfigError(f"a2ats: the codebook '{path}' has nothing for layer {layer.index}; {again}")
    shards = layer.shard_count
    kv_heads = None if layer.kv_heads is None else layer.kv_heads * shards
    if kv_heads is not None and shards > own.kv_heads and kv_heads % own.kv_heads == 0:
        kv_heads = own.kv_heads  # each is held by several processes
    for words, has, wanted in (
        ("query heads", own.query_heads, None if layer.query_heads is None else layer.query_heads * shards),
        ("KV heads", own.kv_heads, kv_heads),
        ("channels a head", own.head_dim, layer.head_dim),
    ):
        if wanted is not None and wanted != has:
            raise ConfigError(
                f"a2ats: the codebook '{path}' is of a model with {has} {words}, and layer {layer.index} has "
                f"{wanted}; {again}"
            )
    wanted_rope = rope or layer.rope or rope_from_options(config.rope_base, config.rope_scaling, own.head_dim)
    if wanted_rope != own.rope:
        raise ConfigError(
            f"a2ats: the codebook '{path}' is of a model with another rotary embedding ({_short(own.rope)}, and layer "
            f"{layer.index} has {_short(wanted_rope)}); {again}"
        )
    asked = (config.sub_dim, config.codebook_bits)
    if config.mode == "compress" and asked != (header.sub_dim, header.bits):
        raise ConfigError(
            f"a2ats: the codebook '{path}' has sub_dim={header.sub_dim} and codebook_bits={header.bits}, and the "
            f"options say {asked[0]} and {asked[1]}; give the options of the file, or {again}"
        )


def _short(rope: Rope) -> str:
    """The rotation in a few words."""
    waves = "" if rope.frequencies is None else ", own frequencies"
    pairs = ", traditional" if rope.traditional else ""
    size = "" if rope.magnitude == 1.0 else f", magnitude {rope.magnitude}"
    return f"{rope.dims} channels, base {rope.base}, scale {rope.scale}{waves}{pairs}{size}"
