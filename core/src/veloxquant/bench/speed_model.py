"""Decoding on a model, end to end: one prompt is processed once and handed to the caches of every arm."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from veloxquant.attention import is_routed
from veloxquant.attention import keep_routed
from veloxquant.attention import unroute
from veloxquant.bench.arms import Arm
from veloxquant.bench.held import held
from veloxquant.bench.quality import prefill_step
from veloxquant.bench.quality_run import Track
from veloxquant.bench.race import PLAIN
from veloxquant.bench.race import WARM_UP
from veloxquant.bench.race import LeftOut
from veloxquant.bench.race import Race
from veloxquant.bench.race import reason_of
from veloxquant.bench.records import Writer
from veloxquant.bench.speed import burst
from veloxquant.bench.speed import record
from veloxquant.build import native_caches
from veloxquant.timing import arrays_within

__all__ = ["measure_generation"]


def measure_generation(
    model: Any,
    arms: Sequence[Arm],
    prompt: Sequence[int],
    writer: Writer,
    track: Track,
    *,
    steps: int = 30,
    step: int = 2048,
    left_out: list[LeftOut] | None = None,
) -> list[LeftOut]:
    """Time the decoding of every arm after one prompt, in turns; greedy, as mlx-lm generates.

    Args:
        model: An mlx-lm model.
        arms: The arms, the plain one among them.
        prompt: Tokens of the prompt, at least two.
        writer: Takes the results, ``generation``.
        track: Shows the progress.
        steps: Rounds that count.
        step: Prompt tokens of a chunk.
        left_out: Where to note arms that fail.

    Returns:
        Arms that failed, with the reason.

    Raises:
        VeloxQuantError: The plain arm fails.
    """
    failed: list[LeftOut] = [] if left_out is None else left_out
    where = f"a prompt of {len(prompt):,} tokens"
    try:
        with track(f"prompt of {len(prompt):,} tokens", len(prompt)) as advance:
            lanes, first = _read(model, arms, prompt, step, advance)
        failed += [LeftOut(lane.name, where, lane.failure) for lane in lanes if lane.failure is not None]
        lanes = [lane for lane in lanes if lane.failure is None]
        bytes_held = {lane.name: held(lane.caches).total for lane in lanes}
        race = Race({lane.name: _lap(model, lane.caches, first, burst()) for lane in lanes})
        del lanes
        try:
            with track("decoding", steps + WARM_UP) as advance:
                race.run(steps, advance)
        finally:
            found = functools.partial(_figures, race, prompt, bytes_held)
            record(race, arms, writer, "generation", found, failed, where)
    finally:
        while is_routed(model):
            unroute(model)
    return failed


def _figures(race: Race, prompt: Sequence[int], bytes_held: dict[str, int], name: str) -> dict[str, Any]:
    return {
        "prompt_tokens": len(prompt),
        "bytes_held": bytes_held[name],
        "steps_together": burst(),
        "tokens_per_second": 1 / race.figures(name)["seconds"],
    }


@attrs.define
class _Lane:
    """The caches of one arm, and why they had to be given up."""

    name: str
    caches: list[Any]
    failure: str | None = None

    def give_up(self, error: Exception) -> None:
        self.failure, self.caches = reason_of(error), []


class _Tee:
    """A plain cache that hands every row and query on to the caches of other arms at the same layer."""

    def __init__(self, plain: Any, index: int, lanes: Sequence[_Lane]) -> None:
        self.plain, self.index, self.lanes = plain, index, lanes
        self._waiting: list[tuple[_Lane, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store rows in every cache; returns what the plain one holds."""
        self._waiting = []
        for lane in self.lanes:
            if lane.failure is None:
                cache = lane.caches[self.index]
                try:
                    rows = cache.update_and_fetch(keys, values)
                    if hasattr(cache, "attend"):
                        self._waiting.append((lane, rows))
                except Exception as error:
                    lane.give_up(error)
        found: tuple[mx.array, mx.array] = self.plain.update_and_fetch(keys, values)
        return found

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend to the plain rows; the others see the queries, and what they would answer is not computed."""
        own_mask = "causal" if queries.shape[2] > 1 else None
        for lane, rows in self._waiting:
            if lane.failure is None:
                try:
                    lane.caches[self.index].attend(queries, *rows, scale=scale, mask=own_mask, sinks=sinks)
                except Exception as error:
                    lane.give_up(error)
        self._waiting = []
        output: mx.array = scaled_dot_product_attention(
            queries, keys, values, cache=self.plain, scale=scale, mask=mask, sinks=sinks
        )
        return output


def _read(
    model: Any, arms: Sequence[Arm], prompt: Sequence[int], step: int, advance: Callable[[int], None]
) -> tuple[list[_Lane], mx.array]:
    """Feed a prompt once; gives the caches of all arms and the first token ``[1, 1]``."""
    native = native_caches(model)
    lanes = [_Lane(arm.name, arm.make(model)) for arm in arms if arm.name != PLAIN]
    if any(hasattr(cache, "attend") for lane in lanes for cache in lane.caches):
        keep_routed(model)
    caches = [_Tee(cache, index, lanes) if type(cache) is KVCache else cache for index, cache in enumerate(native)]
    tokens = mx.array(list(prompt))[None]
    ends = [*range(0, len(prompt) - 1, prefill_step(len(prompt) - 1, step)), len(prompt) - 1, len(prompt)]
    for start, stop in itertools.pairwise(ends):
        logits = model(tokens[:, start:stop], cache=caches)
        first = mx.argmax(logits[:, -1], axis=-1)[:, None]
        del logits
        mx.eval(arrays_within(native), *([first] if stop == len(prompt) else []))
        for lane in lanes:
            _settle(lane)
        mx.clear_cache()
        advance(stop - start)
    for lane in lanes:
        if lane.failure is None:
            # Layers without full attention keep the caches of the model, which only the plain arm has fed.
            lane.caches = [
                lane.caches[index] if isinstance(caches[index], _Tee) else copy.deepcopy(cache)
                for index, cache in enumerate(native)
            ]
    return [_Lane(PLAIN, native), *lanes], first


def _settle(lane: _Lane) -> None:
    try:
        mx.eval(arrays_within(lane.caches))
    except Exception as error:
        lane.give_up(error)


def _lap(model: Any, caches: list[Any], token: mx.array, together: int) -> Callable[[int], dict[str, float]]:
    def lap(_: int) -> dict[str, float]:
        nonlocal token
        mx.synchronize()
        start = time.perf_counter()
        for _step in range(together):
            logits = model(token, cache=caches)
            token = mx.argmax(logits[:, -1], axis=-1)[:, None]
            mx.async_eval(token)  # type: ignore[no-untyped-call]
        mx.eval(token)
        mx.synchronize()
        return {"seconds": (time.perf_counter() - start) / together}

    return lap
