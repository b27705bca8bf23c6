"""Whether an arm is worth having: against the simplest evictor at its bytes, and mlx-lm's quantized caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from veloxquant.bench.companions import RECENT
from veloxquant.bench.companions import TOP
from veloxquant.bench.records import Result
from veloxquant.bench.spread import mean_difference

__all__ = ["Verdict", "bytes_of", "sentences", "verdicts"]

SAME = 1.02
"""Bytes up to this factor count as the same."""

_WORDS = {"beats": "yes", "level": "level", "loses": "no", "smaller": "n/a"}


@attrs.frozen(kw_only=True)
class Verdict:
    """One arm against one reference, by the mean KL of the same tokens.

    Args:
        arm: Name of the arm.
        reference: Name of the reference.
        kind: ``recent rows``, ``top rows``, or the name of the quantized cache.
        outcome: ``beats``, ``level`` (the difference may be chance), ``loses``, or ``smaller``: the reference holds
            fewer bytes and loses more, so that neither replaces the other.
        bytes_ratio: Bytes of the reference over those of the arm.
        difference: Mean KL of the arm less that of the reference.
        interval: 95-percent interval of the difference.
        arm_kl: Mean KL of the arm.
        reference_kl: Mean KL of the reference.
    """

    arm: str
    reference: str
    kind: str
    outcome: str
    bytes_ratio: float
    difference: float
    interval: tuple[float, float]
    arm_kl: float
    reference_kl: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return attrs.asdict(self)

    @property
    def words(self) -> str:
        """What tables say: the outcome, and the reference's bytes over the arm's."""
        return f"{_WORDS[self.outcome]} ({self.bytes_ratio:.2f})"

    @property
    def told(self) -> bool:
        """Whether it must be said in words: the arm neither beats the reference nor is too unlike it to compare."""
        return self.outcome in ("level", "loses") and self.kind != TOP


def sentences(found: Iterable[Verdict]) -> list[str]:
    """What must be said in words: which arms do not beat which references.

    Args:
        found: What ``verdicts`` gave.

    Returns:
        One sentence for each arm that does not beat all of them.
    """
    words = {"loses": "does not beat", "level": "is not told apart from"}
    clauses: dict[str, list[str]] = {}
    for verdict in found:
        if verdict.told:
            name = "the newest rows" if verdict.kind == RECENT else verdict.reference
            clauses.setdefault(verdict.arm, []).append(
                f"{words[verdict.outcome]} {name} at {verdict.bytes_ratio:.2f} x its bytes (mean KL "
                f"{verdict.arm_kl:.4f} against {verdict.reference_kl:.4f})"
            )
    return [f"{arm} {'; '.join(parts)}" for arm, parts in clauses.items()]


def bytes_of(result: Result) -> int:
    """Bytes that count: the mean of those right after the prompt and at the end."""
    figures = result.figures
    return (int(figures["after_prompt"]["bytes_total"]) + int(figures["at_end"]["bytes_total"])) // 2


def verdicts(results: Iterable[Result]) -> list[Verdict]:
    """Compare every method and peer of a run with the references that were measured.

    Args:
        results: Results of kind ``quality`` of one run.
    """
    results = [result for result in results if result.kind == "quality"]
    common = [result for result in results if result.method == "QuantizedKVCache"]
    found = []
    for arm in results:
        if arm.role == "reference":
            continue
        beside = [result for result in results if result.figures.get("beside") == arm.arm]
        found += [_verdict(arm, reference) for reference in (*beside, *common)]
    return found


def _verdict(arm: Result, reference: Result) -> Verdict:
    difference, low, high = mean_difference(arm.figures["kl"], reference.figures["kl"])
    ratio = bytes_of(reference) / max(1, bytes_of(arm))
    outcome = "beats" if high < 0 else "loses" if low > 0 else "level"
    if outcome == "beats" and ratio < 1 / SAME and reference.method not in (RECENT, TOP):
        outcome = "smaller"
    return Verdict(
        arm=arm.arm,
        reference=reference.arm,
        kind=reference.method if reference.method in (RECENT, TOP) else reference.arm,
        outcome=outcome,
        bytes_ratio=ratio,
        difference=difference,
        interval=(low, high),
        arm_kl=arm.figures["mean_kl"],
        reference_kl=reference.figures["mean_kl"],
    )
