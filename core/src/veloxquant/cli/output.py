"""How commands write: tables and JSON to stdout, errors and progress to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Annotated
from typing import Any
from typing import Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = [
    "NO_METHOD",
    "Json",
    "animated",
    "fields",
    "help_style",
    "only_json",
    "open_stderr",
    "open_stdout",
    "printable",
    "say_error",
    "table",
    "write_json",
]

NO_METHOD = "no method is installed; for example: pip install veloxquant-snapkv, or in a checkout: ./plugins/snapkv"
"""What is said where methods would be listed."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
"""The option ``--json`` of every command."""


def open_stdout() -> Console:
    """A console on stdout that shows texts as they are, brackets included."""
    return _console()


def open_stderr() -> Console:
    """The same on stderr."""
    return _console(stderr=True)


def animated() -> bool:
    """Whether progress on stderr may move; in a log, or where NO_COLOR asks for plain text, it is lines."""
    # Not rich's own guess, which FORCE_COLOR overrules: an animation in a log file helps nobody.
    return sys.stderr.isatty() and not _no_color() and not open_stderr().is_dumb_terminal


def help_style() -> Literal["rich"] | None:
    """How typer writes help: with frames and colours on a terminal, as plain text elsewhere."""
    return "rich" if open_stdout().color_system else None


def _console(*, stderr: bool = False) -> Console:
    # rich drops colours for NO_COLOR and keeps bold and dim; plain text has none of them.
    system: Literal["auto"] | None = None if _no_color() else "auto"
    return Console(stderr=stderr, color_system=system, markup=False, highlight=False, emoji=False)


def _no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))


def say_error(message: str) -> None:
    """Write one line on stderr, whatever line breaks the message has."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


def write_json(value: Any) -> None:
    """Write a value on stdout."""
    print(json.dumps(value, indent=2))


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """Send what plugins and libraries print to stderr while JSON is wanted on stdout."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def table(*columns: str, right: bool = False, caption: str | None = None) -> Table:
    """A table with these headings.

    Args:
        columns: Headings.
        right: Align all columns but the first to the right, for numbers.
        caption: Text under the table.
    """
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption, caption_justify="left")
    for index, heading in enumerate(columns):
        # Names and figures are useless when cut; running text folds.
        result.add_column(
            heading,
            justify="right" if right and index else "left",
            vertical="top",
            no_wrap=right or not index,
            overflow="fold",
        )
    return result


def fields(pairs: dict[str, str]) -> Table:
    """Names and values without lines around them."""
    result = Table.grid(padding=(0, 2, 0, 0))
    for name, value in pairs.items():
        result.add_row(printable(name), printable(value))
    return result


def printable(text: str) -> str:
    """A text of unknown origin without the characters that command a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in str(text))
