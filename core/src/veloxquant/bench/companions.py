"""The references that stand beside an arm: made to hold as many bytes as it does, or to read as many rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
from mlx_lm.models.cache import KVCache

from veloxquant.bench.arms import GROUP_SIZES
from veloxquant.bench.arms import Arm
from veloxquant.bench.arms import quantized_arm
from veloxquant.bench.arms import recent_rows_arm
from veloxquant.bench.arms import top_rows_arm
from veloxquant.bench.held import Held
from veloxquant.bench.held import held

__all__ = ["RECENT", "TOP", "full_layers", "quantized_arms", "recent_beside", "top_beside"]

RECENT, TOP = "recent rows", "top rows"
"""What ``method`` of the two references beside an arm says."""

SINKS = 4


def full_layers(plain: Sequence[Any]) -> list[int]:
    """Layers of full attention, by their plain caches: the ones that an arm may compress."""
    return [index for index, cache in enumerate(plain) if type(cache) is KVCache]


def quantized_arms(plain: Sequence[Any]) -> list[Arm]:
    """mlx-lm's quantized cache in 8 and 4 bits; none where no group size divides the head dims.

    Args:
        plain: Plain caches that hold rows.
    """
    dims = {array.shape[3] for index in full_layers(plain) for array in (plain[index].keys, plain[index].values)}
    group = next((size for size in GROUP_SIZES if all(dim % size == 0 for dim in dims)), None)
    return [] if group is None else [quantized_arm(bits, group) for bits in (8, 4)]


def recent_beside(
    arm: Arm, plain: Sequence[Any], after_prompt: Held, at_end: Held | None = None, tokens: int = 0
) -> Arm | None:
    """The simplest evictor, with the bytes of an arm right after the prompt and after the tokens that follow.

    Args:
        arm: The arm.
        plain: Plain caches with rows.
        after_prompt: What the arm's layers of full attention held right after the prompt.
        at_end: What they held at the end.
        tokens: Tokens in between.

    Returns:
        The evictor, or None when the arm holds no fewer bytes than plain rows.
    """
    row = _row_bytes(plain)
    seen = max((plain[index].offset for index in full_layers(plain)), default=0)
    rows = max(SINKS + 1, round(after_prompt.total / row)) if row else seen
    if rows >= seen:
        return None
    growth = 1.0
    if at_end is not None and tokens:
        growth = min(1.0, max(0.0, (at_end.total - after_prompt.total) / row / tokens))
    name = f"newest rows, bytes of {arm.name}"
    return attrs.evolve(recent_rows_arm(rows, growth=round(growth, 4), sinks=SINKS, name=name), method=RECENT)


def top_beside(arm: Arm, rows_read: float, seen: int) -> Arm | None:
    """Exact top rows, as many as an arm reads at a step; None when it reads all.

    Args:
        arm: The arm.
        rows_read: Rows per KV head that it reads.
        seen: Tokens seen by then.
    """
    rows = math.ceil(rows_read)
    if rows < 1 or rows >= 0.98 * seen:
        return None
    return attrs.evolve(top_rows_arm(rows, sinks=SINKS, name=f"exact top rows, reads of {arm.name}"), method=TOP)


def _row_bytes(plain: Sequence[Any]) -> float:
    layers = [plain[index] for index in full_layers(plain)]
    count = held(layers)
    seen = max((cache.offset for cache in layers), default=0)
    return count.plain / seen if seen else 0.0
