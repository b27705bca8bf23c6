"""Small methods for the tests of the core; each keeps a log of the hooks that ran."""

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import DenseRows
from veloxquant import MethodInfo
from veloxquant import PositionedRows
from veloxquant import RoutingError
from veloxquant import Snapshot
from veloxquant import UnsupportedShapeError
from veloxquant import hookimpl
from veloxquant.attention import attention
from veloxquant.attention import live_mask


@attrs.frozen(kw_only=True)
class NoOpConfig:
    window: int = 4


class NoOp:
    """Keeps every row as it came."""

    name = "noop"
    needs = ()

    def __init__(self):
        self.log = []

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(
            name=self.name, config=NoOpConfig, summary="all rows", kind="toy", prompt_window="window", needs=self.needs
        )

    @hookimpl
    def veloxquant_create(self, config, layer):
        return layer.make_rows()

    @hookimpl
    def veloxquant_prefill(self, state, keys, values):
        self.log.append(("prefill", keys.shape[2]))
        state.append(keys, values)
        return state.keys_values()

    @hookimpl
    def veloxquant_decode(self, state, keys, values):
        self.log.append(("decode", keys.shape[2]))
        state.append(keys, values)
        return state.keys_values()

    @hookimpl
    def veloxquant_finish_prompt(self, state):
        self.log.append(("finish", state.count))

    @hookimpl
    def veloxquant_account(self, state):
        return state.account()

    @hookimpl
    def veloxquant_trim(self, state, count):
        self.log.append(("trim", count))
        state.drop_last(count)
        return count

    @hookimpl
    def veloxquant_serialize(self, state):
        return Snapshot(state.arrays())

    @hookimpl
    def veloxquant_restore(self, config, layer, snapshot):
        state = layer.make_rows()
        state.load(snapshot.arrays)
        return state


class NoOpAttend(NoOp):
    """As NoOp, and asks for the true queries without using them."""

    name = "noop_attend"

    @hookimpl
    def veloxquant_attend(self, state, queries, keys, values, scale, mask, sinks):
        self.log.append(("attend", queries.shape[2]))
        return


class Picky(NoOpAttend):
    """Refuses proxy mode."""

    name = "picky"
    needs = ("queries",)


@attrs.frozen(kw_only=True)
class ChoosyConfig:
    window: int = 4
    choose: bool = False

    @property
    def needs(self):
        return ("queries",) if self.choose else ()


class Choosy(NoOpAttend):
    """Needs true queries with one of its options only."""

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(name="choosy", config=ChoosyConfig, summary="all rows", kind="toy", prompt_window="window")


class RopeReader(NoOp):
    """Wants to know the rotary embedding."""

    name = "rope_reader"
    needs = ("rope",)


class Rigid:
    """A method with no optional hook at all, and no prompt window of its own."""

    name = "rigid"

    def __init__(self):
        self.log = []

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(name=self.name, config=NoOpConfig, summary="no trim", kind="toy")

    veloxquant_create = NoOp.veloxquant_create
    veloxquant_prefill = NoOp.veloxquant_prefill
    veloxquant_decode = NoOp.veloxquant_decode
    veloxquant_account = NoOp.veloxquant_account
    veloxquant_serialize = NoOp.veloxquant_serialize
    veloxquant_restore = NoOp.veloxquant_restore


class Refuser(NoOp):
    """Takes head dims that are a multiple of 8 only, which it finds out in prefill."""

    name = "refuser"
    refuse_next = False

    @hookimpl
    def veloxquant_prefill(self, state, keys, values):
        if keys.shape[3] % 8 or self.refuse_next:
            self.refuse_next = False
            raise UnsupportedShapeError(f"refuser serves head dims that are a multiple of 8, not {keys.shape[3]}")
        return super().veloxquant_prefill(state, keys, values)


@attrs.frozen(kw_only=True)
class EvictorConfig:
    keep: int = 8
    window: int = 4
    storage: str | None = None
    storage_config: dict | None = None


class Evictor:
    """When the prompt ends, KV head h keeps its first h rows and the latest others: the heads keep different rows."""

    name = "evictor"

    def __init__(self):
        self.log = []

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(
            name=self.name, config=EvictorConfig, summary="evicts", kind="toy", evicts=True, prompt_window="window"
        )

    @hookimpl
    def veloxquant_create(self, config, layer):
        return EvictorState(config, PositionedRows(layer.make_rows()))

    @hookimpl
    def veloxquant_prefill(self, state, keys, values):
        return state.rows.append(keys, values)

    @hookimpl
    def veloxquant_decode(self, state, keys, values):
        return state.rows.append(keys, values)

    @hookimpl
    def veloxquant_attend(self, state, queries, keys, values, scale, mask, sinks):
        valid = state.rows.valid()
        if valid is None:
            return None
        if isinstance(mask, mx.array):
            raise RoutingError("evictor cannot combine a mask array with dead rows")
        return attention(queries, keys, values, scale, live_mask(valid, queries.shape[1], queries.shape[2]), sinks)

    @hookimpl
    def veloxquant_finish_prompt(self, state):
        self.log.append(("finish", state.rows.end))
        count, keep = state.rows.count, state.config.keep
        if count <= keep:
            return
        batch, heads = state.rows.store.keys_values()[0].shape[:2]
        row = [[*range(h % keep), *range(count - keep + h % keep, count)] for h in range(heads)]
        state.rows.keep(mx.array([row] * batch, dtype=mx.int32))

    @hookimpl
    def veloxquant_account(self, state):
        return state.rows.account()

    @hookimpl
    def veloxquant_trim(self, state, count):
        state.rows.rewind(state.rows.end - count)
        return count

    @hookimpl
    def veloxquant_serialize(self, state):
        return Snapshot(state.rows.arrays(), state.rows.values())

    @hookimpl
    def veloxquant_restore(self, config, layer, snapshot):
        state = self.veloxquant_create(config, layer)
        state.rows.load(snapshot.arrays, **snapshot.values)
        return state


@attrs.define(eq=False)
class EvictorState:
    config: EvictorConfig
    rows: PositionedRows


@attrs.frozen(kw_only=True)
class CoarseConfig:
    levels: int = 100


@attrs.define(eq=False)
class CoarseRows:
    """Rows as whole numbers of a fixed step, one byte each: a codec whose loss is easy to predict."""

    levels: int
    dtype: str = "float32"
    codes: tuple | None = None

    lossless = False

    @property
    def step(self):
        return 4.0 / self.levels

    @property
    def count(self):
        return 0 if self.codes is None else self.codes[0].shape[2]

    def append(self, keys, values):
        self.dtype = str(keys.dtype).rpartition(".")[2]
        new = [mx.round(rows.astype(mx.float32) / self.step).astype(mx.int8) for rows in (keys, values)]
        if self.codes is not None:
            new = [mx.concatenate([old, rows], axis=2) for old, rows in zip(self.codes, new, strict=True)]
        self.codes = tuple(new)

    def keys_values(self):
        return tuple((codes.astype(mx.float32) * self.step).astype(getattr(mx, self.dtype)) for codes in self.codes)

    def _dense(self):
        rows = DenseRows()
        rows.append(*self.keys_values())
        return rows

    def gather(self, index):
        return self._dense().gather(index)

    def select(self, index):
        return self._dense().select(index)

    def scores(self, queries):
        return self._dense().scores(queries)

    def mix(self, weights):
        return self._dense().mix(weights)

    def keep(self, index):
        self.codes = tuple(mx.take_along_axis(codes, index[..., None], axis=2) for codes in self.codes)

    def drop_last(self, count):
        left = self.count - count
        self.codes = tuple(mx.contiguous(codes[:, :, :left]) for codes in self.codes) if left else None

    def arrays(self):
        return {} if self.codes is None else {"keys": self.codes[0], "values": self.codes[1]}

    def load(self, arrays):
        if arrays:
            self.codes = (mx.array(arrays["keys"]), mx.array(arrays["values"]))

    def account(self):
        if self.codes is None:
            return ByteCount()
        return ByteCount(keys=self.codes[0].nbytes, values=self.codes[1].nbytes)


class Coarse:
    """A lossy codec with no attention hook, which lends its row store to other methods."""

    name = "coarse"

    def __init__(self):
        self.layers = []

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(name=self.name, config=CoarseConfig, summary="rounds", kind="codec")

    @hookimpl
    def veloxquant_create(self, config, layer):
        return PositionedRows(CoarseRows(config.levels))

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
        state = PositionedRows(CoarseRows(config.levels, values.pop("dtype")))
        state.load(snapshot.arrays, **values)
        return state

    @hookimpl
    def veloxquant_rows(self, config, layer):
        self.layers.append((config, layer.index))
        return CoarseRows(config.levels)


ALL = (NoOp, NoOpAttend, Picky, RopeReader, Rigid, Refuser, Evictor, Coarse)
