"""When a rule applies: decided by the hooks that a method implements, and by nothing that it claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from veloxquant.registry import default_registry
from veloxquant.threads import threads_compute

if TYPE_CHECKING:
    from veloxquant.testing.subject import Subject

__all__ = [
    "Condition",
    "Rule",
    "dense",
    "evicting",
    "finishing",
    "in_layers",
    "installed",
    "layers_of",
    "once",
    "reason_to_skip",
    "returning_all",
    "routed",
    "sinks",
    "storing",
    "threaded",
    "trimmable",
    "when",
]

Rule = Callable[["Subject"], None]
Condition = Callable[["Subject"], str | None]
"""Gives the reason why a rule does not apply, or None if it does."""

_CONDITIONS = "_veloxquant_conditions"
_LAYERS = "_veloxquant_layers"


def when(*conditions: Condition) -> Callable[[Rule], Rule]:
    """Let a rule apply only where every condition holds."""

    def mark(rule: Rule) -> Rule:
        setattr(rule, _CONDITIONS, conditions)
        return rule

    return mark


def reason_to_skip(rule: Rule, subject: Subject) -> str | None:
    """Why a rule does not apply to a subject, or None if it does."""
    conditions: tuple[Any, ...] = getattr(rule, _CONDITIONS, ())
    return next((reason for condition in conditions if (reason := condition(subject)) is not None), None)


def in_layers(*indices: int) -> Callable[[Rule], Rule]:
    """Run a rule in several layers, for methods that treat layers differently; without it, in layer 0."""

    def mark(rule: Rule) -> Rule:
        setattr(rule, _LAYERS, indices)
        return rule

    return mark


def layers_of(rule: Rule) -> tuple[int, ...]:
    """The layers in which a rule runs."""
    layers: tuple[int, ...] = getattr(rule, _LAYERS, (0,))
    return layers


def trimmable(subject: Subject) -> str | None:
    """The caches can be trimmed."""
    if subject.method.ops.trim is None:
        return "the method has no trim hook"
    return None if subject.trimmable else "evicting caches without true queries are not trimmable"


def routed(subject: Subject) -> str | None:
    """The caches get true queries."""
    if subject.method.ops.attend is None:
        return "the method has no attend hook"
    return None if subject.routed else "there are no true queries"


def returning_all(subject: Subject) -> str | None:
    """A step gets back every row held; only a sparse method without an attention of its own returns fewer."""
    if subject.method.info.kind == "sparse" and not subject.routed:
        return "in proxy mode a sparse method returns the rows that it chose, so those held cannot be told from them"
    return None


def evicting(subject: Subject) -> str | None:
    """The method drops rows for good."""
    return None if subject.evicts else "the method does not evict"


def finishing(subject: Subject) -> str | None:
    """The method learns when the prompt ends."""
    return "the method has no finish_prompt hook" if subject.method.ops.finish_prompt is None else None


def dense(subject: Subject) -> str | None:
    """A config is known that keeps everything."""
    return "no dense_config was given" if subject.dense_config is None else None


def sinks(subject: Subject) -> str | None:
    """The config promises to keep the first tokens."""
    count = getattr(subject.config, "sinks", None)
    if not isinstance(count, int) or isinstance(count, bool):
        return "the config has no option 'sinks'"
    return None if count > 0 else "the config keeps no sinks"


def storing(subject: Subject) -> str | None:
    """The method lends its row store to others."""
    return "the method has no rows hook" if subject.method.ops.rows is None else None


def threaded(subject: Subject) -> str | None:
    """Threads may compute at once."""
    return None if threads_compute() else "on CUDA MLX ends a process in which several threads compute at once"


def installed(subject: Subject) -> str | None:
    """Other processes, and mlx-lm, which knows no registry, find the method."""
    if subject.registry is default_registry() and subject.method.version:
        return None
    return "the method is not installed, so another process cannot find it"


def once(subject: Subject) -> str | None:
    """The rule looks at all query modes by itself, or at none."""
    return None if subject.mode == subject.modes[0] else "checked in the first mode"
