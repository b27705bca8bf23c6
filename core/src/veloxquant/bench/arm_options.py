"""From the words of the command line to arms: ``--methods``, ``--set method.key=value`` and ``--arm``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence

import attrs

from veloxquant.bench.arms import Arm
from veloxquant.bench.arms import method_arm
from veloxquant.config import suggest
from veloxquant.discovery import CALIBRATIONS
from veloxquant.discovery import discover
from veloxquant.errors import ConfigError
from veloxquant.errors import VeloxQuantError
from veloxquant.registry import Registry
from veloxquant.registry import default_registry

__all__ = ["Skipped", "chosen_arms", "split_usable"]

# A comma separates options where another key follows it; values may hold commas of their own.
_OPTIONS = re.compile(r",(?=[A-Za-z_][\w.]*=)")


@attrs.frozen
class Skipped:
    """A method that is installed and cannot be measured as things stand.

    Args:
        method: Its name.
        reason: Why, and what to do.
    """

    method: str
    reason: str


def chosen_arms(
    methods: Sequence[str] | None,
    settings: Sequence[str] = (),
    arms: Sequence[str] = (),
    *,
    registry: Registry | None = None,
) -> list[Arm]:
    """The arms that the user chose.

    Args:
        methods: Names of methods, each an arm; None: all that are installed, unless ``arms`` names some.
        settings: Options of these, as ``method.key=value``.
        arms: Further arms, as ``name=method:key=value,key=value``; one method may have several.
        registry: Where to find methods.

    Returns:
        The arms, with distinct names.

    Raises:
        VeloxQuantError: Something in it cannot be used; the message says what.
    """
    registry = registry or default_registry()
    names = [*methods] if methods is not None else [] if arms else registry.names()
    given = _by_method(settings, names)
    found = [method_arm(name, given[name], registry=registry) for name in names]
    found += [_named(text, registry) for text in arms]
    seen: set[str] = set()
    for arm in found:
        if arm.name in seen:
            raise ConfigError(f"two arms are called '{arm.name}'; give one of them another name with --arm NAME=METHOD")
        seen.add(arm.name)
    return found


def split_usable(arms: Iterable[Arm], model: object, *, tolerant: bool) -> tuple[list[Arm], list[Skipped]]:
    """Try to make the caches of every arm, before anything is measured.

    Args:
        arms: The arms.
        model: The model.
        tolerant: Give back what cannot be used instead of raising: the user named no method.

    Returns:
        Arms that can be used, and the others with the reason.

    Raises:
        VeloxQuantError: An arm cannot be used, unless ``tolerant``.
    """
    usable, skipped = [], []
    for arm in arms:
        try:
            arm.make(model)
        except VeloxQuantError as error:
            if not tolerant:
                raise
            skipped.append(Skipped(arm.method, f"{error}{_calibration(arm.method, str(error))}"))
        else:
            usable.append(arm)
    return usable, skipped


def _calibration(method: str, message: str) -> str:
    command = f"veloxquant calibrate {method}"
    if method in discover(group=CALIBRATIONS) and command not in message:
        return f" ('{command} --help' says how to make it)"
    return ""


def _by_method(settings: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {name: [] for name in names}
    for text in settings:
        key, equals, value = text.partition("=")
        method, dot, option = key.strip().partition(".")
        if not (equals and dot and option):
            raise ConfigError(f"write options as --set METHOD.KEY=VALUE, not '{text}'")
        if method not in given:
            known = f" (methods of this run: {', '.join(given)})" if given else ""
            raise ConfigError(f"--set {text} is for no method of this run{suggest(method, given)}{known}")
        given[method].append(f"{option}={value}")
    return given


def _named(text: str, registry: Registry) -> Arm:
    name, equals, rest = text.partition("=")
    method, _, options = rest.partition(":")
    if not (equals and name.strip() and method.strip()):
        raise ConfigError(f"write an arm as --arm NAME=METHOD:KEY=VALUE,KEY=VALUE, not '{text}'")
    pairs = [pair for pair in _OPTIONS.split(options) if pair.strip()]
    return method_arm(method.strip(), pairs, name=name.strip(), registry=registry)
