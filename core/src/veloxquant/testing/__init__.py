"""What tests and plugin authors need: the conformance kit, a sample model, a sample text and toy models.

``check_method`` runs the kit without pytest; ``MethodTests`` is the base class of a test file of one method.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from veloxquant.testing.failures import RuleFailure
    from veloxquant.testing.kit import RuleResult
    from veloxquant.testing.kit import check_method
    from veloxquant.testing.kit import rule_names
    from veloxquant.testing.pytest_base import MethodTests
    from veloxquant.testing.subject import Shape
    from veloxquant.testing.subject import Subject
    from veloxquant.testing.subject import make_subject

__all__ = [
    "MethodTests",
    "RuleFailure",
    "RuleResult",
    "Shape",
    "Subject",
    "check_method",
    "make_subject",
    "rule_names",
]

# Resolved at first use: MethodTests needs pytest, and nothing else does.
_LAZY = {
    "MethodTests": "pytest_base",
    "RuleFailure": "failures",
    "RuleResult": "kit",
    "Shape": "subject",
    "Subject": "subject",
    "check_method": "kit",
    "make_subject": "subject",
    "rule_names": "kit",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'veloxquant.testing' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"veloxquant.testing.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
