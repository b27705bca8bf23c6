"""What the figures of a run depend on, and what it is called."""

from __future__ import annotations

from results_page.command import command_lines
from results_page.intake import SAMPLE
from results_page.markdown import code
from veloxquant.bench.records import Run

__all__ = ["facts", "place", "title"]


def title(run: Run) -> str:
    """What a run was made of, for its heading."""
    subject = _model(run) if run.model else "One layer"
    if run.command == "speed" and run.model and run.arguments.get("shape"):
        subject = f"One layer, and {_model(run)}"
    return f"{subject[0].upper()}{subject[1:]}, {run.dtype}, {place(run)}"


def _model(run: Run) -> str:
    return "the sample model" if run.model == "sample" else str(run.model)


def _named(run: Run) -> str:
    return " (SmolLM2-135M-Instruct)" if run.model == "sample" else ""


def place(run: Run, between: str = " ") -> str:
    """Where a run was made, in a few words.

    Args:
        run: The run.
        between: What stands between the back end and what it runs on.
    """
    here = run.environment
    if here["back_end"] != "cpu":
        name = {"cuda": "CUDA", "metal": "Metal"}.get(here["back_end"], here["back_end"])
        return f"{name},{between}{here['machine'].get('gpu')}"
    blas = "mlx's own BLAS" if here["blas"].startswith("as mlx") else here["blas"].partition(",")[0]
    return f"CPU,{between}{blas}"


def facts(run: Run, file: str) -> list[str]:
    """Machine, versions, text and command, as lines."""
    here = run.environment
    machine = here["machine"]
    memory = machine.get("memory_bytes")
    parts = [
        machine.get("gpu"),
        f"{machine.get('cores')} cores, {machine.get('cpu')}",
        f"{memory / 2**30:.0f} GiB of memory" if memory else None,
        machine.get("system"),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    lines = [
        f"- Machine: {'; '.join(part for part in parts if part)}",
        f"- Back end: {here['back_end']}; BLAS: {here['blas']}; dtype: {run.dtype}",
        f"- Model: {_model(run) + _named(run) if run.model else 'none, one layer of random rows'}{_layer(run)}",
        *_text(run),
        f"- Versions: {versions}",
        f"- Date: {run.time[:16].replace('T', ' ')} UTC; run {code(run.id)} of [{file}](results/{file})",
    ]
    return [*lines, "", "```text", *command_lines(run), "```", ""]


def _layer(run: Run) -> str:
    shape = run.arguments.get("shape")
    return f" ({shape})" if shape else ""


def _text(run: Run) -> list[str]:
    if run.text is None:
        return []
    name = run.arguments.get("text", "not named in the record")
    about = f"{name} of Python {run.environment['versions'].get('python')}" if name == SAMPLE else name
    return [f"- Text: {about}, SHA-256 {code(run.text)}"]
