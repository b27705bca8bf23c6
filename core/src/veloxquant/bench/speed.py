"""The speed benchmark of one layer: time of a decode step after prompts of several lengths, and of a prompt's block."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.bench.arms import Arm
from veloxquant.bench.environment import back_end
from veloxquant.bench.held import held
from veloxquant.bench.layer_work import Rows
from veloxquant.bench.layer_work import Shape
from veloxquant.bench.layer_work import blocks
from veloxquant.bench.layer_work import read_block
from veloxquant.bench.layer_work import settle
from veloxquant.bench.layer_work import store
from veloxquant.bench.quality_run import Track
from veloxquant.bench.race import PLAIN
from veloxquant.bench.race import WARM_UP
from veloxquant.bench.race import LeftOut
from veloxquant.bench.race import Race
from veloxquant.bench.race import reason_of
from veloxquant.bench.records import Result
from veloxquant.bench.records import Writer
from veloxquant.errors import VeloxQuantError
from veloxquant.timing import arrays_within

__all__ = ["SpeedPlan", "burst", "measure_speed", "record"]

IN_A_ROW = 4
"""Steps of an arm in one turn on a CPU. The first meets the memory as other arms left it; it counts apart."""


@attrs.frozen(kw_only=True)
class SpeedPlan:
    """What to measure.

    Args:
        lengths: Rows before the steps.
        shape: The shape of the layer.
        steps: Decode steps of each arm that count; on a GPU, bursts of them.
        prefill_rows: Rows of the prompt's block that is timed; 0 for none.
        prefill_rounds: Rounds of it that count.
        step: Rows of a block when a cache is filled.
    """

    lengths: tuple[int, ...] = (4096, 32768)
    shape: Shape = attrs.field(factory=Shape)
    steps: int = 30
    prefill_rows: int = 1024
    prefill_rounds: int = 5
    step: int = 2048


def burst() -> int:
    """Steps that are timed together: on a GPU a single one is shorter than the clock and the launches can tell."""
    return 1 if back_end() == "cpu" else 20


def measure_speed(
    arms: Mapping[int, Sequence[Arm]],
    plan: SpeedPlan,
    writer: Writer,
    track: Track,
    left_out: list[LeftOut] | None = None,
) -> list[LeftOut]:
    """Measure; what was measured when this is interrupted is in ``writer.run`` and in its file.

    Args:
        arms: The arms by length, the plain one among them: of a peer a setting may follow from the length.
        plan: What to measure.
        writer: Takes the results, ``speed`` and ``prefill``.
        track: Shows the progress.
        left_out: Where to note arms that fail; an arm that does leaves the others alone.

    Returns:
        Arms that failed, with the reason.

    Raises:
        VeloxQuantError: The plain arm fails.
    """
    failed: list[LeftOut] = [] if left_out is None else left_out
    for length in plan.lengths:
        _steps(arms[length], plan, length, writer, track, failed)
        mx.clear_cache()
    if plan.prefill_rows:
        _prefill(arms[plan.prefill_rows], plan, writer, track, failed)
    return failed


def record(
    race: Race,
    arms: Sequence[Arm],
    writer: Writer,
    kind: str,
    figures: Callable[[str], dict[str, Any]],
    failed: list[LeftOut],
    where: str,
) -> None:
    """Take the results of a race, whole or not.

    Args:
        race: The race.
        arms: Who may have run.
        writer: Takes the results.
        kind: Kind of the results.
        figures: Further figures, from the name of an arm.
        failed: Takes the arms that left.
        where: What was measured, for these.
    """
    done = race.finished()
    for arm in arms:
        if arm.name in done:
            found = {**figures(arm.name), **race.figures(arm.name)}
            writer.add(Result(kind=kind, figures=found, **arm.describe()))
    failed += [LeftOut(name, where, reason) for name, reason in race.failed.items()]


# ---------------------------------------------------------------------- steps


def _steps(
    arms: Sequence[Arm], plan: SpeedPlan, length: int, writer: Writer, track: Track, failed: list[LeftOut]
) -> None:
    where = f"{length:,} rows"
    caches: dict[str, Any] = {}
    for arm in arms:
        cache = _filled(arm, plan, length, track, failed)
        if cache is not None:
            caches[arm.name] = cache
    bytes_held = {name: held(cache).total for name, cache in caches.items()}
    if back_end() == "cpu":
        lap, together, rounds = _single_steps, IN_A_ROW, math.ceil(plan.steps / (IN_A_ROW - 1))
    else:
        lap, together, rounds = _burst_of_steps, burst(), plan.steps
    steps = _StepRows(plan.shape, together)
    race = Race({name: lap(cache, steps, plan.shape.scale) for name, cache in caches.items()})
    del caches
    try:
        with track(f"{where}: steps", rounds + WARM_UP) as advance:
            race.run(rounds, advance)
    finally:
        record(
            race,
            arms,
            writer,
            "speed",
            lambda name: {"length": length, "bytes_held": bytes_held[name], "steps_together": burst()},
            failed,
            where,
        )


def _filled(arm: Arm, plan: SpeedPlan, length: int, track: Track, failed: list[LeftOut]) -> Any:
    """The cache of an arm after a prompt, or None when it fails."""
    with track(f"{length:,} rows: filling {arm.name}", length) as advance:
        try:
            cache = arm.make_layer(plan.shape.layer())
            for rows in blocks(plan.shape, length, plan.step):
                read_block(cache, rows, plan.shape.scale)
                advance(rows[1].shape[2])
        except Exception as error:  # a method, or another library, that fails
            if arm.name == PLAIN:
                raise VeloxQuantError(f"{PLAIN}: {reason_of(error)}") from error
            failed.append(LeftOut(arm.name, f"{length:,} rows", reason_of(error)))
            cache = None
    mx.clear_cache()
    return cache


class _StepRows:
    """New rows of the steps of a round, the same for all arms, made outside of what is timed."""

    def __init__(self, shape: Shape, together: int) -> None:
        self.shape, self.together = shape, together
        self._number = -1
        self._rows: list[Rows] = []

    def of(self, number: int) -> list[Rows]:
        if number != self._number:
            first = 10**6 + number * self.together
            self._rows = [self.shape.rows(1, first + place) for place in range(self.together)]
            self._number = number
        return self._rows


def _single_steps(cache: Any, steps: _StepRows, scale: float) -> Callable[[int], dict[str, float]]:
    """Steps one by one: the first after the other arms, and the median of those that follow it."""

    def timed(rows: Rows) -> float:
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(store(cache, rows, scale))
        mx.synchronize()
        return time.perf_counter() - start

    def lap(number: int) -> dict[str, float]:
        first, *others = [timed(rows) for rows in steps.of(number)]
        return {"seconds": statistics.median(others), "first_seconds": first}

    return lap


def _burst_of_steps(cache: Any, steps: _StepRows, scale: float) -> Callable[[int], dict[str, float]]:
    """Steps that are waited for together."""

    def lap(number: int) -> dict[str, float]:
        new = steps.of(number)
        mx.synchronize()
        start = time.perf_counter()
        outputs = []
        for rows in new:
            outputs.append(store(cache, rows, scale))
            mx.async_eval(outputs[-1])  # type: ignore[no-untyped-call]
        mx.eval(outputs)
        mx.synchronize()
        return {"seconds": (time.perf_counter() - start) / len(new)}

    return lap


# -------------------------------------------------------------------- prefill


def _prefill(arms: Sequence[Arm], plan: SpeedPlan, writer: Writer, track: Track, failed: list[LeftOut]) -> None:
    rows = plan.shape.rows(plan.prefill_rows, 0)
    last = plan.shape.rows(1, 1)
    race = Race({arm.name: _block_lap(arm, plan.shape, rows, last) for arm in arms})
    where = f"a block of {plan.prefill_rows:,} rows"
    try:
        with track(f"prompt of {plan.prefill_rows:,} rows", plan.prefill_rounds + 1) as advance:
            race.run(plan.prefill_rounds, advance, warm_up=1)
    finally:
        record(race, arms, writer, "prefill", lambda _: {"length": plan.prefill_rows}, failed, where)


def _block_lap(arm: Arm, shape: Shape, rows: Rows, last: Rows) -> Callable[[int], dict[str, float]]:
    """Time a prompt of one block and its last token, without and with the attention of the block."""

    def lap(_: int) -> dict[str, float]:
        update, end = _block(arm, shape, rows, last, attention=False)
        whole, _end = _block(arm, shape, rows, last, attention=True)
        return {"update_seconds": update, "with_attention_seconds": whole, "last_token_seconds": end}

    return lap


def _block(arm: Arm, shape: Shape, rows: Rows, last: Rows, *, attention: bool) -> tuple[float, float]:
    cache = arm.make_layer(shape.layer())
    mx.synchronize()
    start = time.perf_counter()
    if attention:
        output = store(cache, rows, shape.scale)
        mx.eval(output, arrays_within(cache))
        del output
    else:
        read_block(cache, rows, shape.scale)
    mx.synchronize()
    middle = time.perf_counter()
    # The prompt's end belongs to it: this is where rows are evicted.
    output = store(cache, last, shape.scale)
    mx.eval(output)
    del output
    settle(cache)
    mx.synchronize()
    return middle - start, time.perf_counter() - middle
