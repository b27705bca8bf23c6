"""Running one greedy generation on given caches, apart from showing it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache

import veloxquant
from veloxquant.devices import on_cpu
from veloxquant.registry import default_registry
from veloxquant.reports import Report
from veloxquant.reports import report
from veloxquant.timing import HookTime
from veloxquant.timing import TimingObserver

__all__ = ["Agreement", "Generation", "agreement", "default_step", "run_compressed", "run_plain", "warm_up"]

CPU_STEP = 128
GPU_STEP = 2048


@attrs.frozen(kw_only=True)
class Generation:
    """What one run gave.

    Args:
        cache: Name of the method, or ``plain``.
        text: The text generated.
        tokens: Its tokens, the one that ended it included.
        prompt_tokens: Length of the prompt.
        finish_reason: ``stop`` or ``length``.
        prefill_speed: Prompt tokens per second.
        decode_speed: Tokens per second after the first one, or None when there is only one.
        report: What the caches hold at the end.
        profile: Time of each hook in each layer, or None when it was not measured.
    """

    cache: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    prefill_speed: float
    decode_speed: float | None
    report: Report
    profile: tuple[HookTime, ...] | None = None

    @property
    def tokens_kept(self) -> float:
        """Rows held per KV head; a plain cache holds one for every token."""
        return self.report.tokens_kept if self.report.compressed else self.report.tokens_seen

    @property
    def query_mode(self) -> str | None:
        """The query mode, or None for the plain cache."""
        return self.report.query_mode if self.report.compressed else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "cache": self.cache,
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "tokens_seen": self.report.tokens_seen,
            "tokens_kept": self.tokens_kept,
            "bytes_held": self.report.bytes_held,
            "bytes_plain": self.report.bytes_plain,
            "bytes_static": self.report.bytes_static,
            "ratio": self.report.ratio,
            "query_mode": self.query_mode,
            "step_bytes": self.report.step_bytes,
            "prefill_tokens_per_second": self.prefill_speed,
            "decode_tokens_per_second": self.decode_speed,
        }


@attrs.frozen
class Agreement:
    """How far two greedy runs agree.

    Args:
        leading: Equal tokens before the first difference.
        equal: Positions with equal tokens.
        length: Tokens of the longer run.
    """

    leading: int
    equal: int
    length: int

    @property
    def share(self) -> float:
        """Equal positions over the length of the longer run."""
        return self.equal / self.length if self.length else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"leading_tokens": self.leading, "equal_tokens": self.equal, "equal_share": self.share}


def agreement(first: Sequence[int], second: Sequence[int]) -> Agreement:
    """Compare two runs token by token."""
    same = [a == b for a, b in zip(first, second, strict=False)]
    leading = same.index(False) if False in same else len(same)
    return Agreement(leading, sum(same), max(len(first), len(second)))


def default_step(prompt_tokens: int) -> int:
    """Prompt tokens to process at a time: few on a CPU, where a step takes long and progress should be seen.

    A last step of one token would end the prompt a token early (the token after it comes alone), so the step avoids it.
    """
    step = CPU_STEP if on_cpu() else GPU_STEP
    while prompt_tokens - 1 > step and (prompt_tokens - 1) % step == 1:
        step -= 1
    return step


def warm_up(model: Any, token: int) -> None:
    """Run one token, so that the first of two runs does not pay for what both need."""
    mx.eval(model(mx.array([[token]])))


def run_compressed(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    *,
    method: str,
    config: object,
    true_queries: bool,
    profile: bool = False,
    **options: Any,
) -> Generation:
    """Generate with the caches of a method; the model is as before afterwards.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        prompt: Token ids.
        method: Name of the method.
        config: Its options.
        true_queries: Route the model's queries to the caches.
        profile: Time the hooks, which slows the run down.
        options: ``max_tokens``, ``step``, ``on_prefill`` and ``on_text`` as for ``_run``.

    Raises:
        VeloxQuantError: The model cannot be served.
    """
    # Caches are timed from the moment they are made, so the observer comes first.
    with _observing(profile) as observer, veloxquant.use(model, method, config, true_queries=true_queries):
        return _run(model, tokenizer, prompt, cache=method, observer=observer, **options)


@contextlib.contextmanager
def _observing(wanted: bool) -> Iterator[TimingObserver | None]:
    if not wanted:
        yield None
        return
    registry, observer = default_registry(), TimingObserver(synchronize=True)
    registry.observe(observer)
    try:
        yield observer
    finally:
        registry.unobserve(observer)


def run_plain(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> Generation:
    """Generate with mlx-lm's own caches; arguments as for ``run_compressed``."""
    return _run(model, tokenizer, prompt, cache="plain", **options)


def _run(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    *,
    cache: str,
    max_tokens: int,
    step: int,
    on_prefill: Callable[[int, int], None],
    on_text: Callable[[str], None],
    observer: TimingObserver | None = None,
) -> Generation:
    """Generate greedily.

    Args:
        model: The model, with the ``make_cache`` to use.
        tokenizer: Its tokenizer.
        prompt: Token ids.
        cache: Label of the run.
        max_tokens: Tokens to generate at most.
        step: Prompt tokens to process at a time.
        on_prefill: Called with the prompt tokens processed and their number.
        on_text: Called with each piece of text.
        observer: What times the hooks.
    """
    if observer is not None:
        observer.reset()  # caches were made before, to see whether the model can be served
    caches = make_prompt_cache(model)
    responses, times = [], []
    for response in stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        prompt_cache=caches,
        prefill_step_size=step,
        prompt_progress_callback=on_prefill,
    ):
        times.append(time.perf_counter())
        responses.append((response.text, int(response.token)))
        on_text(response.text)
    seconds = times[-1] - times[0]
    # Before the report, which runs a step more.
    profile = None if observer is None else tuple(observer.rows())
    return Generation(
        cache=cache,
        text="".join(text for text, _ in responses),
        tokens=tuple(token for _, token in responses),
        prompt_tokens=len(prompt),
        finish_reason=str(response.finish_reason),
        prefill_speed=float(response.prompt_tps),
        decode_speed=(len(times) - 1) / seconds if seconds > 0 else None,
        report=report(caches, measure_step=True),
        profile=profile,
    )
