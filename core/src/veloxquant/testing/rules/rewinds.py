"""Trimming: exact near the end, never wrong further back, refused with nothing changed where it is not offered."""

from __future__ import annotations

import copy

import mlx.core as mx

from veloxquant.cache import LayerCache
from veloxquant.errors import VeloxQuantError
from veloxquant.rewind import trim_prompt_cache
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import contents
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import require_equal
from veloxquant.testing.failures import refusing
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import trimmable
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import LATER
from veloxquant.testing.subject import Subject

_MARK = 100.0


def require_same_future(subject: Subject, found: LayerCache, expected: LayerCache, what: str) -> None:
    """Require that two caches answer alike from now on.

    Raises:
        RuleFailure: They do not.
    """
    counts = {"offset": (found.offset, expected.offset), "rows held": (found.rows, expected.rows)}
    for name, (one, other) in counts.items():
        require(one == other, f"{what}: {name} {one} instead of {other}")
    cuts = [1, 1, max(1, min(3, subject.window - 1)), 1]
    rows = subject.rows(sum(cuts), seed=5)
    pairs = zip(feed(found, rows, cuts), feed(expected, rows, cuts), strict=True)
    for number, (one_step, other_step) in enumerate(pairs):
        for name in ("keys", "values", "output"):
            place = f"{what}: {name} of call {number} afterwards"
            require_equal(getattr(one_step, name), getattr(other_step, name), place)


def _tails(subject: Subject) -> list[list[int]]:
    """Blocks after the prompt that are trimmed away again."""
    return [[1], [1] * 5, [max(1, min(4, subject.window - 1))], [1] * 40]


@when(trimmable)
@in_layers(0, 1)
def check_trim_forgets(subject: Subject) -> None:
    """After trimming what followed the prompt, a cache goes on as if it had never seen it."""
    for tail in _tails(subject):
        cache, _ = subject.used()
        expected = copy.deepcopy(cache)
        feed(cache, subject.rows(sum(tail), seed=1), tail)
        returned = cache.trim(sum(tail))
        require(returned == sum(tail), f"trim({sum(tail)}) returned {returned}")
        require_same_future(subject, cache, expected, f"after {sum(tail)} tokens and trim({sum(tail)})")


@when(trimmable)
def check_trim_state(subject: Subject) -> None:
    """After trimming what followed the prompt, arrays, counters and bytes are as before it."""
    for tail in _tails(subject):
        cache, _ = subject.used(1)
        expected, held = contents(cache), cache.nbytes
        feed(cache, subject.rows(sum(tail), seed=1), tail)
        cache.trim(sum(tail))
        what = f"after {sum(tail)} tokens and trim({sum(tail)})"
        require_equal(contents(cache), expected, what)
        require(cache.nbytes == held, f"{what}: {cache.nbytes} bytes are held instead of {held}")


@when(trimmable)
def check_trim_in_prompt(subject: Subject) -> None:
    """A prompt from which some tokens are trimmed before it ends is stored as if they had not been there."""
    rows, wrong = subject.rows(), subject.rows(5, seed=1)
    # A short rest, so that what was remembered of the trimmed tokens would still count when the prompt ends.
    for first in (subject.tokens // 2, subject.tokens - 4):
        cache, expected = subject.cache(), subject.cache()
        feed(cache, rows.part(0, first).then(wrong))
        cache.trim(5)
        feed(cache, rows.part(first), [subject.tokens - first - 1, 1])
        feed(expected, rows, [first, subject.tokens - first - 1, 1])
        what = f"after a block of {first + 5}, trim(5) and the rest of the prompt"
        require_equal(contents(cache), contents(expected), what)
        require(cache.nbytes == expected.nbytes, f"{what}: {cache.nbytes} bytes are held, not {expected.nbytes}")


@when(trimmable)
def check_trim_rewrites(subject: Subject) -> None:
    """Tokens written after a trim replace the trimmed ones, in rows and in counts."""
    cache, rows = subject.used(5)
    other = subject.rows(5, seed=1)
    cache.trim(5)
    feed(cache, other, [1] * 5)
    expected = subject.cache()
    feed(expected, rows.part(0, subject.tokens).then(other), [*subject.prompt, *[1] * 5])
    require(cache.nbytes == expected.nbytes, f"{cache.nbytes} bytes are held instead of {expected.nbytes}")
    require_same_future(subject, cache, expected, "after trim(5) and five other tokens")


@when(trimmable)
def check_trim_limits(subject: Subject) -> None:
    """trim(0) changes nothing, trimming more than was seen forgets all of it, an empty cache gives 0."""
    require(subject.cache().trim(5) == 0, "trim(5) of an empty cache does not return 0")
    cache, rows = subject.used(2)
    before = contents(cache)
    require(cache.trim(0) == 0, "trim(0) does not return 0")
    require_equal(contents(cache), before, "after trim(0)")
    with refusing("trim(-1)"):
        cache.trim(-1)
    require_equal(contents(cache), before, "after the refused trim(-1)")
    returned = cache.trim(rows.tokens + 50)
    require(returned == rows.tokens, f"trim of more than the {rows.tokens} tokens seen returned {returned}")
    require(cache.nbytes == 0 and cache.empty(), f"{cache.nbytes} bytes are held after everything was trimmed")
    fresh = subject.cache()
    for one in (cache, fresh):
        feed(one, rows, [*subject.prompt, 1, 1])
    require_equal(contents(cache), contents(fresh), "used again after everything was trimmed, against a new cache")


class _Untrimmable:
    """A layer that cannot be trimmed."""

    offset = 10**6

    def is_trimmable(self) -> bool:
        """It says so."""
        return False

    def trim(self, n: int) -> int:
        """As such caches do."""
        return 0


@when(trimmable)
def check_trim_all_or_none(subject: Subject) -> None:
    """``trim_prompt_cache`` trims every layer to the same length, or none."""
    ahead, behind = subject.used(3)[0], subject.in_layer(1).used()[0]
    before = contents(ahead), contents(behind)
    returned = trim_prompt_cache([ahead, behind, _Untrimmable()], 2)
    require(returned == 0, f"trimming 2 tokens of three layers, one of which cannot be trimmed, returned {returned}")
    require_equal(contents(ahead), before[0], "the first layer, after a trim that another could not follow")
    require_equal(contents(behind), before[1], "the second layer, after a trim that another could not follow")
    # As a forward pass leaves them that failed half way.
    returned = trim_prompt_cache([ahead, behind], 5)
    offsets, left = (returned, ahead.offset, behind.offset), subject.tokens - 2
    require(
        offsets == (5, left, left),
        f"trimming 5 tokens of layers that have seen {subject.tokens + 3} and {subject.tokens} returned, and left "
        f"offsets, {offsets} instead of {(5, left, left)}",
    )


def _refused(subject: Subject) -> str | None:
    """The caches cannot be trimmed."""
    return "the caches are trimmable" if subject.trimmable else None


@when(_refused)
def check_trim_refused(subject: Subject) -> None:
    """A cache that cannot be trimmed says so from birth; trim then returns 0, or raises, and changes nothing."""
    for name, cache in subject.moments().items():
        require(not cache.is_trimmable(), f"{name}: the cache has become trimmable")
        before = contents(cache)
        try:
            returned = cache.trim(3)
        except VeloxQuantError:
            returned = 0
        require(returned == 0, f"{name}: trim(3) of a cache that is not trimmable returned {returned}")
        require_equal(contents(cache), before, f"{name}: after the refused trim")


@when(trimmable)
def check_deep_rewind(subject: Subject) -> None:
    """Any rewind up to the tokens seen works, and no forgotten token is ever attended again."""
    for dtype in ("float32", "float16"):
        one = subject.shaped(dtype=dtype)
        into_prompt = (one.tokens - 1, one.tokens - one.window, one.tokens // 2, 10, 2, 1)
        for seen, lefts in (
            (one.tokens + 3, (one.tokens, *into_prompt)),
            (one.tokens + LATER, (one.tokens + LATER - 3, one.tokens + LATER // 2, *into_prompt[:2])),
        ):
            for left in lefts:
                _rewind(one, seen, left, f"{dtype}, {seen} tokens cut back to {left}")


def _rewind(subject: Subject, seen: int, left: int, what: str) -> None:
    rows = subject.rows(seen)
    forgotten = mx.arange(seen).reshape(1, 1, -1, 1) >= left
    # Every query looks into one direction, and in each head other tokens, and more or fewer of them, lie there,
    # forgotten ones farthest: heads keep different rows. Forgotten tokens carry a mark in their values.
    direction = mx.where(mx.arange(subject.shape.key_dim) % 3 == 0, 2.0, -2.0)
    share = 0.05 + 0.1 * (mx.arange(subject.shape.kv_heads) % 2).reshape(1, -1, 1, 1)
    looked_at = mx.random.uniform(shape=(1, subject.shape.kv_heads, seen, 1), key=mx.random.key(9)) < share
    keys = mx.where(looked_at, mx.where(forgotten, 1.2 * direction, direction), rows.keys).astype(rows.keys.dtype)
    values = mx.where(forgotten, _MARK, rows.values).astype(rows.values.dtype)
    # An array of its own: MLX's attention on CUDA fails on queries that are a broadcast view, which no model has.
    queries = mx.contiguous(mx.broadcast_to(direction, rows.queries.shape).astype(rows.queries.dtype))
    cache = subject.cache()
    feed(cache, Rows(queries, keys, values), [*subject.prompt, *[1] * (seen - subject.tokens)])
    returned = cache.trim(seen - left)
    require(returned == seen - left, f"{what}: trim returned {returned}")
    require(cache.offset == left, f"{what}: the offset is {cache.offset}")
    require(cache.rows <= left, f"{what}: {cache.rows} rows are held")
    new = subject.rows(4, seed=1)
    new = Rows(queries[:, :, :4], new.keys, new.values)
    for number, got in enumerate(feed(cache, new, [1, 3])):
        worst = numbers(mx.abs(got.output.astype(mx.float32)).max()).item()
        require(worst < _MARK / 2, f"{what}: the output of call {number} is {worst:.3g}, as of forgotten tokens")
    require(cache.offset == left + 4, f"{what}: the offset is {cache.offset} after 4 more tokens")


@when(trimmable)
def check_speculative(subject: Subject) -> None:
    """The rest of a prompt in one block with a draft, then blocks of 1 + draft: rejected tokens leave no trace."""
    size = min(subject.window - 1, 8)
    rest = max(1, size // 2)
    rows, draft = subject.rows(subject.tokens + 3 * size), subject.rows(3 * size, seed=1)
    for rejected in range(size - rest + 1):
        cache, expected = subject.cache(), subject.cache()
        for one in (cache, expected):
            feed(one, rows.part(0, subject.tokens))
        real = subject.tokens
        for block in (size, size - rest + 1, size - rest + 1):
            kept = block - rejected
            if kept < 1:
                continue
            accepted = rows.part(real, real + kept)
            feed(cache, accepted.then(draft.part(0, rejected)) if rejected else accepted)
            cache.trim(rejected)
            feed(expected, accepted)
            expected.trim(0)
            real += kept
        what = f"with {rejected} of the draft rejected in each block"
        require(cache.nbytes == expected.nbytes, f"{what}: {cache.nbytes} bytes are held instead of {expected.nbytes}")
        require_same_future(subject, cache, expected, what)
