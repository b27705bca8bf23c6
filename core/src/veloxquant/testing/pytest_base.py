"""The conformance kit as a pytest class: one test id a rule."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from typing import ClassVar

import pytest

from veloxquant.registry import Registry
from veloxquant.testing.kit import rule_names
from veloxquant.testing.kit import run_rule
from veloxquant.testing.subject import Subject
from veloxquant.testing.subject import make_subject

__all__ = ["MethodTests"]


@functools.cache
def _subject(kind: Any) -> Subject:
    """The method of a test class, prepared once for all rules."""
    return make_subject(
        kind.method,
        config=kind.config,
        dense_config=kind.dense_config,
        registry=kind.registry,
        tokens=kind.tokens,
    )


class MethodTests:
    """Hold one method against the cache contract; derive a class whose name begins with ``Test``.

    Attributes:
        method: Its name, a loaded ``Method``, or a plugin that is not installed.
        config: Its options. Small budgets make a sharper examination.
        dense_config: Options with which it keeps every row as it came, if it has such.
        registry: Where to find it; by default the installed ones.
        tokens: Length of the usual prompt, see ``make_subject``.
        expected_failures: Rules that the method breaks on purpose, each with the reason. A rule in it that
            passes, or does not apply, fails the test.
    """

    method: ClassVar[Any]
    config: ClassVar[Any] = None
    dense_config: ClassVar[Any] = None
    registry: ClassVar[Registry | None] = None
    tokens: ClassVar[int | None] = None
    expected_failures: ClassVar[Mapping[str, str]] = {}

    @pytest.mark.parametrize("rule", rule_names())
    def test_rule(self, rule: str) -> None:
        """The method keeps the rule, or breaks it with a reason."""
        kind: Any = type(self)
        result = run_rule(rule, _subject(kind))
        reason = self.expected_failures.get(rule)
        if reason is not None:
            if result.outcome == "failed":
                pytest.xfail(f"{reason} ({result.message})")
            pytest.fail(f"{rule} was expected to fail ({reason}) and has {result.outcome}; take it out of the list")
        if result.outcome == "not applicable":
            pytest.skip(result.message)
        if result.outcome == "failed":
            raise AssertionError(result.message) from result.error

    def test_expected_failures_name_rules(self) -> None:
        """Every expected failure names a rule and gives a reason."""
        unknown = sorted(set(self.expected_failures) - set(rule_names()))
        assert not unknown, f"no such rules: {', '.join(unknown)}"
        assert all(reason.strip() for reason in self.expected_failures.values())
