"""Copies, and caches beside one another."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.cache import LayerCache
from veloxquant.state import rebuild
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import Step
from veloxquant.testing.driver import blocks
from veloxquant.testing.driver import contents
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import require_equal
from veloxquant.testing.driver import step
from veloxquant.testing.failures import RuleFailure
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import threaded
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import LATER
from veloxquant.testing.subject import Subject

_MORE = [5, 1, 1]


def _go_on(cache: LayerCache, rows: Rows) -> dict[str, Any]:
    """Feed more to a cache; returns all that it answers and holds then, as independent numpy arrays."""
    steps = feed(cache, rows, _MORE)
    return {**_answers(steps), **contents(cache)}


def _answers(steps: list[Step]) -> dict[str, Any]:
    names = ("keys", "values", "output")
    return {f"{name} of call {i}": numbers(getattr(one, name)) for i, one in enumerate(steps) for name in names}


def check_deepcopy_independent(subject: Subject) -> None:
    """A deepcopy, at any moment, goes on like the original, and neither notices what the other does."""
    rows = subject.rows(sum(_MORE), seed=1)
    for name, cache in subject.moments().items():
        first, second, before = copy.deepcopy(cache), copy.deepcopy(cache), contents(cache)
        require_equal(contents(first), before, f"{name}: a copy, against the original")
        by_copy = _go_on(first, rows)
        require_equal(contents(cache), before, f"{name}: the original, after its copy went on (shared between copies?)")
        by_original = _go_on(cache, rows)
        what = f"{name}: the copy going on, against the original, which went on after it (shared between copies?)"
        require_equal(by_copy, by_original, what)
        what = f"{name}: another copy, after the original went on (shared between copies?)"
        require_equal(contents(second), before, what)


def check_deepcopy_memory(subject: Subject) -> None:
    """Two hundred copies, each written to and dropped, leave memory where it was."""
    cache, _ = subject.used(2)
    more = subject.rows(1, seed=1)

    def cycle() -> None:
        feed(copy.deepcopy(cache), more)

    cycle()
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(200):
        cycle()
    gc.collect()
    grown = mx.get_active_memory() - before
    require(grown <= 64 * 1024, f"{grown} bytes more are in use after 200 copies were dropped")


def check_dropped_caches_freed(subject: Subject) -> None:
    """Ten caches, made, used, restored and dropped, leave memory where it was and no state behind."""

    def cycle() -> list[weakref.ref[Any]]:
        cache, _ = subject.used(2)
        return _watched(cache, rebuild(cache.state, subject.registry))

    cycle()
    gc.collect()
    before, states = mx.get_active_memory(), [one for _ in range(10) for one in cycle()]
    gc.collect()
    grown, alive = mx.get_active_memory() - before, sum(one() is not None for one in states)
    require(grown <= 64 * 1024, f"{grown} bytes more are in use after 10 caches were dropped")
    require(alive == 0, f"{alive} of {len(states)} states of dropped caches are still held by something")


def _watched(*caches: LayerCache) -> list[weakref.ref[Any]]:
    """Weak references to the states of caches, of those that allow it."""
    return [weakref.ref(one.method_state) for one in caches if type(one.method_state).__weakrefoffset__]


def check_interleaved(subject: Subject) -> None:
    """Caches used in turn give what each gives alone: nothing is shared between them."""
    cuts = [*blocks(subject.tokens, subject.tokens // 3), 1, 1, 3, 1]
    fed = [subject.rows(sum(cuts), seed=seed) for seed in (1, 2)]
    caches = [subject.cache(index) for index in (0, 0)]
    found: list[list[Step]] = [[], []]
    start = 0
    for size in cuts:
        for which, cache in enumerate(caches):
            found[which] += feed(cache, fed[which].part(start, start + size))
        start += size
    for which, cache in enumerate(caches):
        alone = subject.cache()
        answers = _answers(feed(alone, fed[which], cuts))
        what = f"cache {which} of two used in turn, against one alone"
        require_equal(_answers(found[which]), answers, what)
        require_equal(contents(cache), contents(alone), what)


@when(threaded)
def check_threads(subject: Subject) -> None:
    """Four threads with a cache each give what the same caches give one after another."""
    cuts = [*subject.prompt, 1, 1, 1, 3, 1]
    fed = [subject.rows(sum(cuts), seed=seed) for seed in range(4)]
    found: dict[int, Any] = {}

    def work(which: int) -> None:
        try:
            cache = subject.cache()
            found[which] = {**_answers(feed(cache, fed[which], cuts)), **contents(cache)}
        except Exception as error:  # shown by the thread that checks
            found[which] = error

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in range(4):
        if isinstance(found[which], Exception):
            raise found[which]
        cache = subject.cache()
        serial = _answers(feed(cache, fed[which], cuts))
        require_equal(found[which], {**serial, **contents(cache)}, f"thread {which} of 4, against a serial run")


@when(threaded)
def check_handover(subject: Subject) -> None:
    """A cache that was begun in one thread, where nothing but its outputs was computed, goes on in another."""
    begun = {
        "in the middle of a prompt": [subject.tokens // 2],
        "after a prompt": subject.prompt,
        "after a step": [*subject.prompt, 1],
        "after two steps": [*subject.prompt, 1, 1],
        "after a short block": [*subject.prompt, 1, min(4, subject.window - 1)],
        "long after a prompt": [*subject.prompt, *[1] * LATER],
    }
    later = subject.rows(sum(_MORE), seed=1)
    for name, cuts in begun.items():
        rows = subject.rows(sum(cuts))
        for rewind in (0, 2) if subject.trimmable and len(cuts) < LATER else (0,):
            found = [_handed_over(subject, rows, cuts, rewind, later, run) for run in (_in_a_thread, _here)]
            what = f"{name}{f', {rewind} tokens trimmed away' if rewind else ''}: going on in another thread"
            require_equal(found[0], found[1], f"{what}, against going on in the same one")


def _handed_over(
    subject: Subject,
    rows: Rows,
    cuts: Sequence[int],
    rewind: int,
    later: Rows,
    run: Callable[[Callable[[], Any], str], Any],
) -> dict[str, Any]:
    def begin() -> LayerCache:
        cache, start = subject.cache(), 0
        for size in cuts:
            # The state is left alone: a generator computes tokens, and whatever they depend on.
            mx.eval(step(cache, rows.part(start, start + size)).output)
            start += size
        cache.trim(rewind)
        return cache

    cache = run(begin, "a thread began a cache")
    answers: dict[str, Any] = run(lambda: _go_on(cache, later), "a thread went on with a cache that another one began")
    return answers


def _here(work: Callable[[], Any], what: str) -> Any:
    return work()


def _in_a_thread(work: Callable[[], Any], what: str) -> Any:
    """Do something in a thread of its own, which ends with it."""
    found: list[Any] = []
    errors: list[Exception] = []

    def body() -> None:
        try:
            found.append(work())
        except Exception as error:  # shown by the thread that checks
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise RuleFailure(f"{what} and failed: {type(errors[0]).__name__}: {errors[0]}") from errors[0]
    return found[0]
