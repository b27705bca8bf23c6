"""Batches, head counts and head dims."""

from __future__ import annotations

import mlx.core as mx

from veloxquant.attention import attention
from veloxquant.errors import VeloxQuantError
from veloxquant.reports import report
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import require_equal
from veloxquant.testing.driver import require_like
from veloxquant.testing.driver import step
from veloxquant.testing.failures import RuleFailure
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import returning_all
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject

HEAD_DIMS = (32, 40, 56, 64, 80, 96, 112, 128, 192, 256)


def _works(subject: Subject, what: str) -> None:
    """A prompt and two steps: shapes and dtypes are right, the first block is exact, nothing is inf or NaN."""
    shape = subject.shape
    rows = subject.rows(subject.tokens + 2)
    cache, first = subject.cache(), rows.part(0, subject.tokens - 1)
    got = step(cache, first)
    expected = attention(*first.arrays, shape.key_dim**-0.5, "causal")
    require_like(got.output, expected, f"{what}: the attention over the first block", 5e-5)
    for later in feed(cache, rows.part(subject.tokens - 1), [1, 1, 1]):
        for name, array, width in (("keys", later.keys, shape.key_dim), ("values", later.values, shape.value_dim)):
            heads = (array.shape[0], array.shape[1], array.shape[3])
            wanted = (shape.batch, shape.kv_heads, width)
            require(heads == wanted, f"{what}: {name} came back with B, Hkv and D {heads} instead of {wanted}")
        wanted_output = (shape.batch, shape.query_heads, 1, shape.value_dim)
        require(later.output.shape == wanted_output, f"{what}: the output is {later.output.shape}")
        require(bool(mx.isfinite(later.output).all().item()), f"{what}: the attention output is not finite")


def _works_or_refuses(subject: Subject, what: str) -> None:
    cache = subject.cache()
    try:
        step(cache, subject.rows(40))
    except VeloxQuantError:
        return
    except Exception as error:
        raise RuleFailure(f"{what}: a {type(error).__name__} where a VeloxQuantError is due: {error}") from error
    _works(subject, what)


def check_query_groups(subject: Subject) -> None:
    """1, 2 and 4 query heads to a KV head are served."""
    for query_heads, kv_heads in ((4, 4), (4, 2), (4, 1), (1, 1)):
        one = subject.shaped(query_heads=query_heads, kv_heads=kv_heads)
        _works(one, f"{query_heads} query heads over {kv_heads} KV heads")


def check_batch_rows_independent(subject: Subject) -> None:
    """Each sequence of a batch is treated as if it were alone."""
    one = subject.shaped(batch=3)
    cuts = [*one.prompt, 1, 3, 1]
    rows = one.rows(sum(cuts))
    together = feed(one.cache(), rows, cuts)
    for index in range(3):
        alone = feed(subject.shaped(batch=1).cache(), rows.sequence(index), cuts)
        for number, (both, own) in enumerate(zip(together, alone, strict=True)):
            what = f"sequence {index} of 3, call {number}"
            require_equal(both.keys[index : index + 1], own.keys, f"{what}: the keys returned")
            require_equal(both.values[index : index + 1], own.values, f"{what}: the values returned")
            require_like(both.output[index : index + 1], own.output, f"{what}: the attention output", 1e-5)


def check_value_dim(subject: Subject) -> None:
    """Values narrower or wider than keys are served, or refused with a VeloxQuantError at the first call."""
    for key_dim, value_dim in ((64, 32), (64, 128)):
        one = subject.shaped(key_dim=key_dim, value_dim=value_dim)
        _works_or_refuses(one, f"keys of {key_dim} and values of {value_dim} channels")


def check_head_dims(subject: Subject) -> None:
    """Every usual head dim is served, or refused with a VeloxQuantError at the first call."""
    for dim in HEAD_DIMS:
        one = subject.shaped(query_heads=2, kv_heads=1, key_dim=dim, value_dim=dim)
        _works_or_refuses(one, f"head dim {dim}")


@when(returning_all)
def check_counts_are_tokens(subject: Subject) -> None:
    """Tokens seen and kept are tokens, whatever the number of sequences and heads."""
    kept = set()
    for batch, heads in ((1, 1), (1, 2), (1, 4), (2, 2), (4, 1)):
        one = subject.shaped(batch=batch, kv_heads=heads)
        cache, _ = one.used(2)
        (layer,) = report(cache).layers
        what = f"with {batch} sequences and {heads} KV heads"
        require(
            layer.tokens_seen == subject.tokens + 2,
            f"{what} the report says {layer.tokens_seen} tokens seen of {subject.tokens + 2}",
        )
        returned = step(cache, one.rows(1)).keys.shape[2] - 1
        require(
            layer.tokens_kept == returned, f"{what} the report says {layer.tokens_kept} rows kept, and {returned} are"
        )
        kept.add(layer.tokens_kept)
    require(len(kept) == 1, f"the rows kept depend on the number of sequences or heads: {sorted(kept)}")
