"""The tables of ``veloxquant bench speed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from veloxquant.cli.bench_quality_table import show_run_heading
from veloxquant.cli.display import show_rows
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import printable

if TYPE_CHECKING:
    from veloxquant.bench.records import Result
    from veloxquant.bench.records import Run
    from veloxquant.bench.speed_blas import Measured

__all__ = ["show_remarks", "show_speed", "show_wide"]

_STEP_LEGEND = (
    "a decode step of one layer: update and attention. x plain: its time over the plain cache's in the round; less "
    "is faster. Ranges are quartiles: half of the steps lay inside."
)

_FIRST_LEGEND = (
    " first: the step right after the other arms, whose rows have taken the processor's caches; the other columns are "
    "of the steps that follow it."
)

_PREFILL_LEGEND = (
    "a prompt in one block. update: of the cache alone. own: what it takes beyond the plain cache's, per row. whole: "
    "update and attention of the block, and beside the plain cache's. end: the last token, with all that ends a prompt."
)

_GENERATION_LEGEND = (
    "greedy decoding after one prompt that all arms have read; x plain: time of a token over the plain cache's "
    "(less is faster). Ranges are quartiles."
)


def show_speed(found: Sequence[Measured], note: str | None = None) -> None:
    """Show what was measured.

    Args:
        found: One run for each BLAS.
        note: A sentence on these.
    """
    console = open_stdout()
    for number, one in enumerate(found):
        if number:
            console.print()
        _show_run(one.run)
    if not any(one.run.results for one in found):
        console.print("nothing was measured")
    show_remarks([part for one in found for part in one.skipped], [one.run for one in found])
    if note is not None:
        console.print(printable(note), soft_wrap=True)


def show_remarks(skipped: Sequence[dict[str, str]], runs: Sequence[Run]) -> None:
    """Say who is missing, and why, each once."""
    lines = [f"skipped {one['method']}: {one['reason']}" for one in skipped]
    lines += [f"left out {one.arm} at {one.where}: {one.reason}" for run in runs for one in run.left_out]
    for line in dict.fromkeys(lines):
        open_stdout().print(printable(line), soft_wrap=True)


def show_wide(columns: Sequence[str], rows: Sequence[Sequence[str]], legend: str) -> None:
    """A table, or blocks where the terminal is narrower than its columns: figures must not be cut."""
    cells = [columns, *rows]
    widths = [max(len(line) for row in cells for line in row[place].split("\n")) for place in range(len(columns))]
    show_rows(columns, rows, legend, narrow=sum(widths) + 2 * len(widths))


def _show_run(run: Run) -> None:
    show_run_heading(run)
    shape = run.arguments.get("shape")
    if shape:
        open_stdout().print(f"layer: {printable(str(shape))}", soft_wrap=True)
    steps = run.of_kind("speed")
    lengths = list(dict.fromkeys(result.figures["length"] for result in steps))
    for length in lengths:
        own = [result for result in steps if result.figures["length"] == length]
        columns: tuple[str, ...] = (f"{length:,} rows", "ms a step", "quartiles", "x plain", "quartiles\nof it")
        cells: list[tuple[str, ...]] = [_timed(result) for result in own]
        legend = _STEP_LEGEND
        if all("first_seconds" in result.figures for result in own):
            columns = (*columns, "first\nms", "first\nx plain")
            cells = [(*row, *_first(result)) for row, result in zip(cells, own, strict=True)]
            legend += _FIRST_LEGEND
        show_wide(columns, cells, legend if length == lengths[-1] else "")
    if run.of_kind("prefill"):
        show_wide(*_prefill(run.of_kind("prefill")), _PREFILL_LEGEND)
    if run.of_kind("generation"):
        show_wide(*_generation(run.of_kind("generation")), _GENERATION_LEGEND)


def _timed(result: Result) -> tuple[str, ...]:
    figures = result.figures
    return (
        result.arm,
        _ms(figures["seconds"]),
        _range(figures["seconds_quartiles"], 1e3),
        f"{figures['seconds_ratio']:.2f}",
        _range(figures["seconds_ratio_quartiles"], 1),
    )


def _first(result: Result) -> tuple[str, str]:
    return _ms(result.figures["first_seconds"]), f"{result.figures['first_seconds_ratio']:.2f}"


def _prefill(results: Sequence[Result]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = results[0].figures["length"]
    columns = (f"prompt, {rows:,} rows", "update\nms", "own us\na row", "whole\nms", "x plain", "quartiles", "end\nms")
    return columns, [(result.arm, *_prefill_cells(result.figures)) for result in results]


def _prefill_cells(figures: dict[str, Any]) -> tuple[str, ...]:
    return (
        _ms(figures["update_seconds"]),
        f"{1e6 * figures['update_seconds_over_plain'] / figures['length']:.2f}",
        _ms(figures["with_attention_seconds"]),
        f"{figures['with_attention_seconds_ratio']:.2f}",
        _range(figures["with_attention_seconds_ratio_quartiles"], 1),
        _ms(figures["last_token_seconds"]),
    )


def _generation(results: Sequence[Result]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    tokens = results[0].figures["prompt_tokens"]
    columns = (f"after {tokens:,} tokens", "tokens/s", "ms a\ntoken", "quartiles", "x plain", "quartiles\nof it")
    rows = []
    for result in results:
        name, *cells = _timed(result)
        rows.append((name, f"{result.figures['tokens_per_second']:.2f}", *cells))
    return columns, rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 1e-2 else f"{1e3 * seconds:.1f}"


def _range(ends: Sequence[float], scale: float) -> str:
    low, high = (scale * end for end in ends)
    digits = 3 if scale > 1 and high < 10 else 2 if scale == 1 else 1
    return f"{low:.{digits}f}-{high:.{digits}f}"
