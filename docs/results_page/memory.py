"""Memory: held, at the peak, and for a moment."""

from __future__ import annotations

from results_page.markdown import DASH
from results_page.markdown import mib
from results_page.markdown import table
from veloxquant.bench.records import Result
from veloxquant.bench.records import Run

__all__ = ["LEGEND", "memory"]

LEGEND = """\
Each arm ran in a process of its own. *Held* is what the caches' arrays take at the end, spare capacity included, and
its *share* of plain rows in the dtype of the run. *Peak* is the most that MLX held at once beyond weights and input;
*for a moment* is what of the peak was held neither before nor after, in the prompt and in the steps. *Process* is the
growth of resident memory at its peak, buffers kept for reuse included. All but the share in MiB."""

_COLUMNS = (
    "arm",
    "held",
    "share",
    "peak, prompt",
    "peak, steps",
    "for a moment, prompt",
    "for a moment, steps",
    "process",
)
_FIGURES = (
    "prompt_peak_bytes",
    "decode_peak_bytes",
    "prompt_transient_bytes",
    "decode_transient_bytes",
    "rss_bytes",
)


def memory(run: Run) -> list[str]:
    """The part of a memory run, without its heading."""
    results = run.of_kind("memory")
    lines: list[str] = []
    for length in sorted({result.figures["length"] for result in results}):
        own = {result.arm: result for result in results if result.figures["length"] == length}
        also = "" if run.model else ", without the attention of the prompt"
        lines += [f"**{length:,} tokens and {run.arguments.get('tokens')} after them**{also}.", ""]
        lines += table(_COLUMNS, [_row(result) for result in own.values()])
    return lines


def _row(result: Result) -> list[str]:
    figures = result.figures
    share = figures.get("share")
    cells = [result.arm, mib(figures["bytes_held"]), DASH if share is None else f"{share:.3f}"]
    return [*cells, *(mib(figures.get(name)) for name in _FIGURES)]
