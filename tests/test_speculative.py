"""Every method under speculative decoding, where rejected drafts must leave no trace."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

COUNT = 24


def speculate(model, draft, prompt, caches, drafts):
    """mlx-lm's own loop; the caches are left as they are after its last trim."""
    both = [*caches, *make_prompt_cache(draft)]
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, prompt_cache=both, num_draft_tokens=drafts, max_tokens=COUNT
    )
    return [token for token, _, _ in steps]


class AlwaysWrong(nn.Module):
    """A draft model that proposes what the real one finds least likely."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.layers = model.layers

    def __call__(self, inputs, cache=None):
        return -self.model(inputs, cache=cache)


@pytest.fixture(params=["same", "wrong"])
def draft(request, model):
    return model if request.param == "same" else AlwaysWrong(model)


@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("length", [3, 97, 150])
def test_a_lossless_cache_gives_the_tokens_of_ordinary_decoding(method, model, draft, generate, drafts, length):
    prompt = mx.random.randint(0, 64, (length,), key=mx.random.key(length)).tolist()
    expected = generate(model, prompt, make_prompt_cache(model), COUNT)
    assert generate(model, prompt, method.caches(model, method.lossless), COUNT) == expected
    assert speculate(model, draft, prompt, method.caches(model, method.lossless), drafts) == expected


@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("length", [40, 97, 150])
def test_a_draft_that_is_always_wrong_leaves_no_trace(method, model, generate, drafts, length):
    """With a real budget: the prompt is cut once, and the state is that of a run without drafts."""
    prompt = mx.random.randint(0, 64, (length,), key=mx.random.key(length)).tolist()
    caches, plain = method.caches(model), method.caches(model)
    assert speculate(model, AlwaysWrong(model), prompt, caches, drafts) == generate(model, prompt, plain, COUNT)
    for one, other in zip(caches, plain, strict=True):
        # mlx-lm decodes a token ahead where it does not speculate.
        other.trim(other.offset - one.offset)
        assert (one.offset, one.rows) == (other.offset, other.rows)
        first, second = (cache.method.ops.serialize(cache.method_state) for cache in (one, other))
        assert first.values == second.values
        assert first.arrays.keys() == second.arrays.keys()
        for name, array in first.arrays.items():
            # A block of several tokens rounds differently from single ones.
            assert mx.allclose(array, second.arrays[name], atol=1e-5).item(), name
