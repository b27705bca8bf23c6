"""What ``update_and_fetch`` returns, and what attention makes of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from veloxquant.attention import attention
from veloxquant.routed import RoutedLayerCache
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import blocks
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import require_equal
from veloxquant.testing.driver import require_like
from veloxquant.testing.driver import step
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import dense
from veloxquant.testing.rules.applies import evicting
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import returning_all
from veloxquant.testing.rules.applies import routed
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject

# Sums in another order differ by this much in fp32.
_ROUNDING = 2e-5


def _calls(subject: Subject) -> list[int]:
    """Blocks of every kind: a prompt in two parts, its last token, steps, short blocks, a step."""
    first = subject.tokens // 2
    return [first, subject.tokens - 1 - first, 1, 1, 1, 3, 1, 4, 1]


def _attended(rows: Rows) -> Any:
    return attention(*rows.arrays, rows.keys.shape[3] ** -0.5, "causal")


@in_layers(0, 1)
def check_own_rows_exact(subject: Subject) -> None:
    """A call returns its own rows last, in order and exactly as they came; a first call returns nothing else."""
    cuts = _calls(subject)
    rows, cache, start = subject.rows(sum(cuts)), subject.cache(), 0
    for size in cuts:
        own = rows.part(start, start + size)
        got = step(cache, own)
        for name, returned, given in (("keys", got.keys, own.keys), ("values", got.values, own.values)):
            what = f"the {name} returned for a block of {size} after {start} tokens"
            require(returned.shape[2] >= size, f"{what} are only {returned.shape[2]} rows")
            require(start > 0 or returned.shape[2] == size, f"{what} are {returned.shape[2]} rows")
            require_equal(returned[:, :, -size:], given, f"{what}, its own rows")
        start += size


@when(returning_all)
def check_held_rows_first(subject: Subject) -> None:
    """A call returns as many rows as were held before it, and then its own."""
    cuts = _calls(subject)
    rows, cache, start = subject.rows(sum(cuts)), subject.cache(), 0
    for size in cuts:
        held = cache.rows
        got = step(cache, rows.part(start, start + size))
        for name, returned in (("keys", got.keys), ("values", got.values)):
            require(
                returned.shape[2] == held + size,
                f"a block of {size} after {start} tokens got {returned.shape[2]} rows of {name} back, where the cache "
                f"said that it held {held}",
            )
        start += size


def check_dtype_kept(subject: Subject) -> None:
    """Keys, values and attention outputs have the dtype that came in, in fp32, fp16 and bf16 alike."""
    for dtype in ("float32", "float16", "bfloat16"):
        one = subject.shaped(dtype=dtype)
        rows = one.rows(one.tokens + 3)
        for got in feed(one.cache(), rows, [*one.prompt, 1, 1, 1]):
            for name, array in (("keys", got.keys), ("values", got.values), ("the attention output", got.output)):
                found = str(array.dtype).rpartition(".")[2]
                require(found == dtype, f"{name} come back as {found} for rows of {dtype}")


def check_results_final(subject: Subject) -> None:
    """What a call returned is not changed by its attention, or by later calls, evictions or rewinds."""
    cuts = [*_calls(subject), 1, 1]
    rows, cache, start = subject.rows(sum(cuts)), subject.cache(), 0
    results: list[tuple[str, mx.array, Any]] = []
    for size in cuts:
        own = rows.part(start, start + size)
        returned = cache.update_and_fetch(own.keys, own.values)
        for name, array in zip(("keys", "values"), returned, strict=True):
            results.append((f"the {name} returned for a block of {size} after {start} tokens", array, numbers(array)))
        if isinstance(cache, RoutedLayerCache):
            cache.attend(own.queries, *returned, subject.shape.key_dim**-0.5, cache.make_mask(size))
        start += size
    if subject.trimmable:
        cache.trim(4)
        feed(cache, subject.rows(2, seed=1), [1, 1])
    for what, array, before in results:
        require_equal(numbers(array), before, f"{what} changed later")


@in_layers(0, 1)
def check_first_block_exact(subject: Subject) -> None:
    """The first block is attended densely and exactly, whatever is evicted or compressed afterwards."""
    for tokens in sorted({1, 2, subject.window - 1, subject.window + 1, subject.tokens}):
        rows = subject.rows(tokens)
        got = feed(subject.cache(), rows)[0]
        require_like(got.output, _attended(rows), f"the attention over a first block of {tokens}", _ROUNDING)


@when(routed, evicting)
def check_prompt_attended_whole(subject: Subject) -> None:
    """Every token of a prompt sees the whole prompt before it, in however many chunks it comes."""
    rows = subject.rows()
    for size in (subject.tokens, subject.window + 3, 50):
        outputs = feed(subject.cache(), rows, blocks(subject.tokens, size))
        expected, start = _attended(rows), 0
        for got in outputs:
            stop = start + got.output.shape[2]
            what = f"tokens {start} to {stop - 1} of a prompt in blocks of {size}"
            require_like(got.output, expected[:, :, start:stop], what, _ROUNDING)
            start = stop


@when(dense)
def check_dense_equality(subject: Subject) -> None:
    """With the config that keeps everything, rows and attention are those of a plain cache."""
    one = subject.dense()
    cuts = _calls(one)
    rows = one.rows(sum(cuts))
    expected, start = _attended(rows), 0
    for size, got in zip(cuts, feed(one.cache(), rows, cuts), strict=True):
        stop, what = start + size, f"a block of {size} after {start} tokens"
        require_equal(got.keys, rows.keys[:, :, :stop], f"keys returned for {what}")
        require_equal(got.values, rows.values[:, :, :stop], f"values returned for {what}")
        require_like(got.output, expected[:, :, start:stop], f"the attention of {what}", _ROUNDING)
        start = stop
