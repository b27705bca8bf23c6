"""Which rows are still held, told by their values."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache import LayerCache
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import blocks
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import step
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import sinks
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject


def held_tokens(cache: LayerCache, rows: Rows) -> np.ndarray[Any, Any]:
    """The token that each held row belongs to: the one whose values are nearest.

    Args:
        cache: A cache; it is not changed.
        rows: Everything that it was fed.

    Returns:
        ``[B, Hkv, rows]``; lossy stores are told apart as long as they are nearer to their own token than to others.
    """
    return _nearest(step(copy.deepcopy(cache), rows.part(0, 1)).values[:, :, :-1], rows.values)


def _nearest(found: mx.array, fed: mx.array) -> np.ndarray[Any, Any]:
    found, fed = found.astype(mx.float32), fed.astype(mx.float32)
    # |a - b|^2 without |a|^2, which does not change which b is nearest.
    distance = (fed * fed).sum(axis=3)[:, :, None, :] - 2 * (found @ fed.swapaxes(2, 3))
    return numbers(mx.argmin(distance, axis=3)).astype(np.int64)


def check_eviction_declared(subject: Subject) -> None:
    """A method drops rows if, and only if, it says ``evicts=True``."""
    cache, _ = subject.used(2)
    if subject.method.info.evicts:
        require(
            cache.rows < cache.offset,
            f"all of {cache.offset} tokens are still held, so nothing about eviction is examined; give the rules a "
            "smaller budget or a longer prompt (tokens=)",
        )
    else:
        require(
            cache.rows == cache.offset,
            f"{cache.rows} rows are held of {cache.offset} tokens by a method that does not say evicts=True",
        )


def check_held_rows_in_order(subject: Subject) -> None:
    """Held rows are rows that came in, each once, in the order of their tokens, in every head."""
    steps = 6
    rows = subject.rows(subject.tokens + steps)
    for size in (subject.tokens, subject.window + 3):
        cache = subject.cache()
        feed(cache, rows, [*blocks(subject.tokens, size), *[1] * steps])
        found = held_tokens(cache, rows)
        require(
            bool((np.diff(found, axis=2) > 0).all()),
            f"after a prompt in blocks of {size}, the held rows belong to tokens {_shown(found)} in some head: not "
            "ascending, so rows are doubled, moved, padded or mixed up between heads",
        )


def check_keys_fit_values(subject: Subject) -> None:
    """The key and the value of a held row are those of one token."""
    cache, rows = subject.used(2)
    got = step(copy.deepcopy(cache), rows.part(0, 1))
    by_keys, by_values = _nearest(got.keys[:, :, :-1], rows.keys), _nearest(got.values[:, :, :-1], rows.values)
    wrong = int((by_keys != by_values).sum())
    require(wrong == 0, f"{wrong} of {by_keys.size} held rows have the key of one token and the value of another")


def check_newest_row_held(subject: Subject) -> None:
    """A decoded row is still held when the next one comes, right before it."""
    steps = 20
    rows, cache = subject.rows(subject.tokens + steps), subject.cache()
    feed(cache, rows.part(0, subject.tokens), subject.prompt)
    for token in range(subject.tokens, subject.tokens + steps):
        feed(cache, rows.part(token, token + 1))
        newest = held_tokens(cache, rows)[:, :, -1]
        require(
            bool((newest == token).all()),
            f"the row of token {token} is not the last one held after its step (that is token {int(newest.min())})",
        )


def check_block_rows_held(subject: Subject) -> None:
    """The rows of a short block after the prompt are all held when the next token comes."""
    size = max(1, min(4, subject.window - 1))
    cache, rows = subject.used()
    block = subject.rows(size, seed=1)
    feed(cache, block)
    newest = held_tokens(cache, rows.then(block))[:, :, -size:]
    expected = np.arange(subject.tokens, subject.tokens + size)
    require(
        bool((newest == expected).all()),
        f"after a block of {size} the last rows held are those of tokens {_shown(newest)}, not all of the block",
    )


@when(sinks)
def check_sinks_held(subject: Subject) -> None:
    """The first ``sinks`` tokens are held in every head, after short and long prompts, in however many chunks."""
    count = subject.config.sinks
    for tokens in (1, 2, 3, 5, 17, subject.tokens):
        for size in sorted({tokens, min(tokens, subject.window + 3)}):
            rows, cache = subject.rows(tokens), subject.cache()
            feed(cache, rows, blocks(tokens, size))
            first = held_tokens(cache, rows)[:, :, : min(count, tokens)]
            require(
                first.shape[2] == min(count, tokens) and bool((first == np.arange(first.shape[2])).all()),
                f"after a prompt of {tokens} in blocks of {size} the first rows held are those of tokens "
                f"{_shown(first)}, not the first {count} tokens",
            )


def check_short_prompts(subject: Subject) -> None:
    """Prompts of 1 to 64 tokens leave at least one row and at most one a token, and attention stays finite."""
    rows = subject.rows(65)
    for tokens in range(1, 65):
        cache = subject.cache()
        cuts = [tokens - 1, 1] if tokens > 1 else [1]
        steps = feed(cache, rows.part(0, tokens), cuts)
        require(
            1 <= cache.rows <= tokens and cache.offset == tokens,
            f"{cache.rows} rows are held after a prompt of {tokens} tokens (offset {cache.offset})",
        )
        steps += feed(cache, rows.part(tokens, tokens + 1))
        finite = all(bool(mx.isfinite(one.output).all().item()) for one in steps)
        require(finite, f"attention is not finite with a prompt of {tokens} tokens")


def _shown(tokens: np.ndarray[Any, Any]) -> str:
    """The row of tokens of the first head that looks wrong."""
    flat = tokens.reshape(-1, tokens.shape[-1])
    wrong = next((row for row in flat if (np.diff(row) <= 0).any()), flat[0])
    text = ", ".join(str(token) for token in wrong[:12])
    return f"{text}, ..." if len(wrong) > 12 else text or "none"
