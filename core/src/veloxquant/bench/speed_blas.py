"""With which BLAS to measure, and measuring again in a process of its own: a BLAS is chosen when a program starts."""

from __future__ import annotations

import ctypes.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import attrs

from veloxquant.bench.environment import back_end
from veloxquant.bench.environment import blas
from veloxquant.bench.race import LeftOut
from veloxquant.bench.records import Result
from veloxquant.bench.records import Run
from veloxquant.errors import INTERRUPTED
from veloxquant.errors import VeloxQuantError

__all__ = ["CHOICES", "HERE", "Blas", "Measured", "environment_with", "measure_in_child", "which"]

Blas = Literal["own", "openblas"]

HERE = "here"
"""The choice of a process that another one started: measure with whatever it was given."""

CHOICES = ("both", "own", "openblas", HERE)

_INSTALL = "Debian and Ubuntu: apt install libopenblas0-pthread"


def which(choice: str, dtype: str) -> tuple[list[Blas | None], str | None]:
    """With what to measure.

    Args:
        choice: One of ``CHOICES``.
        dtype: Dtype of the rows.

    Returns:
        What to measure with, None being whatever this process has; and a sentence for the user, or None.

    Raises:
        VeloxQuantError: The choice cannot be had here; the message says why.
    """
    if choice not in CHOICES:
        raise VeloxQuantError(f"--blas must be both, own or openblas, not '{choice}'")
    if choice == HERE:
        return [None], None
    if sys.platform != "linux" or back_end() != "cpu" or dtype != "float32":
        if choice == "both":
            return [None], None
        raise VeloxQuantError(f"--blas {choice} is for a CPU, in float32, under Linux; leave it out here")
    if _loaded() and not _preloaded():
        if choice == "own":
            return [None], None
        return [None], "mlx uses OpenBLAS here without being told to, so there is no other BLAS to compare with"
    if choice == "own":
        return ["own"], None
    if not _loaded() and _library() is None:
        if choice == "openblas":
            raise VeloxQuantError(f"OpenBLAS was not found; install it ({_INSTALL}) or leave --blas out")
        return ["own"], f"OpenBLAS was not found, so the BLAS that mlx's wheel brings was measured alone ({_INSTALL})"
    return (["openblas"] if choice == "openblas" else ["own", "openblas"]), None


def has(kind: Blas | None) -> bool:
    """Whether this process has it already."""
    return kind is None or (kind == "openblas") is _loaded()


def environment_with(kind: Blas, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a process that shall have it."""
    words = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    others = [word for word in words if "openblas" not in word.lower()]
    library = _library() if kind == "openblas" else None
    return {**environment, "LD_PRELOAD": " ".join(filter(None, [library, *others]))}


def _library() -> str | None:
    return ctypes.util.find_library("openblas")


def _loaded() -> bool:
    return blas().startswith("OpenBLAS")


def _preloaded() -> bool:
    return "openblas" in os.environ.get("LD_PRELOAD", "").lower()


@attrs.define
class Measured:
    """What one run of the speed benchmark gave.

    Args:
        run: The run.
        skipped: Methods that were passed over: ``method`` and ``reason``.
        whole: Whether it came to its end.
    """

    run: Run
    skipped: list[dict[str, str]] = attrs.field(factory=list)
    whole: bool = True


def measure_in_child(words: Sequence[str], kind: Blas) -> Measured | None:
    """Run the command in a process that has the BLAS.

    Args:
        words: The words of the command; it is told to print JSON and to measure with what it has.
        kind: The BLAS.

    Returns:
        What it measured, also when Ctrl-C stopped it; None when it had measured nothing by then.

    Raises:
        VeloxQuantError: It failed; what it said is on stderr already.
    """
    command = [sys.executable, "-c", "import sys; from veloxquant.cli import main; sys.exit(main())", *words]
    command += ["--json", "--blas", HERE]
    with tempfile.TemporaryFile() as printed:
        # A group of its own: Ctrl-C on the terminal reaches this process alone, which passes it on once.
        process = subprocess.Popen(command, stdout=printed, env=environment_with(kind, os.environ), process_group=0)
        interrupted = False
        try:
            process.wait()
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return _read(text, process.returncode, kind, interrupted)


def _read(text: str, code: int, kind: Blas, interrupted: bool) -> Measured | None:
    if code not in (0, INTERRUPTED) or not text.strip():
        if interrupted or code == INTERRUPTED:
            return None
        raise VeloxQuantError(f"the process that was to measure with the BLAS '{kind}' ended with the code {code}")
    answer = json.loads(text)
    [found] = answer["runs"]
    return Measured(_run(found), answer["skipped"], whole=code == 0)


def _run(record: Mapping[str, Any]) -> Run:
    fields = {name: value for name, value in record.items() if name not in ("kind", "format", "results", "left_out")}
    left_out = [LeftOut(**one) for one in record["left_out"]]
    return Run(**fields, results=[Result(**one) for one in record["results"]], left_out=left_out)
