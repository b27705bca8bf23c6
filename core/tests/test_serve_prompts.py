"""The server's prompt cache: what it finds is right, keeps what a rewind would lose, and leaves a token to feed."""

import copy
import random

import attrs
import mlx.core as mx
import pytest

import veloxquant
from veloxquant.rewind import exact_trim
from veloxquant.serve.prompts import PromptCache
from veloxquant.serve.prompts import is_checkpoint
from veloxquant.state import rebuild
from veloxquant.testing.toys import tiny_llama

MODEL = "model"


@attrs.define(eq=False)
class Tape:
    """A cache that remembers its tokens; rewinds deeper than ``reach`` are approximate."""

    tokens: list
    reach: int = 10**6
    trimmable: bool = True
    nbytes: int = 10

    @property
    def offset(self):
        return len(self.tokens)

    @property
    def exact_trim(self):
        return self.reach

    def is_trimmable(self):
        return self.trimmable

    def trim(self, count):
        del self.tokens[len(self.tokens) - count :]
        return count


def letters(text):
    return [ord(letter) for letter in text]


def put(store, text, reach=10**6, trimmable=True, kind="assistant"):
    store.insert_cache(MODEL, letters(text), [Tape(letters(text), reach, trimmable)], cache_type=kind)


def take(store, text):
    """How many tokens a request finds in its cache, which must be its own first ones; None without a cache."""
    caches, rest = store.fetch_nearest_cache(MODEL, letters(text))
    assert rest
    held = [] if caches is None else caches[0].tokens
    assert held + rest == letters(text)
    return None if caches is None else len(held)


def keys(store):
    return sorted("".join(map(chr, key)) for _, key in store._keys())


def test_an_entry_that_the_prompt_extends_is_found():
    store = PromptCache()
    put(store, "abcd")
    assert take(store, "abcdef") == 4
    assert store.counts.memory_hits == 1
    assert (store.counts.exact_rewinds, store.counts.approximate_rewinds) == (0, 0)


def test_the_stored_prompt_itself_leaves_its_last_token():
    store = PromptCache()
    put(store, "abcd", reach=1)
    assert take(store, "abcd") == 3
    assert store.counts.exact_rewinds == 1


def test_a_cache_that_cannot_be_rewound_is_not_used_for_its_own_prompt():
    store = PromptCache()
    put(store, "abcd", trimmable=False)
    assert take(store, "abcd") is None
    assert take(store, "abcde") == 4


def test_prefixes_stay_where_a_rewind_would_lose_something():
    store = PromptCache()
    put(store, "ab", reach=0)
    put(store, "abcd", reach=1)
    assert keys(store) == ["ab", "abcd"]
    put(store, "abcdef", reach=2)
    assert keys(store) == ["ab", "abcdef"]
    assert len(store) == 2
    assert store.nbytes == 20


def test_a_shorter_exact_entry_is_preferred_to_an_approximate_rewind():
    store = PromptCache()
    put(store, "ab", reach=0)
    put(store, "abcdefgh", reach=1)
    assert take(store, "abcdefx") == 2
    assert store.counts.approximate_rewinds == 0
    # An exact rewind of the longer entry is better than both.
    assert take(store, "abcdefgx") == 7


def test_an_approximate_rewind_must_save_half_of_the_prompt():
    store = PromptCache()
    put(store, "abcdefgh", reach=0)
    assert take(store, "abcdxxx") == 4
    assert store.counts.approximate_rewinds == 1
    assert take(store, "abcxxxx") is None
    assert store.counts.misses == 1


def test_what_was_found_is_a_copy():
    store = PromptCache()
    put(store, "abcd")
    caches, _ = store.fetch_nearest_cache(MODEL, letters("abxx"))
    assert caches[0].tokens == letters("ab")
    assert take(store, "abcde") == 4


def test_other_models_are_apart():
    store = PromptCache()
    put(store, "abcd")
    assert store.fetch_nearest_cache("other", letters("abcdef")) == (None, letters("abcdef"))


def test_what_was_found_was_used_last():
    store = PromptCache(max_size=2)
    put(store, "abc")
    put(store, "xyz")
    take(store, "abcd")
    put(store, "klm")
    assert keys(store) == ["abc", "klm"]


def test_tokens_are_counted():
    store = PromptCache()
    put(store, "abcd")
    take(store, "abcdef")
    take(store, "xyz")
    assert (store.counts.prompt_tokens, store.counts.reused_tokens) == (9, 4)


def expected(stored, prompt):
    """The rule in plain Python: most tokens reused, exactly before approximately."""
    best = (False, 0)
    for key, (reach, trimmable) in stored.items():
        shared = 0
        while shared < min(len(key), len(prompt) - 1) and key[shared] == prompt[shared]:
            shared += 1
        trim = len(key) - shared
        exact = trim == 0 or (trimmable and trim <= reach)
        if shared and (exact or (trimmable and 2 * shared >= len(prompt))):
            best = max(best, (exact, shared))
    return best[1] or None


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_against_the_rule(seed):
    draw = random.Random(seed)
    store, stored = PromptCache(max_size=10**6), {}
    for _ in range(150):
        text = "".join(draw.choices("ab", k=draw.randint(1, 9)))
        if draw.random() < 0.5:
            reach, trimmable = draw.randint(0, 4), draw.random() < 0.8
            put(store, text, reach, trimmable)
            if trimmable:
                for key in [key for key in stored if text.startswith(key) and key != text]:
                    if len(text) - len(key) <= reach:
                        del stored[key]
            stored[text] = (reach, trimmable)
        else:
            assert take(store, text) == expected(stored, text), (text, stored)
        assert keys(store) == sorted(stored)


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_within_bounds(seed):
    draw = random.Random(seed)
    store = PromptCache(max_size=4, max_bytes=35)
    for _ in range(200):
        text = "".join(draw.choices("abc", k=draw.randint(1, 7)))
        if draw.random() < 0.6:
            put(store, text, draw.randint(0, 3), kind=draw.choice(["assistant", "user", "system"]))
        elif draw.random() < 0.1:
            store.trim_to(n_sequences=2)
        else:
            take(store, text)
        entries = [store._trie.get(model, key) for model, key in store._keys()]
        assert len(entries) == len(store) <= 4
        assert store.nbytes == sum(entry.nbytes for entry in entries) <= 35


# --------------------------------------------------------------- with real caches


@pytest.fixture
def model():
    model = tiny_llama()
    yield model
    while veloxquant.attention.is_routed(model):
        veloxquant.unroute(model)


def run(model, caches, tokens):
    return model(mx.array([tokens]), cache=caches)[0, -1]


def test_an_evictors_prompt_is_a_checkpoint_until_its_end(model, registry):
    prompt = [int(token) for token in mx.random.randint(0, 64, (40,), key=mx.random.key(1))]
    caches = veloxquant.make_prompt_cache(model, "evictor", registry=registry)
    run(model, caches, prompt[:-1])
    assert is_checkpoint(caches)
    assert exact_trim(caches) == 39
    store = PromptCache()
    store.insert_cache(MODEL, prompt[:-1], copy.deepcopy(caches), cache_type="user")
    cold = run(model, caches, prompt[-1:])
    assert not is_checkpoint(caches)
    assert exact_trim(caches) == 0
    tokens = [*prompt, 5, 6, 7]
    for token in tokens[40:]:
        run(model, caches, [token])
    assert exact_trim(caches) == 3
    store.insert_cache(MODEL, tokens, caches)
    held = store.held()
    assert held["checkpoints"]["entries"] == 1
    assert held["checkpoints"]["bytes_held"] > held["bytes_held"] / 2
    # The same prompt again: from the checkpoint, so as if it had never been evicted.
    found, rest = store.fetch_nearest_cache(MODEL, prompt)
    assert rest == prompt[-1:]
    assert mx.array_equal(run(model, found, rest), cold)
    assert store.counts.exact_rewinds == store.counts.approximate_rewinds == 0


def test_checkpoints_can_be_left_out(model, registry):
    prompt = list(range(20))
    store = PromptCache(checkpoints=False)
    for name, kept in (("evictor", 0), ("noop_attend", 1)):
        caches = veloxquant.make_prompt_cache(model, name, registry=registry)
        run(model, caches, prompt)
        store.insert_cache(name, prompt, caches, cache_type="user")
        assert len(store) == kept


def test_a_cache_of_other_tokens_is_not_kept(model, registry):
    caches = veloxquant.make_prompt_cache(model, "noop_attend", registry=registry)
    run(model, caches, [1, 2, 3])
    store = PromptCache()
    store.insert_cache(MODEL, [1, 2], caches)
    assert len(store) == 0
    # A token that was not fed is not taken for one that was.
    store.insert_cache(MODEL, [1, 2, 3, 4], caches)
    assert [key for _, key in store._keys()] == [[1, 2, 3]]


def test_rewinds_are_as_exact_as_they_say(model, registry):
    """After an exact rewind the cache answers as one that never saw the tokens; states and copies know it too."""
    prompt = [int(token) for token in mx.random.randint(0, 64, (30,), key=mx.random.key(2))]
    caches = veloxquant.make_prompt_cache(model, "evictor", registry=registry)
    run(model, caches, prompt[:-1])
    run(model, caches, prompt[-1:])
    expected_answer = run(model, copy.deepcopy(caches), [9])
    for token in (1, 2, 3, 4):
        run(model, caches, [token])
    for again in (copy.deepcopy(caches), [rebuild(cache.state, registry) for cache in caches]):
        assert exact_trim(again) == 4
        veloxquant.trim_prompt_cache(again, 4)
        assert exact_trim(again) == 0
        assert mx.array_equal(run(model, again, [9]), expected_answer)
