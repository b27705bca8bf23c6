"""Showing generations: progress on stderr, text and tables on stdout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn
from rich.progress import TimeRemainingColumn

from veloxquant.cli.output import animated
from veloxquant.cli.output import fields
from veloxquant.cli.output import open_stderr
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import table

if TYPE_CHECKING:
    from veloxquant.cli.generation import Agreement
    from veloxquant.cli.generation import Generation
    from veloxquant.timing import HookTime

__all__ = [
    "loading",
    "prefill_bar",
    "show_agreement",
    "show_heading",
    "show_profile",
    "show_rows",
    "show_table",
    "write_text",
]

_LEGEND = (
    "seen: prompt and generated tokens, and one that mlx-lm computes ahead. kept: rows per KV head. held: bytes of the "
    "caches' arrays. plain: what mlx-lm's cache would hold for the tokens seen, without spare rows. "
    "ratio: plain / held. step: what a decode step of one layer allocates for a moment."
)

# Columns of text that the table of a generation needs.
_NARROW = 78

# More than a table of figures can need.
_ANY_WIDTH = 10_000

_PROFILE_LEGEND = (
    "the hooks of the method, all layers. Each call is computed before the next one begins, so the speeds above are "
    "below what they would be. attend, where the method leaves it to the core: only the rows that the core then reads."
)


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Say on stderr that a model is being loaded."""
    console, text = open_stderr(), f"loading the model {model}"
    if animated():
        with console.status(text):
            yield
    else:
        print(text, file=sys.stderr, flush=True)
        yield


@contextlib.contextmanager
def prefill_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for the prompt on stderr, one line of text where stderr is no terminal.

    Args:
        label: What stands before the bar.

    Yields:
        A function to call with the tokens processed and their number.
    """
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=open_stderr(),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    moving = animated()
    task = progress.add_task(f"{label}: prompt", total=None)

    def update(done: int, total: int) -> None:
        if not moving:
            if done == 0:
                print(f"{label}: reading {total:,} prompt tokens", file=sys.stderr, flush=True)
            return
        progress.update(task, completed=done, total=total)
        if done == total:  # the text that follows must not share the terminal with a live bar
            progress.stop()

    if moving:
        progress.start()
    try:
        yield update
    finally:
        if moving:
            progress.stop()


def show_heading(label: str) -> None:
    """A line that says whose text follows."""
    open_stdout().rule(label, align="left", style="dim")


def write_text(text: str) -> None:
    """Write a piece of generated text at once."""
    print(text, end="", flush=True)


def show_table(runs: Sequence[Generation]) -> None:
    """One row a run: what its caches saw, kept and cost."""
    held, held_unit = _scaled([run.report.bytes_held for run in runs])
    plain, plain_unit = _scaled([run.report.bytes_plain for run in runs])
    step, step_unit = _scaled([run.report.step_bytes for run in runs])
    columns = (
        "cache",
        "tokens\nseen",
        "tokens\nkept",
        f"held\n{held_unit}",
        f"plain\n{plain_unit}",
        "ratio",
        "queries",
        f"step\n{step_unit}",
        "prefill\ntok/s",
        "decode\ntok/s",
    )
    rows = [
        (
            run.cache,
            f"{run.report.tokens_seen}",
            f"{run.tokens_kept:.1f}".removesuffix(".0"),
            held[index],
            plain[index],
            f"{run.report.ratio:.2f}",
            run.query_mode or "-",
            step[index],
            f"{run.prefill_speed:.1f}",
            "-" if run.decode_speed is None else f"{run.decode_speed:.1f}",
        )
        for index, run in enumerate(runs)
    ]
    show_rows(columns, rows, _LEGEND)


def show_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], legend: str, narrow: int = _NARROW) -> None:
    """A table, or one block a row where the terminal is too narrow for figures side by side.

    Args:
        columns: Headings.
        rows: Their texts.
        legend: What stands under the table.
        narrow: Columns of text that the table needs.
    """
    console = open_stdout()
    shown = table(*columns, right=True, caption=legend)
    for row in rows:
        shown.add_row(*row)
    # A table that does not fit loses figures, and long names make it wide.
    needed = Measurement.get(console, console.options.update(width=_ANY_WIDTH), shown).maximum
    if console.width >= max(narrow, needed):
        console.print(shown)
        return
    for row in rows:
        console.print(fields({name.replace("\n", " "): text for name, text in zip(columns, row, strict=True)}))
        console.print()
    console.print(legend)


def show_agreement(result: Agreement) -> None:
    """How far the texts of two runs agree."""
    open_stdout().print(
        f"agreement with the plain cache: the first {result.leading} tokens are equal, "
        f"{result.equal} of {result.length} in all ({result.share:.0%}); greedy texts part at the first token that "
        "differs and then tell different stories, so see the documentation for measured quality",
        soft_wrap=True,
    )


def show_profile(rows: Sequence[HookTime]) -> None:
    """Where the time of a run went, hook by hook."""
    from veloxquant.timing import total_by_hook

    columns = ("hook", "calls", "total\nms", "mean\nms", "worst\nms", "worst in\nlayer")
    shown = []
    for row in total_by_hook(rows):
        times = (f"{1000 * seconds:.{digits}f}" for seconds, digits in ((row.total, 1), (row.mean, 3), (row.worst, 3)))
        shown.append((row.hook, f"{row.calls}", *times, "-" if row.layer is None else f"{row.layer}"))
    show_rows(columns, shown, _PROFILE_LEGEND)


def _scaled(counts: Sequence[int | None]) -> tuple[list[str], str]:
    """Byte counts in the unit that suits the largest of them."""
    largest, unit, size = max((count for count in counts if count is not None), default=0), "bytes", 1
    for name in ("KiB", "MiB", "GiB"):
        if largest >= 1024 * size:
            unit, size = name, 1024 * size
    digits = 0 if size == 1 else 2
    return ["-" if count is None else f"{count / size:.{digits}f}" for count in counts], unit
