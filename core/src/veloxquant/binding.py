"""Hooks of one method, resolved once into plain callables.

A call through ``pm.hook`` costs about a microsecond and grows with every installed method, and plain ``pm.hook``
lets the last registered method answer for another one's state. So a method's hooks are looked up once and called
directly; only when an observer wraps a hook does the call go through pluggy, restricted to this method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

import attrs
import pluggy

from veloxquant import hookspecs
from veloxquant.errors import PluginError

if TYPE_CHECKING:
    from pluggy import HookImpl

__all__ = ["OPTIONAL", "Ops", "bind", "new_manager"]

PREFIX = "veloxquant_"

OPTIONAL = frozenset({"attend", "finish_prompt", "trim", "rows", "step", "unread"})
"""Hooks that a method may leave out."""

Hook = Callable[..., Any]


@attrs.frozen(kw_only=True, eq=False)
class Ops:
    """The hooks of one method, called with positional arguments in the order of the specification.

    Caches of the method share one instance; copies of a cache do too.
    """

    method: Hook
    create: Hook
    prefill: Hook
    decode: Hook
    account: Hook
    serialize: Hook
    restore: Hook
    attend: Hook | None = None
    finish_prompt: Hook | None = None
    trim: Hook | None = None
    rows: Hook | None = None
    step: Hook | None = None
    unread: Hook | None = None

    def __deepcopy__(self, memo: object) -> Ops:
        return self


def new_manager() -> pluggy.PluginManager:
    """Make a plugin manager that knows the hooks and nothing else."""
    manager = pluggy.PluginManager("veloxquant")
    manager.add_hookspecs(hookspecs)
    return manager


def bind(manager: pluggy.PluginManager, name: str) -> Ops:
    """Resolve the hooks of the plugin registered under ``name``.

    Args:
        manager: The manager that the plugin is registered with.
        name: Its name there.

    Returns:
        The bound callables; optional hooks that it lacks are None.

    Raises:
        PluginError: A hook that every method needs is missing, or one is marked as a wrapper.
    """
    found: dict[str, Hook] = {}
    for field in attrs.fields(Ops):
        caller = getattr(manager.hook, PREFIX + field.name)
        if any(impl.plugin_name == name and _wraps(impl) for impl in caller.get_hookimpls()):
            raise PluginError(
                f"the plugin marks {caller.name} with wrapper=True, which would run around every other method's too; "
                "mark it with a plain hookimpl (observers go through Registry.observe)"
            )
        implementation = _implementation(caller, name)
        if implementation is not None:
            found[field.name] = _callable(caller, implementation)
    missing = [PREFIX + f.name for f in attrs.fields(Ops) if f.name not in found and f.name not in OPTIONAL]
    if missing:
        raise PluginError(
            f"the plugin lacks {', '.join(missing)}; every method needs these, each marked with veloxquant.hookimpl"
        )
    return Ops(**found)


def _implementation(caller: pluggy.HookCaller, name: str) -> HookImpl | None:
    return next((impl for impl in caller.get_hookimpls() if impl.plugin_name == name and not _wraps(impl)), None)


def _wraps(impl: HookImpl) -> bool:
    return impl.wrapper or impl.hookwrapper


def _callable(caller: pluggy.HookCaller, impl: HookImpl) -> Hook:
    """The implementation itself where its arguments are those of the specification, else a thin adapter."""
    assert caller.spec is not None  # every field of Ops has a specification
    arguments = tuple(caller.spec.argnames)
    if any(_wraps(other) for other in caller.get_hookimpls()):
        return _through_pluggy(caller, impl, arguments)
    if tuple(impl.argnames) == arguments:
        return impl.function
    places = [arguments.index(argument) for argument in impl.argnames]
    function = impl.function

    def adapted(*args: Any) -> Any:
        return function(*[args[place] for place in places])

    return adapted


def _through_pluggy(caller: pluggy.HookCaller, impl: HookImpl, arguments: tuple[str, ...]) -> Hook:
    """A caller that runs this implementation inside the wrappers of observers, and no other method's."""
    # A manager of its own: a subset of the shared one is looked up anew in every call, so that a method loaded
    # later would answer, and observers would come and go under caches that are in use.
    own = new_manager()
    for other in caller.get_hookimpls():
        if (other is impl or _wraps(other)) and not own.is_registered(other.plugin):
            own.register(other.plugin, other.plugin_name)
    hook = getattr(own.hook, caller.name)

    def observed(*args: Any) -> Any:
        return hook(**dict(zip(arguments, args, strict=True)))

    return observed
