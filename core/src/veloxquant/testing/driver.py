"""Feeding a cache as mlx-lm's models and generators do, and looking at what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from veloxquant.attention import attention
from veloxquant.cache import LayerCache
from veloxquant.testing.failures import RuleFailure
from veloxquant.testing.failures import require

__all__ = ["Rows", "Step", "blocks", "contents", "feed", "numbers", "require_equal", "require_like", "same", "step"]


@attrs.frozen(eq=False)
class Rows:
    """Queries, keys and values of consecutive tokens.

    Args:
        queries: ``[B, Hq, S, Dk]``.
        keys: ``[B, Hkv, S, Dk]``.
        values: ``[B, Hkv, S, Dv]``.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array

    @property
    def tokens(self) -> int:
        """How many."""
        return self.keys.shape[2]

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys, values."""
        return self.queries, self.keys, self.values

    def part(self, start: int, stop: int | None = None) -> Rows:
        """The tokens from ``start`` to ``stop``."""
        return Rows(*(array[:, :, start:stop] for array in self.arrays))

    def sequence(self, index: int) -> Rows:
        """One sequence of a batch, with B = 1."""
        return Rows(*(array[index : index + 1] for array in self.arrays))

    def then(self, other: Rows) -> Rows:
        """These tokens followed by others."""
        pairs = zip(self.arrays, other.arrays, strict=True)
        return Rows(*(mx.concatenate([first, second], axis=2) for first, second in pairs))

    def cast(self, dtype: str) -> Rows:
        """The same rows in another dtype."""
        return Rows(*(array.astype(getattr(mx, dtype)) for array in self.arrays))


@attrs.frozen(eq=False)
class Step:
    """What one call of a cache gave.

    Args:
        keys: Keys that ``update_and_fetch`` returned.
        values: Values that it returned.
        output: The attention output ``[B, Hq, S, Dv]``.
    """

    keys: mx.array
    values: mx.array
    output: mx.array


def step(
    cache: Any,
    rows: Rows,
    mask: mx.array | str | None = None,
    *,
    scale: float | None = None,
    sinks: mx.array | None = None,
) -> Step:
    """One forward pass of a layer: mask, rows, attention, in mlx-lm's order.

    Args:
        cache: A cache.
        rows: All tokens of the call.
        mask: A mask to use in place of the one that the cache makes.
        scale: Factor on the logits; by default the usual one of the head dim.
        sinks: Sink logits ``[Hq]``, as some models have them.
    """
    own = cache.make_mask(rows.tokens)
    keys, values = cache.update_and_fetch(rows.keys, rows.values)
    attend = getattr(cache, "attend", None) or attention
    scale = rows.keys.shape[3] ** -0.5 if scale is None else scale
    output = attend(rows.queries, keys, values, scale, own if mask is None else mask, sinks)
    return Step(keys, values, output)


def feed(cache: Any, rows: Rows, cuts: Sequence[int] | None = None) -> list[Step]:
    """Feed tokens in blocks.

    Args:
        cache: A cache.
        rows: The tokens.
        cuts: Sizes of the blocks, whose sum is the number of tokens; by default one block.

    Returns:
        What each call gave; outputs are evaluated.
    """
    cuts = [rows.tokens] if cuts is None else list(cuts)
    assert sum(cuts) == rows.tokens, (cuts, rows.tokens)
    start, steps = 0, []
    for size in cuts:
        steps.append(step(cache, rows.part(start, start + size)))
        mx.eval(steps[-1].output)
        if size > 1:
            # As mlx-lm after every chunk of a prompt.
            mx.eval(cache.state)
        start += size
    return steps


def blocks(tokens: int, size: int) -> list[int]:
    """Cut a prompt as mlx-lm does: blocks of ``size``, and the last token alone.

    A rest of one token joins the block before it: a block of one token would end the prompt.
    """
    cuts, left = [], tokens - 1
    while left > 0:
        block = left if left <= size + 1 else size
        cuts.append(block)
        left -= block
    return [*cuts, 1]


def numbers(array: mx.array) -> np.ndarray[Any, Any]:
    """An array as numpy, exactly; bf16, which numpy lacks, as fp32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def contents(cache: LayerCache) -> dict[str, Any]:
    """All that a state holds, as independent numpy arrays and plain values by name, and the tokens seen."""
    snapshot = cache.method.ops.serialize(cache.method_state)
    arrays = {name: numbers(array) for name, array in snapshot.arrays.items()}
    return {**arrays, **{f"value {name}": value for name, value in snapshot.values.items()}, "offset": cache.offset}


def same(one: Any, other: Any) -> bool:
    """Whether two arrays or values are equal bit for bit, dtype and shape included; NaN equals NaN."""
    if isinstance(one, mx.array) and isinstance(other, mx.array):
        return one.dtype == other.dtype and same(numbers(one), numbers(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        fits = one.dtype == other.dtype and one.shape == other.shape
        return fits and bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    return type(one) is type(other) and bool(one == other)


def require_equal(found: Any, expected: Any, what: str) -> None:
    """Require two arrays, or two ``contents``, to be equal bit for bit.

    Raises:
        RuleFailure: They are not; the message says where and by how much.
    """
    if isinstance(found, dict):
        if found.keys() != expected.keys():
            raise RuleFailure(f"{what}: {_names_apart(found.keys(), expected.keys())}")
        for name in found:
            require_equal(found[name], expected[name], f"{what}: {name}")
    elif not same(found, expected):
        raise RuleFailure(f"{what}: {_difference(found, expected)}")


def require_like(found: mx.array, expected: mx.array, what: str, tolerance: float) -> None:
    """Require two arrays to be equal up to an absolute tolerance.

    Raises:
        RuleFailure: They are not.
    """
    require(found.shape == expected.shape, f"{what}: the shape is {found.shape} instead of {expected.shape}")
    off = np.abs(numbers(found).astype(np.float64) - numbers(expected).astype(np.float64))
    worst = float(off.max()) if off.size else 0.0
    # The comparison is this way round so that NaN fails.
    require(worst <= tolerance, f"{what}: differs by up to {worst:.3g}, more than {tolerance:.1g}")


def _names_apart(found: Set[str], expected: Set[str]) -> str:
    parts = {"is missing": expected - found, "is there and should not be": found - expected}
    return "; ".join(f"{', '.join(sorted(names))} {what}" for what, names in parts.items() if names)


def _difference(found: Any, expected: Any) -> str:
    if isinstance(found, mx.array) and isinstance(expected, mx.array):
        if found.dtype != expected.dtype:
            return f"the dtype is {found.dtype} instead of {expected.dtype}"
        found, expected = numbers(found), numbers(expected)
    if not (isinstance(found, np.ndarray) and isinstance(expected, np.ndarray)):
        return f"{found!r} instead of {expected!r}"
    if found.shape != expected.shape:
        return f"the shape is {found.shape} instead of {expected.shape}"
    if found.dtype != expected.dtype:
        return f"the dtype is {found.dtype} instead of {expected.dtype}"
    wrong = (found != expected) & ~((found != found) & (expected != expected))
    first = tuple(int(place) for place in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} numbers differ, the first at {first}: "
        f"{found[first]} instead of {expected[first]}"
    )
