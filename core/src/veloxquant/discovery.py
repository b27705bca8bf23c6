"""Which methods the installed distributions announce, without importing any of them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint

import attrs

from veloxquant.errors import PluginError

__all__ = ["CALIBRATIONS", "GROUP", "Entry", "Unreadable", "discover", "import_plugin", "installed"]

GROUP = "veloxquant.methods"

CALIBRATIONS = "veloxquant.calibrations"
"""Entry points of functions behind ``veloxquant calibrate``, each under the name of its method."""


@attrs.frozen
class Entry:
    """A method as its distribution announces it; nothing of it has been imported.

    Args:
        name: Name of the method.
        distribution: Distribution that brings it, or ``(registered)`` for plugins given as objects.
        version: Version of the distribution.
        target: Module, or module and attribute, that the entry point names.
    """

    name: str
    distribution: str
    version: str
    target: str


@attrs.frozen
class Unreadable:
    """A distribution whose metadata cannot be read.

    Args:
        place: Its folder.
        reason: What reading it led to.
    """

    place: str
    reason: str


def discover(
    given: Iterable[EntryPoint] | None = None, group: str = GROUP
) -> dict[str, list[tuple[Entry, EntryPoint]]]:
    """Find entry points by name.

    Args:
        given: Entry points to use instead of the installed ones.
        group: The group of installed ones to look at.

    Returns:
        For each name its entry points in the order of their distributions, whatever the file system's order; one
        that is listed twice, as editable installs do, counts once.
    """
    points = installed(group)[0] if given is None else given
    unique: dict[tuple[str, str, str], tuple[Entry, EntryPoint]] = {}
    for point in points:
        entry = _entry(point)
        key = (entry.name, _normalized(entry.distribution), entry.target)
        unique.setdefault(key, (entry, point))
    found: dict[str, list[tuple[Entry, EntryPoint]]] = {}
    for key in sorted(unique):
        found.setdefault(key[0], []).append(unique[key])
    return found


def installed(group: str = GROUP) -> tuple[list[EntryPoint], list[Unreadable]]:
    """The entry points of a group, distribution by distribution, and the distributions that cannot be read.

    One distribution with a damaged file must not hide all others, so they are not asked for all at once.
    """
    points: list[EntryPoint] = []
    unreadable: list[Unreadable] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            name = _normalized(distribution.metadata["Name"] or str(distribution.locate_file("")))
            # The first on the path is the one that is imported.
            if name in seen:
                continue
            points += [point for point in distribution.entry_points if point.group == group]
            seen.add(name)
        except Exception as error:  # whatever a damaged file leads to
            where = getattr(distribution, "_path", None) or "a distribution of unknown place"
            unreadable.append(Unreadable(str(where), f"{type(error).__name__}: {error}"))
    return points, unreadable


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _entry(point: EntryPoint) -> Entry:
    dist = point.dist
    if dist is None:
        return Entry(point.name, "(unknown distribution)", "", point.value)
    return Entry(point.name, dist.metadata["Name"] or "(unnamed)", dist.version or "", point.value)


def import_plugin(entry: Entry, point: EntryPoint) -> object:
    """Import what an entry point names.

    Raises:
        PluginError: It cannot be imported; the cause is chained.
    """
    if point.pattern.match(point.value) is None:
        raise PluginError(
            f"the plugin '{entry.name}' of {entry.distribution} {entry.version} has the target '{entry.target}', which "
            f"is neither module nor module:attribute; update or uninstall {entry.distribution}"
        )
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin that calls sys.exit() at import must not end the program
        raise PluginError(
            f"the plugin '{entry.name}' of {entry.distribution} {entry.version} ({entry.target}) cannot be imported: "
            f"{type(error).__name__}: {error}; update or uninstall {entry.distribution}"
        ) from error
