"""Time: of a decode step, of a prompt, and of generation."""

from __future__ import annotations

from collections.abc import Sequence

from results_page.facts import place
from results_page.markdown import DASH
from results_page.markdown import ms
from results_page.markdown import span
from results_page.markdown import table
from veloxquant.bench.records import Result
from veloxquant.bench.records import Run

__all__ = ["LEGEND", "overview", "timing"]

LEGEND = """\
A step is the update and the attention of one layer on random rows, the median of the rounds in which all arms took
turns in one process. *X plain* is its time over the plain cache's in the same run, median over median: below 1 is
faster. In brackets are the quartiles of the ratios round by round. *Held* is what the arrays take right after the
prompt, as a share of what the plain cache's take there, in the dtype of the run. A dash stands where an arm was not
measured, or failed."""

_PREFILL = """\
*Update* is that of the cache alone, and *beyond plain* what it takes more than the plain cache's, for
each row; *whole* is update and attention of the block; *end* is the last token, with all that ends a prompt."""

_GENERATION = """\
Greedy decoding on the model after one prompt that all arms have read, in the dtype of the model."""


def overview(runs: Sequence[Run]) -> list[str]:
    """The ratios to plain of all runs side by side, where there is more than one."""
    runs = [run for run in runs if run.of_kind("speed")]
    if len(runs) < 2:
        return []
    columns = [(run, length) for run in runs for length in _lengths(run.of_kind("speed"))]
    names = [f"{place(run, '<br>')}<br>{run.dtype}<br>{length:,}" for run, length in columns]
    arms = dict.fromkeys(result.arm for run in runs for result in run.of_kind("speed"))
    rows = []
    for arm in arms:
        if arm == "plain":
            continue
        cells = [_of(run.of_kind("speed"), arm, length) for run, length in columns]
        rows.append([arm, *(DASH if cell is None else f"{cell.figures['seconds_ratio']:.2f}" for cell in cells)])
    return ["**All runs side by side**: time of a step over the plain cache's, by rows before it.", "", *table(
        ["arm", *names], rows
    )]  # fmt: skip


def timing(run: Run) -> list[str]:
    """The part of a speed run, without its heading."""
    return [*_steps(run.of_kind("speed")), *_prefill(run.of_kind("prefill")), *_generation(run.of_kind("generation"))]


def _lengths(results: Sequence[Result]) -> list[int]:
    return sorted({result.figures["length"] for result in results})


def _of(results: Sequence[Result], arm: str, length: int) -> Result | None:
    own = [result for result in results if (result.arm, result.figures["length"]) == (arm, length)]
    return own[-1] if own else None


def _arms(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result.arm for result in results))


def _steps(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    lengths = _lengths(results)
    first = all("first_seconds" in result.figures for result in results)
    columns = ["arm"]
    for length in lengths:
        columns += [f"{length:,} rows, ms", "x plain", *(["first, x plain"] if first else [])]
    rows = []
    for arm in _arms(results):
        cells = [arm]
        for length in lengths:
            result = _of(results, arm, length)
            cells += [DASH, DASH] if result is None else [ms(result.figures["seconds"]), _ratio(result, "seconds")]
            if first:
                cells.append(DASH if result is None else _ratio(result, "first_seconds"))
        rows.append([*cells, _held(results, arm, lengths[-1])])
    rounds = max(result.figures.get("rounds", 0) for result in results)
    about = f"**A decode step**, {rounds} rounds"
    together = max(result.figures.get("steps_together", 1) for result in results)
    about += f" of {together} steps timed together" if together > 1 else ""
    about += (
        "; first: the step right after the other arms, whose rows have taken the processor's caches" if first else ""
    )
    return [f"{about}.", "", *table([*columns, f"held at {lengths[-1]:,}"], rows)]


def _ratio(result: Result, what: str) -> str:
    figures = result.figures
    if result.arm == "plain":
        return "1"
    return f"{figures[f'{what}_ratio']:.2f} ({span(figures[f'{what}_ratio_quartiles'])})"


def _held(results: Sequence[Result], arm: str, length: int) -> str:
    own, plain = _of(results, arm, length), _of(results, "plain", length)
    if own is None or plain is None or not plain.figures.get("bytes_held") or "bytes_held" not in own.figures:
        return DASH
    return f"{own.figures['bytes_held'] / plain.figures['bytes_held']:.3f}"


def _prefill(results: Sequence[Result]) -> list[str]:
    lines = []
    for length in _lengths(results):
        own = [result for result in results if result.figures["length"] == length]
        rows = []
        for result in own:
            figures = result.figures
            beyond = 1e6 * figures["update_seconds_over_plain"] / length
            rows.append(
                [
                    result.arm,
                    ms(figures["update_seconds"]),
                    DASH if result.arm == "plain" else f"{beyond:.2f}",
                    ms(figures["with_attention_seconds"]),
                    _ratio(result, "with_attention_seconds"),
                    ms(figures["last_token_seconds"]),
                ]
            )
        lines += [f"**A prompt of {length:,} rows** in one block.", "", _PREFILL, ""]
        columns = ("arm", "update, ms", "beyond plain, us a row", "whole, ms", "x plain", "end, ms")
        lines += table(columns, rows)
    return lines


def _generation(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    tokens = results[-1].figures["prompt_tokens"]
    rows = [
        [
            result.arm,
            f"{result.figures['tokens_per_second']:,.1f}",
            ms(result.figures["seconds"]),
            _ratio(result, "seconds"),
        ]
        for result in results
    ]
    lines = [f"**Generation after {tokens:,} tokens.** {_GENERATION}", ""]
    return [*lines, *table(("arm", "tokens/s", "ms a token", "x plain"), rows)]
