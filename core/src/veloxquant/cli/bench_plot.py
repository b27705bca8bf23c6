"""``veloxquant bench plot``: pictures of what was recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from veloxquant.cli.output import Json
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import write_json

__all__ = ["plot"]


def plot(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files that --output of a benchmark wrote.")],
    output: Annotated[str, typer.Option("--output", metavar="DIR", help="Folder for the pictures.")] = ".",
    as_json: Json = False,
) -> None:
    """Draw recorded runs as PNG and SVG: quality against bytes held, time and memory against length."""
    from veloxquant.bench.plot import draw
    from veloxquant.bench.records import read_runs

    written = draw([run for file in files for run in read_runs(file)], output)
    if as_json:
        write_json({"files": [str(file) for file in written]})
        return
    for file in written:
        open_stdout().print(f"wrote {file}", soft_wrap=True)
