"""Every method in mlx-lm's LRU prompt cache: what it finds again, and that what it finds is right.

What is promised (docs/guides/prompt-reuse.md): a prompt that was answered is found by itself and by what extends it;
an entry is rewound for a shared prefix, exactly when the rewind stays within the rows that were decoded or the method
loses nothing, approximately when it reaches into an evicted prompt.
"""

import pytest
from mlx_lm.models.cache import LRUPromptCache

import veloxquant


@pytest.fixture
def store():
    return LRUPromptCache()


def answer(method, model, generate, store, prompt, count, config=None):
    """Answer a prompt as mlx-lm's server does; returns the tokens and how many had to be prefilled."""
    caches, rest = store.fetch_nearest_cache("model", prompt)
    if caches is None:
        caches = method.caches(model, config)
    tokens = generate(model, rest, caches, count)
    # The server stores what the cache has seen: the prompt and the tokens that were fed.
    seen = caches[0].offset
    store.insert_cache("model", [*prompt, *tokens][:seen], caches)
    return tokens, len(rest)


def test_the_same_prompt_again(method, model, prompts, generate, store):
    prompt = prompts[2]
    cold = generate(model, prompt, method.caches(model, method.lossless), 8)
    assert answer(method, model, generate, store, prompt, 8, method.lossless) == (cold, len(prompt))
    again, prefilled = answer(method, model, generate, store, prompt, 8, method.lossless)
    assert (again, prefilled) == (cold, 1)


def test_a_prompt_that_shares_a_prefix(method, model, prompts, generate, store):
    first, second = prompts[2], [*prompts[2][:100], *prompts[1]]
    answer(method, model, generate, store, first, 8, method.lossless)
    cold = generate(model, second, method.caches(model, method.lossless), 8)
    tokens, prefilled = answer(method, model, generate, store, second, 8, method.lossless)
    assert tokens == cold
    assert len(prompts[1]) - 5 <= prefilled <= len(prompts[1])


def test_a_prompt_that_extends_the_answer(method, model, prompts, generate, store):
    """A growing conversation goes on from the entry itself; nothing is rewound, so it holds for every budget."""
    prompt = prompts[2]
    tokens, _ = answer(method, model, generate, store, prompt, 8)
    turn = [*prompt, *tokens, 5, 6, 7]
    warm, prefilled = answer(method, model, generate, store, turn, 8)
    # A reference that was never stored: one cache, fed what the entry had seen, then the rest.
    caches = method.caches(model)
    generate(model, prompt, caches, 8)
    expected = generate(model, turn[caches[0].offset :], caches, 8)
    assert prefilled <= 4
    assert warm == expected


def test_a_rewind_into_an_evicted_prompt_is_served_and_reported_as_approximate(method, model, prompts, generate, store):
    prompt = prompts[2]
    answer(method, model, generate, store, prompt, 8)
    caches, rest = store.fetch_nearest_cache("model", [*prompt[:60], 1, 2, 3])
    if not method.evicts:
        assert len(rest) == 3
        return
    assert {cache.offset for cache in caches} == {60}
    assert rest == [1, 2, 3]
    assert {layer.trim for layer in veloxquant.report(caches).layers} == {"approximate"}
    assert len(generate(model, rest, caches, 8)) == 8


def test_a_stored_entry_is_not_touched_by_those_who_use_it(method, model, prompts, generate, store):
    prompt = prompts[1]
    answer(method, model, generate, store, prompt, 8)
    entry = store._trie.get("model", list(store._trie.search("model", prompt).longer))
    before = [cache.state[0] for cache in entry.prompt_cache]
    for _ in range(2):
        caches, rest = store.fetch_nearest_cache("model", [*prompt, 1, 2])
        generate(model, rest, caches, 8)
    assert [cache.state[0] for cache in entry.prompt_cache] == before
