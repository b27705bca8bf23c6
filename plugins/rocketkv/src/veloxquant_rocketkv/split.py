"""How a compression ratio is split between the two stages, and the second stage between pages and channels.

Pure functions of numbers. Section numbers refer to RocketKV, arXiv:2502.14051.
"""

from __future__ import annotations

import math

import attrs

from veloxquant import ConfigError

__all__ = ["BudgetSplit", "split_budget", "split_compression_ratio", "split_pages_and_channels"]


def _exponent(ratio: float) -> float:
    return min(0.2 + 0.06 * math.log2(ratio), 0.8)


def split_compression_ratio(ratio: float) -> tuple[float, float]:
    """Split a ratio between eviction and sparse attention (section 3.6).

    Args:
        ratio: Rows of a prompt over rows read at a decode step, at least 1.

    Returns:
        The ratios of stage 1 and stage 2, whose product is ``ratio``.

    Raises:
        ConfigError: The ratio is below 1 or not finite.
    """
    if not 1 <= ratio < math.inf:
        raise ConfigError(f"rocketkv: a compression ratio is a finite number of at least 1, not {ratio}")
    exponent = _exponent(ratio)
    return ratio**exponent, ratio ** (1 - exponent)


def split_pages_and_channels(stage2_ratio: float, head_dim: int, page_size: int | None = None) -> tuple[int, int]:
    """Split the ratio of stage 2 between rows (pages) and channels (section 3.6).

    Args:
        stage2_ratio: The ratio of stage 2, at least 1.
        head_dim: Channels of a key D.
        page_size: Rows of a page, where it is not to follow from the ratio.

    Returns:
        Rows of a page and channels read of each page, 1 to D.
    """
    if page_size is None:
        page_size = math.ceil(math.sqrt(stage2_ratio))
        if page_size > stage2_ratio:
            page_size = 1
    return page_size, max(1, min(head_dim, int(head_dim * page_size / stage2_ratio)))


@attrs.frozen(kw_only=True)
class BudgetSplit:
    """What follows from a budget of rows read at a step.

    Args:
        exponent: Share of stage 1 in the ratio, as an exponent.
        capacity: Rows held when all new tokens are there.
        prompt_budget: Rows kept of the prompt.
        stage2_ratio: Capacity over budget.
        page_size: Rows of a page.
        head_topk1: Channels read of a page.
        topk: Rows attended.
    """

    exponent: float
    capacity: int
    prompt_budget: int
    stage2_ratio: float
    page_size: int
    head_topk1: int
    topk: int


def split_budget(tokens: int, budget: int, *, new_tokens: int = 0, head_dim: int = 128) -> BudgetSplit:
    """Split a budget as the paper's accuracy experiments do, with room for the answer inside the rows held.

    Args:
        tokens: Prompt and answer together.
        budget: Rows read at a decode step, in pairs of key and value per KV head, estimation included.
        new_tokens: Longest answer.
        head_dim: Channels of a key.

    Returns:
        The split.

    Raises:
        ConfigError: The budget is not between 1 and ``tokens``, or the answer leaves nothing for the prompt.
    """
    if not 1 <= budget <= tokens or not 0 <= new_tokens < tokens:
        raise ConfigError(
            f"rocketkv: a budget lies between 1 and the number of tokens, and an answer is shorter than those; got "
            f"{budget} and {new_tokens} of {tokens}"
        )
    exponent = _exponent(tokens / budget)
    capacity = max(int(tokens / (tokens / budget) ** exponent), min(2 * new_tokens, tokens))
    stage2_ratio = max(1.0, capacity / budget)
    page_size, channels = split_pages_and_channels(stage2_ratio, head_dim)
    return BudgetSplit(
        exponent=exponent,
        capacity=capacity,
        prompt_budget=capacity - new_tokens,
        stage2_ratio=stage2_ratio,
        page_size=page_size,
        head_topk1=channels,
        topk=budget // 2,
    )
