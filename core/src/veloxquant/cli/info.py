"""``veloxquant info NAME``: what one method says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import attrs
import typer

from veloxquant.cli.complete import complete_method
from veloxquant.cli.output import Json
from veloxquant.cli.output import fields
from veloxquant.cli.output import only_json
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import table
from veloxquant.cli.output import write_json

if TYPE_CHECKING:
    from veloxquant.config import Option
    from veloxquant.method import Method

__all__ = ["info"]


def info(
    name: Annotated[str, typer.Argument(help="A name that 'veloxquant list' shows.", autocompletion=complete_method)],
    as_json: Json = False,
) -> None:
    """Show a method's summary, paper, query modes and options, and a command to try it."""
    from veloxquant.registry import default_registry

    with only_json(as_json):
        record = _describe(default_registry().get(name))
    if as_json:
        write_json(record)
    else:
        _show(record)


def _describe(method: Method) -> dict[str, Any]:
    from veloxquant.config import describe_options

    modes = method.query_modes
    return {
        "name": method.name,
        "distribution": method.distribution,
        "version": method.version,
        "summary": method.info.summary,
        "kind": method.info.kind,
        "paper": method.info.paper,
        "needs": list(method.info.needs),
        "query_modes": list(modes),
        "trimmable": {mode: method.trimmable(mode) for mode in modes} or {"none": method.trimmable(None)},
        "options": [attrs.asdict(option) for option in describe_options(method.info.config)],
        "examples": _examples(method.name, describe_options(method.info.config)),
    }


def _examples(name: str, options: list[Option]) -> list[str]:
    """Commands to copy: what makes the files that options name, and a generation with the options of examples."""
    from veloxquant.discovery import CALIBRATIONS
    from veloxquant.discovery import discover

    shown = " ".join(f"--set {option.name}={option.example}" for option in options if option.example is not None)
    files = [option.example for option in options if option.calibrated and name in discover(group=CALIBRATIONS)]
    calibration = [f"veloxquant calibrate {name} -o {file}" for file in files]
    return [*calibration, " ".join(f"veloxquant generate --method {name} {shown} --compare".split())]


def _show(record: dict[str, Any]) -> None:
    console = open_stdout()
    console.print(f"{record['name']}: {record['summary']}")
    trimmable = {mode: "yes" if answer else "no" for mode, answer in record["trimmable"].items()}
    rows = {
        "kind": record["kind"],
        "paper": record["paper"] or "none",
        "needs": ", ".join(record["needs"]),
        "query modes": ", ".join(record["query_modes"]) or "none: it looks at no queries",
        "trimmable": ", ".join(
            trimmable[mode] if mode == "none" else f"{mode}: {trimmable[mode]}" for mode in trimmable
        ),
        "installed": f"{record['distribution']} {record['version']}".rstrip(),
    }
    console.print(fields({name: value for name, value in rows.items() if value}))
    _show_options(record["options"])
    console.print("\nto try it:")
    for line in record["examples"]:
        console.print(f"  {line}", soft_wrap=True)


def _show_options(options: list[dict[str, Any]]) -> None:
    console = open_stdout()
    if not options:
        console.print("\nno options")
        return
    console.print("\noptions (--set option=value):")
    shown = table("option", "type", "default", "meaning")
    for option in options:
        shown.add_row(option["name"], option["type"], option["default"], option["help"])
    console.print(shown)
