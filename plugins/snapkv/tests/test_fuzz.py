"""Random sequences of everything mlx-lm does to a cache, against a model of SnapKV in plain Python and numpy."""

import copy
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import veloxquant
from veloxquant import LayerSpec
from veloxquant.safefile import read_file
from veloxquant.safefile import write_file
from veloxquant_snapkv import SnapKVConfig

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
GROUP = HEADS // KV_HEADS
SCALE = DIM**-0.5
CONFIG = SnapKVConfig(budget=24, window=8, sinks=2, kernel_size=5)
TOKENS = 1200
# nox -s fuzz asks for 1,000 examples, new ones each time; otherwise the same 50 run every time.
EXAMPLES = int(os.environ.get("VELOXQUANT_FUZZ", "0"))

_RNG = np.random.default_rng(0)
QUERIES = _RNG.standard_normal((HEADS, TOKENS, DIM)).astype(np.float32)
KEYS = _RNG.standard_normal((KV_HEADS, TOKENS, DIM)).astype(np.float32) * 2
VALUES = _RNG.standard_normal((KV_HEADS, TOKENS, VALUE_DIM)).astype(np.float32)


class Reference:
    """What SnapKV is said to do, row by row.

    A row is (position, index into the data), or None where a deep rewind left a head with fewer rows than another:
    such a row has no votes and is seen by no query, but it keeps its place until the next eviction.
    """

    def __init__(self):
        self.rows = [[] for _ in range(KV_HEADS)]
        self.seen, self.open, self.block, self.recent = 0, True, 0, []

    def feed(self, tokens):
        count = len(tokens)
        self.open = self.open or count >= CONFIG.window
        output = np.zeros((HEADS, count, VALUE_DIM))
        for step, token in enumerate(tokens):
            for head in range(KV_HEADS):
                self.rows[head].append((self.seen + step, token))
            for head in range(HEADS):
                output[head, step] = self._attend(head, token)
        self.seen += count
        if self.open:
            self.block = count
            self.recent = [*self.recent, *tokens][-2 * CONFIG.window :]
            if count == 1:
                self.finish()
        return output

    def _weights(self, head, token, rows):
        alive = np.array([row is not None for row in rows])
        keys = KEYS[head // GROUP, [index for _, index in filter(None, rows)]].astype(np.float64)
        logits = keys @ QUERIES[head, token].astype(np.float64) * SCALE
        weights = np.zeros(len(rows))
        weights[alive] = np.exp(logits - logits.max())
        return weights / weights.sum()

    def _attend(self, head, token):
        rows = self.rows[head // GROUP]
        values = VALUES[head // GROUP, [row[1] if row else 0 for row in rows]].astype(np.float64)
        return self._weights(head, token, rows) @ values

    def finish(self):
        self.open = False
        recent, self.recent = self.recent[-CONFIG.window :], []
        if len(self.rows[0]) > CONFIG.budget and recent:
            self.rows = [self._choose(head, recent) for head in range(KV_HEADS)]

    def _choose(self, kv_head, recent):
        rows = self.rows[kv_head]
        # The last rows stay, also where a rewind has left fewer queries than a window to vote.
        scored = len(rows) - CONFIG.window
        votes = np.zeros(scored)
        for place, token in enumerate(recent):
            for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
                seen = len(rows) - len(recent) + place + 1
                votes += self._weights(head, token, rows[:seen])[:scored]
        half = CONFIG.kernel_size // 2
        pooled = [votes[max(0, row - half) : row + half + 1].max() for row in range(scored)]
        best = sorted(range(CONFIG.sinks, scored), key=lambda row: (rows[row] is None, -pooled[row], row))
        chosen = best[: CONFIG.budget - CONFIG.sinks - CONFIG.window]
        return [rows[row] for row in sorted([*range(CONFIG.sinks), *chosen, *range(scored, len(rows))])]

    def trim(self, count):
        if count == self.seen:
            self.__init__()
            return
        self.seen -= count
        self.rows = [[row if row and row[0] < self.seen else None for row in rows] for rows in self.rows]
        while all(rows and rows[-1] is None for rows in self.rows):
            self.rows = [rows[:-1] for rows in self.rows]
        self.recent = self.recent[: max(0, len(self.recent) - count)]
        if self.open and 0 < self.block < CONFIG.window:
            self.finish()


def feed(cache, tokens):
    queries, keys, values = (mx.array(array[None, :, tokens]) for array in (QUERIES, KEYS, VALUES))
    mask = cache.make_mask(len(tokens))
    all_keys, all_values = cache.update_and_fetch(keys, values)
    return np.array(cache.attend(queries, all_keys, all_values, scale=SCALE, mask=mask))[0]


def positions(cache):
    """Positions of the live rows of each KV head."""
    rows = cache.method_state.rows
    held = np.broadcast_to(np.array(rows.positions()), (1, KV_HEADS, rows.count))[0]
    return [[int(position) for position in head if position >= 0] for head in held]


def saved_and_loaded(cache):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        header, *arrays = cache.state
        write_file(path, {"header": header}, {str(number): array for number, array in enumerate(arrays)})
        file = read_file(path)
        return type(cache).from_state([file.description["header"], *map(file.arrays.get, map(str, range(len(arrays))))])


def through_a_batch(cache):
    """Decode nothing, but join a batch with a stranger, lose it again, and come out."""
    stranger = new_cache()
    feed(stranger, list(range(13)))
    batch = type(cache).merge([stranger, cache])
    batch.extend(type(cache).merge([new_cache()]))
    batch.filter([1])
    return batch.extract(0)


def new_cache():
    layer = LayerSpec(query_mode="routed", query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    return veloxquant.get_cache("snapkv", CONFIG, layer=layer)


STEPS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 60)),
    st.tuples(st.just("feed"), st.integers(1, 9)),
    st.tuples(st.just("feed"), st.just(1)),
    st.tuples(st.just("trim"), st.integers(0, 6)),
    st.tuples(st.just("trim"), st.integers(0, 200)),
    st.tuples(st.sampled_from(["copy", "save and load", "batch"]), st.just(0)),
)


@settings(max_examples=EXAMPLES or 50, derandomize=EXAMPLES == 0, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=20))
def test_snapkv_does_what_it_says(steps):
    cache, reference, used = new_cache(), Reference(), 0
    for step, count in steps:
        if step == "feed":
            tokens = list(range(used, used + count))
            used += count
            np.testing.assert_allclose(feed(cache, tokens), reference.feed(tokens), atol=2e-5)
        elif step == "trim":
            count = min(count, reference.seen)
            assert cache.trim(count) == count
            reference.trim(count)
        elif step == "copy":
            abandoned, cache = cache, copy.deepcopy(cache)
            feed(abandoned, list(range(20)))
        else:
            cache = saved_and_loaded(cache) if step == "save and load" else through_a_batch(cache)
        assert cache.offset == reference.seen
        assert positions(cache) == [[row[0] for row in rows if row] for rows in reference.rows]
        assert cache.rows == len(reference.rows[0])
        assert (cache.nbytes == 0) == (reference.seen == 0)
