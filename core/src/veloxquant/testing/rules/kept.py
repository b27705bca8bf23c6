"""Which rows are still held, told by their values."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache import LayerCache
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import Step
from veloxquant.testing.driver import blocks
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import step
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import evicting
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import returning_all
from veloxquant.testing.rules.applies import sinks
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import LATER
from veloxquant.testing.subject import Subject


def held_tokens(cache: LayerCache, rows: Rows) -> np.ndarray[Any, Any]:
    """The token that each held row belongs to: the one whose values are nearest.

    Args:
        cache: A cache; it is not changed.
        rows: Everything that it was fed.

    Returns:
        ``[B, Hkv, rows]``; lossy stores are told apart as long as they are nearer to their own token than to others.
    """
    return nearest_tokens(step(copy.deepcopy(cache), rows.part(0, 1)).values[:, :, :-1], rows.values)


def nearest_tokens(found: mx.array, fed: mx.array) -> np.ndarray[Any, Any]:
    """For each row of ``found`` ``[B, H, S, D]``, the place of the row of ``fed`` that is nearest to it."""
    found, fed = found.astype(mx.float32), fed.astype(mx.float32)
    # |a - b|^2 without |a|^2, which does not change which b is nearest.
    distance = (fed * fed).sum(axis=3)[:, :, None, :] - 2 * (found @ fed.swapaxes(2, 3))
    return numbers(mx.argmin(distance, axis=3)).astype(np.int64)


def check_eviction_declared(subject: Subject) -> None:
    """A method drops rows if, and only if, it says ``evicts=True`` and its config does not deny it."""
    cache, _ = subject.used(2)
    if subject.evicts:
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


@in_layers(0, 1)
def check_held_rows_in_order(subject: Subject) -> None:
    """Held rows are rows that came in, each once, in the order of their tokens, in every head, at any step."""
    rows = subject.rows(subject.tokens + LATER)
    for size in (subject.tokens, subject.window + 3):
        cache = subject.cache()
        feed(cache, rows.part(0, subject.tokens), blocks(subject.tokens, size))
        steps = feed(cache, rows.part(subject.tokens), [1] * LATER)
        for number in _telling(steps):
            found = nearest_tokens(steps[number].values, rows.values)
            require(
                bool((np.diff(found, axis=2) > 0).all()),
                f"{number} steps after a prompt in blocks of {size}, the held rows belong to tokens {_shown(found)} in "
                "some head: not ascending, so rows are doubled, moved, padded or mixed up between heads",
            )


def _telling(steps: list[Step]) -> list[int]:
    """The steps before which rows were dropped, the first, the last, and some others."""
    counts = [got.values.shape[2] for got in steps]
    dropped = [number for number in range(1, len(steps)) if counts[number] <= counts[number - 1]]
    return sorted({*dropped, *range(0, len(steps), 25), len(steps) - 1})


@in_layers(0, 1)
def check_keys_fit_values(subject: Subject) -> None:
    """The key and the value of a held row are those of one token, as far as its key comes back at its own position."""
    # A method that needs the rotary embedding may give keys back as if they stood elsewhere: of its keys only those
    # that came back as they were fed tell whose they are.
    moves = "rope" in subject.method.needs(subject.config)
    for steps in (2, LATER):
        cache, rows = subject.used(steps)
        got = step(copy.deepcopy(cache), rows.part(0, 1))
        by_keys = nearest_tokens(got.keys[:, :, :-1], rows.keys)
        by_values = nearest_tokens(got.values[:, :, :-1], rows.values)
        wrong = by_keys != by_values
        if moves:
            wrong &= _as_fed(got.keys[:, :, :-1], rows.keys, by_keys)
        count = int(wrong.sum())
        require(count == 0, f"{count} of {by_keys.size} held rows have the key of one token and the value of another")


def _as_fed(found: mx.array, fed: mx.array, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which rows of ``found`` are, bit for bit, those of their ``tokens``."""
    expected = np.take_along_axis(numbers(fed), tokens[..., None], axis=2)
    return np.asarray((numbers(found) == expected).all(axis=3))


@when(returning_all)
@in_layers(0, 1)
def check_newest_row_held(subject: Subject) -> None:
    """A decoded row is still held when the next one comes, right before it, at every one of 150 steps."""
    rows, cache = subject.rows(subject.tokens + LATER), subject.cache()
    feed(cache, rows.part(0, subject.tokens), subject.prompt)
    steps = feed(cache, rows.part(subject.tokens), [1] * LATER)
    for token, got in enumerate(steps[1:], start=subject.tokens):
        newest = nearest_tokens(got.values[:, :, -2:], rows.values)[:, :, 0]
        require(
            got.values.shape[2] > 1 and bool((newest == token).all()),
            f"the row of token {token} is not the last one held after its step (that is token {int(newest.min())})",
        )


@when(returning_all)
def check_block_rows_held(subject: Subject) -> None:
    """The rows of a short block, soon or long after the prompt, are all held when the next token comes."""
    size = max(1, min(4, subject.window - 1))
    for steps in (0, LATER):
        cache, rows = subject.used(steps)
        block = subject.rows(size, seed=1)
        feed(cache, block)
        newest = held_tokens(cache, rows.then(block))[:, :, -size:]
        expected = np.arange(rows.tokens, rows.tokens + size)
        require(
            bool((newest == expected).all()),
            f"after {steps} steps and a block of {size} the last rows held are those of tokens {_shown(newest)}, not "
            "all of the block",
        )


@when(evicting)
def check_layers_alike(subject: Subject) -> None:
    """The same rows leave the same tokens held in layers 0, 1 and 7, after a prompt and long after it."""
    for steps in (0, LATER):
        found = {}
        for index in (0, 1, 7):
            cache, rows = subject.in_layer(index).used(steps)
            found[index] = held_tokens(cache, rows)
            require(
                np.array_equal(found[index], found[0]),
                f"{steps} steps after the same prompt, layer {index} holds {found[index].shape[2]} rows and layer 0 "
                f"{found[0].shape[2]}, or those of other tokens",
            )


@when(sinks, returning_all)
@in_layers(0, 1)
def check_sinks_held(subject: Subject) -> None:
    """The first ``sinks`` tokens are held in every head, after prompts in any chunks, long answers, later prompts."""
    for tokens in (1, 2, 3, 5, 17, subject.tokens):
        for size in sorted({tokens, min(tokens, subject.window + 3)}):
            cuts = blocks(tokens, size)
            _first_held(subject, cuts, f"a prompt of {tokens} in blocks of {size}")
    long = [*subject.prompt, *[1] * LATER]
    _first_held(subject, long, f"a prompt of {subject.tokens} and {LATER} steps")
    for size in (subject.later_prompt, subject.window + 3):
        later = [*subject.prompt, *[1] * 6, *blocks(subject.later_prompt, size)]
        _first_held(subject, later, f"two prompts, the second of {subject.later_prompt} in blocks of {size}")


def _first_held(subject: Subject, cuts: list[int], what: str) -> None:
    rows, cache = subject.rows(sum(cuts)), subject.cache()
    feed(cache, rows, cuts)
    count = min(subject.config.sinks, rows.tokens)
    first = held_tokens(cache, rows)[:, :, :count]
    require(
        first.shape[2] == count and bool((first == np.arange(count)).all()),
        f"after {what} the first rows held are those of tokens {_shown(first)}, not the first {count} tokens",
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
