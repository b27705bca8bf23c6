"""Random sequences of everything mlx-lm does to a cache, against a model of the method in plain Python and numpy.

Rotations and levels are taken as given, for other tests hold them against theory. Tokens whose codes or scales hang on
the last bits of fp32 are left out of the data, so that the model in float64 must agree with every one.
"""

import copy
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
from veloxquant_turboquant_rvq import TurboQuantRVQConfig
from veloxquant_turboquant_rvq.codebooks import key_codebook
from veloxquant_turboquant_rvq.codebooks import value_codebook
from veloxquant_turboquant_rvq.rotation import rotation

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
GROUP = HEADS // KV_HEADS
SCALE = DIM**-0.5
SPARE = 64
"""Rows beyond the recent ones that stay as they came."""
TOKENS = 1700
# nox -s fuzz asks for 1,000 examples, new ones each time; otherwise the same 50 run every time.
EXAMPLES = int(os.environ.get("VELOXQUANT_FUZZ", "0"))
CONFIGS = {
    "keys": TurboQuantRVQConfig(sinks=2, recent=8),
    "keys and values": TurboQuantRVQConfig(bits=2, value_bits=4, recent=0, sinks=3),
    "laplace": TurboQuantRVQConfig(codebook="laplace", value_bits=2, sinks=0, recent=5),
    "matched": TurboQuantRVQConfig(codebook="matched", bits=2, value_bits=3, sinks=0, recent=0),
}


class Vectors:
    """Vectors as they came and as they are rebuilt, ``[KV_HEADS, TOKENS, dim]``."""

    def __init__(self, part, config, dim, seed):
        self.bits = config.bits if part == "keys" else config.value_bits
        self.came = np.random.default_rng(seed).standard_normal((KV_HEADS, TOKENS + 100, dim)).astype(np.float32) * 2
        self.rebuilt, self.safe = self.came.astype(np.float64), np.ones(TOKENS + 100, dtype=bool)
        if self.bits is None:
            return
        book = (key_codebook if part == "keys" else value_codebook)(config.codebook, self.bits, dim)
        matrix = np.array(rotation(dim, config.seed, part).apply(mx.eye(dim))).astype(np.float64)
        rotated = self.came.astype(np.float64) @ matrix
        levels, near = self._levels(rotated / np.linalg.norm(rotated, axis=2, keepdims=True) * dim**0.5, book)
        scales = (rotated * levels).sum(2, keepdims=True) / (levels**2).sum(2, keepdims=True)
        # bf16 keeps 8 bits.
        unit = 2.0 ** (np.floor(np.log2(scales)) - 7)
        self.rebuilt = np.rint(scales / unit) * unit * levels @ matrix.T
        tie = np.abs(scales / unit % 1 - 0.5) < 1e-3
        self.safe = ~(near.any((0, 2)) | tie.any((0, 2)))

    @staticmethod
    def _levels(coordinates, book):
        """Levels of the nearest codes, stage by stage, and where two were about as near."""
        level, near = Vectors._nearest(coordinates, book.first)
        if book.second is None:
            return level, near
        side = np.where(book.folded & (level < 0), -1, 1)
        second, near_too = Vectors._nearest(side * (coordinates - level), book.second)
        return level + side * second, near | near_too

    @staticmethod
    def _nearest(values, levels):
        cuts = (levels[1:] + levels[:-1]) / 2
        place = np.searchsorted(cuts, values)
        gap = np.minimum(
            np.abs(values - cuts[np.maximum(place - 1, 0)]), np.abs(values - cuts[np.minimum(place, len(cuts) - 1)])
        )
        return levels[place], gap < 2e-5


class Data:
    """What is fed to a cache with a config."""

    def __init__(self, config):
        keys, values = Vectors("keys", config, DIM, 0), Vectors("values", config, VALUE_DIM, 1)
        use = np.flatnonzero(keys.safe & values.safe)[:TOKENS]
        assert len(use) == TOKENS
        self.keys, self.values = keys.came[:, use], values.came[:, use]
        self.rebuilt_keys, self.rebuilt_values = keys.rebuilt[:, use], values.rebuilt[:, use]
        self.queries = np.random.default_rng(2).standard_normal((HEADS, TOKENS, DIM)).astype(np.float32)


class Reference:
    """What the method is said to do: which rows are as they came, and attention over all of them."""

    def __init__(self, config, data):
        self.config, self.data = config, data
        self.tokens, self.ring = [], 0

    def feed(self, tokens):
        exact = min(self.ring, self.config.recent) + len(tokens)
        self.tokens = [*self.tokens, *tokens]
        self.ring = min(self.ring + len(tokens), self.config.recent + SPARE) if self.config.recent else 0
        rows = np.arange(len(self.tokens))
        as_came = ((rows < self.config.sinks) | (rows >= len(rows) - exact))[:, None]
        data = self.data
        keys = np.where(as_came, data.keys[:, self.tokens], data.rebuilt_keys[:, self.tokens])
        values = np.where(as_came, data.values[:, self.tokens], data.rebuilt_values[:, self.tokens])
        return keys, values, self._attend(tokens, keys, values)

    def _attend(self, tokens, keys, values):
        logits = self.data.queries[:, tokens].astype(np.float64) @ keys.repeat(GROUP, 0).swapaxes(1, 2) * SCALE
        seen = np.arange(keys.shape[1]) <= np.arange(keys.shape[1] - len(tokens), keys.shape[1])[:, None]
        weights = np.where(seen, np.exp(logits - logits.max(axis=2, keepdims=True)), 0)
        return weights / weights.sum(axis=2, keepdims=True) @ values.repeat(GROUP, 0)

    def trim(self, count):
        self.tokens = self.tokens[: len(self.tokens) - count]
        self.ring = max(0, self.ring - count)


DATA = {name: Data(config) for name, config in CONFIGS.items()}


def feed(cache, data, tokens):
    queries, keys, values = (mx.array(array[None, :, tokens]) for array in (data.queries, data.keys, data.values))
    mask = cache.make_mask(len(tokens))
    all_keys, all_values = cache.update_and_fetch(keys, values)
    output = cache.attend(queries, all_keys, all_values, scale=SCALE, mask=mask)
    return [np.array(array)[0] for array in (all_keys, all_values, output)]


def new_cache(config):
    layer = LayerSpec(query_mode="routed", query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    return veloxquant.get_cache("turboquant_rvq", config, layer=layer)


def saved_and_loaded(cache):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        header, *arrays = cache.state
        write_file(path, {"header": header}, {str(number): array for number, array in enumerate(arrays)})
        file = read_file(path)
        return type(cache).from_state([file.description["header"], *map(file.arrays.get, map(str, range(len(arrays))))])


def through_a_batch(cache, data):
    """Decode nothing, but join a batch with a stranger, lose it again, and come out."""
    stranger = new_cache(cache.config)
    feed(stranger, data, list(range(13)))
    batch = type(cache).merge([stranger, cache])
    batch.extend(type(cache).merge([new_cache(cache.config)]))
    batch.filter([1])
    return batch.extract(0)


STEPS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 140)),
    st.tuples(st.just("feed"), st.integers(1, 9)),
    st.tuples(st.just("feed"), st.just(1)),
    st.tuples(st.just("trim"), st.integers(0, 6)),
    st.tuples(st.just("trim"), st.integers(0, 300)),
    st.tuples(st.sampled_from(["copy", "save and load", "batch"]), st.just(0)),
)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=EXAMPLES or 50, derandomize=EXAMPLES == 0, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=12))
def test_the_method_does_what_it_says(name, steps):
    config, data = CONFIGS[name], DATA[name]
    cache, reference, used = new_cache(config), Reference(config, data), 0
    for step, count in steps:
        if step == "feed":
            tokens = list(range(used, used + count))
            used += count
            for found, expected in zip(feed(cache, data, tokens), reference.feed(tokens), strict=True):
                np.testing.assert_allclose(found, expected, atol=2e-5)
        elif step == "trim":
            count = min(count, len(reference.tokens))
            assert cache.trim(count) == count
            reference.trim(count)
        elif step == "copy":
            abandoned, cache = cache, copy.deepcopy(cache)
            feed(abandoned, data, list(range(20)))
        else:
            cache = saved_and_loaded(cache) if step == "save and load" else through_a_batch(cache, data)
        assert cache.offset == cache.rows == len(reference.tokens)
        assert (cache.nbytes == 0) == (not reference.tokens)
