"""Taking a run into the repository: without per-token lists and paths of the machine, small enough to keep."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from veloxquant.bench.race import LeftOut
from veloxquant.bench.records import Result
from veloxquant.bench.records import Run
from veloxquant.bench.records import read_runs
from veloxquant.bench.records import text_hash
from veloxquant.bench.verdicts import Verdict
from veloxquant.bench.verdicts import verdicts
from veloxquant.errors import VeloxQuantError

__all__ = ["LARGEST", "SAMPLE", "keep", "stored_verdicts", "take"]

LARGEST = 200_000
"""Bytes that a file of records may have."""

SAMPLE = "the sample text"

# Folders that lead to a file or a model: they mean nothing elsewhere.
_FOLDERS = re.compile(r"(?<![\w.:/])~?(?:/[^\s/,:=]+)+/(?=[^\s/,:=])")
_NEEDLE = ("length", "depth", "found", "beside")


def take(files: Sequence[str | Path], target: Path, text: str | None = None) -> Path:
    """Write the runs of some files as one file of the repository.

    Args:
        files: Files that ``veloxquant bench --output`` wrote.
        target: Where to; a file that is there is written anew.
        text: Name of the text that was read, where it is not the sample text.

    Raises:
        VeloxQuantError: The file would be too large.
    """
    runs = [keep(run, text) for file in files for run in read_runs(file)]
    lines = [line for run in runs for line in run.lines()]
    content = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    if len(content.encode()) >= LARGEST:
        raise VeloxQuantError(
            f"{target.name} would have {len(content):,} bytes, and {LARGEST:,} are the most; take fewer runs at a time"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content, encoding="utf-8")
    return target


def keep(run: Run, text: str | None = None) -> Run:
    """What is kept of a run.

    Args:
        run: The run, as recorded or kept already.
        text: Name of its text, where it is not the sample text.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    if any("kl" in result.figures for result in run.of_kind("quality")):
        for verdict in verdicts(run.results):
            found.setdefault(verdict.arm, []).append(verdict.to_dict())
    arguments = dict(run.arguments)
    if run.text is not None and "text" not in arguments:
        name = text or (SAMPLE if run.text == _sample_hash() else None)
        arguments |= {} if name is None else {"text": name}
    return attrs.evolve(
        run,
        model=None if run.model is None else _without_folders(run.model.rstrip("/")),
        arguments=_without_folders(arguments),
        results=[_keep_result(result, found.get(result.arm)) for result in run.results],
        left_out=[LeftOut(**_without_folders(attrs.asdict(one))) for one in run.left_out],
    )


def _keep_result(result: Result, found: list[dict[str, Any]] | None) -> Result:
    figures, config = dict(result.figures), result.config
    if result.kind == "needle":  # the arm's options stand in its other line
        figures, config = {name: figures[name] for name in _NEEDLE if name in figures}, {}
    if figures.pop("kl", None) is not None and found:
        figures["verdicts"] = found
    fields = {"arm": result.arm, "config": config, "figures": figures}
    return attrs.evolve(result, **_without_folders(fields))


def _without_folders(value: Any) -> Any:
    if isinstance(value, str):
        return _FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {name: _without_folders(part) for name, part in value.items()}
    return [_without_folders(part) for part in value] if isinstance(value, list | tuple) else value


def _sample_hash() -> str:
    from veloxquant.testing.sample import sample_text

    return text_hash(sample_text())


def stored_verdicts(run: Run) -> list[Verdict]:
    """The verdicts of a run: those that were kept, or, where its lists are still there, from these."""
    results = run.of_kind("quality")
    if any("kl" in result.figures for result in results):
        return verdicts(results)
    return [Verdict(**fields) for result in results for fields in result.figures.get("verdicts", [])]
