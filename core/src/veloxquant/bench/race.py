"""Timing of arms in turns: each round runs every arm once, in another order, so that all meet the same machine."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from veloxquant.errors import VeloxQuantError

__all__ = ["PLAIN", "WARM_UP", "LeftOut", "Race", "reason_of"]

PLAIN = "plain"
"""Name of the arm to which all others are compared."""

WARM_UP = 3
"""Rounds that are run and do not count."""

Lap = Callable[[int], dict[str, float]]
"""One turn of an arm, from the number of the round; gives seconds by name."""


@attrs.frozen
class LeftOut:
    """An arm that could not be measured.

    Args:
        arm: Its name.
        where: At what.
        reason: Why.
    """

    arm: str
    where: str
    reason: str


def reason_of(error: Exception) -> str:
    """What befell an arm, in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, VeloxQuantError) else f"{type(error).__name__}: {text}"


class Race:
    """Arms that are timed in turns.

    Args:
        laps: What to run, by the name of the arm.
    """

    def __init__(self, laps: Mapping[str, Lap]) -> None:
        self.laps = dict(laps)
        self.failed: dict[str, str] = {}
        """Why arms had to leave, by name."""
        self._rounds: list[dict[str, dict[str, float]]] = []

    def run(self, rounds: int, advance: Callable[[int], None], warm_up: int = WARM_UP) -> None:
        """Run; rounds that were whole when this is interrupted count.

        Raises:
            VeloxQuantError: The plain arm fails, without which nothing can be compared.
        """
        order = random.Random(0)
        for number in range(warm_up + rounds):
            names = list(self.laps)
            order.shuffle(names)
            found = {name: lap for name in names if (lap := self._lap(name, number)) is not None}
            if number >= warm_up:
                self._rounds.append(found)
            advance(1)

    def _lap(self, name: str, number: int) -> dict[str, float] | None:
        try:
            return self.laps[name](number)
        except Exception as error:
            if name == PLAIN:
                raise VeloxQuantError(f"{PLAIN}: {reason_of(error)}") from error
            self.failed[name] = reason_of(error)
            del self.laps[name]
            mx.clear_cache()
            return None

    @property
    def rounds(self) -> int:
        """Whole rounds that count."""
        return len(self._rounds)

    def finished(self) -> list[str]:
        """Arms that ran every round, in the order in which they were given; none before the first round."""
        return list(self.laps) if self._rounds else []

    def figures(self, name: str) -> dict[str, Any]:
        """Median and quartiles of an arm's seconds, and of their ratio to the plain arm's, round by round."""
        found: dict[str, Any] = {"rounds": self.rounds}
        for what in self._rounds[0][name]:
            own = [one[name][what] for one in self._rounds]
            plain = [one[PLAIN][what] for one in self._rounds]
            found[what] = statistics.median(own)
            found[f"{what}_quartiles"] = _quartiles(own)
            ratios = [a / b for a, b in zip(own, plain, strict=True)]
            found[f"{what}_ratio"] = statistics.median(ratios)
            found[f"{what}_ratio_quartiles"] = _quartiles(ratios)
            found[f"{what}_over_plain"] = statistics.median(a - b for a, b in zip(own, plain, strict=True))
        return found


def _quartiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, [0.25, 0.75])]
