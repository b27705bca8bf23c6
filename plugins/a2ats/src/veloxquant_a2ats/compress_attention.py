"""Attention over rows of which most are codes: exact for near tokens, at one distance for far ones."""

from __future__ import annotations

import attrs
import mlx.core as mx

from veloxquant import Rope
from veloxquant.attention import refuse_other_rows
from veloxquant_a2ats.codebook import Codebook
from veloxquant_a2ats.rotation import derotate
from veloxquant_a2ats.rotation import far_query_rope
from veloxquant_a2ats.scoring import codes_are_summed
from veloxquant_a2ats.scoring import rebuild_keys
from veloxquant_a2ats.scoring import rebuild_values
from veloxquant_a2ats.scoring import sum_by_code
from veloxquant_a2ats.scoring import table_scores
from veloxquant_a2ats.scoring import weights_by_code

__all__ = ["CodedRows", "attend_coded"]

# Logits computed at a time; longer blocks of queries are cut.
_LOGITS = 2**25


@attrs.frozen(eq=False, kw_only=True)
class CodedRows:
    """All rows of a layer, positions 0 to ``end``, for one call of attention.

    Args:
        codebook: The layer's codebook.
        rope: Its rotation.
        window: Distance from which a token is far.
        far_position: The distance at which far tokens are seen.
        end: Number of rows, those of the queries included.
        key_codes: Codes of the first rows, all but those of the last window at least ``[B, Hkv * M, coded, 1]``.
        value_codes: ``[B, Hkv, coded, Mv]``.
        sinks: Keys and values of the first rows as they came, or None.
        exact_start: First position of ``exact``.
        exact: Keys and values as they came, positions ``exact_start`` to ``end``.
    """

    codebook: Codebook
    rope: Rope
    window: int
    far_position: int
    end: int
    key_codes: mx.array
    value_codes: mx.array
    sinks: tuple[mx.array, mx.array] | None
    exact_start: int
    exact: tuple[mx.array, mx.array]

    @property
    def sink_count(self) -> int:
        """Number of the first rows that are never coded."""
        return 0 if self.sinks is None else min(self.sinks[0].shape[2], self.exact_start)


def attend_coded(
    queries: mx.array, rows: CodedRows, scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    """Attend with true queries.

    Args:
        queries: Queries of the last S rows ``[B, Hq, S, D]``.
        rows: The rows.
        scale: Factor on the logits.
        mask: None, ``"causal"``, or an array that broadcasts to ``[B, Hq, S, end]``.
        sinks: Sink logits ``[Hq]`` of the model, or None.

    Returns:
        ``[B, Hq, S, Dv]`` in the dtype of the queries.

    Raises:
        RoutingError: An array mask does not fit the rows.
    """
    batch, heads, length, dim = queries.shape
    kv_heads = rows.exact[0].shape[1]
    refuse_other_rows(mask, rows.end)
    first = rows.end - length
    far = far_query_rope(derotate(queries, rows.rope, first), rows.rope, rows.far_position)
    shape = (batch, kv_heads, heads // kv_heads, length, dim)
    near, far = queries.astype(mx.float32).reshape(shape), far.reshape(shape)
    attention = _Attention(rows, scale, mask, sinks, first, heads)
    piece = max(1, _LOGITS // (batch * heads * rows.end))
    outputs = [
        attention.of(near[:, :, :, start : start + piece], far[:, :, :, start : start + piece], start)
        for start in range(0, length, piece)
    ]
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=3)
    return joined.reshape(batch, heads, length, -1).astype(queries.dtype)


class _Attention:
    """One call of attention, whose queries may come in pieces.

    Columns of the logits are positions: the sinks, then coded rows, then rows that are near for some queries and far
    for others, then rows that are near for all.
    """

    def __init__(
        self,
        rows: CodedRows,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
        first: int,
        heads: int,
    ) -> None:
        self.rows, self.scale, self.mask, self.sinks, self.first, self.heads = rows, scale, mask, sinks, first, heads
        self.begin, self.start = rows.sink_count, rows.exact_start
        # A single query has the window that the exact rows are cut to; of several each has its own.
        self.single = rows.end - first == 1
        # Rows of the last window are near for all, and may have no codes yet.
        self.mixed = self.start if self.single else max(self.start, min(first, rows.end - rows.window))
        coded = slice(self.begin, self.mixed)
        self.any_coded = self.begin < self.mixed
        self.key_codes = rows.key_codes[:, :, coded]
        self.value_codes = rows.value_codes[:, :, coded]
        self.keys = None
        self.by_code = self.single and codes_are_summed()
        if self.any_coded:
            if not self.by_code:
                self.values = rebuild_values(rows.codebook.value_centroids, self.value_codes)
            if not self.single:
                self.keys = rebuild_keys(rows.codebook.keys, self.key_codes)
        self.exact_keys, self.exact_values = (array.astype(mx.float32) for array in rows.exact)

    def of(self, near: mx.array, far: mx.array, start: int) -> mx.array:
        """Outputs ``[B, Hkv, G, L, Dv]`` of queries ``[B, Hkv, G, L, D]``, the first of which is the ``start``-th."""
        length = near.shape[3]
        positions = self.first + start + mx.arange(length)[:, None]
        # [L, mixed columns]: which of them are near.
        close = positions - mx.arange(self.start, self.mixed) < self.rows.window
        weights = self._weights(self._logits(near, far, close), positions, start)
        return self._mix(weights, close)

    def _logits(self, near: mx.array, far: mx.array, close: mx.array) -> mx.array:
        exact = _dot(near, self.exact_keys)
        columns = []
        if self.begin and self.rows.sinks is not None:
            columns.append(_dot(near, self.rows.sinks[0][:, :, : self.begin].astype(mx.float32)))
        if self.any_coded:
            coded = self._coded(far)
            only = self.start - self.begin
            columns.append(coded[..., :only])
            count = self.mixed - self.start
            if count:
                columns.append(mx.where(close, exact[..., :count], coded[..., only:]))
                exact = exact[..., count:]
        return mx.concatenate([*columns, exact], axis=-1) * self.scale

    def _coded(self, far: mx.array) -> mx.array:
        if self.keys is not None:
            return _dot(far, self.keys)
        return table_scores(far[:, :, :, 0], self.rows.codebook.keys, self.key_codes)[:, :, :, None]

    def _weights(self, logits: mx.array, positions: mx.array, start: int) -> mx.array:
        batch, kv_heads, group, length, columns = logits.shape
        if not self.single:
            logits = mx.where(mx.arange(columns) <= positions, logits, -mx.inf)
        if isinstance(self.mask, mx.array):
            full = mx.broadcast_to(self.mask, (batch, self.heads, self.rows.end - self.first, columns))
            part = full[:, :, start : start + length].reshape(logits.shape)
            logits = mx.where(part, logits, -mx.inf) if part.dtype == mx.bool_ else logits + part
        if self.sinks is None:
            return mx.softmax(logits, axis=-1, precise=True)
        sink = self.sinks.astype(mx.float32).reshape(1, kv_heads, group, 1, 1)
        joined = mx.concatenate([logits, mx.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
        return mx.softmax(joined, axis=-1, precise=True)[..., :columns]

    def _mix(self, weights: mx.array, close: mx.array) -> mx.array:
        """Sum values by their weights: as they came where the key was, from their codes elsewhere."""
        exact = weights[..., self.start :]
        parts = []
        count = self.mixed - self.start
        if self.begin and self.rows.sinks is not None:
            parts.append(_sum(weights[..., : self.begin], self.rows.sinks[1][:, :, : self.begin].astype(mx.float32)))
        if self.any_coded:
            coded = weights[..., self.begin : self.start]
            if count:
                mixed = exact[..., :count]
                coded = mx.concatenate([coded, mx.where(close, 0.0, mixed)], axis=-1)
                exact = mx.concatenate([mx.where(close, mixed, 0.0), exact[..., count:]], axis=-1)
            parts.append(self._sum_by_code(coded) if self.by_code else _sum(coded, self.values))
        total = _sum(exact, self.exact_values)
        for part in parts:
            total = total + part
        return total

    def _sum_by_code(self, weights: mx.array) -> mx.array:
        """As ``_sum`` for the coded values and the weights ``[B, Hkv, G, 1, rows]`` of one query."""
        centroids = self.rows.codebook.value_centroids
        by_code = weights_by_code(weights[:, :, :, 0], self.value_codes, centroids.shape[2])
        return sum_by_code(by_code, centroids)[:, :, :, None]


def _dot(queries: mx.array, keys: mx.array) -> mx.array:
    """Products of ``[B, Hkv, G, L, D]`` and ``[B, Hkv, rows, D]``: ``[B, Hkv, G, L, rows]``."""
    batch, heads, group, length, dim = queries.shape
    product = queries.reshape(batch, heads, group * length, dim) @ keys.swapaxes(-1, -2)
    return product.reshape(batch, heads, group, length, -1)


def _sum(weights: mx.array, values: mx.array) -> mx.array:
    """Sums of ``[B, Hkv, rows, Dv]`` by weights ``[B, Hkv, G, L, rows]``: ``[B, Hkv, G, L, Dv]``."""
    batch, heads, group, length, rows = weights.shape
    product = weights.reshape(batch, heads, group * length, rows) @ values
    return product.reshape(batch, heads, group, length, -1)
