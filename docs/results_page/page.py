"""The whole page, from recorded runs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path

import attrs

from results_page import memory
from results_page import quality
from results_page import suites
from results_page import timing
from results_page.facts import facts
from results_page.facts import title
from results_page.markdown import code
from veloxquant.bench.records import Run
from veloxquant.bench.records import read_runs

__all__ = ["Recorded", "page", "picture_name", "read"]


@attrs.frozen
class Recorded:
    """A run of the repository.

    Args:
        run: The run.
        file: Name of its file.
        number: Its place there, from 1; 0 when it is alone.
    """

    run: Run
    file: str
    number: int

    @property
    def stem(self) -> str:
        """With what the names of its pictures begin."""
        return self.file.removesuffix(".jsonl") + (f"-{self.number}" if self.number else "")


def read(folder: Path) -> list[Recorded]:
    """The runs of a folder, in the order of their files' names."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        runs = read_runs(file)
        found += [Recorded(run, file.name, place if len(runs) > 1 else 0) for place, run in enumerate(runs, start=1)]
    return found


_HEAD = """\
# Results

<!-- Written by nox -s results from docs/results/*.jsonl: change the records, not this page. -->
"""

_NONE = """\
No runs are recorded yet: nothing is claimed here. [Measuring](guides/benchmarks.md) takes a command.
"""

_ABOUT = """\
Everything here comes from runs of `veloxquant bench` that are recorded in the repository, and is written by a
program; the command of each run stands beside it. [What compression costs on your model](guides/benchmarks.md) says
how to measure yours, which tells more.
"""

_APPLE = """\
**Nothing was measured on Apple silicon**, for which mlx is made first: neither times nor peaks carry over to it.
"""

_BYTES = """\
**Bytes are counted from the arrays, as a share of plain rows in the dtype of the run.** Codes are of one size
whatever the dtype, so that in float32 a packed row saves about twice what it saves in 16 bits: a share of 0.25 there
can be one of 0.5 here. Rows that are dropped save the same in both. A record adds up the arrays of a cache and does
not tell codes from rows, so that a share in 16 bits cannot be computed from one in float32.
"""

_BESIDE = """\
Where the bytes of the same method with the same options were also measured with 16-bit rows, the share there stands
in a column of its own; the others have a dash.
"""

_LEFT_OUT = """\
No run here gives the quality tables a column of 16-bit shares, so they leave it out.
"""

_Part = tuple[str, tuple[str, ...], str, Callable[[Run, Sequence[Run]], list[str]]]

_PARTS: tuple[_Part, ...] = (
    ("Quality", ("quality", "needle"), quality.LEGEND, quality.quality),
    ("Speed", ("speed", "prefill", "generation"), timing.LEGEND, lambda run, _: timing.timing(run)),
    ("Memory", ("memory",), memory.LEGEND, lambda run, _: memory.memory(run)),
)


def picture_name(recorded: Recorded, kind: str) -> str:
    """Name of a picture, without what follows the dot."""
    return f"{recorded.stem}-{kind}"


def page(found: Sequence[Recorded], pictures: Sequence[str], tested: Sequence[suites.Suites] = ()) -> str:
    """The page.

    Args:
        found: The runs.
        pictures: Names of the pictures that there are.
        tested: The tests that ran on other back ends.
    """
    if not found:
        return f"{_HEAD}\n{_NONE}\n{_APPLE}"
    runs = [recorded.run for recorded in found]
    lines = [_HEAD, _ABOUT]
    if not any(run.environment["back_end"] == "metal" for run in runs):
        lines.append(_APPLE)
    beside = any(quality.elsewhere(runs, run) is not None for run in runs if run.of_kind("quality"))
    lines += [_BYTES, _BESIDE if beside else _LEFT_OUT]
    for name, kinds, legend, part in _PARTS:
        own = [recorded for recorded in found if any(recorded.run.of_kind(kind) for kind in kinds)]
        if not own:
            lines.append(f"## {name}\n\nNo runs are recorded yet.\n")
            continue
        lines += [f"## {name}\n", f"{legend}\n"]
        lines += timing.overview([recorded.run for recorded in own]) if name == "Speed" else []
        for recorded in own:
            lines += [f"### {title(recorded.run)}\n", *facts(recorded.run, recorded.file)]
            lines += _picture(recorded, kinds[0], pictures)
            lines += [*part(recorded.run, runs), *_left_out(recorded.run)]
    lines += suites.suites(tested)
    return "\n".join(lines).rstrip("\n") + "\n"


# What a message means to who reads it here.
_MEANT = {
    "[quantized_matmul] No implementation": (
        "MLX has no kernel on CUDA for what mlx-lm's cache multiplies with, which are views of its buffers, and one "
        "array for all query heads of a group"
    ),
}


def _left_out(run: Run) -> list[str]:
    """Which arms could not be measured, in words: a table only shows what could."""
    reasons: dict[str, dict[str, str]] = {}
    for one in run.left_out:
        reasons.setdefault(one.arm, {})[one.where] = one.reason
    lines = []
    for arm, places in reasons.items():
        (where, reason), others = next(iter(places.items())), len(places) - 1
        also = f", and {others} more of the kind" if others else ""
        meant = next((f"{words}: " for part, words in _MEANT.items() if part in reason), "")
        lines.append(f"- Left out: **{arm}**, which could not be measured at {where}{also}: {meant}{code(reason)}")
    return [*lines, ""] if lines else []


def _picture(recorded: Recorded, kind: str, pictures: Sequence[str]) -> list[str]:
    name = picture_name(recorded, kind)
    file = next((picture for picture in sorted(pictures) if picture.rpartition(".")[0] == name), None)
    words = {"quality": "Quality against bytes held", "speed": "Time of a step", "memory": "Bytes held"}
    return [] if file is None else [f"![{words[kind]}](results/{file})\n"]
