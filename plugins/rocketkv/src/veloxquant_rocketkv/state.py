"""What RocketKV holds of one layer."""

from __future__ import annotations

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import PositionedRows
from veloxquant import Snapshot
from veloxquant_rocketkv.config import RocketKVConfig
from veloxquant_rocketkv.exact import ExactEnds
from veloxquant_rocketkv.report import byte_count
from veloxquant_rocketkv.selection import Selector
from veloxquant_snapkv import append_recent
from veloxquant_snapkv import keep_indices
from veloxquant_snapkv import pool_scores
from veloxquant_snapkv import window_scores

__all__ = ["RocketKVState"]


@attrs.define(eq=False)
class RocketKVState:
    """Rows with their positions, what is needed to choose among them, and while a prompt is open the latest queries.

    Args:
        config: Options of the method.
        layer: The layer served.
        rows: Rows held.
        selector: Chooses the rows of a decode step.
    """

    config: RocketKVConfig
    layer: LayerSpec
    rows: PositionedRows
    selector: Selector
    # True while a prompt is open.
    collecting: bool = False
    # [B, H, <= 2 * window, D] while a prompt is open: true queries, or keys in proxy mode. Twice the window, so that
    # a draft of less than a window can be trimmed away and a whole window is left to vote.
    recent: mx.array | None = None
    # What the model's attention call says of the logits, while a prompt is open.
    scale: float | None = None
    sinks: mx.array | None = None
    # Bytes of the key and the value of one token in all heads, as they came.
    row_bytes: int = 0
    # The first and the newest rows as they came, where the store loses something.
    exact: ExactEnds = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.exact = ExactEnds(self.config.sinks, self.config.exact_rows)

    @classmethod
    def empty(cls, config: RocketKVConfig, layer: LayerSpec) -> RocketKVState:
        """A state that has seen nothing."""
        rows = PositionedRows(layer.make_rows())
        return cls(config, layer, rows, Selector(config, rows))

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows; returns all that are held, the new ones as they came."""
        if not self.row_bytes:
            self.row_bytes = (keys.nbytes + values.nbytes) // keys.shape[2]
            self.selector.learn(keys.shape)
        found = self.rows.append(keys, values)
        if self.rows.store.lossless:
            return found
        return self.exact.append((keys, values), found, whole=self.rows.end == self.rows.count)

    def open_prompt(self) -> None:
        """A prompt begins or goes on: what was chosen among the rows so far is out of date."""
        if not self.collecting:
            self.collecting = True
            self.selector.clear()

    def observe(self, queries: mx.array) -> None:
        """Remember the latest queries of an open prompt ``[B, H, S, D]``."""
        self.recent = append_recent(self.recent, queries, 2 * self.config.window)

    def finish(self) -> None:
        """Cut the rows down, or filter them, summarise their pages, and let go of what only the vote needed."""
        index = self._chosen()
        if index is not None and self.config.multi_turn:
            self.selector.filter(index)
        elif index is not None:
            self.rows.keep(index)
            # Rows of the window survive in every head; of older ones each head has kept others.
            self.exact.keep_newest(self.config.window)
        self.collecting = False
        self.recent = self.scale = self.sinks = None
        self.selector.summarise()

    def _chosen(self) -> mx.array | None:
        """The rows that stage 1 keeps ``[B, Hkv, k]``, by the votes of the latest queries; None for all."""
        budget, window = self.config.rows_to_keep(self.rows.end), self.config.window
        if self.recent is None or not self.config.stage1 or self.rows.count <= budget:
            return None
        keys, _ = self.rows.store.keys_values()
        scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
        valid = self.rows.valid()
        votes = window_scores(self.recent[:, :, -window:, :], keys, scale, valid=valid, sinks=self.sinks)
        # After a rewind fewer queries than a window may be left to vote; the rows of the window stay all the same.
        pooled = pool_scores(votes[..., : self.rows.count - window], self.config.kernel_size, "max")
        return keep_indices(pooled, self.rows.count, budget, sinks=self.config.sinks, valid=valid)

    def trim(self, count: int) -> None:
        """Forget the last ``count`` tokens, their queries, and the pages that they were in."""
        before = self.rows.valid()
        self.rows.rewind(self.rows.end - count)
        self.exact.rewind(count, self.rows.end)
        if self.recent is not None:
            left = self.recent.shape[2] - count
            self.recent = mx.contiguous(self.recent[:, :, :left, :]) if left > 0 else None
        if not self.collecting:
            self.selector.rewind(before)

    def unread(self) -> list[mx.array]:
        """Arrays that a step may change without reading them."""
        if self.rows.store.lossless:
            return self.selector.held()
        return [*self.rows.unread(), *self.selector.held(), *self.exact.arrays().values()]

    def account(self) -> ByteCount:
        """Bytes of rows, positions, summaries and queries."""
        return byte_count(self)

    def snapshot(self) -> Snapshot:
        """Everything, as arrays and plain values."""
        arrays = {**self.rows.arrays(), **self.selector.arrays(), **self.exact.arrays()}
        if self.recent is not None:
            arrays["recent"] = self.recent
        if self.sinks is not None:
            arrays["sinks"] = self.sinks
        values = {"collecting": self.collecting, "scale": self.scale, "row_bytes": self.row_bytes}
        return Snapshot(arrays, {**self.rows.values(), **self.selector.values(), **values})

    @classmethod
    def restored(cls, config: RocketKVConfig, layer: LayerSpec, snapshot: Snapshot) -> RocketKVState:
        """A state equal to the one that ``snapshot`` was taken of."""
        state = cls.empty(config, layer)
        arrays, values = dict(snapshot.arrays), snapshot.values
        state.recent, state.sinks = arrays.pop("recent", None), arrays.pop("sinks", None)
        state.exact.load(arrays)
        state.collecting = bool(values["collecting"])
        scale = values["scale"]
        state.scale = None if scale is None else float(scale)
        state.row_bytes = int(values["row_bytes"] or 0)
        state.selector.load(arrays, values)
        state.rows.load(arrays, start=int(values["start"] or 0), ragged=bool(values["ragged"]))
        if state.rows.count:
            state.selector.learn(state.rows.store.keys_values()[0].shape)
        return state
