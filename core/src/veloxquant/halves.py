"""A second thread of the CPU for work that is large enough: MLX computes what one stream is given in one thread."""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx

from veloxquant.devices import on_cpu

__all__ = ["ALL_HEADS", "Stream", "by_halves", "second_stream"]

Stream = mx.Stream | mx.ThreadLocalStream | None

ALL_HEADS = slice(None)

# Bytes from which reading them on another thread gains more than it costs to wake it.
_WORTH_A_STREAM = 2**20


def second_stream(size: int) -> Stream:
    """For reading ``size`` bytes: another stream of a CPU, which has a thread for each; None for the usual one."""
    return _cpu_stream() if size >= _WORTH_A_STREAM and on_cpu() else None


@functools.cache
def _cpu_stream() -> Stream:
    return mx.new_thread_local_stream(mx.cpu)


def by_halves(compute: Callable[[slice], mx.array], heads: int, size: int) -> mx.array:
    """Compute something of every head, half of the heads on a second thread of the CPU where that pays.

    Args:
        compute: From a slice of the heads to their result ``[B, heads of the slice, ...]``. No head's result may
            depend on what other heads are in the slice.
        heads: Number of heads.
        size: Bytes that are read for all of them.

    Returns:
        ``[B, heads, ...]``.
    """
    second = second_stream(size)
    if second is None or heads < 2:
        return compute(ALL_HEADS)
    # The usual thread, which starts first, gets the odd head.
    middle = (heads + 1) // 2
    first = compute(slice(0, middle))
    with mx.stream(second):
        other = compute(slice(middle, heads))
    return mx.concatenate([first, other], axis=1)
