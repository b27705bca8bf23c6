"""A loaded method: what it says of itself, checked, and its bound hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import attrs

from veloxquant.binding import Ops
from veloxquant.errors import PluginError
from veloxquant.hooks import PROTOCOL
from veloxquant.types import MethodInfo

if TYPE_CHECKING:
    from veloxquant.discovery import Entry
    from veloxquant.types import Need
    from veloxquant.types import QueryMode

__all__ = ["Method", "MisnamedError", "checked_info"]


class MisnamedError(PluginError):
    """The entry point and the plugin disagree on the method's name."""


@attrs.frozen(eq=False)
class Method:
    """A loaded method: what it says of itself and its bound hooks."""

    info: MethodInfo
    ops: Ops
    distribution: str
    version: str

    @property
    def name(self) -> str:
        """The name users type."""
        return self.info.name

    @property
    def query_modes(self) -> tuple[QueryMode, ...]:
        """The query modes it can run in; empty for a method that needs no queries at all."""
        if self.ops.attend is None:
            return ()
        return ("routed",) if "queries" in self.info.needs else ("routed", "proxy")

    def needs(self, config: Any) -> frozenset[Need]:
        """What it cannot do without when run with these options: its own needs, and those that the options name."""
        return frozenset((*self.info.needs, *getattr(config, "needs", ())))

    def evicts(self, config: Any = None) -> bool:
        """Whether prompt rows are dropped for good when run with these options; with None, whether they may be."""
        return self.info.evicts and bool(getattr(config, "evicts", True))

    def exact_rows(self, config: Any) -> int:
        """How many of the newest rows are attended to as they came and left as codes later, with these options."""
        return 0 if self.info.exact_rows is None else int(getattr(config, self.info.exact_rows))

    def trimmable(self, mode: QueryMode | None, config: Any = None) -> bool:
        """Whether caches in this query mode can be trimmed, whatever the options or with these."""
        return self.ops.trim is not None and not (self.evicts(config) and mode != "routed")

    def __deepcopy__(self, memo: object) -> Method:
        return self


def checked_info(ops: Ops, entry: Entry, origin: str) -> MethodInfo:
    """Ask a plugin what it is.

    Args:
        ops: Its bound hooks.
        entry: How it was announced.
        origin: Plugin, distribution and target, for messages.

    Raises:
        PluginError: The answer is missing, of another name or protocol, or does not hold together.
    """
    try:
        info = ops.method()
    except Exception as error:
        raise PluginError(f"{origin}: veloxquant_method failed: {type(error).__name__}: {error}") from error
    if not isinstance(info, MethodInfo):
        raise PluginError(f"{origin}: veloxquant_method must return a MethodInfo, not {type(info).__name__}")
    if info.name != entry.name:
        raise MisnamedError(f"{origin} calls itself '{info.name}'; entry point and method must carry one name")
    if info.protocol != PROTOCOL:
        raise PluginError(
            f"{origin} was written for hook protocol {info.protocol}, this veloxquant speaks {PROTOCOL}; "
            f"update {'veloxquant' if info.protocol > PROTOCOL else entry.distribution}"
        )
    if not attrs.has(info.config):
        raise PluginError(f"{origin}: the config must be an attrs class, {info.config.__name__} is not")
    for field in ("prompt_window", "exact_rows"):
        name = getattr(info, field)
        if name is not None and not _has(info.config, name):
            raise PluginError(f"{origin}: {field} names '{name}', which is no option or property of the config")
    return info


def _has(config: type, name: str) -> bool:
    """Whether instances of a config class have an option or a property of this name."""
    return name in attrs.fields_dict(config) or isinstance(getattr(config, name, None), property)
