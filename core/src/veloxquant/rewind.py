"""Trimming the caches of all layers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from veloxquant.errors import VeloxQuantError

__all__ = ["exact_trim", "trim_prompt_cache"]


def trim_prompt_cache(caches: Sequence[Any], num_tokens: int) -> int:
    """Forget the last tokens in every layer, or in none.

    mlx-lm's function of the same name trims layer by layer and reports the first layer's count, so that layers can
    end up at different lengths.

    Args:
        caches: The caches of a model, compressed and native ones alike.
        num_tokens: Tokens to forget; more than were seen means all of them.

    Returns:
        Tokens forgotten in every layer: 0, with nothing changed, when some layer cannot be trimmed that far.

    Raises:
        VeloxQuantError: ``num_tokens`` is negative.
    """
    if num_tokens < 0:
        raise VeloxQuantError(f"trim takes the number of tokens to forget, at least 0, not {num_tokens}")
    if not caches or not all(cache.is_trimmable() for cache in caches):
        return 0
    seen = [_seen(cache) for cache in caches]
    num_tokens = min(num_tokens, max(seen))
    # After a forward pass that failed half way some layers have seen fewer tokens, and have fewer to forget.
    counts = [max(0, own - (max(seen) - num_tokens)) for own in seen]
    if any(count > _reach(cache) for count, cache in zip(counts, caches, strict=True)):
        return 0
    for count, cache in zip(counts, caches, strict=True):
        cache.trim(count)
    return num_tokens


def exact_trim(caches: Sequence[Any]) -> int:
    """The most tokens that ``trim_prompt_cache`` forgets without loss.

    Args:
        caches: The caches of a model, compressed and native ones alike.

    Returns:
        The least of all layers; a deeper trim is approximate, or refused.
    """
    return min((_exact(cache) for cache in caches), default=0)


def _exact(cache: Any) -> int:
    if not cache.is_trimmable():
        return 0
    own = getattr(cache, "exact_trim", None)
    return _reach(cache) if own is None else int(own)


def _seen(cache: Any) -> int:
    members = getattr(cache, "caches", None)
    if members is not None:
        return max(_seen(member) for member in members)
    offset = getattr(cache, "offset", 0)
    return offset if isinstance(offset, int) else int(cache.size())


def _reach(cache: Any) -> int:
    """Tokens that a trimmable cache can forget at most."""
    members = getattr(cache, "caches", None)
    if members is not None:
        return min(_reach(member) for member in members)
    # A cache of chunks has let go of what lies before its start.
    return _seen(cache) - int(getattr(cache, "start_position", 0))
