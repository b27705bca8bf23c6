"""``veloxquant new NAME``: write a complete small plugin project to start a method from."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated

import typer

from veloxquant.cli.output import Json
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import write_json
from veloxquant.errors import VeloxQuantError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["EXAMPLE", "new", "project_files"]

EXAMPLE = "sink_window"
"""The method of the templates, and the one that the tutorial builds."""

LONGEST = 24
"""Characters of a name, so that the lines of the project are not too long."""
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_SUFFIX = ".tmpl"


def new(
    name: Annotated[str, typer.Argument(help="Name of the method, for example sink_window.")],
    parent: Annotated[str, typer.Option("--dir", metavar="DIR", help="Folder to write the project folder in.")] = ".",
    as_json: Json = False,
) -> None:
    """Write a plugin project: a small method that works, with its configuration, tests and packaging."""
    _check_name(name)
    folder = _new_folder(parent, name)
    written = project_files(name)
    _write(folder, written)
    if as_json:
        write_json({"method": name, "distribution": folder.name, "folder": str(folder), "files": sorted(written)})
        return
    console = open_stdout()
    console.print(f"wrote {folder}, a method that keeps the first and the latest tokens", soft_wrap=True)
    console.print("in that folder: pip install -e '.[test]' && pytest; then change it into yours", soft_wrap=True)


def project_files(name: str) -> dict[str, str]:
    """The files of a project.

    Args:
        name: Name of the method.

    Returns:
        Content by path, relative to the project's folder.
    """
    words = name.split("_")
    spellings = {
        EXAMPLE: name,
        EXAMPLE.replace("_", "-"): "-".join(words),
        _class_name(EXAMPLE.split("_")): _class_name(words),
    }
    # In one pass, so that what was put in is not read again.
    pattern = re.compile("|".join(map(re.escape, spellings)))

    def renamed(text: str) -> str:
        return pattern.sub(lambda match: spellings[match[0]], text)

    templates = files("veloxquant.cli").joinpath("templates")
    return {renamed(path.removesuffix(_SUFFIX)): renamed(text) for path, text in _texts(templates, "")}


def _class_name(words: list[str]) -> str:
    return "".join(word.capitalize() for word in words)


def _texts(folder: Traversable, place: str) -> Iterator[tuple[str, str]]:
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            yield from _texts(item, f"{place}{item.name}/")
        elif item.name.endswith(_SUFFIX):
            yield f"{place}{item.name}", item.read_text(encoding="utf-8")


def _check_name(name: str) -> None:
    from veloxquant.registry import default_registry

    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        words = re.findall(r"[a-z0-9]+", name.lower())
        better = "_".join(words).lstrip("0123456789_")[:LONGEST].rstrip("_")
        hint = f"; did you mean '{better}'?" if better else ""
        raise VeloxQuantError(
            "a method's name is lower-case letters, digits and single underscores, a letter first, "
            f"{LONGEST} characters at most, not '{name}'{hint}"
        )
    for entry in default_registry().entries():
        if entry.name == name:
            origin = f"{entry.distribution} {entry.version}".rstrip()
            raise VeloxQuantError(f"the method name '{name}' is taken by the installed {origin}; choose another")
    if importlib.util.find_spec(f"veloxquant_{name}") is not None:
        raise VeloxQuantError(f"a Python module veloxquant_{name} is installed already; choose another name")


def _new_folder(parent: str, name: str) -> Path:
    place = Path(parent).expanduser()
    if not place.is_dir():
        raise VeloxQuantError(f"there is no folder '{parent}' to write the project in; make it first")
    folder = place / f"veloxquant-{name.replace('_', '-')}"
    if folder.exists() or folder.is_symlink():
        raise VeloxQuantError(f"{folder} exists already; remove it, or choose another name or --dir")
    return folder


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Write a project whole or not at all."""
    try:
        folder.mkdir()
        try:
            for path, text in texts.items():
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8", newline="\n")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise VeloxQuantError(f"cannot write {folder}: {error.strerror or error}") from error
