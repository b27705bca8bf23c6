"""What TurboQuant-RVQ holds of one layer."""

from __future__ import annotations

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import Snapshot
from veloxquant.devices import on_cpu
from veloxquant_turboquant_rvq.config import TurboQuantRVQConfig
from veloxquant_turboquant_rvq.exact import ExactRows
from veloxquant_turboquant_rvq.store import TurboQuantRows

__all__ = ["CODED_AT_ONCE", "SPARE", "TurboQuantRVQState"]

CODED_AT_ONCE = 16
"""Rows that get their codes together on a CPU, where coding one takes as long as coding them all."""

SPARE = 64
"""Rows beyond ``recent`` that stay as they came, so that rewinds of up to as many tokens are exact."""


@attrs.define(eq=False)
class TurboQuantRVQState:
    """All rows packed, and copies of the first and the newest ones as they came.

    On a CPU up to 15 of the newest rows, none but such as are attended to as they came, wait for their codes. How many
    do follows from the number of rows alone, so that rewinds leave no trace.

    Args:
        config: Options of the method.
        layer: The layer served.
        rows: All rows.
    """

    config: TurboQuantRVQConfig
    layer: LayerSpec
    rows: TurboQuantRows
    # As they came: the first rows, at most ``sinks``, and the newest, at most ``recent + SPARE``.
    first: ExactRows | None = None
    newest: ExactRows | None = None
    # Between a call and its attention: the recent rows and the call's own.
    fresh: ExactRows | None = None

    @classmethod
    def empty(cls, config: TurboQuantRVQConfig, layer: LayerSpec) -> TurboQuantRVQState:
        """A state that has seen nothing."""
        # On a GPU the kernels for codes packed row by row are the fast ones; the method's page has figures.
        return cls(config, layer, TurboQuantRows(config, blocked=on_cpu()))

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows.

        Args:
            keys: ``[B, Hkv, S, Dk]``.
            values: ``[B, Hkv, S, Dv]``.

        Returns:
            The rows held before, recent and first ones as they came, followed by the new rows.
        """
        return self.returned(self.store(keys, values))

    def store(self, keys: mx.array, values: mx.array) -> ExactRows:
        """Store new rows as ``append`` does; returns the recent rows and the new ones as they came."""
        before = self.rows.count
        new = ExactRows(keys, values if self.config.value_bits else None)
        self.rows.take(keys, values)
        self._code(new)
        fresh = self._fresh(new)
        self.fresh = fresh if self.layer.routed else None
        if before < self.config.sinks:
            first = new if self.first is None else self.first.followed_by(new)
            self.first = first.part(0, self.config.sinks)
        return fresh

    def _code(self, new: ExactRows) -> None:
        """Make the codes that are due when ``new`` is stored and not yet among the newest."""
        due = self._due(self.rows.count) - self.rows.coded
        if due <= 0:
            return
        older = self.rows.waiting - new.count
        if older and self.newest is not None:
            waiting = self.newest.last(older)
            if due <= CODED_AT_ONCE:
                new = waiting.followed_by(new)
            else:
                # A prompt is not copied for the sake of a few rows.
                self.rows.code(waiting.keys, waiting.values)
                due -= older
        rows = new.first(due)
        self.rows.code(rows.keys, rows.values)

    def _due(self, count: int) -> int:
        """Rows of ``count`` that have codes."""
        # On a GPU the kernels read every row by its code.
        together = max(1, min(CODED_AT_ONCE, self.config.recent)) if self.rows.blocked else 1
        return count - count % together

    def _fresh(self, new: ExactRows) -> ExactRows:
        """Take new rows among the newest; the recent rows followed by them."""
        if self.config.recent == 0:
            return new
        limit, before = self.config.recent + SPARE, 0 if self.newest is None else self.newest.count
        if self.newest is None or new.count >= limit:
            fresh = new if self.newest is None else self.newest.last(min(before, self.config.recent)).followed_by(new)
            self.newest = new.part(max(0, new.count - limit), new.count)
            return fresh
        # What is joined is a copy already.
        whole = self.newest.last(min(before, max(limit - new.count, self.config.recent))).followed_by(new)
        fresh = whole.last(min(before, self.config.recent) + new.count)
        self.newest = whole if whole.count <= limit else whole.part(whole.count - limit, whole.count)
        return fresh

    def returned(self, fresh: ExactRows) -> tuple[mx.array, mx.array]:
        """All rows, those of them that are held as they came in the place of what was packed."""
        end = self.rows.count - fresh.count
        if end == 0:
            return fresh.keys, self._values_of(fresh, self.rows.count)
        # Only now, after the new rows were written: a view taken before would keep the buffer from being written in
        # place.
        keys, values = self.rows.keys_values()
        first = self.leading(end)
        start = 0 if first is None else first.count
        exact = [fresh] if first is None else [first, fresh]
        keys = _with_rows(keys[:, :, start:end], [rows.keys for rows in exact])
        if fresh.values is not None:
            values = _with_rows(values[:, :, start:end], [rows.values for rows in exact if rows.values is not None])
        return keys, values

    def leading(self, end: int) -> ExactRows | None:
        """The first rows as they came, none of them at or beyond ``end``."""
        if self.first is None or end == 0:
            return None
        return self.first if self.first.count <= end else self.first.part(0, end)

    def _values_of(self, exact: ExactRows, end: int) -> mx.array:
        """Values of exact rows that end before row ``end``."""
        if exact.values is not None:
            return exact.values
        return self.rows.values_as_they_came()[:, :, end - exact.count : end]

    def trim(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        self.rows.drop_last(count)
        self.fresh = None
        if self.first is not None and self.first.count > self.rows.count:
            self.first = self.first.part(0, self.rows.count)
        if self.newest is not None:
            left = self.newest.count - count
            self.newest = self.newest.part(0, left) if left > 0 else None
        self._settle()

    def _settle(self) -> None:
        """Have codes for those rows that would have some had no token been forgotten, as far as that can be."""
        # Of rows that are not there as they came the codes must stay.
        exact = 0 if self.newest is None else self.newest.count
        change = max(self._due(self.rows.count), self.rows.count - exact) - self.rows.coded
        if change < 0:
            self.rows.uncode(-change)
        elif change and self.newest is not None:
            rows = self.newest.last(self.rows.waiting).first(change)
            self.rows.code(rows.keys, rows.values)

    def account(self) -> ByteCount:
        """Bytes of packed rows, and of copies."""
        count = self.rows.account()
        copies = [rows.nbytes for rows in (self.first, self.newest, self.fresh) if rows is not None]
        keys, values = (sum(sizes[part] for sizes in copies) for part in (0, 1))
        details = {**count.details, "exact_key_bytes": keys, "exact_value_bytes": values}
        return attrs.evolve(count, keys=count.keys + keys, values=count.values + values, rows=None, details=details)

    def arrays(self) -> list[mx.array]:
        """Every array held."""
        exact = [rows for rows in (self.first, self.newest) if rows is not None]
        copies = [array for rows in exact for array in (rows.keys, rows.values) if array is not None]
        return [*self.rows.buffers(), *copies]

    def snapshot(self) -> Snapshot:
        """Everything, as arrays."""
        arrays = dict(self.rows.arrays())
        for name, rows in (("first", self.first), ("newest", self.newest)):
            if rows is not None:
                arrays[f"{name}_keys"] = rows.keys
                if rows.values is not None:
                    arrays[f"{name}_values"] = rows.values
        return Snapshot(arrays, {"waiting": self.rows.waiting})

    @classmethod
    def restored(cls, config: TurboQuantRVQConfig, layer: LayerSpec, snapshot: Snapshot) -> TurboQuantRVQState:
        """A state equal to the one that ``snapshot`` was taken of."""
        state, arrays = cls.empty(config, layer), snapshot.arrays
        names = ("first", "newest")
        exact = {f"{name}_{part}" for name in names for part in ("keys", "values")}
        waiting = int(snapshot.values["waiting"] or 0)
        state.rows.load({name: array for name, array in arrays.items() if name not in exact}, waiting)
        state.first, state.newest = (
            ExactRows(arrays[f"{name}_keys"], arrays.get(f"{name}_values")) if f"{name}_keys" in arrays else None
            for name in names
        )
        # Made on a CPU and read on a GPU, or the other way round.
        state._settle()
        return state


def _with_rows(packed: mx.array, exact: list[mx.array]) -> mx.array:
    """Rebuilt rows between those that come first and those that come last."""
    return mx.concatenate([*exact[:-1], packed, exact[-1]], axis=2)
