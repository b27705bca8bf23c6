"""The server's prompt cache: what a rewind would lose is kept, and files take part."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.models.cache import PromptTrie

from veloxquant.cache import LayerCache
from veloxquant.reports import report
from veloxquant.rewind import exact_trim
from veloxquant.rewind import trim_prompt_cache
from veloxquant.serve.disk import DiskEntry
from veloxquant.serve.disk import DiskStore

__all__ = ["PromptCache", "PromptCounts", "is_checkpoint"]


@attrs.define
class PromptCounts:
    """How requests fared at the prompt cache.

    Args:
        memory_hits: Requests that found a part of their prompt in memory.
        disk_hits: Requests that found it in a file.
        misses: Requests that found nothing of use.
        exact_rewinds: Entries that were rewound without loss.
        approximate_rewinds: Entries that were rewound into what had been evicted, or into codes.
        prompt_tokens: Tokens of all prompts.
        reused_tokens: Those of them that did not have to be processed again.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    exact_rewinds: int = 0
    approximate_rewinds: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0


@attrs.frozen
class _Candidate:
    """A stored cache of which ``reused`` tokens can be used after forgetting ``trim``."""

    exact: bool
    reused: int
    trim: int
    tokens: Any
    file: DiskEntry | None

    @property
    def rank(self) -> tuple[bool, int, bool, int]:
        return self.exact, self.reused, self.file is None, -self.trim


def is_checkpoint(caches: Sequence[Any]) -> bool:
    """Whether a prompt was stored before its end: caches of methods that evict are full size then."""
    return any(isinstance(cache, LayerCache) and cache.prompt_open for cache in caches)


class _KeepingTrie(PromptTrie):
    """A trie that gives up a stored prefix only if the longer entry can be rewound to it without loss."""

    def pop_prefixes(self, model: Any, tokens: list[int]) -> list[tuple[int, Any]]:
        reach = exact_trim(self.get(model, tokens).prompt_cache)
        redundant = []
        for length, entry in super().pop_prefixes(model, tokens):
            if len(tokens) - length <= reach:
                redundant.append((length, entry))
            else:
                self.add(model, tokens[:length], entry)
        return redundant


class PromptCache(LRUPromptCache):
    """mlx-lm's LRU prompt cache with three differences.

    Stored prefixes stay unless they are redundant; a shorter exact entry is preferred to an approximate rewind of a
    longer one, which is done only when it saves at least half of the prompt; and at least one token is always left to
    feed (mlx-lm's server ends its generation thread otherwise).

    Args:
        max_size: Most entries in memory.
        max_bytes: Most bytes in memory.
        disk: Files that keep entries, or None.
        checkpoints: Keep prompts of methods that evict as they are before the eviction, which is full size.
    """

    def __init__(
        self,
        max_size: int = 10,
        max_bytes: int = 1 << 63,
        *,
        disk: DiskStore | None = None,
        checkpoints: bool = True,
    ) -> None:
        super().__init__(max_size, max_bytes)
        self._trie = _KeepingTrie()  # type: ignore[no-untyped-call]
        self.counts = PromptCounts()
        self.disk = disk
        self._checkpoints = checkpoints

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Find the stored cache that saves the most of a prompt.

        Args:
            model: The key of the model.
            tokens: The prompt.

        Returns:
            A copy of the cache, or None, and the tokens that remain to be fed: at least one.
        """
        caches, reused = self._take(model, tokens)
        self.counts.prompt_tokens += len(tokens)
        self.counts.reused_tokens += reused
        if caches is None:
            self.counts.misses += 1
        return caches, tokens[reused:]

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Store a cache, in memory and, when its request was answered, in a file.

        Args:
            model: The key of the model.
            tokens: The tokens that the cache has seen, and maybe some that it has not.
            prompt_cache: The cache; it must not be used any more.
            cache_type: What mlx-lm's server calls it: ``system``, ``user`` or ``assistant``.
        """
        seen = _tokens_seen(prompt_cache, len(tokens))
        if not 0 < seen <= len(tokens):
            logging.warning(f"a prompt cache has seen {seen} tokens where {len(tokens)} were announced; it is not kept")
            return
        # After speculative decoding the last token, which was never fed, is announced too.
        tokens = tokens[:seen]
        checkpoint = is_checkpoint(prompt_cache)
        if checkpoint and not self._checkpoints and _evicts(prompt_cache):
            return
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        if self.disk is not None and not checkpoint:
            self.disk.offer(model, tokens, prompt_cache)

    def held(self) -> dict[str, Any]:
        """What the entries in memory hold, as plain values; for the thread that generates."""
        entries = [self._trie.get(model, tokens).prompt_cache for model, tokens in self._keys()]
        reports = [report(caches) for caches in entries]
        early = [one for one, caches in zip(reports, entries, strict=True) if is_checkpoint(caches)]
        return {
            "entries": len(reports),
            "tokens_seen": sum(one.tokens_seen for one in reports),
            "tokens_kept": round(sum(one.tokens_kept for one in reports), 1),
            "bytes_held": sum(one.bytes_held for one in reports),
            "bytes_plain": sum(one.bytes_plain for one in reports),
            "checkpoints": {"entries": len(early), "bytes_held": sum(one.bytes_held for one in early)},
        }

    def _keys(self) -> Iterator[tuple[Any, list[int]]]:
        for order in self._lru._lrus.values():
            yield from order

    def _take(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, int]:
        from_file = False
        for best in sorted(self._candidates(model, tokens), key=lambda one: one.rank, reverse=True):
            if best.file is not None:
                assert self.disk is not None
                loaded = self.disk.load(model, best.file)
                if loaded is None:
                    continue
                super().insert_cache(model, best.file.tokens.tolist(), loaded)
                caches, from_file = copy.deepcopy(loaded), True
            else:
                caches = copy.deepcopy(self._trie.get(model, best.tokens).prompt_cache)
            if best.trim and trim_prompt_cache(caches, best.trim) != best.trim:
                continue
            self._note(model, best, from_file)
            return caches, best.reused
        return None, 0

    def _note(self, model: Any, used: _Candidate, from_file: bool) -> None:
        if from_file:
            self.counts.disk_hits += 1
        else:
            self.counts.memory_hits += 1
            self._touch(model, used.tokens)
        if used.trim and used.exact:
            self.counts.exact_rewinds += 1
        elif used.trim:
            self.counts.approximate_rewinds += 1

    def _touch(self, model: Any, tokens: Sequence[int]) -> None:
        for order in self._lru._lrus.values():
            if (model, tokens) in order:
                order.remove((model, tokens))
                order.append((model, tokens))

    def _candidates(self, model: Any, tokens: list[int]) -> Iterator[_Candidate]:
        prompt = np.array(tokens, dtype=np.int64)
        for own_model, key in self._keys():
            if own_model == model:
                caches = self._trie.get(model, key).prompt_cache
                trimmable = all(cache.is_trimmable() for cache in caches)
                yield from _usable(prompt, np.array(key, dtype=np.int64), key, None, trimmable, caches)
        for file in self.disk.entries(model) if self.disk is not None else ():
            yield from _usable(prompt, file.tokens, file.tokens, file, file.trimmable, None)


def _usable(
    prompt: np.ndarray, stored: np.ndarray, key: Any, file: DiskEntry | None, trimmable: bool, caches: Any
) -> Iterator[_Candidate]:
    reused = min(_common_prefix(prompt, stored), len(prompt) - 1)
    trim = len(stored) - reused
    if reused < 1 or (trim and not trimmable):
        return
    exact = not trim or trim <= (exact_trim(caches) if file is None else file.exact_trim)
    # A few tokens are not worth a loss: chat templates alone let unrelated prompts begin alike.
    if exact or 2 * reused >= len(prompt):
        yield _Candidate(exact, reused, trim, key, file)


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if different.size else length


def _tokens_seen(caches: Sequence[Any], otherwise: int) -> int:
    """Tokens that all compressed layers have seen; 0 when they disagree."""
    found = {cache.offset for cache in caches if isinstance(cache, LayerCache)} or {otherwise}
    return found.pop() if len(found) == 1 else 0


def _evicts(caches: Sequence[Any]) -> bool:
    return any(isinstance(cache, LayerCache) and cache.method.info.evicts for cache in caches)
