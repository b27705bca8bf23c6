"""What several test files share: feeding a cache, and telling whether anything changed in it.

Loaded by conftest.py under the name ``core_test_helpers``.
"""

import dataclasses

import mlx.core as mx
from mlx_lm.utils import save_config
from mlx_lm.utils import save_model
from tokenizers import Tokenizer
from tokenizers import decoders
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from veloxquant.routed import RoutedLayerCache


def mask_for(size):
    """The mask that a model passes for ``size`` tokens."""
    return None if size == 1 else "causal"


def feed(cache, rows, *sizes, **shape):
    """Feed blocks of these sizes, with their queries where the cache is routed; returns all that was fed."""
    fed = []
    for size in sizes:
        keys, values = rows(size, **shape)
        fed.append((keys, values))
        got = cache.update_and_fetch(keys, values)
        if isinstance(cache, RoutedLayerCache):
            cache.attend(keys, *got, 1.0, mask_for(size))
    return tuple(mx.concatenate(arrays, axis=2) for arrays in zip(*fed, strict=True))


def same(left, right):
    """Whether two arrays are equal bit for bit, shape and dtype included."""
    return left.dtype == right.dtype and left.shape == right.shape and mx.array_equal(left, right).item()


def facts(cache):
    """All that can be seen of a cache."""
    head, *arrays = cache.state
    return (cache.offset, cache.rows, cache.nbytes, cache.plain_nbytes, head, [array.tolist() for array in arrays])


def save_byte_model(path, model, chat_template=None):
    """Write a model folder with a tokenizer that has one token for each byte."""
    save_model(path, model)
    save_config(dataclasses.asdict(model.args), path / "config.json")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=chat_template)
    fast.save_pretrained(path)
