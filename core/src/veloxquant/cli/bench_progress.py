"""Progress of a benchmark on stderr: a bar for the piece of work at hand and how many are done; none when piped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterator

from rich.progress import BarColumn
from rich.progress import Progress
from rich.progress import SpinnerColumn
from rich.progress import TaskID
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn
from rich.progress import TimeRemainingColumn

from veloxquant.cli.output import animated
from veloxquant.cli.output import open_stderr

__all__ = ["BenchProgress", "bench_progress"]


class BenchProgress:
    """Shows pieces of work, one at a time.

    Args:
        progress: What draws, or None where nothing is to be drawn.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self._whole: TaskID | None = None

    @contextlib.contextmanager
    def track(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """One piece of work.

        Args:
            label: What stands before its bar.
            total: Its length, in any unit.

        Yields:
            A function to call with each amount that is done.
        """
        if self._progress is None:
            yield lambda _: None
            return
        progress = self._progress
        if self._whole is None:
            self._whole = progress.add_task("pieces done: 0", total=None)
        task = progress.add_task(label, total=total)
        try:
            yield lambda amount: progress.advance(task, amount)
        finally:
            progress.remove_task(task)
        self._done += 1
        progress.update(self._whole, description=f"pieces done: {self._done}")


@contextlib.contextmanager
def bench_progress() -> Iterator[BenchProgress]:
    """A progress display that is gone when the work is."""
    if not animated():
        yield BenchProgress(None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=open_stderr(), transient=True, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        yield BenchProgress(progress)
