"""Passkey retrieval: a five-digit number hidden in text and asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from typing import cast

import attrs
import mlx.core as mx

from veloxquant.bench.quality import prefill
from veloxquant.errors import VeloxQuantError

__all__ = ["Passkey", "answer", "found", "passkey_at", "passkeys"]

_HIDDEN = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
_QUESTION = "\nWhat is the pass key? The pass key is"


@attrs.frozen
class Passkey:
    """One prompt that hides a number.

    Args:
        key: The five digits.
        depth: Where it is hidden, as a share of the text.
        prompt: Tokens of the prompt.
    """

    key: str
    depth: float
    prompt: tuple[int, ...]


def passkeys(tokenizer: Any, text: Sequence[int], *, length: int, count: int = 10, seed: int = 0) -> list[Passkey]:
    """Make prompts of one length, the numbers hidden at depths from 10 to 90 percent.

    Args:
        tokenizer: The model's tokenizer.
        text: Tokens to hide the numbers in, at least ``count * length // 2``; each prompt takes another part.
        length: Tokens of a prompt.
        count: Prompts to make.
        seed: Seed of the numbers.

    Returns:
        The prompts.

    Raises:
        VeloxQuantError: The text is too short.
    """
    digits = random.Random(seed)
    keys = [f"{digits.randrange(10**5):05d}" for _ in range(count)]
    parts = [text[place * (length // 2) :] for place in range(count)]
    depths = [0.1 + 0.8 * place / max(1, count - 1) for place in range(count)]
    try:
        return [
            passkey_at(tokenizer, part, length=length, depth=depth, key=key)
            for part, depth, key in zip(parts, depths, keys, strict=True)
        ]
    except VeloxQuantError:
        raise VeloxQuantError(
            f"{count} prompts of {length} tokens need more text than the {len(text)} tokens given"
        ) from None


def passkey_at(tokenizer: Any, text: Sequence[int], *, length: int, depth: float, key: str) -> Passkey:
    """Hide a number in text.

    Args:
        tokenizer: The model's tokenizer.
        text: Tokens to hide it in; the first ones are taken.
        length: Tokens of the whole prompt.
        depth: Where to hide it, as a share of the text.
        key: The number.

    Raises:
        VeloxQuantError: The text is too short, or the length leaves no room for the text.
    """
    hidden = tokenizer.encode(_HIDDEN.format(key=key), add_special_tokens=False)
    question = tokenizer.encode(_QUESTION, add_special_tokens=False)
    room = length - len(hidden) - len(question)
    hay = list(text[: max(0, room)])
    if room <= 0:
        raise VeloxQuantError(
            f"a passkey prompt of {length} tokens has no room for text; use at least {length - room + 1}"
        )
    if len(hay) < room:
        raise VeloxQuantError(f"a passkey prompt of {length} tokens needs more text than the {len(text)} tokens given")
    cut = int(depth * room)
    return Passkey(key, depth, (*hay[:cut], *hidden, *hay[cut:], *question))


def answer(model: Any, tokenizer: Any, caches: list[Any], logits: mx.array, *, tokens: int = 8) -> str:
    """Decode greedily.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        caches: Caches that have seen the prompt.
        logits: Logits for the token after it ``[vocabulary]``.
        tokens: Tokens to decode.
    """
    said = [cast(int, mx.argmax(logits).item())]
    while len(said) < tokens:
        logits = model(mx.array([said[-1:]]), cache=caches)[0, -1]
        said.append(cast(int, mx.argmax(logits).item()))
    return str(tokenizer.decode(said)).strip()


def found(model: Any, tokenizer: Any, caches: list[Any], passkey: Passkey, *, step: int = 2048) -> bool:
    """Whether greedy decoding after the prompt begins with the hidden number.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        caches: Empty caches.
        passkey: The prompt.
        step: Prompt tokens per chunk.
    """
    logits = prefill(model, caches, passkey.prompt, step=step)
    return answer(model, tokenizer, caches, logits).startswith(passkey.key)
