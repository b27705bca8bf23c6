"""What the trim hook answers, and which rows it leaves, long after the prompt too."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache import LayerCache
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import step
from veloxquant.testing.failures import RuleFailure
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import returning_all
from veloxquant.testing.rules.applies import trimmable
from veloxquant.testing.rules.applies import when
from veloxquant.testing.rules.kept import held_tokens
from veloxquant.testing.rules.kept import nearest_tokens
from veloxquant.testing.subject import LATER
from veloxquant.testing.subject import Subject

# Rewinds that are tried, at most.
_MOST = 48
# Factor on a key that makes a query find its row among hundreds.
_SHARP = 8.0


@when(trimmable)
def check_trim_count(subject: Subject) -> None:
    """``veloxquant_trim`` returns the count that it was given."""
    for name, cache in subject.moments().items():
        for count in sorted({1, cache.offset // 2, cache.offset} - {0}):
            if count <= cache.offset:
                found = cache.method.ops.trim(copy.deepcopy(cache).method_state, count)  # type: ignore[misc]
                right = type(found) is int and found == count
                require(right, f"{name}: veloxquant_trim returned {found!r} for a count of {count}")


@when(trimmable, returning_all)
@in_layers(0, 1)
def check_long_rewind(subject: Subject) -> None:
    """Long after the prompt, any rewind works, keeps the rows held of what is left, and forgets all others."""
    cache, rows = subject.used(LATER)
    held = held_tokens(cache, rows)
    # Where a row is held, positions that are off by one show.
    lefts = np.unique(np.concatenate([held.reshape(-1), held.reshape(-1) + 1]))
    lefts = lefts[(lefts > 0) & (lefts < rows.tokens)]
    for left in lefts[:: -(-len(lefts) // _MOST)].tolist():
        _rewind(subject, copy.deepcopy(cache), rows, held, left)


def _rewind(subject: Subject, cache: LayerCache, rows: Rows, held: np.ndarray[Any, Any], left: int) -> None:
    what = f"{rows.tokens} tokens cut back to {left}"
    try:
        returned = cache.trim(rows.tokens - left)
    except Exception as error:
        raise RuleFailure(f"{what}: trim raised a {type(error).__name__}: {error}") from error
    require(returned == rows.tokens - left, f"{what}: trim returned {returned}")
    require(cache.offset == left, f"{what}: the offset is {cache.offset}")
    # In each head: the first held row that must be gone, and the last one that must not.
    gone = np.where(held >= left, held, rows.tokens).min(axis=2)
    there = np.where(held < left, held, -1).max(axis=2)
    found = _found(subject, cache, rows, np.minimum(gone, rows.tokens - 1))
    wrong = (found == gone) & (gone < rows.tokens)
    require(not wrong.any(), f"{what}: token {gone.min()} is still attended")
    found = _found(subject, cache, rows, np.maximum(there, 0))
    wrong = (found != there) & (there >= 0)
    require(not wrong.any(), f"{what}: the row of token {there.max()}, held before, is attended no more")


def _found(subject: Subject, cache: LayerCache, rows: Rows, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The token whose value attention gives to a query that looks for ``tokens`` ``[B, Hkv]``, one in each KV head."""
    group = subject.shape.query_heads // subject.shape.kv_heads
    keys = mx.take_along_axis(rows.keys, mx.array(tokens)[:, :, None, None], axis=2)
    new = subject.rows(1, seed=6)
    got = step(cache, Rows(_SHARP * mx.repeat(keys, group, axis=1), new.keys, new.values))
    # The row of the step itself counts too, so that it is not taken for another one.
    return nearest_tokens(got.output[:, ::group], mx.concatenate([rows.values, new.values], axis=2))[:, :, 0]
