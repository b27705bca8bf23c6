"""The quality benchmark: every arm and its references on one text, then on passkeys, each result recorded at once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.attention import is_routed
from veloxquant.attention import routable
from veloxquant.attention import unroute
from veloxquant.bench.arms import Arm
from veloxquant.bench.arms import plain_arm
from veloxquant.bench.companions import full_layers
from veloxquant.bench.companions import quantized_arms
from veloxquant.bench.companions import recent_beside
from veloxquant.bench.companions import top_beside
from veloxquant.bench.evaluation import Evaluation
from veloxquant.bench.evaluation import Prompt
from veloxquant.bench.evaluation import begin
from veloxquant.bench.evaluation import evaluate
from veloxquant.bench.evaluation import read_prompt
from veloxquant.bench.held import held
from veloxquant.bench.passkey import Passkey
from veloxquant.bench.passkey import answer
from veloxquant.bench.passkey import passkey_at
from veloxquant.bench.race import LeftOut
from veloxquant.bench.records import Result
from veloxquant.bench.records import Writer
from veloxquant.build import native_caches
from veloxquant.errors import VeloxQuantError

__all__ = ["QualityPlan", "Track", "check_text", "measure_quality"]

Track = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Makes the progress of one piece of work, from its name and its length in tokens; gives what to call as it goes on."""


@attrs.frozen(kw_only=True)
class QualityPlan:
    """What to measure.

    Args:
        prompt_tokens: Tokens of the cached prompt.
        tokens: Tokens after it whose predictions are compared.
        needle_lengths: Lengths of passkey prompts, in tokens.
        needle_depths: Depths of the passkeys, as shares.
        step: Prompt tokens of a chunk.
        seed: Seed of the passkeys.
        references: Measure the references too. Without them the plain cache alone stands beside the arms, and looks for
            no passkeys.
    """

    prompt_tokens: int = 1024
    tokens: int = 128
    needle_lengths: tuple[int, ...] = (1024,)
    needle_depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    step: int = 2048
    seed: int = 0
    references: bool = True


def check_text(plan: QualityPlan, text: Sequence[int]) -> None:
    """Refuse a text that is too short for what is planned.

    Raises:
        VeloxQuantError: It is.
    """
    needed = max(plan.prompt_tokens + plan.tokens if plan.tokens else 0, *plan.needle_lengths, 0)
    if len(text) < needed:
        raise VeloxQuantError(
            f"the text has {len(text):,} tokens and {needed:,} are needed; give a longer one, "
            "or a smaller --prompt-tokens, --tokens or --needle-lengths"
        )


def measure_quality(
    model: Any,
    tokenizer: Any,
    text: Sequence[int],
    arms: Sequence[Arm],
    plan: QualityPlan,
    writer: Writer,
    track: Track,
    left_out: list[LeftOut] | None = None,
) -> None:
    """Measure; what was measured when this is interrupted is in ``writer.run`` and in its file.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        text: Tokens of the text.
        arms: Methods and peers.
        plan: What to measure.
        writer: Takes the results.
        track: Shows the progress.
        left_out: Where to note arms that fail, which then leave the others alone; None: the first one ends the run.

    Raises:
        VeloxQuantError: The text is too short, or an arm fails; the message names it.
    """
    check_text(plan, text)
    try:
        if plan.tokens:
            _Continuation(model, text, plan, writer, track, left_out).measure(arms)
        for length, depth, key, hay in _needles(plan, text):
            passkey = passkey_at(tokenizer, hay, length=length, depth=depth, key=key)
            _Needle(model, tokenizer, passkey, plan, writer, track, left_out).measure(arms)
    finally:
        while is_routed(model):
            unroute(model)


class _Work:
    """Arms one after another, each with the references that stand beside it."""

    def __init__(self, where: str, left_out: list[LeftOut] | None) -> None:
        self.where, self.left_out = where, left_out

    def _one(self, arm: Arm, beside: Arm | None = None) -> list[Arm]:
        """Measure one arm; returns the references that stand beside it."""
        raise NotImplementedError

    def one(self, arm: Arm, beside: Arm | None = None) -> list[Arm]:
        """As ``_one``; an arm that fails is noted and not tried again."""
        if self.left_out is None or arm.method == "plain":
            return self._one(arm, beside)
        if arm.name in [failed.arm for failed in self.left_out]:
            return []
        try:
            return self._one(arm, beside)
        except VeloxQuantError as error:
            self.left_out.append(LeftOut(arm.name, self.where, str(error)))
            return []

    def all(self, first: Sequence[Arm], arms: Sequence[Arm]) -> None:
        """Some by themselves, then every arm and what stands beside it."""
        for arm in first:
            self.one(arm)
        for arm in arms:
            for beside in self.one(arm):
                self.one(beside, arm)


class _Continuation(_Work):
    """The tokens after one prompt."""

    def __init__(
        self,
        model: Any,
        text: Sequence[int],
        plan: QualityPlan,
        writer: Writer,
        track: Track,
        left_out: list[LeftOut] | None,
    ) -> None:
        super().__init__(f"{plan.prompt_tokens:,} tokens", left_out)
        self.model, self.plan, self.writer, self.track = model, plan, writer, track
        self.prompt_tokens = text[: plan.prompt_tokens]
        self.continuation = text[plan.prompt_tokens : plan.prompt_tokens + plan.tokens]
        self.reference: list[mx.array] = []
        self.plain: Evaluation | None = None

    def measure(self, arms: Sequence[Arm]) -> None:
        """Plain first, then mlx-lm's quantized caches, then every arm with the references beside it."""
        with self.track("plain: prompt", self.plan.prompt_tokens - 1) as advance:
            self.prompt = read_prompt(self.model, self.prompt_tokens, step=self.plan.step, advance=advance)
        self.full = full_layers(self.prompt.plain)
        quantized = quantized_arms(self.prompt.plain) if self.plan.references else []
        self.all([plain_arm(), *quantized], arms)

    def _one(self, arm: Arm, beside: Arm | None = None) -> list[Arm]:
        with self.track(arm.name, self.plan.prompt_tokens - 1 + self.plan.tokens) as advance, _naming(arm):
            found = evaluate(
                self.model,
                arm,
                self.prompt,
                self.continuation,
                self.reference,
                layers=self.full,
                advance=advance,
            )
            figures = found.figures(self.plain)
        mx.clear_cache()
        if self.plain is None:
            self.plain = found
        if beside is not None:
            figures["beside"] = beside.name
        self.writer.add(Result(kind="quality", figures=figures, **arm.describe()))
        if arm.role == "reference" or not self.plan.references:
            return []
        recent = recent_beside(
            arm, self.prompt.plain, found.full_after_prompt, found.full_at_end, tokens=self.plan.tokens
        )
        # The last token is predicted and never fed.
        seen = self.plan.prompt_tokens + self.plan.tokens - 1
        top = top_beside(arm, found.full_at_end.rows_read, seen) if _routable(self.model) else None
        return [one for one in (recent, top) if one is not None]


class _Needle(_Work):
    """One passkey prompt."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        passkey: Passkey,
        plan: QualityPlan,
        writer: Writer,
        track: Track,
        left_out: list[LeftOut] | None,
    ) -> None:
        super().__init__(f"a passkey in {len(passkey.prompt):,} tokens", left_out)
        self.model, self.tokenizer, self.passkey = model, tokenizer, passkey
        self.writer, self.track, self.step, self.references = writer, track, plan.step, plan.references
        self.full = full_layers(native_caches(model))

    def measure(self, arms: Sequence[Arm]) -> None:
        """The same arms as for the tokens after a prompt, in the same order."""
        if self.references:
            with self.track("plain: prompt", len(self.passkey.prompt) - 1) as advance:
                self.prompt = read_prompt(self.model, self.passkey.prompt, step=self.step, advance=advance)
            first = [plain_arm(), *quantized_arms(self.prompt.plain)]
        else:
            self.prompt, first = Prompt(self.passkey.prompt, [], self.step), []
        self.all(first, arms)

    def _one(self, arm: Arm, beside: Arm | None = None) -> list[Arm]:
        length = len(self.prompt.tokens)
        label = f"{arm.name}: passkey at {self.passkey.depth:.0%} of {length:,}"
        with self.track(label, length - 1) as advance, _naming(arm):
            caches, logits = begin(self.model, arm, self.prompt, advance)
            count = held([caches[index] for index in self.full])
            said = answer(self.model, self.tokenizer, caches, logits)
            rows_read = held([caches[index] for index in self.full]).rows_read
        mx.clear_cache()
        figures: dict[str, Any] = {
            "length": length,
            "depth": self.passkey.depth,
            "key": self.passkey.key,
            "answer": said,
            "found": said.startswith(self.passkey.key),
            "bytes_total": count.total,
        }
        if beside is not None:
            figures["beside"] = beside.name
        self.writer.add(Result(kind="needle", figures=figures, **arm.describe()))
        if arm.role == "reference" or not self.references:
            return []
        top = top_beside(arm, rows_read, length) if _routable(self.model) else None
        return [one for one in (recent_beside(arm, self.prompt.plain, count), top) if one is not None]


def _needles(plan: QualityPlan, text: Sequence[int]) -> Iterator[tuple[int, float, str, Sequence[int]]]:
    """Length, depth, number and text of every passkey prompt; each has another stretch of the text, while it lasts."""
    digits = random.Random(plan.seed)
    for length in plan.needle_lengths:
        for place, depth in enumerate(plan.needle_depths):
            key = f"{digits.randrange(10**5):05d}"
            start = place * (length // 2) % (len(text) - length + 1)
            yield length, depth, key, text[start : start + length]


def _routable(model: Any) -> bool:
    """Whether the true queries can be had, without which no row is known to be the best."""
    return all(routable(layer) for layer in model.layers)


@contextlib.contextmanager
def _naming(arm: Arm) -> Iterator[None]:
    """Say of an error which arm it befell."""
    try:
        yield
    except VeloxQuantError as error:
        raise VeloxQuantError(f"{arm.name}: {error}") from error
    except Exception as error:  # a method, or another library, that fails
        raise VeloxQuantError(f"{arm.name} failed: {type(error).__name__}: {error}") from error
