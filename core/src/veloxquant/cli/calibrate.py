"""``veloxquant calibrate NAME``: let a method learn what it needs to know of a model.

What there is to learn is the method's affair: its distribution names a function in the entry-point group
``veloxquant.calibrations``, whose parameters are the options of the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import typer

from veloxquant.cli.complete import complete_calibration
from veloxquant.cli.output import help_style
from veloxquant.cli.output import open_stdout
from veloxquant.errors import VeloxQuantError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from veloxquant.discovery import Entry

__all__ = ["PASS_ON", "calibrate"]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of the command: what follows the name is for the method, ``--help`` included."""


def calibrate(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help="A method that can be calibrated; its options follow.", autocompletion=complete_calibration
        ),
    ] = None,
) -> Any:
    """Learn what a method needs to know of a model; 'veloxquant calibrate NAME --help' shows its options."""
    from veloxquant.discovery import CALIBRATIONS
    from veloxquant.discovery import discover

    found = discover(group=CALIBRATIONS)
    if name is None or name == "--help":
        names = ", ".join(sorted(found)) or "none is installed"
        open_stdout().print(f"{context.get_help()}\n\nmethods that can be calibrated: {names}", soft_wrap=True)
        return None
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=help_style())
    command.command(name)(_function(name, found))
    return command(context.args, prog_name=f"veloxquant calibrate {name}", standalone_mode=False)


def _function(name: str, found: dict[str, list[tuple[Entry, EntryPoint]]]) -> Any:
    from veloxquant.config import suggest
    from veloxquant.discovery import import_plugin
    from veloxquant.registry import default_registry

    if name in default_registry().blocked:
        raise VeloxQuantError(f"the method '{name}' is blocked; take it out of VELOXQUANT_BLOCK")
    claims = found.get(name, [])
    if not claims:
        known = f"methods that can be: {', '.join(sorted(found))}" if found else "no method that can be is installed"
        raise VeloxQuantError(f"there is no calibration for '{name}'{suggest(name, found)} ({known})")
    if len(claims) > 1:
        names = " and ".join(entry.distribution for entry, _ in claims)
        raise VeloxQuantError(f"{names} both bring a calibration for '{name}'; uninstall one of them")
    return import_plugin(*claims[0])
