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

__all__ = ["Passkey", "found", "passkeys"]

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
    return [_passkey(tokenizer, text, length, key, place, count) for place, key in enumerate(keys)]


def _passkey(tokenizer: Any, text: Sequence[int], length: int, key: str, place: int, count: int) -> Passkey:
    hidden = tokenizer.encode(_HIDDEN.format(key=key), add_special_tokens=False)
    question = tokenizer.encode(_QUESTION, add_special_tokens=False)
    room = length - len(hidden) - len(question)
    start = place * (length // 2)
    hay = list(text[start : start + room])
    if room <= 0 or len(hay) < room:
        raise VeloxQuantError(f"{count} prompts of {length} tokens need more text than the {len(text)} tokens given")
    depth = 0.1 + 0.8 * place / max(1, count - 1)
    cut = int(depth * room)
    return Passkey(key, depth, (*hay[:cut], *hidden, *hay[cut:], *question))


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
    answer: list[int] = []
    for _ in range(8):
        answer.append(cast(int, mx.argmax(logits).item()))
        logits = model(mx.array([answer[-1:]]), cache=caches)[0, -1]
    return str(tokenizer.decode(answer)).strip().startswith(passkey.key)
