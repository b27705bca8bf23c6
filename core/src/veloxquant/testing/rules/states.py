"""``state``: what mlx-lm evaluates, saves and restores."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx

from veloxquant.cache import LayerCache
from veloxquant.state import rebuild
from veloxquant.testing.driver import contents
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import require_equal
from veloxquant.testing.failures import refusing
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import installed
from veloxquant.testing.rules.applies import trimmable
from veloxquant.testing.rules.applies import when
from veloxquant.testing.rules.protocol import require_members
from veloxquant.testing.rules.rewinds import require_same_future
from veloxquant.testing.subject import Subject


def _frozen(state: list[Any]) -> dict[str, Any]:
    """A state's parts, arrays as independent numpy arrays."""
    return {str(i): numbers(part) if isinstance(part, mx.array) else part for i, part in enumerate(state)}


def check_state_flat(subject: Subject) -> None:
    """The state is a flat list of arrays, numbers, texts and None, at any moment, and reading it changes nothing."""
    for name, cache in subject.moments().items():
        before = contents(cache)
        for part in cache.state:
            plain = part is None or isinstance(part, mx.array | str | int | float)
            require(plain, f"{name}: the state holds a {type(part).__name__}")
        require_equal(contents(cache), before, f"{name}: after the state was read")


def check_state_final(subject: Subject) -> None:
    """A state that was taken does not change when the cache goes on, or when a cache restored from it does."""
    rows = subject.rows(8, seed=1)
    for name, cache in subject.moments().items():
        state = cache.state
        before = _frozen(state)
        feed(cache, rows, [5, 1, 1, 1])
        require_equal(_frozen(state), before, f"{name}: the state, after the cache went on")
        restored = rebuild(state, subject.registry)
        feed(restored, rows, [5, 1, 1, 1])
        require_equal(_frozen(state), before, f"{name}: the state, after a cache restored from it went on")
        require_equal(contents(restored), contents(cache), f"{name}: a restored cache going on, against the original")


@in_layers(0, 1)
def check_restored_goes_on(subject: Subject) -> None:
    """A cache rebuilt from its state, at any moment, is complete and goes on as the original does."""
    for name, cache in subject.moments().items():
        restored = rebuild(cache.state, subject.registry)
        require(type(restored) is type(cache), f"{name}: a {type(restored).__name__} came back")
        require_equal(contents(restored), contents(cache), f"{name}: restored, against the original")
        require_members(restored, f"{name}, restored")
        again = rebuild(restored.state, subject.registry)
        require_equal(contents(again), contents(cache), f"{name}: restored twice, against the original")
        if name == "in the middle of a prompt":
            # A short rest, so that what was remembered of the first part still counts when the prompt ends.
            for one in (restored, cache):
                feed(one, subject.rows(4, seed=1), [3, 1])
        require_same_future(subject, restored, cache, f"{name}: restored")
        require_equal(contents(restored), contents(cache), f"{name}: restored and used, against the original")


@when(trimmable)
def check_state_after_trim(subject: Subject) -> None:
    """A cache that was rewound far can be restored too, and rewound again."""
    cache, _ = subject.used(3)
    for count in (2, subject.tokens // 2):
        cache.trim(count)
        restored = rebuild(cache.state, subject.registry)
        require_equal(contents(restored), contents(cache), f"restored after trim({count})")
        restored.trim(1)
    require_same_future(subject, rebuild(cache.state, subject.registry), cache, "restored after a deep rewind")


def check_foreign_state_refused(subject: Subject) -> None:
    """A state of a newer format, of a later version of the method, or cut short is refused."""
    cache, _ = subject.used(1)
    text, *arrays = cache.state
    header = json.loads(text)
    changes = {"a newer format": {"format": header["format"] + 1}, "a later version": {"version": "999.0"}}
    for name, change in changes.items():
        with refusing(f"a state of {name}"):
            rebuild([json.dumps({**header, **change}), *arrays], subject.registry)
    with refusing("a state without its last array"):
        rebuild([text, *arrays[:-1]], subject.registry)
    with refusing("a state without its values"):
        rebuild([json.dumps({key: value for key, value in header.items() if key != "values"}), *arrays])


@when(installed)
def check_from_state(subject: Subject) -> None:
    """``from_state`` and the ``state`` setter, which mlx-lm calls, rebuild an installed method's cache."""
    for name, cache in subject.moments().items():
        other: LayerCache = type(cache).from_state(cache.state)
        require_equal(contents(other), contents(cache), f"{name}: from_state")
        fresh = subject.cache()
        fresh.state = cache.state
        require_equal(contents(fresh), contents(cache), f"{name}: the state setter")
