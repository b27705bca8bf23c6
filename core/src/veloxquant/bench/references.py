"""Caches that every table of the bench is measured against: the simplest evictor, and the best choice of rows.

Both keep rows as they came. ``RecentRows`` forgets all but the first and the newest rows, which takes no thought:
what evicts or packs should lose less at the same bytes. ``TopRows`` forgets nothing and reads, at each step, the rows
with the highest true scores: what reads few rows cannot do much better.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from veloxquant.attention import attention
from veloxquant.attention import causal_mask
from veloxquant.bench.held import Held
from veloxquant.errors import RoutingError
from veloxquant.rows import DenseRows

__all__ = ["RecentRows", "RecentRowsConfig", "ReferenceCache", "TopRows", "TopRowsConfig"]


@attrs.frozen(kw_only=True)
class RecentRowsConfig:
    """How many rows stay.

    Args:
        rows: Rows per KV head that stay when the prompt is complete.
        growth: Rows that may be added for each token after the prompt: 0 a window, 1 all of them.
        sinks: First rows, which always stay.
    """

    rows: int = attrs.field(validator=attrs.validators.ge(1))
    growth: float = attrs.field(default=1.0, validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)])
    sinks: int = attrs.field(default=4, validator=attrs.validators.ge(0))


@attrs.frozen(kw_only=True)
class TopRowsConfig:
    """How many rows are read at a step.

    Args:
        rows: Rows per KV head, those that are read in any case included.
        sinks: First rows, which are always read.
        recent: Newest rows, which are always read; where ``rows`` is smaller than both together, fewer are.
    """

    rows: int = attrs.field(validator=attrs.validators.ge(1))
    sinks: int = attrs.field(default=4, validator=attrs.validators.ge(0))
    recent: int = attrs.field(default=32, validator=attrs.validators.ge(1))


class ReferenceCache:
    """What both have in common: mlx-lm's protocol over rows as they came. Only full attention is served.

    The prompt is complete with the first single token, whose attention still reaches all of it.

    Args:
        config: The options.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rows = DenseRows()
        self.offset = 0
        self.prompt: int | None = None
        """Tokens of the prompt, once it is complete."""

    def take(self, keys: mx.array, values: mx.array) -> None:
        """Begin with rows ``[B, Hkv, S, D]`` that another cache holds; they are copied."""
        self.rows.append(keys, values)
        self.offset = keys.shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows; returns the rows held before, then the new ones."""
        self.rows.append(keys, values)
        self.offset += keys.shape[2]
        found = self.rows.keys_values()
        if keys.shape[2] == 1:
            if self.prompt is None:
                self.prompt = self.offset
            self._stored(self.offset - self.prompt)
        return found

    def _stored(self, later: int) -> None:
        """A single token was stored, the prompt included ``later`` tokens ago."""

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name that mlx-lm uses
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The mask for ``N`` new tokens.

        Raises:
            RoutingError: A window was asked for.
        """
        if window_size is not None:
            raise RoutingError("the reference caches of the bench serve full attention only")
        if N == 1:
            return None
        return causal_mask(N, self.rows.count + N) if return_array else "causal"

    @property
    def state(self) -> list[mx.array]:
        """The arrays held."""
        return list(self.rows.arrays().values())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.held().total

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Rewinds are not served."""
        return False

    def held(self) -> Held:
        """Bytes by kind, and the rows that a step reads."""
        count = self.rows.account()
        rows = max(1, self.rows.count)
        live = sum(array.nbytes for array in self.state) // rows
        return Held(
            keys=count.keys,
            values=count.values,
            auxiliary=count.auxiliary,
            plain=live * self.offset,
            rows_read=float(self._rows_read()),
        )

    def _rows_read(self) -> int:
        return self.rows.count


class RecentRows(ReferenceCache):
    """The first and the newest rows, as many as ``config`` allows."""

    config: RecentRowsConfig

    def _stored(self, later: int) -> None:
        count = self.rows.count
        budget = max(int(self.config.rows + self.config.growth * later), self.config.sinks + 1)
        if count <= budget:
            return
        batch, heads = self.rows.keys_values()[0].shape[:2]
        sinks = mx.arange(self.config.sinks, dtype=mx.int32)
        recent = mx.arange(count - budget + self.config.sinks, count, dtype=mx.int32)
        self.rows.keep(mx.broadcast_to(mx.concatenate([sinks, recent]), (batch, heads, budget)))


class TopRows(ReferenceCache):
    """All rows, of which a step reads those with the highest scores of its true queries."""

    config: TopRowsConfig

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend: blocks of the prompt and its last token to all rows, later tokens to the best ones."""
        later = self.prompt is not None and self.offset > self.prompt
        if queries.shape[2] == 1 and later and self.rows.count > self.config.rows:
            keys, values = self.rows.gather(self._best(queries, scale))
        return attention(queries, keys, values, scale, mask, sinks)

    def _best(self, queries: mx.array, scale: float) -> mx.array:
        """Row numbers ``[B, Hkv, rows]`` of the highest mean weights of the query heads of each KV head."""
        weights = mx.softmax(self.rows.scores(queries) * scale, axis=-1)
        batch, heads, _, count = weights.shape
        kv_heads = self.rows.keys_values()[0].shape[1]
        shared = weights.reshape(batch, kv_heads, heads // kv_heads, count).mean(axis=2)
        place = mx.arange(count)
        always = mx.where(place < self.config.sinks, 1.0, 0.0) + mx.where(place >= count - self.config.recent, 2.0, 0.0)
        best = mx.argpartition(-(shared + always), kth=self.config.rows - 1, axis=-1)
        return mx.sort(best[..., : self.config.rows].astype(mx.int32), axis=-1)

    def _rows_read(self) -> int:
        return min(self.config.rows, self.rows.count)
