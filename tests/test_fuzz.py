"""Random sequences of everything mlx-lm does to a cache, for every method.

With the lossless options the reference is dense attention over the surviving tokens, in numpy. With the small ones it
is a run that was fed the surviving tokens only, as long as every rewind is exact.
"""

import copy
import os

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import veloxquant
from veloxquant import LayerSpec
from veloxquant import Rope

HEADS, KV_HEADS, DIM = 4, 2, 32
SCALE = DIM**-0.5
TOKENS = 1200
# nox -s fuzz asks for 1,000 examples, new ones each time; otherwise the same 50 run every time.
EXAMPLES = int(os.environ.get("VELOXQUANT_FUZZ", "0"))
FUZZ = settings(
    max_examples=EXAMPLES or 50,
    derandomize=EXAMPLES == 0,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

QUERIES, KEYS, VALUES = (
    np.array(mx.random.normal((heads, TOKENS, DIM), key=mx.random.key(heads + seed)))
    for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 60)),
        st.tuples(st.just("feed"), st.integers(1, 9)),
        st.tuples(st.just("feed"), st.just(1)),
        st.tuples(st.just("trim"), st.integers(0, 40)),
        st.tuples(st.sampled_from(["copy", "restore", "batch"]), st.just(0)),
    ),
    min_size=1,
    max_size=16,
)


def new_cache(name, options):
    layer = LayerSpec(
        query_mode="routed",
        query_heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=SCALE,
        rope=Rope(dims=DIM),
    )
    return veloxquant.get_cache(name, options, layer=layer)


def feed(cache, tokens):
    queries, keys, values = (mx.array(array[None, :, tokens]) for array in (QUERIES, KEYS, VALUES))
    mask = cache.make_mask(len(tokens))
    all_keys, all_values = cache.update_and_fetch(keys, values)
    attend = getattr(cache, "attend", None)
    if attend is None:
        output = veloxquant.attention.attention(queries, all_keys, all_values, SCALE, mask)
    else:
        output = attend(queries, all_keys, all_values, scale=SCALE, mask=mask)
    return np.array(output)[0]


def dense(tokens, count):
    """Attention of the last ``count`` of the tokens over all of them."""
    output = np.zeros((HEADS, count, DIM))
    for head in range(HEADS):
        keys, values = (array[head * KV_HEADS // HEADS, tokens].astype(np.float64) for array in (KEYS, VALUES))
        for step in range(count):
            seen = len(tokens) - count + step + 1
            logits = keys[:seen] @ QUERIES[head, tokens[seen - 1]].astype(np.float64) * SCALE
            weights = np.exp(logits - logits.max())
            output[head, step] = weights @ values[:seen] / weights.sum()
    return output


def changed_hands(cache, how, name, options):
    """A cache that must go on as if it were the one given."""
    if how == "restore":
        return type(cache).from_state(cache.state)
    if how == "batch" and hasattr(cache, "merge"):
        stranger = new_cache(name, options)
        feed(stranger, list(range(13)))
        batch = type(cache).merge([stranger, cache])
        batch.filter([1])
        return batch.extract(0)
    twin = copy.deepcopy(cache)
    feed(cache, list(range(20)))
    return twin


@FUZZ
@given(steps=STEPS)
def test_lossless_options_are_dense_attention_over_the_surviving_tokens(method, steps):
    if method.lossless is None:
        return
    cache, alive, used = new_cache(method.name, method.lossless), [], 0
    for step, count in steps:
        if step == "feed":
            alive += range(used, used + count)
            used += count
            np.testing.assert_allclose(feed(cache, alive[-count:]), dense(alive, count), atol=2e-5)
        elif step == "trim":
            count = min(count, len(alive))
            assert cache.trim(count) == count
            del alive[len(alive) - count :]
        else:
            cache = changed_hands(cache, step, method.name, method.lossless)
        assert cache.offset == len(alive)


@FUZZ
@given(steps=STEPS)
def test_what_was_trimmed_from_the_decoded_tokens_was_never_there(method, steps):
    """Decoded tokens are fed and trimmed away again after any step; the twin never sees them."""
    cache, twin = new_cache(method.name, method.small), new_cache(method.name, method.small)
    used, prompt_done = 0, False
    for step, count in steps:
        if step == "feed":
            tokens = list(range(used, used + count))
            used += count
            assert (feed(cache, tokens) == feed(twin, tokens)).all()
            prompt_done = count == 1
        elif step == "trim":
            if prompt_done:
                feed(cache, list(range(TOKENS - min(count, 8), TOKENS))) if count else None
                assert cache.trim(min(count, 8)) == min(count, 8)
        else:
            cache = changed_hands(cache, step, method.name, method.small)
        assert (cache.offset, cache.rows) == (twin.offset, twin.rows)
        one, other = (each.method.ops.serialize(each.method_state) for each in (cache, twin))
        assert one.values == other.values
        assert one.arrays.keys() == other.arrays.keys()
        assert all((array == other.arrays[name]).all().item() for name, array in one.arrays.items())
