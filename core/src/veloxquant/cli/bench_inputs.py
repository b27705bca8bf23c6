"""What all benchmarks read from the command line: numbers, the text, the model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated
from typing import Any

import typer

from veloxquant.cli.model_files import SAMPLE
from veloxquant.errors import VeloxQuantError

__all__ = [
    "ArmWords",
    "MethodNames",
    "ModelName",
    "Output",
    "Peer",
    "Settings",
    "numbers",
    "positive",
    "read_text",
    "rows_dtype",
    "split_names",
    "text_tokens",
    "tokens_hash",
]

ModelName = Annotated[str, typer.Option("--model", help="Model folder, org/name on the hub, or 'sample'.")]
MethodNames = Annotated[
    str | None, typer.Option("--methods", metavar="A,B", help="Methods to measure; by default all installed ones.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="METHOD.KEY=VALUE", help="An option of a method; repeatable.")
]
ArmWords = Annotated[
    list[str] | None,
    typer.Option("--arm", metavar="NAME=METHOD:KEY=VALUE,...", help="A further arm with its options; repeatable."),
]
Peer = Annotated[
    str | None, typer.Option("--peer", metavar="NAME", help="Also measure another library, if it is installed.")
]
Output = Annotated[
    str | None, typer.Option("--output", metavar="FILE", help="Add the run to this file, line by line (JSON Lines).")
]


def split_names(text: str | None) -> list[str] | None:
    """``a,b`` as a list; None stays None.

    Raises:
        VeloxQuantError: It names nothing.
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise VeloxQuantError("--methods names no method; write --methods a,b or leave it out")
    return names


def positive(option: str, value: int, least: int = 1) -> int:
    """Refuse a number that is too small."""
    if value < least:
        raise VeloxQuantError(f"{option} must be at least {least}, not {value}")
    return value


def numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """``1,2`` as numbers.

    Args:
        option: The option, for messages.
        text: What was given; empty for none.
        least: The smallest number allowed.
        most: The largest.

    Raises:
        VeloxQuantError: Something in it is no such number.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if not part.isdecimal() or not least <= int(part) <= most:
            raise VeloxQuantError(f"{option} takes whole numbers from {least} to {most}, as 1,2,3, not '{part}'")
        found.append(int(part))
    return tuple(dict.fromkeys(found))


def read_text(file: str | None) -> str | None:
    """The text of a file, or None for the sample text.

    Raises:
        VeloxQuantError: It cannot be read.
    """
    from veloxquant.cli.prompts import read_prompt

    return read_prompt(None, file, None)


def text_tokens(tokenizer: Any, text: str | None, start: int) -> list[int]:
    """Tokens of a text, or of the sample text, from one on.

    Raises:
        VeloxQuantError: It has no token there.
    """
    from veloxquant.testing.sample import sample_text

    whole = sample_text() if text is None else text
    tokens = [int(token) for token in tokenizer.encode(whole, add_special_tokens=False, verbose=False)]
    if start >= len(tokens):
        raise VeloxQuantError(f"--start {start:,} is beyond the text, which has {len(tokens):,} tokens")
    return tokens[start:]


def tokens_hash(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids, which says whether two runs are of the same text and tokenizer."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()


def rows_dtype(model: Any) -> str:
    """Dtype of the keys that a model makes; found by running one token."""
    import mlx.core as mx

    from veloxquant.bench.companions import full_layers
    from veloxquant.build import native_caches

    caches = native_caches(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    layers = full_layers(caches)
    return str(caches[layers[0]].keys.dtype).rpartition(".")[2] if layers else "unknown"


DEFAULT_MODEL = SAMPLE
