"""Masks: made before the rows come, right for whatever rows are held."""

from __future__ import annotations

import copy

import mlx.core as mx

from veloxquant.attention import causal_mask
from veloxquant.errors import RoutingError
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import step
from veloxquant.testing.failures import refusing
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import routed
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject

_MARK = 100.0


def check_mask_words(subject: Subject) -> None:
    """The mask is None for one token and the word "causal" for more, on empty and used caches."""
    for name, cache in subject.moments().items():
        found = [cache.make_mask(1), cache.make_mask(5)]
        require(found == [None, "causal"], f"{name}: the masks for 1 and 5 tokens are {found}")


def check_mask_array_fits(subject: Subject) -> None:
    """A mask array that is asked for is causal and as wide as the rows that the next call returns."""
    for name, cache in subject.moments().items():
        mask = cache.make_mask(4, return_array=True)
        got = step(cache, subject.rows(4, seed=1))
        require(isinstance(mask, mx.array), f"{name}: return_array gave {mask!r}")
        assert isinstance(mask, mx.array)
        width, rows = mask.shape[-1], got.keys.shape[2]
        require(width == rows, f"{name}: the mask covers {width} rows and the call returned {rows}")
        shown = numbers(mask).reshape(-1, width)[-4:]
        expected = [rows - 3 + query for query in range(4)]
        require(shown.sum(axis=1).tolist() == expected, f"{name}: the mask array is not causal")


def check_window_refused(subject: Subject) -> None:
    """A sliding window is refused, at one token too, since compressed caches cannot honour it."""
    for name, cache in (("empty", subject.cache()), ("after some steps", subject.used(3)[0])):
        for tokens in (1, 4):
            with refusing(f"{name}: a window of 8 for {tokens} tokens"):
                cache.make_mask(tokens, window_size=8)


@when(routed)
def check_mask_array_honoured(subject: Subject) -> None:
    """A mask array of the model is honoured or refused with a RoutingError, never ignored."""
    shape, hidden = subject.shape, subject.tokens // 2
    rows = subject.rows(subject.tokens + 2)
    # The hidden tokens carry a mark in their values, and queries that look for them.
    marked = mx.arange(rows.tokens).reshape(1, 1, -1, 1) < hidden
    keys = mx.where(marked, mx.full(rows.keys.shape, 2.0), rows.keys)
    values = mx.where(marked, mx.full(rows.values.shape, _MARK), rows.values)
    rows = Rows(mx.full(rows.queries.shape, 2.0), keys, values)
    cache = subject.cache()
    feed(cache, rows.part(0, subject.tokens), subject.prompt)
    probe = step(copy.deepcopy(cache), rows.part(subject.tokens))
    seen = probe.values.mean(axis=3) < _MARK / 2
    causal = causal_mask(2, probe.values.shape[2])
    by_head = mx.repeat(seen, shape.query_heads // shape.kv_heads, axis=1)[:, :, None, :]
    try:
        output = step(cache, rows.part(subject.tokens), causal & by_head).output
    except RoutingError:
        return
    worst = numbers(mx.abs(output).max()).item()
    require(worst < _MARK / 2, f"an output of {worst:.3g} comes from rows that the mask array hides")
