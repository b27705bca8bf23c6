"""The work of one layer on rows that come from no model: a prompt put into a cache, and decode steps after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from veloxquant.bench.quality import prefill_step
from veloxquant.timing import arrays_within
from veloxquant.types import LayerSpec
from veloxquant.types import Rope

__all__ = ["DTYPES", "Rows", "Shape", "blocks", "read_block", "settle", "store"]

DTYPES = ("float32", "float16", "bfloat16")

Rows = tuple[mx.array, mx.array, mx.array]
"""Queries ``[1, Hq, S, D]``, keys and values ``[1, Hkv, S, D]``."""


@attrs.frozen(kw_only=True)
class Shape:
    """The shape of a layer.

    Args:
        query_heads: Number of query heads, a multiple of ``kv_heads``.
        kv_heads: Number of key and value heads.
        head_dim: Channels of keys and values.
        dtype: Name of their dtype.
    """

    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = attrs.field(default="float32", validator=attrs.validators.in_(DTYPES))

    def __str__(self) -> str:
        return f"{self.query_heads} query heads, {self.kv_heads} KV heads, head dim {self.head_dim}"

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return float(self.head_dim**-0.5)

    def layer(self) -> LayerSpec:
        """The layer as methods are told of it, with the rotary embedding that most models have."""
        return LayerSpec(
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            layer_count=1,
            rope=Rope(dims=self.head_dim // 2 * 2),
        )

    def rows(self, count: int, seed: int) -> Rows:
        """Random rows of so many tokens, computed; the same for the same seed."""
        heads = (self.query_heads, self.kv_heads, self.kv_heads)
        dtype = getattr(mx, self.dtype)
        queries, keys, values = (
            mx.random.normal((1, number, count, self.head_dim), dtype=dtype, key=part)
            for number, part in zip(heads, mx.random.split(mx.random.key(seed), 3), strict=True)
        )
        mx.eval(queries, keys, values)
        return queries, keys, values


def store(cache: Any, rows: Rows, scale: float) -> mx.array:
    """Update a cache and attend, as a model does.

    Args:
        cache: A cache of any kind.
        rows: New rows.
        scale: Factor on the logits.

    Returns:
        ``[1, Hq, S, D]``, not computed yet.
    """
    queries, keys, values = rows
    mask: Any = "causal" if keys.shape[2] > 1 else None
    all_keys, all_values = cache.update_and_fetch(keys, values)
    attend = getattr(cache, "attend", None)
    output: mx.array
    if attend is not None:
        output = attend(queries, all_keys, all_values, scale=scale, mask=mask)
    else:
        output = scaled_dot_product_attention(queries, all_keys, all_values, cache=cache, scale=scale, mask=mask)
    return output


def settle(cache: Any) -> None:
    """Compute all that a cache holds."""
    mx.eval(arrays_within(cache))


def read_block(cache: Any, rows: Rows, scale: float) -> None:
    """Put rows of a prompt into a cache, which sees their queries; the attention of a block is not computed."""
    output = store(cache, rows, scale)
    if rows[1].shape[2] == 1:
        mx.eval(output)
    del output  # what is still referred to cannot be written in place
    settle(cache)


def blocks(shape: Shape, count: int, step: int) -> Iterator[Rows]:
    """A prompt as mlx-lm hands it over: all but the last token in blocks, the last one alone.

    Args:
        shape: The shape of the layer.
        count: Tokens of the prompt, at least two.
        step: Tokens of a block.
    """
    step = prefill_step(count - 1, step)
    for start in range(0, count - 1, step):
        yield shape.rows(min(step, count - 1 - start), start)
    yield shape.rows(1, count)
