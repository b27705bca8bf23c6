"""``veloxquant bench``: one module a benchmark, each importing what is heavy only when it runs."""

from __future__ import annotations

import typer

from veloxquant.cli import bench_memory
from veloxquant.cli import bench_plot
from veloxquant.cli import bench_quality
from veloxquant.cli import bench_speed

__all__ = ["app"]

app = typer.Typer(
    help="Measure methods on your own model: quality, speed, memory; and draw what was measured.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
)


app.command("quality")(bench_quality.quality)
app.command("speed")(bench_speed.speed)
app.command("memory")(bench_memory.memory)
app.command("plot")(bench_plot.plot)


@app.callback()
def _bench() -> None:
    pass
