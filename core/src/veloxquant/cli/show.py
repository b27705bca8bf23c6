"""``veloxquant show FILE``: what a saved prompt cache holds, with neither a model nor its method at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from typing import Any

import typer

from veloxquant.cli.output import Json
from veloxquant.cli.output import fields
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import table
from veloxquant.cli.output import write_json

__all__ = ["show"]


def show(
    file: Annotated[str, typer.Argument(help="A file that veloxquant.save_prompt_cache wrote.")], as_json: Json = False
) -> None:
    """Show what a saved prompt cache holds; the file is checked, and no plugin is imported."""
    from veloxquant.store import describe_prompt_cache

    path = Path(file).expanduser()
    content = describe_prompt_cache(path)
    record = {
        "file": str(path),
        "bytes": path.stat().st_size,
        **content,
        "methods": _methods(content["layers"]),
    }
    if as_json:
        write_json(record)
    else:
        _show(record)


def _methods(layers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The methods of a file, each with the version that is installed here, or None."""
    from veloxquant.registry import default_registry

    here = {entry.name: entry.version for entry in default_registry().entries()}
    found = {
        (layer["method"], layer["distribution"], layer["version"]) for layer in layers if layer["method"] is not None
    }
    return [
        {"method": method, "distribution": distribution, "version": version, "installed": here.get(method)}
        for method, distribution, version in sorted(found)
    ]


def _show(record: Mapping[str, Any]) -> None:
    console = open_stdout()
    console.print(
        fields(
            {
                "file": record["file"],
                "size": f"{record['bytes']:,} bytes",
                "layers": str(len(record["layers"])),
                **{f"metadata {name}": text for name, text in record["metadata"].items()},
            }
        )
    )
    for method in record["methods"]:
        console.print(_needs(method), soft_wrap=True)
    console.print()
    shown = table("layers", "cache", "tokens", "true queries", "options")
    for numbers, layer in _alike(record["layers"]):
        if layer["method"] is None:
            shown.add_row(numbers, "the model's own", "", "", "")
            continue
        options = ", ".join(f"{name}={_plain(value)}" for name, value in layer["config"].items())
        routed = "yes" if layer["query_mode"] == "routed" else "no"
        shown.add_row(numbers, layer["method"], f"{layer['tokens_seen']:,}", routed, options or "none")
    console.print(shown)


def _needs(method: Mapping[str, Any]) -> str:
    """A line on a method and whether it is here."""
    saved, installed = method["version"], method["installed"]
    origin = f"{method['method']} of {method['distribution']} {saved}".rstrip()
    # The rule by which files are loaded: see veloxquant.state.
    if installed is not None and saved.split(".")[:2] == installed.split(".")[:2]:
        return f"{origin}: installed here" + (f" ({installed})" if installed != saved else "")
    here = "not installed here" if installed is None else f"{installed} is installed here"
    return f"{origin}: {here}; to load the file run: pip install {method['distribution']}=={saved}"


def _alike(layers: Iterable[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Runs of neighbouring layers that differ in nothing but their index, as ``first-last``."""
    runs: list[tuple[int, int, Mapping[str, Any]]] = []
    for index, layer in enumerate(layers):
        shared = {name: value for name, value in layer.items() if name != "index"}
        if runs and runs[-1][2] == shared:
            runs[-1] = (runs[-1][0], index, shared)
        else:
            runs.append((index, index, shared))
    return [(str(first) if first == last else f"{first}-{last}", layer) for first, last, layer in runs]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
