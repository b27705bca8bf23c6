"""How sure a mean over tokens is: block bootstrap, since neighbouring tokens are alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["BLOCK", "mean_difference", "mean_interval"]

BLOCK = 8
"""Neighbouring tokens that are drawn together."""

_DRAWS = 2000
_SEED = 0


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The interval in which the mean over other tokens of the same text may be expected.

    Args:
        values: One figure a token, in the order of the text.
        confidence: Share of draws inside.

    Returns:
        Its ends; the same for the same values.
    """
    means = _means(np.asarray(values, dtype=np.float64))
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mean_difference(
    values: Sequence[float], others: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Mean of ``values - others``, token by token, and its interval.

    Raises:
        ValueError: They are not of the same tokens.
    """
    difference = np.asarray(values, dtype=np.float64) - np.asarray(others, dtype=np.float64)
    return float(difference.mean()), *mean_interval([*difference], confidence)


def _means(values: np.ndarray) -> np.ndarray:
    count = len(values)
    block = min(BLOCK, max(1, count // 4))
    blocks = -(-count // block)
    generator = np.random.default_rng(_SEED)
    starts = generator.integers(0, count, size=(_DRAWS, blocks))
    # The text is closed to a ring, so that its first and last tokens are drawn as often as others.
    place = (starts[:, :, None] + np.arange(block)).reshape(_DRAWS, -1)[:, :count] % count
    means: np.ndarray = values[place].mean(axis=1)
    return means
