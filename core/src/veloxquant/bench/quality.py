"""How far a cache moves a model's predictions: divergence, agreement and perplexity after a cached prompt.

The prompt goes through the cache as in generation, and so do the evaluated tokens, one by one: what is measured is
what a user gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import cast

import attrs
import mlx.core as mx

from veloxquant.errors import VeloxQuantError

__all__ = ["Quality", "compare", "continuation_logprobs", "divergence", "log_softmax", "prefill", "prefill_step"]


@attrs.frozen(kw_only=True)
class Quality:
    """One cache against the plain one, over the tokens after a prompt.

    Args:
        mean_kl: Mean KL divergence of the plain prediction from this one, in nats.
        p95_kl: Its 95th percentile.
        top1_agreement: Share of tokens for which both predict the same next token.
        perplexity: Perplexity of the text under this cache.
        plain_perplexity: Perplexity under the plain cache.
    """

    mean_kl: float
    p95_kl: float
    top1_agreement: float
    perplexity: float
    plain_perplexity: float


def prefill_step(tokens: int, step: int) -> int:
    """The step, or a little less where it would leave a chunk of one token, which ends a prompt too early."""
    while step > 2 and tokens > step and tokens % step == 1:
        step -= 1
    return step


def prefill(model: Any, caches: list[Any], prompt: Sequence[int], *, step: int = 2048) -> mx.array:
    """Feed a prompt as mlx-lm does: all but the last token in chunks, the last one alone.

    Args:
        model: An mlx-lm model.
        caches: Its caches, filled in place.
        prompt: At least one token.
        step: Tokens per chunk.

    Returns:
        Logits for the token after the prompt ``[vocabulary]``.

    Raises:
        VeloxQuantError: The prompt is empty.
    """
    if not len(prompt):
        raise VeloxQuantError("the prompt is empty; give at least one token")
    tokens = mx.array(list(prompt))[None]
    step = prefill_step(len(prompt) - 1, step)
    for start in range(0, len(prompt) - 1, step):
        model(tokens[:, start : min(start + step, len(prompt) - 1)], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    logits: mx.array = model(tokens[:, -1:], cache=caches)[0, -1]
    return logits


def continuation_logprobs(
    model: Any, caches: list[Any], prompt: Sequence[int], continuation: Sequence[int], *, step: int = 2048
) -> mx.array:
    """Predict each token of a given continuation after a cached prompt.

    Args:
        model: An mlx-lm model.
        caches: Its caches, filled in place.
        prompt: Tokens of the prompt.
        continuation: Tokens that follow; each but the last is fed through the caches alone.
        step: Prompt tokens per chunk.

    Returns:
        Log-probabilities ``[len(continuation), vocabulary]``, fp32; row i predicts ``continuation[i]``.
    """
    logits = prefill(model, caches, prompt, step=step)
    rows = []
    for token in continuation[:-1]:
        rows.append(log_softmax(logits))
        mx.eval(rows[-1])
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
    rows.append(log_softmax(logits))
    return mx.stack(rows)


def compare(plain: mx.array, other: mx.array, continuation: Sequence[int]) -> Quality:
    """Compare the predictions of two caches for one text.

    Args:
        plain: What ``continuation_logprobs`` gave for the plain cache.
        other: What it gave for the cache under test.
        continuation: The tokens predicted.
    """
    found = divergence(plain, other)
    ordered = mx.sort(found)
    same = (mx.argmax(plain, axis=-1) == mx.argmax(other, axis=-1)).astype(mx.float32)
    return Quality(
        mean_kl=_number(found.mean()),
        p95_kl=_number(ordered[int(0.95 * (len(continuation) - 1))]),
        top1_agreement=_number(same.mean()),
        perplexity=_perplexity(other, continuation),
        plain_perplexity=_perplexity(plain, continuation),
    )


def divergence(plain: mx.array, other: mx.array) -> mx.array:
    """KL divergence of plain predictions from others, in nats.

    Args:
        plain: Log-probabilities ``[..., vocabulary]``.
        other: The same shape.

    Returns:
        ``[...]``.
    """
    return (mx.exp(plain) * (plain - other)).sum(axis=-1)


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities in fp32, over the last axis."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _perplexity(logprobs: mx.array, continuation: Sequence[int]) -> float:
    chosen = mx.take_along_axis(logprobs, mx.array(list(continuation))[:, None], axis=-1)
    return _number(mx.exp(-chosen.mean()))


def _number(scalar: mx.array) -> float:
    return cast(float, scalar.item())
