"""``veloxquant list``: what is installed, from the metadata of the distributions alone."""

from __future__ import annotations

import collections

from veloxquant.cli.output import NO_METHOD
from veloxquant.cli.output import Json
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import table
from veloxquant.cli.output import write_json

__all__ = ["list_methods"]


def list_methods(as_json: Json = False) -> None:
    """List the installed methods; none of them is imported."""
    from veloxquant.registry import default_registry

    registry = default_registry()
    entries = registry.entries()
    claims = collections.Counter(entry.name for entry in entries)

    def state(name: str) -> str:
        return "blocked" if name in registry.blocked else "duplicate" if claims[name] > 1 else "installed"

    if as_json:
        write_json(
            [
                {"name": e.name, "distribution": e.distribution, "version": e.version, "state": state(e.name)}
                for e in entries
            ]
        )
        return
    if not entries:
        open_stdout().print(NO_METHOD, soft_wrap=True)
        return
    shown = table("method", "distribution", "version", "state")
    for entry in entries:
        shown.add_row(entry.name, entry.distribution, entry.version, state(entry.name))
    open_stdout().print(shown)
