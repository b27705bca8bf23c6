"""What ``GET /veloxquant/stats`` tells."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from typing import Any

import attrs

from veloxquant.config import config_to_dict
from veloxquant.reports import report

if TYPE_CHECKING:
    from veloxquant.serve.generator import CompressedGenerator
    from veloxquant.serve.prompts import PromptCache

__all__ = ["Held", "RequestCounts", "collect", "measure"]

_CHECKPOINTS = (
    "a prompt is also kept as it was before its end; caches of a method that evicts are full size there "
    "(--no-checkpoints leaves them out)"
)


@attrs.define
class RequestCounts:
    """Requests by what became of them, and the tokens generated; shared by the threads that serve HTTP."""

    received: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    abandoned: int = 0
    generated_tokens: int = 0
    _lock: threading.Lock = attrs.field(factory=threading.Lock, repr=False)

    def add(self, **changes: int) -> None:
        """Add to counts, by their names."""
        with self._lock:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)

    def to_dict(self) -> dict[str, int]:
        """Plain values for JSON."""
        with self._lock:
            return {
                field.name: getattr(self, field.name) for field in attrs.fields(type(self)) if field.name != "_lock"
            }


def collect(generator: CompressedGenerator) -> dict[str, Any]:
    """Collect the figures of a server.

    Args:
        generator: What generates.

    Returns:
        Plain values for JSON.
    """
    provider, prompts = generator.provider, generator.prompts
    chosen, counts = provider.compression, prompts.counts
    requests = generator.counts.to_dict()
    held = generator.held()
    stored, running = dict(held.stored), held.running
    note = stored.pop("checkpoints")
    return {
        "method": chosen.method.name,
        "distribution": chosen.method.distribution,
        "version": chosen.method.version,
        "config": config_to_dict(chosen.config),
        "query_mode": provider.query_mode,
        "batched": bool(provider.is_batchable),
        "model": provider.model_key[0] if provider.model_key else None,
        "requests": requests,
        "tokens": {
            "prompt": counts.prompt_tokens,
            "reused": counts.reused_tokens,
            "prefilled": counts.prompt_tokens - counts.reused_tokens,
            "generated": requests.pop("generated_tokens"),
        },
        "caches": {
            name: stored[name] + running[name] for name in ("tokens_seen", "tokens_kept", "bytes_held", "bytes_plain")
        },
        "running": running,
        "prompt_cache": {
            **stored,
            "max_entries": prompts.max_size,
            "hits": {"memory": counts.memory_hits, "disk": counts.disk_hits},
            "misses": counts.misses,
            "rewinds": {"exact": counts.exact_rewinds, "approximate": counts.approximate_rewinds},
            "checkpoints": {**note, "note": _CHECKPOINTS},
        },
        "disk": None if prompts.disk is None else prompts.disk.figures(),
    }


@attrs.frozen
class Held:
    """What caches hold: those stored, and those of the batch that is generated."""

    stored: dict[str, Any]
    running: dict[str, Any]


def measure(prompts: PromptCache, batch: Any) -> Held:
    """Measure what is held. Methods may have to compute for that, so this is for the thread that generates.

    Args:
        prompts: The prompt cache.
        batch: mlx-lm's batch generator, or None; a request served alone is not in it.
    """
    total = {"sequences": 0, "tokens_seen": 0, "tokens_kept": 0.0, "bytes_held": 0, "bytes_plain": 0}
    for part in () if batch is None else (batch._prompt_batch, batch._generation_batch):
        if len(part):
            found = report(part.prompt_cache)
            total["sequences"] += len(part)
            total["tokens_seen"] += found.tokens_seen
            total["tokens_kept"] += round(found.tokens_kept, 1)
            total["bytes_held"] += found.bytes_held
            total["bytes_plain"] += found.bytes_plain
    return Held(prompts.held(), total)
