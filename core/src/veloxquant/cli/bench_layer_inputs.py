"""What ``bench speed`` and ``bench memory`` read: lengths, the shape of a layer, and a model with its text."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import typer

from veloxquant.cli.bench_inputs import numbers
from veloxquant.cli.bench_inputs import positive
from veloxquant.cli.bench_inputs import text_tokens
from veloxquant.errors import VeloxQuantError

if TYPE_CHECKING:
    from veloxquant.bench.layer_work import Shape

__all__ = ["Dtype", "HeadDim", "KVHeads", "QueryHeads", "load_with_text", "read_lengths", "read_shape"]

LONGEST = 2**24

QueryHeads = Annotated[int, typer.Option(help="Query heads of the layer.")]
KVHeads = Annotated[int, typer.Option(help="Key and value heads of the layer.")]
HeadDim = Annotated[int, typer.Option(help="Channels of a key.")]
Dtype = Annotated[str, typer.Option(help="Dtype of keys and values: float32, float16 or bfloat16.")]


def read_lengths(text: str) -> tuple[int, ...]:
    """``4096,32768`` as numbers; empty for none.

    Raises:
        VeloxQuantError: Something in it is no length.
    """
    return numbers("--lengths", text, 2, LONGEST)


def read_shape(query_heads: int, kv_heads: int, head_dim: int, dtype: str) -> Shape:
    """The shape of a layer.

    Raises:
        VeloxQuantError: It cannot be one.
    """
    from veloxquant.bench.layer_work import DTYPES
    from veloxquant.bench.layer_work import Shape

    positive("--query-heads", query_heads)
    positive("--kv-heads", kv_heads)
    positive("--head-dim", head_dim, 2)
    if query_heads % kv_heads:
        raise VeloxQuantError(f"--query-heads must be a multiple of --kv-heads, and {query_heads} is not of {kv_heads}")
    if dtype not in DTYPES:
        raise VeloxQuantError(f"--dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, not '{dtype}'")
    return Shape(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


def load_with_text(name: str, text: str | None, needed: int, otherwise: str) -> tuple[Any, list[int]]:
    """Load a model, and the tokens that it is to read.

    Args:
        name: The model, as the user named it.
        text: The text, or None for the sample text.
        needed: How many tokens of it.
        otherwise: What the user may give instead of a longer text.

    Raises:
        VeloxQuantError: The model cannot be loaded, or the text is too short.
    """
    from veloxquant.cli.display import loading
    from veloxquant.cli.model_files import load_model

    with loading(name):
        model, tokenizer = load_model(name)
    tokens = text_tokens(tokenizer, text, 0)
    if len(tokens) < needed:
        raise VeloxQuantError(
            f"the text has {len(tokens):,} tokens and {needed:,} are needed; give a longer one, or {otherwise}"
        )
    return model, tokens[:needed]
