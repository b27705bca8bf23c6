"""``veloxquant doctor``: which plugins cannot be used and why, and what they would run on."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

import attrs
import typer

from veloxquant.cli.output import NO_METHOD
from veloxquant.cli.output import Json
from veloxquant.cli.output import fields
from veloxquant.cli.output import only_json
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import write_json

__all__ = ["doctor"]

_BACK_ENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda")


def doctor(as_json: Json = False) -> None:
    """Load every installed method and report the broken, misnamed, duplicate and blocked ones."""
    from veloxquant.registry import default_registry

    registry = default_registry()
    with only_json(as_json):
        problems = [attrs.asdict(problem) for problem in registry.problems()]
    wrong = {problem["name"] for problem in problems}
    methods = [attrs.asdict(entry) for entry in registry.entries() if entry.name not in wrong]
    record = {"versions": _versions(), "methods": methods, "problems": problems}
    if as_json:
        write_json(record)
    else:
        _show(record)
    if problems:
        raise typer.Exit(1)


def _versions() -> dict[str, str]:
    import mlx.core as mx

    back_ends = sorted(
        {
            f"{dist.name} {dist.version}"
            for dist in importlib.metadata.distributions()
            if (dist.name or "").lower().replace("_", "-").startswith(_BACK_ENDS)
        }
    )
    return {
        "python": f"{platform.python_version()}, {sys.executable}",
        "veloxquant": _version("veloxquant"),
        "mlx": _version("mlx"),
        "mlx-lm": _version("mlx-lm"),
        "back end": ", ".join(back_ends) or "none found",
        "device": mx.default_device().type.name,
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _show(record: dict[str, Any]) -> None:
    console = open_stdout()
    console.print(fields(record["versions"]))
    console.print()
    for problem in record["problems"]:
        origin = f"{problem['distribution']} {problem['version']}".rstrip()
        console.print(f"{problem['kind']}: {problem['name']} of {origin}, {problem['target']}")
        console.print(fields({"": problem["reason"]}))
    names = ", ".join(f"{method['name']} {method['version']}".rstrip() for method in record["methods"])
    if record["problems"]:
        console.print()
        console.print(f"usable: {names or 'none'}")
    elif names:
        console.print(f"all is well; usable: {names}")
    else:
        console.print(f"all is well, but {NO_METHOD}")
