"""Later turns: a long block after some answer is a prompt again, and is treated as the first one was."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Sequence
from typing import Any

import numpy as np

from veloxquant.cache import LayerCache
from veloxquant.hooks import hookimpl
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import blocks
from veloxquant.testing.driver import contents
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import require_equal
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import evicting
from veloxquant.testing.rules.applies import finishing
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import when
from veloxquant.testing.rules.kept import nearest_tokens
from veloxquant.testing.subject import Subject

# Tokens of the answer between the prompts: few, and enough that an eviction may be due.
_ANSWERS = (6, 70)


def _answered(subject: Subject, steps: int) -> tuple[LayerCache, Rows]:
    """A cache after a prompt and an answer, and all rows up to the end of the next prompt."""
    rows, cache = subject.rows(subject.tokens + steps + subject.later_prompt), subject.cache()
    feed(cache, rows.part(0, subject.tokens + steps), [*subject.prompt, *[1] * steps])
    return cache, rows


def _ways(subject: Subject) -> list[list[int]]:
    """The later prompt in one block, and in blocks of which the first opens a prompt."""
    return [blocks(subject.later_prompt, size) for size in (subject.later_prompt, subject.window, subject.window + 3)]


def check_later_prompt_whole(subject: Subject) -> None:
    """In a later prompt every block gets the rows held before it, and all of the prompt up to itself."""
    one, *several = _ways(subject)
    for steps, ways in zip(_ANSWERS, ([one, several[1]], [several[0]]), strict=True):
        for cuts in ways:
            cache, rows = _answered(subject, steps)
            start = first = subject.tokens + steps
            held: Any = None
            for size in cuts:
                (got,) = feed(cache, rows.part(start, start + size))
                start += size
                what = f"{start - first} tokens into a later prompt that came in blocks of {cuts[0]}"
                require(cache.offset == start, f"{what}: offset is {cache.offset} instead of {start}")
                found = nearest_tokens(got.values, rows.values)
                held = found[:, :, :-size] if held is None else held
                new = np.broadcast_to(np.arange(first, start), (*held.shape[:2], start - first))
                expected = np.concatenate([held, new], axis=2)
                require(
                    np.array_equal(found, expected),
                    f"{what}: {found.shape[2]} rows came back that are not the {held.shape[2]} rows held before it and "
                    f"the {start - first} of the prompt so far: something was evicted before it had been attended",
                )


def check_later_prompt_stored(subject: Subject) -> None:
    """What is stored of a later prompt does not depend on the blocks in which it came."""
    for steps in _ANSWERS:
        expected = None
        for cuts in _ways(subject):
            cache, rows = _answered(subject, steps)
            feed(cache, rows.part(subject.tokens + steps), cuts)
            found = contents(cache)
            expected = found if expected is None else expected
            what = f"a later prompt of {sum(cuts)} tokens in blocks of {cuts[0]}, against one block"
            require_equal(found, expected, what)


@when(evicting, finishing)
@in_layers(0, 1)
def check_later_prompt_evicts(subject: Subject) -> None:
    """If a prompt is evicted when it ends, a later one is too."""
    for cuts in _ways(subject):
        cache, rows = _answered(subject, _ANSWERS[0])
        before = cache.rows
        feed(cache, rows.part(subject.tokens + _ANSWERS[0]), cuts)
        require(
            cache.rows < before + subject.later_prompt,
            f"{before} rows were held before a later prompt of {subject.later_prompt} tokens in blocks of {cuts[0]}, "
            f"and {cache.rows} after it: nothing was dropped",
        )


class _Counter:
    """Counts how often the end of a prompt is told."""

    def __init__(self) -> None:
        self.count = 0

    @hookimpl(wrapper=True)
    def veloxquant_finish_prompt(self) -> Generator[None, Any, Any]:
        """Count, and let the method have it."""
        self.count += 1
        return (yield)


@when(finishing)
def check_prompt_end_once(subject: Subject) -> None:
    """The end of each prompt is told once: after its last token, or the trim of a draft that came with that."""
    later, short = subject.later_prompt, max(1, min(4, subject.window - 1))
    _told(
        subject,
        [
            ("a first part of a prompt", _feeding(subject, [subject.tokens - 1]), 0),
            ("the last token of a prompt", _feeding(subject, [1]), 1),
            ("an answer", _feeding(subject, [1] * 6), 1),
            ("a short block", _feeding(subject, [short]), 1),
            ("a first part of a later prompt", _feeding(subject, [later - subject.window]), 1),
            ("its second part", _feeding(subject, [subject.window - 1]), 1),
            ("its last token", _feeding(subject, [1]), 2),
            ("another answer", _feeding(subject, [1, short, 1]), 2),
        ],
    )
    if subject.trimmable and subject.window > 2:
        block = _feeding(subject, [2])
        draft: list[tuple[str, Callable[[LayerCache], object], int]] = [
            ("a first part of a prompt", _feeding(subject, [subject.tokens]), 0),
            ("the rest of a prompt with a draft", block, 0),
            ("the trim of the draft", lambda cache: cache.trim(1), 1),
            ("a block with another draft, and its trim", lambda cache: (block(cache), cache.trim(1)), 1),
            ("a step", _feeding(subject, [1]), 1),
        ]
        _told(subject, draft)


def _feeding(subject: Subject, cuts: list[int]) -> Callable[[LayerCache], object]:
    return lambda cache: feed(cache, subject.rows(sum(cuts), seed=1), cuts)


def _told(subject: Subject, events: Sequence[tuple[str, Callable[[LayerCache], object], int]]) -> None:
    """Require how often the end of a prompt has been told after each event."""
    counter = _Counter()
    subject.registry.observe(counter)
    try:
        cache = subject.cache()
        for what, happen, expected in events:
            happen(cache)
            require(
                counter.count == expected,
                f"after {what}: veloxquant_finish_prompt has run {counter.count} times instead of {expected}",
            )
    finally:
        subject.registry.unobserve(counter)
