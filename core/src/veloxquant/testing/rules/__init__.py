"""The rules, one module a topic; each rule is a plain function ``check_<name>(subject)``."""

from __future__ import annotations

from types import ModuleType

from veloxquant.testing.rules import account
from veloxquant.testing.rules import attends
from veloxquant.testing.rules import batches
from veloxquant.testing.rules import chunks
from veloxquant.testing.rules import copies
from veloxquant.testing.rules import files
from veloxquant.testing.rules import kept
from veloxquant.testing.rules import masks
from veloxquant.testing.rules import numerics
from veloxquant.testing.rules import protocol
from veloxquant.testing.rules import returns
from veloxquant.testing.rules import rewinds
from veloxquant.testing.rules import shapes
from veloxquant.testing.rules import states
from veloxquant.testing.rules import stores
from veloxquant.testing.rules import trims
from veloxquant.testing.rules import turns
from veloxquant.testing.rules.applies import Rule

__all__ = ["RULES"]

PREFIX = "check_"

_TOPICS = (
    protocol,
    returns,
    attends,
    masks,
    shapes,
    kept,
    chunks,
    turns,
    rewinds,
    trims,
    copies,
    states,
    files,
    account,
    batches,
    stores,
    numerics,
)


def _rules(module: ModuleType) -> dict[str, Rule]:
    return {name.removeprefix(PREFIX): value for name, value in vars(module).items() if name.startswith(PREFIX)}


RULES: dict[str, Rule] = {name: rule for topic in _TOPICS for name, rule in _rules(topic).items()}
"""Every rule by its name, in the order in which they run."""
