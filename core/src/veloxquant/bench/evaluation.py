"""One arm on one prompt: what its caches hold, and how far they move the predictions of the tokens that follow."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import cast

import attrs
import mlx.core as mx
import numpy as np

from veloxquant.bench.arms import Arm
from veloxquant.bench.arms import plain_arm
from veloxquant.bench.held import Held
from veloxquant.bench.held import held
from veloxquant.bench.quality import divergence
from veloxquant.bench.quality import log_softmax
from veloxquant.bench.quality import prefill_step
from veloxquant.bench.spread import mean_interval
from veloxquant.errors import VeloxQuantError

__all__ = ["Evaluation", "Prompt", "evaluate", "read_prompt"]

Advance = Callable[[int], None]


@attrs.frozen
class Prompt:
    """A prompt that the plain caches have read.

    Args:
        tokens: All its tokens.
        plain: Plain caches that have seen all but the last.
        step: Tokens of a chunk.
    """

    tokens: Sequence[int]
    plain: list[Any]
    step: int


@attrs.frozen(kw_only=True)
class Evaluation:
    """Figures of one arm, token by token.

    Args:
        kl: KL divergence of the plain prediction from the arm's, for each token.
        same: Whether both hold the same token for the likeliest.
        logprobs: Log-probability of each token of the text.
        after_prompt: Bytes right after the prompt.
        at_end: Bytes after the last token.
        full_after_prompt: As ``after_prompt``, of the layers of full attention alone.
        full_at_end: As ``at_end``, of these.
    """

    kl: tuple[float, ...]
    same: tuple[bool, ...]
    logprobs: tuple[float, ...]
    after_prompt: Held
    at_end: Held
    full_after_prompt: Held
    full_at_end: Held

    def figures(self, plain: Evaluation | None) -> dict[str, Any]:
        """Plain values for a record.

        Args:
            plain: The figures of the plain arm, for shares of its bytes; None for the plain arm itself.

        Raises:
            VeloxQuantError: A prediction is not a number.
        """
        if not np.isfinite([*self.kl, *self.logprobs]).all():
            raise VeloxQuantError("its predictions are not numbers (NaN or infinite)")
        whole = plain or self
        return {
            "mean_kl": float(np.mean(self.kl)),
            "mean_kl_interval": list(mean_interval(self.kl)),
            "p95_kl": float(np.quantile(self.kl, 0.95)),
            "top1_agreement": float(np.mean(self.same)),
            "perplexity": float(np.exp(-np.mean(self.logprobs))),
            "tokens": len(self.kl),
            "after_prompt": _shared(self.after_prompt, whole.after_prompt),
            "at_end": _shared(self.at_end, whole.at_end),
            "kl": [round(value, 7) for value in self.kl],
        }


def _shared(count: Held, plain: Held) -> dict[str, Any]:
    return {**count.to_dict(), "bytes_plain": plain.plain, "share": count.total / plain.plain if plain.plain else None}


def read_prompt(
    model: Any, tokens: Sequence[int], *, step: int, arm: Arm | None = None, advance: Advance | None = None
) -> Prompt:
    """Feed all of a prompt but its last token.

    Args:
        model: An mlx-lm model.
        tokens: The prompt, at least two tokens.
        step: Tokens of a chunk.
        arm: Whose caches to feed; by default the plain ones.
        advance: Called with the number of tokens after each chunk.

    Returns:
        The prompt, with the caches.
    """
    caches = (arm or plain_arm()).make(model)
    last = len(tokens) - 1
    step = prefill_step(last, step)
    array = mx.array(list(tokens))[None]
    for start in range(0, last, step):
        stop = min(start + step, last)
        model(array[:, start:stop], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
        if advance is not None:
            advance(stop - start)
    return Prompt(tokens, caches, step)


def begin(model: Any, arm: Arm, prompt: Prompt, advance: Advance | None = None) -> tuple[list[Any], mx.array]:
    """Caches of an arm that have seen the whole prompt, and the logits of its last token ``[vocabulary]``.

    Args:
        model: An mlx-lm model.
        arm: The arm; one that can go on from the plain caches does, others read the prompt themselves.
        prompt: The prompt.
        advance: Called with the number of tokens after each chunk.
    """
    if arm.take is not None:
        caches = arm.take(model, prompt.plain)
        if advance is not None:
            advance(len(prompt.tokens) - 1)
    else:
        caches = read_prompt(model, prompt.tokens, step=prompt.step, arm=arm, advance=advance).plain
    logits = model(mx.array([[prompt.tokens[-1]]]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return caches, logits


def evaluate(
    model: Any,
    arm: Arm,
    prompt: Prompt,
    continuation: Sequence[int],
    reference: list[mx.array],
    *,
    layers: Sequence[int],
    advance: Advance | None = None,
) -> Evaluation:
    """Feed the tokens after a prompt one by one, as in generation.

    Args:
        model: An mlx-lm model.
        arm: Whose caches to use.
        prompt: The prompt.
        continuation: The tokens that are predicted; each but the last is fed.
        reference: The plain log-probabilities of each, in fp32; an empty list is filled with those of this arm.
        layers: The layers of full attention.
        advance: Called with the number of tokens done.
    """
    keep = not reference
    caches, logits = begin(model, arm, prompt, advance)
    counts = _counts(caches, layers)
    kl, same, chosen = [], [], []
    for place, token in enumerate(continuation):
        if place:
            logits = model(mx.array([[continuation[place - 1]]]), cache=caches)[0, -1]
        row = log_softmax(logits)
        if keep:
            reference.append(row)
        plain = reference[place]
        figures = mx.stack(
            [divergence(plain, row), (mx.argmax(plain) == mx.argmax(row)).astype(mx.float32), row[token]]
        )
        mx.eval(figures, row)
        values = cast(list[float], figures.tolist())
        kl.append(values[0])
        same.append(values[1] == 1.0)
        chosen.append(values[2])
        if advance is not None:
            advance(1)
    last = _counts(caches, layers)
    return Evaluation(
        kl=tuple(kl),
        same=tuple(same),
        logprobs=tuple(chosen),
        after_prompt=counts[0],
        at_end=last[0],
        full_after_prompt=counts[1],
        full_at_end=last[1],
    )


def _counts(caches: list[Any], layers: Sequence[int]) -> tuple[Held, Held]:
    return held(caches), held([caches[index] for index in layers])
