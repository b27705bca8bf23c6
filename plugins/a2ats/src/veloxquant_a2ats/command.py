"""``veloxquant calibrate a2ats``: learn a codebook file from a model and a text."""

from __future__ import annotations

import enum
import sys
import time
from pathlib import Path
from typing import Annotated
from typing import Any

import typer
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn

from veloxquant import VeloxQuantError
from veloxquant.cli.model_files import SAMPLE
from veloxquant.cli.model_files import check_model
from veloxquant.cli.model_files import load_model
from veloxquant.cli.output import animated
from veloxquant.cli.output import open_stderr

__all__ = ["calibrate"]


class Mode(enum.StrEnum):
    """What the codebook is for."""

    compress = "compress"
    retrieve = "retrieve"


# Tokens read by default: enough for 256 and for 4,096 centroids.
_TOKENS = {Mode.compress: 18432, Mode.retrieve: 75776}
_BITS = {Mode.compress: 8, Mode.retrieve: 12}
# Twenty in compress mode took twice the time, for errors on held-out text that were the same within noise.
_ITERATIONS = {Mode.compress: 10, Mode.retrieve: 10}


def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The codebook file to write.")],
    mode: Annotated[Mode, typer.Option(help="The mode of a2ats to learn for.")] = Mode.compress,
    model: Annotated[str, typer.Option(help="Model folder, org/name on the Hugging Face hub, or 'sample'.")] = SAMPLE,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text to learn from; by default the built-in one.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to read, an eighth of them held out (default 18432, retrieve 75776).")
    ] = None,
    codebook_bits: Annotated[
        int | None, typer.Option(help="Bits of a code (default 8, retrieve 12); 16 tokens a centroid are needed.")
    ] = None,
    sub_dim: Annotated[int, typer.Option(help="compress: channels that share a code.")] = 8,
    beta: Annotated[float, typer.Option(help="compress: weight of the queries in the metric, 0 to 1.")] = 0.5,
    far_position: Annotated[int, typer.Option(help="The distance at which far tokens will be seen.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Learn a codebook for A2ATS from a model and a text."""
    from veloxquant_a2ats.calibration import calibrate_model
    from veloxquant_a2ats.codebook_file import write_codebook
    from veloxquant_a2ats.fitting import Plan

    plan = Plan(
        mode=mode.value,
        sub_dim=_within("--sub-dim", sub_dim, 1, 64),
        bits=_within("--codebook-bits", _BITS[mode] if codebook_bits is None else codebook_bits, 2, 12),
        beta=_within("--beta", beta, 0, 1),
        far_position=_within("--far-position", far_position, 0, 2**20),
        tokens=_within("--tokens", _TOKENS[mode] if tokens is None else tokens, 64, 2**24),
        iterations=_ITERATIONS[mode],
        seed=_within("--seed", seed, 0, 2**31 - 1),
    )
    check_model(model)
    _check_output(output)
    words = None if text is None else _read(text)
    started = time.monotonic()
    print(f"loading the model {model}", file=sys.stderr, flush=True)
    loaded, tokenizer = load_model(model)
    with _Bar() as bar:
        header, arrays = calibrate_model(
            loaded, _tokens(tokenizer, words), plan, on_stage=bar.begin, on_progress=bar.advance
        )
    write_codebook(output, header, arrays)
    _show(output, header, time.monotonic() - started)


def _within(option: str, value: Any, least: float, most: float) -> Any:
    if not least <= value <= most:
        raise VeloxQuantError(f"{option} must be between {least:g} and {most:g}, not {value}")
    return value


def _check_output(output: Path) -> None:
    if output.is_dir() or not output.absolute().parent.is_dir():
        reason = "is a folder" if output.is_dir() else "is in a folder that does not exist"
        raise VeloxQuantError(f"the codebook cannot be written: '{output}' {reason}; name a file")


def _read(text: Path) -> str:
    try:
        return text.expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise VeloxQuantError(f"the text file '{text}' is not UTF-8 text; convert it first") from error
    except OSError as error:
        raise VeloxQuantError(f"the text file '{text}' cannot be read: {error.strerror}") from error


def _tokens(tokenizer: Any, words: str | None) -> list[int]:
    from veloxquant.testing.sample import sample_text

    text = sample_text() if words is None else words
    found: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return found


def _show(output: Path, header: Any, seconds: float) -> None:
    plain, aware = header.errors["plain"], header.errors["query_aware"]
    print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB, for mode={header.mode}, {len(header.layers)} layers")
    print(f"{header.centroids} centroids for each {header.sub_dim} channels, from {header.tokens} tokens")
    print(
        f"mean squared error of the logits on {header.held_out} held-out tokens: {aware:.4g} query-aware, "
        f"{plain:.4g} plain ({aware / plain:.2f} of it)"
    )
    print(f"{seconds:.0f} seconds")


class _Bar:
    """Progress on stderr: a bar on a terminal, a line for each stage elsewhere."""

    def __init__(self) -> None:
        columns = [TextColumn("{task.description}", markup=False), *Progress.get_default_columns()[1:]]
        self._progress = Progress(*columns, TimeElapsedColumn(), console=open_stderr())
        self._animated = animated()
        self._task: Any = None

    def __enter__(self) -> _Bar:
        if self._animated:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._animated:
            self._progress.stop()

    def begin(self, stage: str, steps: int) -> None:
        """A stage of so many steps begins."""
        if not self._animated:
            print(f"{stage}: {steps:,}", file=sys.stderr, flush=True)
            return
        self._task = self._progress.add_task(stage, total=steps)

    def advance(self, steps: int) -> None:
        """So many steps are done."""
        if self._animated and self._task is not None:
            self._progress.update(self._task, advance=steps)
