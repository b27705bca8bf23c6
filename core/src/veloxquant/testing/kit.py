"""Running the rules against a method, and what came of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import attrs

from veloxquant.config import suggest
from veloxquant.errors import VeloxQuantError
from veloxquant.registry import Registry
from veloxquant.testing.failures import RuleFailure
from veloxquant.testing.rules import RULES
from veloxquant.testing.rules.applies import layers_of
from veloxquant.testing.rules.applies import reason_to_skip
from veloxquant.testing.subject import Subject
from veloxquant.testing.subject import make_subject

__all__ = ["Outcome", "RuleResult", "check_method", "rule_names", "run_rule"]

Outcome = Literal["passed", "failed", "not applicable"]


@attrs.frozen
class RuleResult:
    """What came of one rule.

    Args:
        rule: Its name; the function is ``check_<name>``.
        outcome: ``passed``, ``failed`` or ``not applicable``.
        message: What was found, or why the rule does not apply; empty if it passed.
        error: What the rule raised, or None.
    """

    rule: str
    outcome: Outcome
    message: str = ""
    error: BaseException | None = attrs.field(default=None, eq=False, repr=False)


def rule_names() -> list[str]:
    """Names of all rules, in the order in which they run."""
    return list(RULES)


def check_method(
    method: object,
    *,
    config: object = None,
    dense_config: object = None,
    registry: Registry | None = None,
    rules: Collection[str] | None = None,
    tokens: int | None = None,
) -> list[RuleResult]:
    """Hold a method against the cache contract; needs no pytest.

    Args:
        method: Its name, a loaded ``Method``, or a plugin (module or object) that is not installed.
        config: Its options, as for ``get_cache``. Small budgets make a sharper examination.
        dense_config: Options with which it keeps every row as it came, if it has such.
        registry: Where to find it; by default the installed ones.
        rules: Names of the rules to run; by default all.
        tokens: Length of the usual prompt, see ``make_subject``.

    Returns:
        One result a rule, in the order of ``rule_names()``.

    Raises:
        VeloxQuantError: The method or an option is unknown or unusable, or there is no such rule.
    """
    chosen = rule_names() if rules is None else _known(rules)
    subject = make_subject(method, config=config, dense_config=dense_config, registry=registry, tokens=tokens)
    return [run_rule(name, subject) for name in chosen]


def run_rule(name: str, subject: Subject) -> RuleResult:
    """Run one rule in every query mode that the method has, and in every layer that the rule asks for.

    Args:
        name: Name of the rule.
        subject: What is examined.

    Returns:
        ``failed`` if it fails in some mode, ``not applicable`` if it applies in none.
    """
    check = RULES[name]
    skipped = {}
    for mode in subject.modes:
        one = subject.in_mode(mode)
        reason = reason_to_skip(check, one)
        if reason is not None:
            skipped[mode] = reason
            continue
        for index in layers_of(check):
            where = f"in {mode} mode: " if len(subject.modes) > 1 else ""
            where += f"in layer {index}: " if index else ""
            try:
                check(one.in_layer(index))
            except RuleFailure as failure:
                return RuleResult(name, "failed", f"{where}{failure}", failure)
            except Exception as error:  # whatever the method trips over is a finding about it
                return RuleResult(name, "failed", f"{where}{type(error).__name__}: {error}", error)
    if len(skipped) == len(subject.modes):
        return RuleResult(name, "not applicable", "; ".join(dict.fromkeys(skipped.values())))
    return RuleResult(name, "passed")


def _known(rules: Collection[str]) -> list[str]:
    for name in rules:
        if name not in RULES:
            raise VeloxQuantError(f"there is no rule '{name}'{suggest(name, RULES)}")
    return [name for name in RULES if name in rules]
