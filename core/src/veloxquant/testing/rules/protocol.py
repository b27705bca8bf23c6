"""What mlx-lm and users expect of a cache and of a method, apart from rows."""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.batch import BatchLayerCache
from veloxquant.batch import MergeableLayerCache
from veloxquant.binding import Ops
from veloxquant.config import config_to_dict
from veloxquant.config import parse_config
from veloxquant.errors import ConfigError
from veloxquant.hooks import hookimpl
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import contents
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import require_equal
from veloxquant.testing.driver import step
from veloxquant.testing.failures import RuleFailure
from veloxquant.testing.failures import refusing
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.subject import LATER
from veloxquant.testing.subject import Subject

# Whatever mlx-lm's generators, server, prompt cache and files touch.
_METHODS = ("update_and_fetch", "make_mask", "size", "empty", "is_trimmable", "trim", "to_quantized", "from_state")
_VALUES = ("offset", "nbytes", "state")


def require_members(cache: Any, what: str) -> None:
    """Require every member of a cache that mlx-lm uses, and none that would mislead it.

    Raises:
        RuleFailure: One is missing, of the wrong type, or too many.
    """
    for name in _METHODS:
        require(callable(getattr(cache, name, None)), f"{what}: the cache has no method {name}")
    for name in _VALUES:
        require(hasattr(cache, name), f"{what}: the cache has no attribute {name}")
    require(type(cache.offset) is int, f"{what}: offset is a {type(cache.offset).__name__}")
    require(type(cache.nbytes) is int, f"{what}: nbytes is a {type(cache.nbytes).__name__}")
    require(cache.size() == cache.offset, f"{what}: size() is {cache.size()} and offset {cache.offset}")
    require(cache.empty() is (cache.offset == 0), f"{what}: empty() is {cache.empty()} at offset {cache.offset}")
    for name in ("bits", "group_size", "__len__", "__bool__"):
        require(not hasattr(cache, name), f"{what}: the cache has {name}, which mlx-lm takes for something else")


def check_name(subject: Subject) -> None:
    """The method calls itself as it is called, has a frozen config class, and options with help texts."""
    info = subject.method.info
    require(info.name == subject.method.ops.method().name, "veloxquant_method gives another name every time")
    require(subject.registry.get(info.name).info == info, f"the registry finds another method under '{info.name}'")
    require(bool(info.summary.strip()) and "\n" not in info.summary, f"the summary is not one line: {info.summary!r}")
    first = next(iter(attrs.fields(info.config)), None)
    if first is None:
        return
    twin = copy.copy(subject.config)
    try:
        setattr(twin, first.name, getattr(twin, first.name))
    except attrs.exceptions.FrozenInstanceError:
        return
    raise RuleFailure(f"{info.config.__name__} is not frozen: its option {first.name} can be set")


def check_unknown_option(subject: Subject) -> None:
    """A misspelt option is refused, and the message names the right one; plain values make an equal config."""
    cls, name = subject.method.info.config, subject.method.name
    again: Any = parse_config(cls, config_to_dict(subject.config), method=name)
    require(again == subject.config, f"the config does not survive as plain values: {again} from {subject.config}")
    options = [field.name for field in attrs.fields(cls)]
    for option in options:
        wrong = f"{option}_x"
        try:
            parse_config(cls, {wrong: 1}, method=name)
        except ConfigError as error:
            near = difflib.get_close_matches(wrong, options, n=1)
            require(all(word in str(error) for word in near), f"'{wrong}' is refused without naming {near}: {error}")
            continue
        raise RuleFailure(f"the unknown option '{wrong}' is accepted")


def check_members(subject: Subject) -> None:
    """Every member that mlx-lm uses is there, with the same answers, on empty and used caches."""
    fresh = subject.cache()
    for name, cache in subject.moments().items():
        require_members(cache, name)
        require(cache.is_trimmable() == fresh.is_trimmable(), f"{name}: is_trimmable() changed its answer")


def check_offset(subject: Subject) -> None:
    """``offset`` is the number of tokens seen, whatever number of rows is held."""
    cuts = [subject.tokens // 2, subject.tokens - subject.tokens // 2 - 1, 1, 1, 1, 3, 1]
    rows, cache, start = subject.rows(sum(cuts)), subject.cache(), 0
    for size in cuts:
        feed(cache, rows.part(start, start + size))
        start += size
        require(cache.offset == start, f"offset is {cache.offset} after {start} tokens")


def check_kv_bits_refused(subject: Subject) -> None:
    """mlx-lm's ``kv_bits`` is refused and not ignored."""
    for name, cache in (("empty", subject.cache()), ("after some steps", subject.used(3)[0])):
        with refusing(f"{name}: to_quantized"):
            cache.to_quantized(group_size=64, bits=4)


def check_merge_offered(subject: Subject) -> None:
    """Caches with true queries can be merged into a batch, also when empty; others do not have ``merge`` at all."""
    for name, cache in subject.moments().items():
        if not subject.routed:
            require(not hasattr(cache, "merge"), f"{name}: a cache without true queries has the attribute merge")
            continue
        require(isinstance(cache, MergeableLayerCache), f"{name}: the cache is a {type(cache).__name__}")
        members: list[Any] = [cache, subject.cache()]
        batch = MergeableLayerCache.merge(members)
        require(type(batch) is BatchLayerCache, f"{name}: merge makes a {type(batch).__name__}")


class _Observer:
    """Wraps every hook and remembers which ran."""

    def __init__(self) -> None:
        self.seen: set[str] = set()


def _observer() -> _Observer:
    """An observer whose wrappers take no arguments, so that they fit every hook."""

    def wrapper(name: str) -> Any:
        def wrapped(self: _Observer) -> Generator[None, Any, Any]:
            self.seen.add(name)
            return (yield)

        wrapped.__name__ = f"veloxquant_{name}"
        return hookimpl(wrapper=True)(wrapped)

    names = [field.name for field in attrs.fields(Ops)]
    kind = type("Observer", (_Observer,), {f"veloxquant_{name}": wrapper(name) for name in names})
    made: _Observer = kind()
    return made


def check_observers(subject: Subject) -> None:
    """An observer sees every hook of the method run, and changes nothing."""
    observer = _observer()
    subject.registry.observe(observer)
    try:
        cache, rows = subject.used(2)
        cache.method.ops.method()
        if subject.trimmable:
            cache.trim(1)
        found = contents(cache)
        cache.nbytes  # noqa: B018 - runs the account hook
        cache.method.ops.restore(cache.config, cache.layer, cache.method.ops.serialize(cache.method_state))
    finally:
        subject.registry.unobserve(observer)
    plain = subject.cache()
    feed(plain, rows, [*subject.prompt, 1, 1])
    if subject.trimmable:
        plain.trim(1)
    require_equal(found, contents(plain), "observed, against not observed")
    # Those run for other methods, and for a batch.
    unseen = {"rows", "step"}
    unseen |= set() if subject.routed else {"attend"}
    unseen |= set() if subject.trimmable else {"trim"}
    implemented = {field.name for field in attrs.fields(Ops) if getattr(subject.method.ops, field.name) is not None}
    missed = sorted(implemented - observer.seen - unseen)
    require(not missed, f"an observer did not see {', '.join(missed)}")


@contextlib.contextmanager
def _no_evaluation() -> Iterator[None]:
    """Make evaluating and reading back an error for arrays too that do not depend on what is traced."""

    def refused(*_: Any, **__: Any) -> None:
        raise ValueError("[eval] in a hook")

    places = [(mx, "eval"), (mx, "async_eval"), (mx, "synchronize"), (mx.array, "item"), (mx.array, "tolist")]
    before = [getattr(owner, name) for owner, name in places]
    try:
        for owner, name in places:
            setattr(owner, name, refused)
        yield
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


@in_layers(0, 1)
def check_no_host_sync(subject: Subject) -> None:
    """No hook between a token and its attention reads an array back to Python or evaluates one."""
    half = subject.tokens // 2
    blocks: dict[str, tuple[list[int], list[int]]] = {
        "a prompt block": ([], [half]),
        "the next prompt block": ([half], [subject.tokens - half - 1]),
        "the last token of a prompt": ([subject.tokens - 1], [1]),
        "a step": (subject.prompt, [1]),
        "a short block": (subject.prompt, [3]),
        f"one of {LATER} steps": (subject.prompt, [1] * LATER),
        "a block of a later prompt": ([*subject.prompt, 1], [subject.later_prompt]),
    }
    for name, (before, cuts) in blocks.items():
        cache, rows = subject.cache(), subject.rows(sum(before) + sum(cuts))
        if before:
            feed(cache, rows.part(0, sum(before)), before)

        def call(*arrays: mx.array, cache: Any = cache, cuts: list[int] = cuts) -> list[mx.array]:
            rows, start, outputs = Rows(*arrays), 0, []
            for size in cuts:
                outputs.append(step(cache, rows.part(start, start + size)).output)
                start += size
            return [*outputs, *[part for part in cache.state if isinstance(part, mx.array)]]

        try:
            # While MLX traces a function, evaluating an array of it is an error. Its results are not evaluated:
            # that would compile kernels.
            with _no_evaluation():
                mx.compile(call)(*rows.part(sum(before)).arrays)
        except ValueError as error:
            if "eval" not in str(error):
                raise
            raise RuleFailure(f"{name}: an array was evaluated or read back to Python") from error
