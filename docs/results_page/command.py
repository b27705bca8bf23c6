"""The command line of a recorded run."""

from __future__ import annotations

import re
import shlex
from typing import Any

from results_page.intake import SAMPLE
from veloxquant.bench.records import Run

__all__ = ["command_lines"]

_SHAPE = re.compile(r"(\d+) query heads, (\d+) KV heads, head dim (\d+)")
# As recorded, and as typed; in the order in which they are shown.
_PLAIN = {
    "start": "--start",
    "lengths": "--lengths",
    "steps": "--steps",
    "prefill_rows": "--prefill-rows",
    "prompt_tokens": "--prompt-tokens",
    "tokens": "--tokens",
    "needle_lengths": "--needle-lengths",
    "needle_depths": "--needle-depths",
    "prefill_step": "--prefill-step",
    "methods": "--methods",
    "peer": "--peer",
}


def command_lines(run: Run) -> list[str]:
    """What to type for the same run, an option a line.

    Args:
        run: The run. Its record names a text only where it was taken in; else FILE stands in its place.
    """
    asked = run.arguments
    options = _subject(run)
    for name, option in _PLAIN.items():
        if asked.get(name) is not None:
            options.append((option, _typed(asked[name])))
    options += [("--set", text) for text in asked.get("set") or []]
    options += [("--arm", text) for text in asked.get("arm") or asked.get("arms") or []]
    before, blas = _blas(run)
    pieces = [f"{before}veloxquant bench {run.command}"]
    pieces += [f"    {option} {shlex.quote(value)}" for option, value in [*options, *blas]]
    return [f"{piece} \\" for piece in pieces[:-1]] + pieces[-1:]


def _subject(run: Run) -> list[tuple[str, str]]:
    """Model, text and layer."""
    found = []
    if run.model is not None:
        found.append(("--model", run.model))
    if run.text is not None and run.arguments.get("text") != SAMPLE:
        found.append(("--text", str(run.arguments.get("text", "FILE"))))
    shape = _SHAPE.fullmatch(str(run.arguments.get("shape")))
    if shape is not None:
        found += zip(("--query-heads", "--kv-heads", "--head-dim"), shape.groups(), strict=True)
        found.append(("--dtype", str(run.dtype)))
    return found


def _typed(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return str(value)


def _blas(run: Run) -> tuple[str, list[tuple[str, str]]]:
    """What stands before the command for its BLAS, and its options for it."""
    here = run.environment
    if here["back_end"] == "cuda" and here["blas"].endswith("TF32 off"):
        return "MLX_ENABLE_TF32=0 ", []
    if here["back_end"] != "cpu" or not str(here["machine"].get("system")).startswith("Linux"):
        return "", []
    preloaded = here["blas"].startswith("OpenBLAS")
    threads = re.search(r"(\d+) thread", here["blas"])
    before = f"OPENBLAS_NUM_THREADS={threads[1]} " if threads else ""
    if run.command == "speed":
        layer = run.dtype == "float32" and run.arguments.get("shape")
        return before, [("--blas", "openblas" if preloaded else "own")] if layer else []
    return before + ("LD_PRELOAD=libopenblas.so.0 " if preloaded else ""), []
