"""The memory benchmark: every arm in a fresh process, so that none profits from what another left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import attrs

from veloxquant.bench.arms import Arm
from veloxquant.bench.line_up import Wanted
from veloxquant.bench.memory_arm import Request
from veloxquant.bench.quality_run import Track
from veloxquant.bench.race import PLAIN
from veloxquant.bench.race import LeftOut
from veloxquant.bench.records import Result
from veloxquant.bench.records import Writer
from veloxquant.errors import VeloxQuantError

__all__ = ["MemoryPlan", "in_fresh_process", "measure_memory"]


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """What to measure.

    Args:
        lengths: Tokens of the prompts.
        tokens: Tokens after each.
        step: Prompt tokens of a block.
        wanted: What the user chose; the other process lines up the arms again.
        shape: The shape of the layer, where there is no model.
        model: Name of the model, or None.
        text: Tokens of the text, where there is a model.
    """

    lengths: tuple[int, ...]
    tokens: int = 100
    step: int = 2048
    wanted: Wanted = attrs.field(factory=Wanted)
    shape: dict[str, Any] = attrs.field(factory=dict)
    model: str | None = None
    text: Sequence[int] = ()

    def request(self, arm: str, length: int) -> Request:
        """What the process of one arm is told."""
        return Request(
            arm=arm,
            wanted=attrs.asdict(self.wanted),
            length=length,
            tokens=self.tokens,
            step=self.step,
            shape=self.shape,
            model=self.model,
            prompt=None if self.model is None else list(self.text[: length + self.tokens]),
        )


def in_fresh_process(request: Request) -> dict[str, Any]:
    """Measure one arm in another process.

    Raises:
        VeloxQuantError: It failed; the message says why.
    """
    command = [sys.executable, "-m", "veloxquant.bench.memory_arm"]
    # A group of its own: on Ctrl-C it is ended here, without a traceback of its own on the terminal.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        printed, said = process.communicate(json.dumps(attrs.asdict(request)))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    try:
        answer = json.loads(printed.splitlines()[-1])
    except (IndexError, ValueError):
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        # A signal is what the system ends a process with that takes too much memory.
        end = f"was ended by the signal {-process.returncode}" if process.returncode < 0 else "gave no answer"
        raise VeloxQuantError(f"its process {end}{': ' + last if last else ''}") from None
    if "error" in answer:
        raise VeloxQuantError(answer["error"])
    figures: dict[str, Any] = answer["figures"]
    return figures


def measure_memory(
    arms: Mapping[int, Sequence[Arm]],
    plan: MemoryPlan,
    writer: Writer,
    track: Track,
    left_out: list[LeftOut],
    run_arm: Callable[[Request], dict[str, Any]] = in_fresh_process,
) -> None:
    """Measure; what was measured when this is interrupted is in ``writer.run`` and in its file.

    Args:
        arms: The arms by length, the plain one first.
        plan: What to measure.
        writer: Takes the results.
        track: Shows the progress.
        left_out: Takes the arms that fail; one that does leaves the others alone.
        run_arm: Measures one arm.

    Raises:
        VeloxQuantError: The plain arm fails.
    """
    for length in plan.lengths:
        plain: int | None = None
        for arm in arms[length]:
            with track(f"{length:,} tokens: {arm.name}", 1) as advance:
                try:
                    figures = run_arm(plan.request(arm.name, length))
                except VeloxQuantError as error:
                    if arm.name == PLAIN:
                        raise VeloxQuantError(f"{PLAIN}: {error}") from error
                    left_out.append(LeftOut(arm.name, f"{length:,} tokens", str(error)))
                    continue
                advance(1)
            if arm.name == PLAIN:
                plain = figures["at_end"]["bytes_plain"]
            figures["share"] = figures["bytes_held"] / plain if plain else None
            writer.add(Result(kind="memory", figures={"length": length, **figures}, **arm.describe()))
