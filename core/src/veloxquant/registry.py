"""Finding methods: names at once and without importing anything, one plugin when it is asked for."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING
from typing import Any
from typing import Literal

import attrs
import pluggy

from veloxquant.binding import bind
from veloxquant.binding import new_manager
from veloxquant.config import suggest
from veloxquant.discovery import Entry
from veloxquant.discovery import discover
from veloxquant.discovery import import_plugin
from veloxquant.discovery import installed
from veloxquant.errors import PluginError
from veloxquant.errors import UnknownMethodError
from veloxquant.method import Method
from veloxquant.method import MisnamedError
from veloxquant.method import checked_info

if TYPE_CHECKING:
    pass

__all__ = ["BLOCK_VARIABLE", "Method", "Problem", "Registry", "default_registry"]

BLOCK_VARIABLE = "VELOXQUANT_BLOCK"

# Advice for the methods of this project only: what to install when a name is asked for that is not there.
_ADVICE = {name: f"veloxquant-{name.replace('_', '-')}" for name in ("snapkv", "rocketkv", "a2ats", "turboquant_rvq")}


@attrs.frozen
class Problem:
    """One plugin that cannot be used, for ``veloxquant doctor``."""

    name: str
    distribution: str
    version: str
    target: str
    kind: Literal["broken", "misnamed", "duplicate", "blocked", "unreadable"]
    reason: str


class Registry:
    """The methods that are installed, each loaded when it is first asked for.

    Args:
        entry_points: Where to look instead of the installed distributions.
        blocked: Names that must not be loaded; by default those in the environment variable VELOXQUANT_BLOCK.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None, blocked: Iterable[str] | None = None) -> None:
        self._given = None if entry_points is None else list(entry_points)
        self._blocked = None if blocked is None else frozenset(blocked)
        self._manager = new_manager()
        self._loaded: dict[str, Method] = {}
        self._registered: dict[str, Entry] = {}
        self._lock = threading.RLock()

    # ---------------------------------------------------------------- names

    @functools.cached_property
    def _found(self) -> dict[str, list[tuple[Entry, EntryPoint]]]:
        return discover(self._given)

    @property
    def blocked(self) -> frozenset[str]:
        """Names that are not loaded."""
        if self._blocked is not None:
            return self._blocked
        return frozenset(filter(None, (name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(","))))

    def entries(self) -> list[Entry]:
        """Every announced method, ordered by name; nothing is imported."""
        found = [entry for entries in self._found.values() for entry, _ in entries]
        return sorted([*found, *self._registered.values()], key=lambda entry: (entry.name, entry.distribution))

    def names(self) -> list[str]:
        """Names of the methods that are not blocked, in order; nothing is imported."""
        return sorted({entry.name for entry in self.entries()} - self.blocked)

    # -------------------------------------------------------------- loading

    def get(self, name: str) -> Method:
        """Load a method, or hand out the one loaded before.

        Args:
            name: Name of the method.

        Returns:
            The method with its hooks bound.

        Raises:
            UnknownMethodError: No distribution announces the name.
            PluginError: The plugin is blocked, broken, misnamed, or two distributions claim its name.
        """
        if not isinstance(name, str):
            raise UnknownMethodError(f"a method is named by a text, not by {name!r}")
        with self._lock:
            if name in self._loaded and name not in self.blocked:
                return self._loaded[name]
            entry, point = self._choose(name)
            method = self._load(entry, lambda: import_plugin(entry, point))
            self._loaded[name] = method
            return method

    def register(self, plugin: object, name: str | None = None) -> Method:
        """Add a method that is not installed, such as one under development.

        Args:
            plugin: A module or an object with the hooks.
            name: Its name; by default what its ``veloxquant_method`` hook says.

        Returns:
            The method with its hooks bound.

        Raises:
            PluginError: The plugin is broken, or its name is taken.
        """
        with self._lock:
            target = getattr(plugin, "__name__", type(plugin).__name__)
            name = name or _announced_name(plugin, target)
            if name in self._found or name in self._registered:
                raise PluginError(f"the method name '{name}' is taken; give the plugin {target} another one")
            entry = Entry(name, "(registered)", "", target)
            method = self._load(entry, lambda: plugin)
            self._registered[name], self._loaded[name] = entry, method
            return method

    def observe(self, plugin: object) -> None:
        """Run the wrappers of ``plugin`` around the hooks of every method, in caches made from now on.

        Args:
            plugin: An object with ``hookimpl(wrapper=True)`` functions.

        Raises:
            PluginError: It names a hook or an argument that does not exist, or implements a hook without wrapping it.
        """
        with self._lock:
            _register(self._manager, plugin, None, f"the observer {plugin!r}")
            for caller in self._manager.get_hookcallers(plugin) or ():
                if any(i.plugin is plugin and not (i.wrapper or i.hookwrapper) for i in caller.get_hookimpls()):
                    self._manager.unregister(plugin)
                    raise PluginError(f"the observer {plugin!r} must mark {caller.name} with hookimpl(wrapper=True)")
            self._rebind()

    def unobserve(self, plugin: object) -> None:
        """Take an observer out again; caches made while it was there keep it."""
        with self._lock:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
                self._rebind()

    def _rebind(self) -> None:
        for name, method in self._loaded.items():
            self._loaded[name] = attrs.evolve(method, ops=bind(self._manager, name))

    def _choose(self, name: str) -> tuple[Entry, EntryPoint]:
        if name in self.blocked and (name in self._found or name in self._registered):
            raise PluginError(f"the method '{name}' is blocked by {BLOCK_VARIABLE}; take it out of that list to use it")
        candidates = self._found.get(name, [])
        if not candidates:
            raise UnknownMethodError(self._unknown(name))
        if len(candidates) > 1:
            claims = " and ".join(f"{e.distribution} {e.version} ({e.target})" for e, _ in candidates)
            raise PluginError(f"two plugins claim the method name '{name}': {claims}; uninstall one of them")
        return candidates[0]

    def _unknown(self, name: str) -> str:
        names = self.names()
        installed = f"installed: {', '.join(names)}" if names else "no method is installed"
        if name in _ADVICE:
            return (
                f"the method '{name}' is not installed; run: pip install {_ADVICE[name]}, or in a checkout: "
                f"pip install ./plugins/{name} ({installed})"
            )
        hint = suggest(str(name), [*names, *_ADVICE])
        return (
            f"there is no method '{name}'{hint} ({installed}; more with pip install veloxquant-NAME, "
            "'veloxquant doctor' lists broken plugins)"
        )

    def _load(self, entry: Entry, load: Callable[[], object]) -> Method:
        """Import, register, check and bind one plugin; on any failure the registry is as before."""
        origin = f"the plugin '{entry.name}' of {entry.distribution} {entry.version}".rstrip() + f" ({entry.target})"
        plugin = load()
        _register(self._manager, plugin, entry.name, origin)
        try:
            ops = bind(self._manager, entry.name)
            info = checked_info(ops, entry, origin)
        except PluginError as error:
            self._manager.unregister(plugin)
            message = str(error)
            raise type(error)(message if message.startswith(origin) else f"{origin}: {message}") from error
        return Method(info, ops, entry.distribution, entry.version)

    # --------------------------------------------------------------- doctor

    def problems(self) -> list[Problem]:
        """Load every method and say what is wrong, for ``veloxquant doctor``."""
        result = [] if self._given is not None else [
            Problem(
                "(any)", item.place, "", "", "unreadable",
                f"the metadata in {item.place} cannot be read, so methods in it are not found: {item.reason}; "
                "reinstall or remove that distribution",
            )
            for item in installed()[1]
        ]  # fmt: skip
        for name in sorted(self._found):
            entries = [entry for entry, _ in self._found[name]]
            try:
                self.get(name)
            except PluginError as error:
                kind = self._kind(name, error)
                cause = _cause(error)
                reason = str(error) if cause is None or cause in str(error) else f"{error} [{cause}]"
                result += [Problem(e.name, e.distribution, e.version, e.target, kind, reason) for e in entries]
        return result

    def _kind(self, name: str, error: PluginError) -> Literal["broken", "misnamed", "duplicate", "blocked"]:
        if name in self.blocked:
            return "blocked"
        if len(self._found[name]) > 1:
            return "duplicate"
        return "misnamed" if isinstance(error, MisnamedError) else "broken"


def _register(manager: pluggy.PluginManager, plugin: object, name: str | None, origin: str) -> None:
    if plugin is None:
        raise PluginError(f"{origin} is None where a module or an object with hooks is needed")
    here_before = True
    try:
        hash(plugin)  # pluggy keeps plugins in sets
        here_before = manager.is_registered(plugin)
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError, TypeError) as error:
        # pluggy 1.6 leaves a plugin half registered when one of its hooks does not fit.
        if not here_before and manager.is_registered(plugin):
            manager.unregister(plugin)
        raise PluginError(f"{origin} does not fit the hooks of veloxquant: {error}") from error


def _announced_name(plugin: Any, target: str) -> str:
    try:
        return str(plugin.veloxquant_method().name)
    except Exception as error:
        raise PluginError(f"the plugin {target} cannot be asked for its name: {error}") from error


def _cause(error: BaseException) -> str | None:
    """The first cause of an error, unless our own sentence says it already."""
    while error.__cause__ is not None:
        error = error.__cause__
    return None if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"


@functools.cache
def default_registry() -> Registry:
    """The registry of the installed distributions, made at first use and shared by the process."""
    return Registry()
