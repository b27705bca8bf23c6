"""Bytes: those of the arrays that are held, no more and no fewer."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import finishing
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import routed
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject
from veloxquant.types import ByteCount
from veloxquant.types import LayerSpec

# Rows that a cache may hold in reserve, at least; one growth step of a small buffer.
_SPARE = 64
# Allocators round up.
_PAGE = 16 * 1024


def reachable(item: Any) -> dict[int, mx.array]:
    """Every array that can be reached from an object, by its id; the layer's description is not followed."""
    found: dict[int, mx.array] = {}
    seen: dict[int, Any] = {}
    waiting = [item]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, LayerSpec | str | bytes | int | float | type):
            continue
        seen[id(one)] = one
        if isinstance(one, mx.array):
            found[id(one)] = one
        else:
            waiting += _members(one)
    return found


def _members(item: Any) -> Iterable[Any]:
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if callable(item) and not hasattr(type(item), "__attrs_attrs__"):
        return []
    slots = [name for kind in type(item).__mro__ for name in _slots(kind)]
    return [*vars(item).values(), *_present(item, slots)] if hasattr(item, "__dict__") else _present(item, slots)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _present(item: Any, names: Iterable[str]) -> list[Any]:
    return [getattr(item, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(item, name)]


def _held_and_shared(subject: Subject, state: Any) -> tuple[int, int]:
    """Bytes of the arrays of a state, those that an unrelated cache has too apart."""
    other, _ = subject.used(1, seed=3)
    others = reachable(other.method_state)
    arrays = reachable(state)
    shared = sum(array.nbytes for key, array in arrays.items() if key in others)
    return sum(array.nbytes for array in arrays.values()) - shared, shared


@in_layers(0, 1)
def check_bytes_held(subject: Subject) -> None:
    """The bytes reported are those of the arrays that can be reached from the state, at any moment."""
    for name, cache in subject.moments().items():
        held, shared = _held_and_shared(subject, cache.method_state)
        count = cache.account()
        require(count.held == held, f"{name}: {count.held} bytes are reported and {held} are held")
        require(count.static >= shared, f"{name}: {count.static} shared bytes are reported and {shared} are held")
        require(cache.nbytes == held, f"{name}: nbytes is {cache.nbytes} and {held} bytes are held")


@when(lambda subject: None if subject.trimmable else "the caches cannot be trimmed")
def check_bytes_after_trim(subject: Subject) -> None:
    """Bytes reported after rewinds are those of the arrays that are left."""
    cache, _ = subject.used(20)
    for count in (3, 17 + subject.tokens // 2, 1):
        cache.trim(count)
        held, _ = _held_and_shared(subject, cache.method_state)
        require(cache.nbytes == held, f"after trim({count}): {cache.nbytes} bytes are reported and {held} are held")


def check_empty_holds_nothing(subject: Subject) -> None:
    """An empty cache holds no bytes of its own, and says so."""
    cache = subject.cache()
    held, _ = _held_and_shared(subject, cache.method_state)
    require(
        (cache.nbytes, held, cache.rows) == (0, 0, 0),
        f"an empty cache reports {cache.nbytes} bytes and {cache.rows} rows, and holds {held} bytes",
    )


def check_account_details(subject: Subject) -> None:
    """The account is a ByteCount with plain details; asking twice gives the same and changes nothing."""
    for name, cache in subject.moments().items():
        count = cache.account()
        require(isinstance(count, ByteCount), f"{name}: the account is a {type(count).__name__}")
        require(count == cache.account(), f"{name}: asked twice, the account gives two answers")
        for key, value in count.details.items():
            plain = value is None or isinstance(value, int | float | str)
            require(plain, f"{name}: the detail {key} is a {type(value).__name__}")
            if key.endswith("bytes") and isinstance(value, int):
                # What begins with "dense" says what rows would take as they came.
                limit = cache.plain_nbytes if key.startswith("dense") else count.held + count.static
                require(0 <= value <= limit, f"{name}: the detail {key} is {value}, of {limit} bytes in all")


@when(lambda subject: "the method evicts" if subject.evicts else None)
def check_bytes_grow(subject: Subject) -> None:
    """Without eviction, more tokens are never fewer bytes."""
    held = {}
    for tokens in (1, 32, 128, 512):
        cache = subject.cache()
        feed(cache, subject.rows(tokens), [tokens - 1, 1] if tokens > 1 else [1])
        held[tokens] = cache.nbytes
    sizes = list(held.values())
    require(sizes == sorted(sizes) and sizes[0] > 0, f"bytes by tokens: {held}")


def check_spare_rows(subject: Subject) -> None:
    """A cache holds the rows kept and one growth step in reserve, not hundreds of rows, and in no wider dtype."""
    for steps in (0, 1, 40):
        cache, _ = subject.used(steps)
        count = cache.account()
        row = cache.plain_nbytes // cache.offset
        allowed = cache.rows + max(_SPARE, cache.rows // 4)
        require(
            count.keys + count.values <= row * allowed,
            f"{count.keys + count.values} bytes of keys and values are held for {cache.rows} rows of {row} bytes: as "
            f"many as {(count.keys + count.values) // row} rows take",
        )


def check_half_precision(subject: Subject) -> None:
    """Rows that come in fp16 or bf16 are not stored in fp32."""
    sizes = {}
    for dtype in ("float32", "float16", "bfloat16"):
        cache, _ = subject.shaped(dtype=dtype).used(3)
        count = cache.account()
        sizes[dtype] = (count.keys + count.values, cache.rows * cache.plain_nbytes // cache.offset)
    for dtype in ("float16", "bfloat16"):
        held, plain = sizes[dtype]
        require(
            held <= 0.75 * sizes["float32"][0] or held <= 1.25 * plain,
            f"{held} bytes of keys and values are held for rows of {dtype}, which take {plain} as they came",
        )


def check_memory_held(subject: Subject) -> None:
    """A cache keeps no more memory in use than it reports: no view of a dropped buffer, no pending computation."""
    for cuts in ([subject.tokens - 1], subject.prompt, [*subject.prompt, *[1] * 10]):
        used, count, arrays = _memory(subject, cuts)
        allowed = 1.05 * (count.held + count.static) + _PAGE * (arrays + 1)
        require(used <= allowed, f"{used} bytes are in use after {sum(cuts)} tokens and {count.held} are reported")


def _memory(subject: Subject, cuts: list[int]) -> tuple[int, ByteCount, int]:
    """Bytes in use for a new cache alone, what it reports, and the number of its arrays."""
    gc.collect()
    before = mx.get_active_memory()
    cache, rows = subject.cache(), subject.rows(sum(cuts))
    feed(cache, rows, cuts)
    mx.eval(cache.state)
    del rows
    gc.collect()
    return mx.get_active_memory() - before, cache.account(), len(reachable(cache.method_state))


@when(routed, finishing)
def check_queries_freed(subject: Subject) -> None:
    """No query of the prompt is held once the prompt is complete."""
    cache, rows = subject.used()
    mx.eval(cache.state)
    known = {row.tobytes() for row in numbers(rows.queries).reshape(-1, subject.shape.key_dim)}
    for array in reachable(cache.method_state).values():
        if array.ndim < 2 or array.shape[-1] != subject.shape.key_dim or array.dtype != mx.float32:
            continue
        found = sum(row.tobytes() in known for row in numbers(array).reshape(-1, subject.shape.key_dim))
        require(found == 0, f"{found} query rows are still held after the prompt, in an array of {array.shape}")
