"""Pictures of recorded runs: quality against bytes, time and memory against length."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veloxquant.bench.companions import RECENT
from veloxquant.bench.companions import TOP
from veloxquant.bench.plot_style import GREY
from veloxquant.bench.plot_style import Looks
from veloxquant.bench.plot_style import log_ticks
from veloxquant.bench.plot_style import new_figure
from veloxquant.bench.plot_style import place_labels
from veloxquant.bench.plot_style import save
from veloxquant.bench.plot_style import spread_labels
from veloxquant.bench.records import Result
from veloxquant.bench.records import Run
from veloxquant.errors import VeloxQuantError

__all__ = ["draw"]

_LEAST_KL = 1e-5
"""What is below this is drawn there: on a logarithmic axis there is no zero."""


def draw(runs: Iterable[Run], folder: str | Path, looks: Looks | None = None) -> list[Path]:
    """Draw all that can be drawn of some runs, one picture for runs that are alike.

    Args:
        runs: The runs; of two results of one arm the later one counts.
        folder: Where to write.
        looks: Looks that methods have already in pictures drawn before; new methods are added.

    Returns:
        The files written, PNG and SVG.

    Raises:
        VeloxQuantError: matplotlib is not installed, there is nothing to draw, or the files cannot be written.
    """
    folder = Path(folder).expanduser()
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_alike(run), []).append(run)
    files: list[Path] = []
    names: set[str] = set()
    looks = looks or Looks()  # of all pictures, so that a method looks the same in each
    for group in groups.values():
        for kind, picture in (("quality", _quality), ("speed", _speed), ("memory", _memory)):
            results = _latest([result for run in group for result in run.of_kind(kind)])
            figure = picture(group[-1], results, looks) if results else None
            if figure is not None:
                files += save(figure, folder, _unused(kind, names))
    if not files:
        raise VeloxQuantError("there is nothing to draw: no quality, speed or memory was recorded in these runs")
    return files


def _alike(run: Run) -> tuple[str, ...]:
    """What must agree for figures to stand in one picture."""
    here = run.environment
    place = (str(run.model), str(run.dtype), str(run.text), str(here["back_end"]), str(here["machine"].get("cpu")))
    task = {name: run.arguments.get(name) for name in ("prompt_tokens", "tokens", "start", "shape")}
    # Quality does not depend on it, time does.
    blas = str(here["blas"]) if run.command == "speed" else ""
    return (run.command, *place, blas, str(task))


def _unused(name: str, names: set[str]) -> str:
    found, number = name, 1
    while found in names:
        number += 1
        found = f"{name}-{number}"
    names.add(found)
    return found


def _latest(results: Iterable[Result]) -> list[Result]:
    return list({(result.arm, result.figures.get("length")): result for result in results}.values())


def _note(run: Run) -> str:
    here = run.environment
    versions = ", ".join(
        f"{name} {here['versions'][name]}" for name in ("veloxquant", "mlx", "mlx-lm") if name in here["versions"]
    )
    machine = here["machine"]
    place = machine.get("gpu") or f"{machine.get('cores')} cores, {machine.get('cpu')}"
    return f"{here['back_end']}, {here['blas']}; {place}; {versions}; {run.time[:10]}"


def _subject(run: Run) -> str:
    name = str(run.model).rstrip("/").rpartition("/")[2] if run.model else None
    parts = [name, run.dtype, run.arguments.get("shape")]
    return ", ".join(str(part) for part in parts if part)


# -------------------------------------------------------------------- quality


def _quality(run: Run, results: Sequence[Result], looks: Looks) -> Any:
    drawn = [result for result in results if result.arm != "plain" and result.method not in (RECENT, TOP)]
    if not drawn:
        return None
    asked = run.arguments
    title = (
        f"What compression costs: {_subject(run)}\n"
        f"{asked.get('tokens')} tokens after a prompt of {asked.get('prompt_tokens')}"
    )
    figure, axes = new_figure(title, _note(run))
    points, marks = [], []
    for result in drawn:
        look = looks.of(result.method, result.role)
        share, kl, low, high = _place(result)
        axes.errorbar(
            share, kl, yerr=[[kl - low], [high - kl]], color=look.colour, marker=look.marker, linestyle="none",
            markerfacecolor="white" if look.dashed else look.colour, elinewidth=1.1, capsize=2.5, zorder=3,
        )  # fmt: skip
        points.append((share, kl, result.arm, look.colour))
        marks.append((share, low, high))
    marks += _beside(axes, drawn, results)
    axes.set_yscale("log")
    if axes.get_legend() is not None:  # above the data
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.15)
    log_ticks(axes)
    axes.yaxis.set_major_formatter("{x:g}")
    _share_axis(axes, [point[0] for point in points])
    figure.set_figheight(figure.get_figheight() + 0.15 * max(0, len(points) - 8))  # room for the labels
    axes.set_xlabel("bytes held right after the prompt, as a share of plain rows")
    axes.set_ylabel("mean KL to the plain cache, nats (lower is better)")
    axes.axvline(1.0, color=GREY, linewidth=0.9, linestyle=(0, (2, 3)))
    place_labels(figure, axes, points, marks)
    return figure


def _share_axis(axes: Any, shares: Sequence[float]) -> None:
    """An axis on which twice the compression is the same step everywhere: 2x, 4x and 8x stand equally far apart."""
    ticks = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
    low, high = 0.8 * min(shares), 1.3 * max(1.0, *shares)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def _place(result: Result) -> tuple[float, float, float, float]:
    """Share of bytes, mean KL and its interval, all of them drawable."""
    figures = result.figures
    kl = max(figures["mean_kl"], _LEAST_KL)
    low, high = figures["mean_kl_interval"]
    return figures["after_prompt"]["share"], kl, min(kl, max(low, _LEAST_KL)), max(kl, high)


def _beside(axes: Any, drawn: Sequence[Result], results: Sequence[Result]) -> list[tuple[float, float, float]]:
    """References that belong to one arm stand above and below it, joined to it by a thin line; returns their marks."""
    marks = []
    signs = {RECENT: ("o", "first and newest rows, at the same bytes"), TOP: ("_", "best choice of as many rows read")}
    shown: set[str] = set()
    for arm in drawn:
        share, kl, _, _ = _place(arm)
        for result in results:
            if result.figures.get("beside") != arm.arm:
                continue
            marker, label = signs[result.method]
            other = _place(result)[1]
            axes.plot([share, share], [kl, other], color=GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
            axes.plot(
                share, other, marker=marker, color=GREY, markerfacecolor="white", markersize=7, linestyle="none",
                label=None if result.method in shown else label, zorder=2, markeredgewidth=1.4,
            )  # fmt: skip
            shown.add(result.method)
            marks.append((share, other, other))
    if shown:
        axes.legend(loc="upper right", facecolor="white", edgecolor="none", fontsize=9, labelcolor=GREY)
    return marks


# ------------------------------------------------------------ against length


def _speed(run: Run, results: Sequence[Result], looks: Looks) -> Any:
    series = _series(results, "seconds", scale=1e3)
    if not series:
        return None
    figure, axes = new_figure(f"Time of a decode step: {_subject(run)}", _note(run))
    axes.set_ylabel("update and attention, ms a step")
    return _lines(figure, axes, series, looks)


def _memory(run: Run, results: Sequence[Result], looks: Looks) -> Any:
    series = _series(results, "bytes_held", scale=1 / 2**20)
    if not series:
        return None
    figure, axes = new_figure(f"Bytes held: {_subject(run)}", _note(run))
    axes.set_ylabel("bytes of the caches' arrays, MiB")
    return _lines(figure, axes, series, looks)


_Series = dict[str, tuple[Result, list[tuple[float, float]]]]


def _series(results: Sequence[Result], figure: str, *, scale: float) -> _Series:
    """Points (length, figure) of each arm, in the order of lengths."""
    found: _Series = {}
    for result in results:
        if figure in result.figures and "length" in result.figures:
            own = found.setdefault(result.arm, (result, []))
            own[1].append((float(result.figures["length"]), scale * float(result.figures[figure])))
    for _, points in found.values():
        points.sort()
    return found


def _lines(figure: Any, axes: Any, series: _Series, looks: Looks) -> Any:
    ends = []
    lengths = sorted({length for _, points in series.values() for length, _ in points})
    for name, (result, points) in series.items():
        look = looks.of(result.method, result.role)
        axes.plot(
            *zip(*points, strict=True), color=look.colour, marker=look.marker,
            linestyle="--" if look.dashed else "-",
        )  # fmt: skip
        ends.append((*points[-1], name, look.colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes)
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.set_xlabel("rows before the step")
    # Room for the labels at the right ends; they are wide, and the axis is logarithmic.
    width = max(len(re.sub(r"\s+", " ", name)) for name in series)
    axes.set_xlim(right=lengths[-1] * (max(lengths[-1] / lengths[0], 4) ** (0.02 * width)))
    spread_labels(figure, axes, ends)
    return figure
