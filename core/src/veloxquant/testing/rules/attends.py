"""What attention makes of the rows that a call returned: of which, with which scale, with which sink logits."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.errors import RoutingError
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import Step
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import require_like
from veloxquant.testing.driver import step
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import routed
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject

# Other than that of any head dim.
_SCALE = 0.3
# Sums in another order differ by this much in fp32.
_ROUNDING = 5e-5
# A sink logit far above those of all rows, so that nothing is left for them, or far below.
_ALL, _NOTHING = 200.0, -200.0


def _reference(queries: mx.array, got: Step, sinks: mx.array | None) -> mx.array:
    """Causal attention over all rows returned, in fp64."""
    group = queries.shape[1] // got.keys.shape[1]
    keys, values = (np.repeat(numbers(array).astype(np.float64), group, axis=1) for array in (got.keys, got.values))
    logits = _SCALE * numbers(queries).astype(np.float64) @ keys.swapaxes(2, 3)
    length, rows = logits.shape[2:]
    logits[..., np.arange(rows) > np.arange(rows - length, rows)[:, None]] = -np.inf
    if sinks is not None:
        column = np.broadcast_to(numbers(sinks).reshape(1, -1, 1, 1), (*logits.shape[:3], 1))
        logits = np.concatenate([logits, column], axis=3)
    weights = np.exp(logits - logits.max(axis=3, keepdims=True))
    weights = (weights / weights.sum(axis=3, keepdims=True))[..., :rows]
    return mx.array((weights @ values).astype(np.float32))


def _cuts(subject: Subject) -> list[int]:
    """A prompt in two parts, steps and short blocks, a later prompt in two parts, a step and a short block."""
    half, later, short = subject.tokens // 2, subject.later_prompt, max(1, min(4, subject.window - 1))
    first = [half, subject.tokens - half - 1, 1, 1, 1, short, 1]
    return [*first, later - subject.window, subject.window - 1, 1, 1, short]


def _attends_all(subject: Subject) -> str | None:
    """Attention is meant to be over every row returned: the method evicts, or has a config that keeps everything."""
    if subject.dense_config is not None or (subject.evicts and subject.method.info.kind != "sparse"):
        return None
    return "the method may choose among the rows returned, and no dense_config was given"


@when(routed, _attends_all)
@in_layers(0, 1)
def check_attention_exact(subject: Subject) -> None:
    """With another scale than usual, with and without sink logits, attention is causal over all rows returned."""
    # Others than evictors may choose among the rows, unless their config keeps everything.
    one = subject if subject.evicts and subject.method.info.kind != "sparse" else subject.dense()
    cuts = _cuts(one)
    rows = one.rows(sum(cuts))
    random = 2 * mx.random.normal((one.shape.query_heads,), key=mx.random.key(4))
    for sinks, words in ((None, ""), (random, " and sink logits")):
        cache, start = one.cache(), 0
        for size in cuts:
            own = rows.part(start, start + size)
            try:
                got = step(cache, own, scale=_SCALE, sinks=sinks)
            except RoutingError:
                require(sinks is not None, f"a scale of {_SCALE} was refused")
                return
            what = f"the attention of a block of {size} after {start} tokens, with a scale of {_SCALE}{words}"
            require_like(got.output, _reference(own.queries, got, sinks), what, _ROUNDING)
            mx.eval(cache.state)
            start += size


def _sizes(subject: Subject) -> list[int]:
    """A step, a short block, and a block that is prompt."""
    return [1, max(1, min(4, subject.window - 1)), subject.window + 3]


def _output(cache: Any, rows: Rows, scale: float = _SCALE, sinks: mx.array | None = None) -> mx.array:
    """The attention output that a copy of the cache would give."""
    return step(copy.deepcopy(cache), rows, scale=scale, sinks=sinks).output


@when(routed)
def check_scale_honoured(subject: Subject) -> None:
    """Queries twice as long with half the scale give the same attention, whichever rows it is over."""
    for name, cache in subject.moments().items():
        for size in _sizes(subject):
            rows = subject.rows(size, seed=1)
            double = Rows(2 * rows.queries, rows.keys, rows.values)
            what = f"{name}: a block of {size} with twice the queries and half the scale"
            require_like(_output(cache, double, _SCALE / 2), _output(cache, rows), what, _ROUNDING)


@when(routed)
def check_sinks_honoured(subject: Subject) -> None:
    """Sink logits of the model take part in the softmax, head by head, or are refused with a RoutingError."""
    heads = mx.arange(subject.shape.query_heads)
    for name, cache in subject.moments().items():
        for size in _sizes(subject):
            rows = subject.rows(size, seed=1)
            for head in (0, subject.shape.query_heads - 1):
                try:
                    got = _output(cache, rows, sinks=mx.where(heads == head, _ALL, _NOTHING))
                except RoutingError:
                    return
                expected = mx.where((heads == head)[None, :, None, None], 0.0, _output(cache, rows))
                what = f"{name}: a block of {size} with a sink logit of {_ALL:g} in head {head} and none elsewhere"
                require_like(got, expected, what, _ROUNDING)


@when(routed)
def check_block_causal(subject: Subject) -> None:
    """In a block of several tokens, what a token is given does not depend on the rows of later ones."""
    for name, cache in subject.moments().items():
        for size in (max(2, min(4, subject.window - 1)), subject.window + 3):
            rows, other = subject.rows(size, seed=1), subject.rows(size, seed=2)
            last = (mx.arange(size) == size - 1)[:, None]
            changed = Rows(rows.queries, *(mx.where(last, 3 * b, a) for a, b in _pairs(rows, other)))
            what = f"{name}: the first tokens of a block of {size}, when keys and values of its last token change"
            require_like(_output(cache, changed)[:, :, :-1], _output(cache, rows)[:, :, :-1], what, _ROUNDING)


def _pairs(rows: Rows, other: Rows) -> list[tuple[mx.array, mx.array]]:
    return [(rows.keys, other.keys), (rows.values, other.values)]
