"""Random sequences of everything mlx-lm does to a cache, against a model of RocketKV in plain Python and numpy."""

import copy
import importlib.util
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import veloxquant
from veloxquant import LayerSpec
from veloxquant.safefile import read_file
from veloxquant.safefile import write_file
from veloxquant_rocketkv import RocketKVConfig
from veloxquant_rocketkv import page_bounds
from veloxquant_rocketkv import select_indices
from veloxquant_rocketkv.exact import SPARE

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
GROUP = HEADS // KV_HEADS
SCALE = DIM**-0.5
PAGE, CHANNELS, READ, RECENT = 2, 3, 9, 1
CONFIG = RocketKVConfig(
    compression_ratio=8, page_size=PAGE, head_topk1=CHANNELS, topk=READ, window=8, sinks=2, kernel_size=5
)
STAGE1 = 8**0.38
TOKENS = 1200
# nox -s fuzz asks for 1,000 examples, new ones each time; otherwise the same 50 run every time.
EXAMPLES = int(os.environ.get("VELOXQUANT_FUZZ", "0"))

_RNG = np.random.default_rng(0)
QUERIES = _RNG.standard_normal((HEADS, TOKENS, DIM)).astype(np.float32)
KEYS = _RNG.standard_normal((KV_HEADS, TOKENS, DIM)).astype(np.float32) * 2
VALUES = _RNG.standard_normal((KV_HEADS, TOKENS, VALUE_DIM)).astype(np.float32)


def exponential(logits):
    """2 to a power, exact for whole powers and linear in between."""
    power = np.maximum((logits - logits.max()) / np.log(2), -126)
    return (1 + power - np.floor(power)) * 2 ** np.floor(power)


class Reference:
    """What RocketKV is said to do, row by row and page by page.

    A row is (position, index into the data), or None where a deep rewind left a head with fewer rows than another.
    """

    def __init__(self):
        self.rows = [[] for _ in range(KV_HEADS)]
        self.seen, self.open, self.block, self.recent = 0, True, 0, []
        # Whether some choice was so close that rounding decides it.
        self.close = False

    def feed(self, tokens):
        self.close = False
        count = len(tokens)
        self.open = self.open or count >= CONFIG.window
        output = np.zeros((HEADS, count, VALUE_DIM))
        for step, token in enumerate(tokens):
            for kv_head in range(KV_HEADS):
                self.rows[kv_head].append((self.seen + step, token))
                rows = self.rows[kv_head] if self.open else self._read(kv_head, token)
                for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
                    values = VALUES[kv_head, [row[1] if row else 0 for row in rows]].astype(np.float64)
                    output[head, step] = self._weights(head, token, rows) @ values
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

    def _read(self, kv_head, token):
        """The rows that a decode step attends to."""
        rows = self.rows[kv_head]
        pages = (len(rows) - RECENT) // PAGE
        newest = rows[pages * PAGE :]
        wanted = max(1, -(-(READ - len(newest)) // PAGE))
        if wanted >= pages:
            return rows
        parts = [rows[page * PAGE : (page + 1) * PAGE] for page in range(pages)]
        queries = QUERIES[kv_head * GROUP : (kv_head + 1) * GROUP, token].astype(np.float64)
        ranks = self._ranks(kv_head, queries, parts)
        order = np.argsort(-ranks, kind="stable")
        last, next_one = ranks[order[wanted - 1]], ranks[order[wanted]]
        self.close = self.close or (next_one > 0 and last - next_one < 1e-4 * last)
        return [row for page in sorted(order[:wanted]) for row in parts[page]] + newest

    def _ranks(self, kv_head, queries, parts):
        sizes = np.abs(queries).sum(0)
        channels = np.argsort(-sizes, kind="stable")[:CHANNELS]
        share = np.abs(queries[:, channels]).sum(1) / np.abs(queries).sum(1)
        alive = [page for page, part in enumerate(parts) if any(part)]
        bounds = np.zeros((len(alive), CHANNELS))
        for place, page in enumerate(alive):
            keys = KEYS[kv_head, [row[1] for row in parts[page] if row]].astype(np.float64)
            for slot, channel in enumerate(channels):
                column = keys[:, channel]
                bounds[place, slot] = column.max() if queries[:, channel].sum() > 0 else column.min()
        ranks = np.full(len(parts), -1.0)
        ranks[alive] = 0
        for query, part in zip(queries, share, strict=True):
            weights = exponential(bounds @ query[channels] * SCALE / np.sqrt(part))
            ranks[alive] += weights / weights.sum()
        return ranks

    def finish(self):
        self.open = False
        recent, self.recent = self.recent[-CONFIG.window :], []
        budget = max(int(self.seen / STAGE1), CONFIG.sinks + CONFIG.window)
        if len(self.rows[0]) > budget and recent:
            self.rows = [self._keep(head, recent, budget) for head in range(KV_HEADS)]

    def _keep(self, kv_head, recent, budget):
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
        chosen = best[: budget - CONFIG.sinks - CONFIG.window]
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


def require_summary_of_rows(cache):
    """The summary, kept page by page through all of it, is bit for bit the one made of the rows in one go."""
    state = cache.method_state
    summary = state.selector.summary
    if summary.pages:
        rows = summary.pages * PAGE
        valid = state.rows.valid()
        valid = None if valid is None else valid[:, :, :rows]
        rebuilt = page_bounds(state.rows.store.keys_values()[0][:, :, :rows], PAGE, valid)
        assert (np.array(summary.live()) == np.array(rebuilt)).all()


def saved_and_loaded(cache):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        header, *arrays = cache.state
        write_file(path, {"header": header}, {str(number): array for number, array in enumerate(arrays)})
        file = read_file(path)
        return type(cache).from_state([file.description["header"], *map(file.arrays.get, map(str, range(len(arrays))))])


def through_a_batch(cache):
    """Decode nothing, but join a batch with a stranger, lose it again, and come out."""
    stranger = new_cache(cache.config)
    feed(stranger, list(range(13)))
    batch = type(cache).merge([stranger, cache])
    batch.extend(type(cache).merge([new_cache(cache.config)]))
    batch.filter([1])
    return batch.extract(0)


def new_cache(config=CONFIG):
    layer = LayerSpec(query_mode="routed", query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    return veloxquant.get_cache("rocketkv", config, layer=layer)


STEPS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 60)),
    st.tuples(st.just("feed"), st.integers(1, 7)),
    st.tuples(st.just("feed"), st.just(1)),
    st.tuples(st.just("trim"), st.integers(0, 6)),
    st.tuples(st.just("trim"), st.integers(0, 200)),
    st.tuples(st.sampled_from(["copy", "save and load", "batch"]), st.just(0)),
)


@settings(max_examples=EXAMPLES or 50, derandomize=EXAMPLES == 0, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=20))
def test_rocketkv_does_what_it_says(steps):
    cache, reference, used = new_cache(), Reference(), 0
    for step, count in steps:
        if step == "feed":
            tokens = list(range(used, used + count))
            used += count
            found, expected = feed(cache, tokens), reference.feed(tokens)
            if not reference.close:
                np.testing.assert_allclose(found, expected, atol=2e-5)
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
        require_summary_of_rows(cache)


PACKED = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}, "window": 8, "topk": 20}
EXACT = 5
STACKED = [
    RocketKVConfig(ranking="rows", stage1=False, exact_recent=EXACT, **PACKED),
    RocketKVConfig(ranking="rows", exact_recent=EXACT, **PACKED),
    RocketKVConfig(page_size=3, exact_recent=EXACT, multi_turn=True, **PACKED),
    RocketKVConfig(page_size=2, exact_recent=EXACT, summary_bits=4, **PACKED),
    RocketKVConfig(page_size=2, exact_recent=EXACT, dense_rows=40, **PACKED),
]


class Ends:
    """Which tokens a cache over packed rows has seen, and how many of the newest are still there as they came."""

    def __init__(self, config):
        self.config, self.tokens, self.known = config, [], 0

    def feed(self, tokens, evicted):
        self.tokens += tokens
        self.known = min(self.known + len(tokens), EXACT + SPARE)
        if evicted:
            self.known = min(self.known, self.config.window)

    def trim(self, count):
        del self.tokens[len(self.tokens) - count :]
        self.known = max(0, self.known - count)

    def attended(self, state, head):
        """Attention of the newest token in one KV head: sinks and known rows as they came, others as stored."""
        token = self.tokens[-1]
        group = slice(head * GROUP, (head + 1) * GROUP)
        queries = QUERIES[group, token]
        index = select_indices(state, mx.array(queries), 0, head, keep_recent=state.config.newest_rows)
        index = np.array(index)
        held = np.broadcast_to(np.array(state.rows.positions()), (1, KV_HEADS, state.rows.count))[0, head, index]
        came = [self.tokens[position] for position in held]
        exact = (held < state.config.sinks) | (held >= len(self.tokens) - min(self.known, EXACT))
        keys, values = (
            np.where(exact[:, None], data[head, came], np.array(stored)[0, head, index]).astype(np.float64)
            for data, stored in zip((KEYS, VALUES), state.rows.store.keys_values(), strict=True)
        )
        logits = queries @ keys.T * SCALE
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True) @ values


@pytest.mark.skipif(importlib.util.find_spec("veloxquant_turboquant_rvq") is None, reason="turboquant_rvq is missing")
@settings(max_examples=EXAMPLES or 40, derandomize=EXAMPLES == 0, deadline=None)
@given(st.sampled_from(STACKED), st.integers(30, 90), st.lists(STEPS, min_size=1, max_size=20))
def test_the_ends_of_packed_rows_count_as_they_came(config, prompt, steps):
    cache, ends, used = new_cache(config), Ends(config), 0
    for step, count in [("feed", prompt), ("feed", 1), ("feed", 1), *steps, ("feed", 1), ("feed", 1)]:
        if step == "feed":
            tokens = list(range(used, used + count))
            used += count
            before, decoding = cache.rows, bool(cache.offset) and not cache.method_state.collecting
            found = feed(cache, tokens)
            ends.feed(tokens, evicted=cache.rows < before + count)
            if decoding and count == 1:
                for head in range(KV_HEADS):
                    expected = ends.attended(cache.method_state, head)
                    np.testing.assert_allclose(found[head * GROUP : (head + 1) * GROUP, 0], expected, atol=2e-4)
        elif step == "trim":
            count = min(count, len(ends.tokens))
            collecting, left = cache.method_state.collecting, cache.rows - count
            assert cache.trim(count) == count
            ends.trim(count)
            if collecting and cache.rows < left:
                # What was left of the block completes the prompt.
                ends.known = min(ends.known, config.window)
        elif step == "copy":
            abandoned, cache = cache, copy.deepcopy(cache)
            feed(abandoned, list(range(20)))
        else:
            cache = saved_and_loaded(cache) if step == "save and load" else through_a_batch(cache)
        newest = cache.method_state.exact.newest
        assert (0 if newest is None else newest[0].shape[2]) == ends.known
        assert cache.offset == len(ends.tokens)
