"""Clean methods for the tests of the conformance kit: evictors that do everything themselves, and a codec.

What a fault replaces is in methods of its own, so that a faulty method is a few lines.
"""

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import DenseRows
from veloxquant import MethodInfo
from veloxquant import PositionedRows
from veloxquant import RoutingError
from veloxquant import Snapshot
from veloxquant import hookimpl
from veloxquant.attention import attention
from veloxquant.attention import live_mask


@attrs.frozen(kw_only=True)
class KeeperConfig:
    budget: int = 40
    window: int = 8
    sinks: int = 4


@attrs.define(eq=False)
class KeeperState:
    config: KeeperConfig
    layer: object
    keys: mx.array | None = None
    values: mx.array | None = None
    # [B, Hkv, rows] int32; -1: rewound in this head only.
    positions: mx.array | None = None
    queries: mx.array | None = None
    seen: int = 0
    collecting: bool = False
    ragged: bool = False

    @property
    def count(self):
        return 0 if self.keys is None else self.keys.shape[2]


def joined(old, new):
    return new if old is None else mx.concatenate([old, new], axis=2)


class Keeper:
    """When the prompt ends, keeps the first rows, the last ones, and those that the last queries look at."""

    config = KeeperConfig
    evicts = True
    state = KeeperState

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(
            name="keeper",
            config=self.config,
            summary="keeps what is looked at",
            kind="toy",
            evicts=self.evicts,
            prompt_window="window",
        )

    @hookimpl
    def veloxquant_create(self, config, layer):
        return self.state(config, layer)

    @hookimpl
    def veloxquant_prefill(self, state, keys, values):
        return self.prompt_rows(state, keys, values)

    def prompt_rows(self, state, keys, values):
        state.collecting = True
        result = self.store(state, keys, values)
        if not state.layer.routed:
            self.observe(state, keys)
        return result

    @hookimpl
    def veloxquant_decode(self, state, keys, values):
        return self.later_rows(state, keys, values)

    def later_rows(self, state, keys, values):
        return self.store(state, keys, values)

    def store(self, state, keys, values):
        self.place(state, keys.shape[2], keys.shape[:2])
        state.keys, state.values = joined(state.keys, keys), joined(state.values, values)
        return state.keys, state.values

    def place(self, state, count, heads):
        new = mx.broadcast_to(mx.arange(state.seen, state.seen + count, dtype=mx.int32), (*heads, count))
        state.positions = joined(state.positions, new)
        state.seen += count

    def observe(self, state, queries):
        state.queries = mx.contiguous(joined(state.queries, queries)[:, :, -2 * state.config.window :])

    @hookimpl
    def veloxquant_attend(self, state, queries, keys, values, scale, mask, sinks):
        return self.attend(state, queries, keys, values, scale, mask, sinks)

    def attend(self, state, queries, keys, values, scale, mask, sinks):
        if state.collecting:
            self.observe(state, queries)
        if not state.ragged:
            return None
        if isinstance(mask, mx.array):
            raise RoutingError("keeper cannot combine a mask array with rewound rows")
        alive = live_mask(state.positions >= 0, queries.shape[1], queries.shape[2])
        return attention(queries, keys, values, scale, alive, sinks)

    @hookimpl
    def veloxquant_finish_prompt(self, state):
        self.finish(state)

    def finish(self, state):
        if state.count > self.budget(state):
            self.evict(state, self.budget(state))
        state.collecting, state.queries = False, None

    def budget(self, state):
        return state.config.budget

    def evict(self, state, budget):
        votes = self.protected(state, self.votes(state))
        self.take(state, mx.sort(mx.argsort(-votes, axis=-1)[..., :budget], axis=-1))

    def take(self, state, index):
        for name in ("keys", "values"):
            setattr(state, name, mx.take_along_axis(getattr(state, name), index[..., None], axis=2))
        state.positions = mx.take_along_axis(state.positions, index, axis=2)

    def votes(self, state):
        queries = state.queries[:, :, -state.config.window :]
        batch, heads, _, dim = state.keys.shape
        weights = mx.softmax(
            queries.reshape(batch, heads, -1, dim).astype(mx.float32) @ state.keys.astype(mx.float32).swapaxes(2, 3),
            axis=-1,
        )
        return mx.where(state.positions >= 0, mx.nan_to_num(weights.sum(axis=2)), -1.0)

    def protected(self, state, votes):
        place = mx.arange(state.count)
        keep = (place < state.config.sinks) | (place >= state.count - state.config.window)
        return mx.where(keep, mx.inf, votes)

    @hookimpl
    def veloxquant_account(self, state):
        return self.account(state)

    def account(self, state):
        if state.keys is None:
            return ByteCount(rows=0)
        queries = 0 if state.queries is None else state.queries.nbytes
        return ByteCount(
            keys=state.keys.nbytes,
            values=state.values.nbytes,
            auxiliary=state.positions.nbytes + queries,
            rows=state.count,
            details={"query_bytes": queries},
        )

    @hookimpl
    def veloxquant_trim(self, state, count):
        self.rewind(state, count)
        return count

    def rewind(self, state, count):
        state.seen -= count
        alive = (state.positions >= 0) & (state.positions < state.seen)
        rows = mx.where(alive, mx.arange(1, state.count + 1), 0).max().item()
        # Contiguous: a view would hold all rows.
        cut = [mx.contiguous(array[:, :, :rows]) if rows else None for array in (state.keys, state.values)]
        state.keys, state.values = cut
        state.positions = mx.contiguous(mx.where(alive, state.positions, -1)[..., :rows]) if rows else None
        state.ragged = bool(rows) and (state.positions < 0).any().item()
        if state.queries is not None:
            left = state.queries.shape[2] - count
            state.queries = mx.contiguous(state.queries[:, :, :left]) if left > 0 else None

    @hookimpl
    def veloxquant_serialize(self, state):
        return self.serialize(state)

    def serialize(self, state):
        names = ("keys", "values", "positions", "queries")
        arrays = {name: getattr(state, name) for name in names if getattr(state, name) is not None}
        return Snapshot(arrays, {name: getattr(state, name) for name in ("seen", "collecting", "ragged")})

    @hookimpl
    def veloxquant_restore(self, config, layer, snapshot):
        return self.restore(config, layer, snapshot)

    def restore(self, config, layer, snapshot):
        arrays = {name: mx.array(array) for name, array in snapshot.arrays.items()}
        return self.state(config, layer, **arrays, **snapshot.values)


class Streamer(Keeper):
    """After the prompt, lets 64 rows gather above the budget and then drops those between the first and the latest."""

    SPARE = 64

    def due(self, state):
        return not state.collecting and state.count >= state.config.budget + self.SPARE

    def later_rows(self, state, keys, values):
        self.drop(state)
        return super().later_rows(state, keys, values)

    def prompt_rows(self, state, keys, values):
        self.drop(state)
        return super().prompt_rows(state, keys, values)

    def drop(self, state):
        if self.due(state):
            index = self.left(state)
            self.take(state, mx.broadcast_to(index, (*state.keys.shape[:2], index.shape[0])))

    def left(self, state):
        """The rows that stay: sinks, and as many of the latest as fit."""
        place = mx.arange(state.config.budget)
        return mx.where(place < state.config.sinks, place, place + state.count - state.config.budget)

    def account(self, state):
        return attrs.evolve(super().account(state), rows=state.config.budget if self.due(state) else state.count)


@attrs.frozen(kw_only=True)
class RounderConfig:
    levels: int = 127


@attrs.define(eq=False)
class RounderRows:
    """Rows in one byte a number, with a scale a row."""

    levels: int
    dtype: str = "float32"
    # Codes and scales of keys, then of values.
    parts: tuple | None = None

    lossless = False

    @property
    def count(self):
        return 0 if self.parts is None else self.parts[0].shape[2]

    def append(self, keys, values):
        self.dtype = str(keys.dtype).rpartition(".")[2]
        new = (*self.encode(keys), *self.encode(values))
        self.parts = new if self.parts is None else tuple(map(joined, self.parts, new))

    def encode(self, rows):
        wide = rows.astype(mx.float32)
        scales = self.scales(wide) / self.levels
        return mx.round(wide / mx.maximum(scales, 1e-30)).astype(mx.int8), scales

    def scales(self, wide):
        return mx.abs(wide).max(axis=-1, keepdims=True)

    def decode(self, codes, scales):
        return (codes.astype(mx.float32) * scales).astype(getattr(mx, self.dtype))

    def keys_values(self):
        return self.decode(*self.parts[:2]), self.decode(*self.parts[2:])

    def taken(self, index):
        return tuple(mx.take_along_axis(part, index[..., None], axis=2) for part in self.parts)

    def select(self, index):
        return self.dense().select(index)

    def gather(self, index):
        parts = self.taken(index)
        return self.decode(*parts[:2]), self.decode(*parts[2:])

    def dense(self):
        rows = DenseRows()
        rows.append(*self.keys_values())
        return rows

    def scores(self, queries):
        return self.dense().scores(queries)

    def mix(self, weights):
        return self.dense().mix(weights)

    def keep(self, index):
        self.parts = self.taken(index)

    def drop_last(self, count):
        left = self.count - count
        self.parts = tuple(mx.contiguous(part[:, :, :left]) for part in self.parts) if left else None

    def arrays(self):
        names = ("key_codes", "key_scales", "value_codes", "value_scales")
        return {} if self.parts is None else dict(zip(names, self.parts, strict=True))

    def load(self, arrays):
        if arrays:
            self.parts = tuple(mx.array(array) for array in arrays.values())

    def account(self):
        if self.parts is None:
            return ByteCount()
        sizes = [part.nbytes for part in self.parts]
        return ByteCount(keys=sizes[0] + sizes[1], values=sizes[2] + sizes[3])


class Rounder:
    """A codec: rounds rows to bytes, looks at no queries, lends its rows to other methods."""

    rows = RounderRows

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(name="rounder", config=RounderConfig, summary="rounds", kind="codec")

    @hookimpl
    def veloxquant_create(self, config, layer):
        return PositionedRows(self.rows(config.levels))

    @hookimpl
    def veloxquant_prefill(self, state, keys, values):
        return state.append(keys, values)

    @hookimpl
    def veloxquant_decode(self, state, keys, values):
        return state.append(keys, values)

    @hookimpl
    def veloxquant_account(self, state):
        return state.account()

    @hookimpl
    def veloxquant_trim(self, state, count):
        state.rewind(state.end - count)
        return count

    @hookimpl
    def veloxquant_serialize(self, state):
        return Snapshot(state.arrays(), {**state.values(), "dtype": state.store.dtype})

    @hookimpl
    def veloxquant_restore(self, config, layer, snapshot):
        values = dict(snapshot.values)
        state = PositionedRows(self.rows(config.levels, values.pop("dtype")))
        state.load(snapshot.arrays, **values)
        return state

    @hookimpl
    def veloxquant_rows(self, config, layer):
        return self.rows(config.levels)
