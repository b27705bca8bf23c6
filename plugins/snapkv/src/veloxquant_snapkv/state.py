"""What SnapKV holds of one layer."""

from __future__ import annotations

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import PositionedRows
from veloxquant import Snapshot
from veloxquant_snapkv.config import SnapKVConfig
from veloxquant_snapkv.selection import append_recent
from veloxquant_snapkv.selection import keep_indices
from veloxquant_snapkv.selection import pool_scores
from veloxquant_snapkv.selection import window_scores

__all__ = ["SnapKVState"]


@attrs.define(eq=False)
class SnapKVState:
    """Rows with their positions, and while a prompt is open the latest queries.

    Args:
        config: Options of the method.
        layer: The layer served.
        rows: Rows held.
    """

    config: SnapKVConfig
    layer: LayerSpec
    rows: PositionedRows
    # True while a prompt is open.
    collecting: bool = False
    # [B, H, <= 2 * window, D] while a prompt is open: true queries, or keys in proxy mode. Twice the window, so that
    # a draft of less than a window can be trimmed away and a whole window is left to vote.
    recent: mx.array | None = None
    # What the model's attention call says of the logits, while a prompt is open.
    scale: float | None = None
    sinks: mx.array | None = None

    @classmethod
    def empty(cls, config: SnapKVConfig, layer: LayerSpec) -> SnapKVState:
        """A state that has seen nothing."""
        return cls(config, layer, PositionedRows(layer.make_rows()))

    def observe(self, queries: mx.array) -> None:
        """Remember the latest queries of an open prompt ``[B, H, S, D]``."""
        self.recent = append_recent(self.recent, queries, 2 * self.config.window)

    def evict(self) -> None:
        """Cut the rows held down to the budget, by the votes of the latest queries."""
        budget = self.config.rows_to_keep(self.rows.end)
        if self.recent is None or self.rows.count <= budget:
            return
        keys, _ = self.rows.store.keys_values()
        queries = self.recent[:, :, -self.config.window :, :]
        scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
        valid = self.rows.valid()
        votes = window_scores(queries, keys, scale, valid=valid, sinks=self.sinks)
        # After a rewind fewer queries than a window may be left to vote; the rows of the window stay all the same.
        votes = votes[..., : self.rows.count - self.config.window]
        pooled = pool_scores(votes, self.config.kernel_size, self.config.pooling)
        self.rows.keep(keep_indices(pooled, self.rows.count, budget, sinks=self.config.sinks, valid=valid))
        # Of older queries the rows may be gone now, and votes pair the latest queries with the latest rows.
        self.recent = queries

    def finish(self) -> None:
        """Evict, and let go of what only the vote needed."""
        self.evict()
        self.collecting = False
        self.recent = self.scale = self.sinks = None

    def trim(self, count: int) -> None:
        """Forget the last ``count`` tokens, and their queries."""
        self.rows.rewind(self.rows.end - count)
        if self.recent is not None:
            left = self.recent.shape[2] - count
            self.recent = mx.contiguous(self.recent[:, :, :left, :]) if left > 0 else None

    def account(self) -> ByteCount:
        """Bytes of rows, positions and queries."""
        count = self.rows.account()
        extra = 0 if self.recent is None else self.recent.nbytes
        # The sink logits are the model's own array.
        static = count.static + (0 if self.sinks is None else self.sinks.nbytes)
        details = {**count.details, "query_bytes": extra}
        return attrs.evolve(count, auxiliary=count.auxiliary + extra, static=static, details=details)

    def snapshot(self) -> Snapshot:
        """Everything, as arrays and plain values."""
        arrays = dict(self.rows.arrays())
        if self.recent is not None:
            arrays["recent"] = self.recent
        if self.sinks is not None:
            arrays["sinks"] = self.sinks
        return Snapshot(arrays, {**self.rows.values(), "collecting": self.collecting, "scale": self.scale})

    @classmethod
    def restored(cls, config: SnapKVConfig, layer: LayerSpec, snapshot: Snapshot) -> SnapKVState:
        """A state equal to the one that ``snapshot`` was taken of."""
        state = cls.empty(config, layer)
        arrays, values = dict(snapshot.arrays), snapshot.values
        state.recent, state.sinks = arrays.pop("recent", None), arrays.pop("sinks", None)
        state.collecting = bool(values["collecting"])
        scale = values["scale"]
        state.scale = None if scale is None else float(scale)
        state.rows.load(arrays, start=int(values["start"] or 0), ragged=bool(values["ragged"]))
        return state
