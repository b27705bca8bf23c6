"""The tables of ``veloxquant bench quality``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from veloxquant.bench.companions import RECENT
from veloxquant.bench.companions import TOP
from veloxquant.bench.verdicts import Verdict
from veloxquant.bench.verdicts import sentences
from veloxquant.bench.verdicts import verdicts
from veloxquant.cli.display import show_rows
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import printable

if TYPE_CHECKING:
    from veloxquant.bench.arm_options import Skipped
    from veloxquant.bench.records import Result
    from veloxquant.bench.records import Run

__all__ = ["show_quality", "show_run_heading"]

_QUALITY_LEGEND = (
    "KL: divergence of the plain cache's predictions from the arm's, in nats, with the 95 % interval of its mean over "
    "tokens. held: bytes of the caches' arrays as a share of the plain rows, right after the prompt and at the end; "
    "other: what is neither keys nor values, at the end. newest rows: the simplest evictor, at the arm's bytes. exact "
    "top rows: the best choice of as many rows as the arm reads at a step."
)

_VERDICT_LEGEND = (
    "yes: the mean KL is lower, beyond chance (95 %). level: the difference may be chance. no: it is higher. n/a: the "
    "reference holds fewer bytes and loses more. In brackets the reference's bytes over the arm's. top rows: KL of the "
    "arm over that of the best choice of as many rows."
)


def show_quality(run: Run, skipped: Sequence[Skipped] = ()) -> None:
    """Show a run, whole or not.

    Args:
        run: The run.
        skipped: Methods that cannot serve here.
    """
    console = open_stdout()
    show_run_heading(run)
    results = run.of_kind("quality")
    if results:
        _show(*_quality_rows(results, run.of_kind("needle")), _QUALITY_LEGEND)
    found = verdicts(results)
    if found:
        _show(*_verdict_rows(found), _VERDICT_LEGEND)
        for sentence in sentences(found):
            console.print(f"- {printable(sentence)}", soft_wrap=True)
    needles = run.of_kind("needle")
    if needles:
        _show(*_needle_rows(needles), "passkeys found (+) or not (.), by length and depth.")
    if not results and not needles:
        console.print("nothing was measured")
    for one in skipped:
        console.print(f"skipped {one.method}: {printable(one.reason)}", soft_wrap=True)
    for failed in run.left_out:
        console.print(f"left out at {failed.where}: {printable(failed.reason)}", soft_wrap=True)


def show_run_heading(run: Run) -> None:
    """What the figures of a run depend on, in two lines."""
    here = run.environment
    versions = here["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("veloxquant", "mlx", "mlx-lm") if name in versions)
    console = open_stdout()
    subject = "no model" if run.model is None else f"model {printable(run.model)}"
    console.print(f"{subject}, {run.dtype}; {names}", soft_wrap=True)
    console.print(
        f"back end {here['back_end']}, BLAS: {here['blas']}; {here['machine']['cores']} cores, "
        f"{here['machine']['cpu']}",
        soft_wrap=True,
    )


def _show(columns: Sequence[str], rows: Sequence[Sequence[str]], legend: str) -> None:
    """A table, or blocks where the terminal is narrower than its columns: figures must not be cut."""
    cells = [columns, *rows]
    widths = [max(len(line) for row in cells for line in row[place].split("\n")) for place in range(len(columns))]
    show_rows(columns, rows, legend, narrow=sum(widths) + 2 * len(widths))


def _quality_rows(
    results: Sequence[Result], needles: Sequence[Result]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns = (
        "arm",
        "held\nprompt",
        "held\nend",
        "other",
        "mean\nKL",
        "95 %\ninterval",
        "KL\np95",
        "top-1",
        "perplexity",
        "passkeys",
    )
    rows: list[tuple[str, ...]] = []
    for result in results:
        figures = result.figures
        low, high = figures["mean_kl_interval"]
        end = figures["at_end"]
        other = end["bytes_auxiliary"] / end["bytes_plain"] if end["bytes_plain"] else 0.0
        rows.append(
            (
                _name(result),
                _share(figures["after_prompt"]["share"]),
                _share(end["share"]),
                _share(other),
                f"{figures['mean_kl']:.4f}",
                f"{max(low, 0):.4f}-{max(high, 0):.4f}",
                f"{figures['p95_kl']:.3f}",
                f"{figures['top1_agreement']:.3f}",
                f"{figures['perplexity']:.2f}",
                _found([needle for needle in needles if needle.arm == result.arm]),
            )
        )
    return columns, rows


_BESIDE = {RECENT: "  newest rows, same bytes", TOP: "  exact top rows, same reads"}


def _name(result: Result) -> str:
    return _BESIDE[result.method] if "beside" in result.figures else result.arm


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _found(needles: Sequence[Result]) -> str:
    return f"{sum(needle.figures['found'] for needle in needles)}/{len(needles)}" if needles else "-"


def _verdict_rows(found: Sequence[Verdict]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    kinds = list(dict.fromkeys(verdict.kind for verdict in found if verdict.kind not in (RECENT, TOP)))
    columns = ("arm", "beats newest\nrows", *(f"beats {kind}".replace(" Quantized", "\nQuantized") for kind in kinds))
    columns = (*columns, "KL over\ntop rows")
    rows = []
    for arm in dict.fromkeys(verdict.arm for verdict in found):
        own = {verdict.kind: verdict for verdict in found if verdict.arm == arm}
        top = own.get(TOP)
        over = f"{top.arm_kl / top.reference_kl:.1f} x" if top is not None and top.reference_kl > 0 else "-"
        rows.append((arm, *(_cell(own.get(kind)) for kind in (RECENT, *kinds)), over))
    return columns, rows


def _cell(verdict: Verdict | None) -> str:
    return "-" if verdict is None else verdict.words


def _needle_rows(needles: Sequence[Result]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    lengths = sorted({needle.figures["length"] for needle in needles})
    places = {
        length: sorted({needle.figures["depth"] for needle in needles if needle.figures["length"] == length})
        for length in lengths
    }
    columns = ("passkeys", *(f"{length:,}\n{_depths(places[length])}" for length in lengths))
    rows = []
    arms = {needle.arm: needle for needle in needles}
    for arm, one in arms.items():
        hits: dict[Any, bool] = {
            (needle.figures["length"], needle.figures["depth"]): needle.figures["found"]
            for needle in needles
            if needle.arm == arm
        }
        marks = ("".join(_mark(hits.get((length, depth))) for depth in places[length]) for length in lengths)
        rows.append((_name(one), *marks))
    return columns, rows


def _depths(depths: Sequence[float]) -> str:
    return f"{depths[0]:.0%}" if len(depths) == 1 else f"{depths[0]:.0%} to {depths[-1]:.0%}"


def _mark(hit: bool | None) -> str:
    return " " if hit is None else "+" if hit else "."
