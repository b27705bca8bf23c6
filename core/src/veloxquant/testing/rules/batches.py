"""Batches: every sequence as if it were alone, padding nowhere."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.batch import BatchLayerCache
from veloxquant.batch import MergeableLayerCache
from veloxquant.cache import LayerCache
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import Step
from veloxquant.testing.driver import contents
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import require_equal
from veloxquant.testing.driver import require_like
from veloxquant.testing.driver import step
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import routed
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject

# A batched product may sum in another order than that of one sequence.
_ROUNDING = 1e-5
_PADDING = 1000.0


def _stacked(members: Sequence[Rows], width: int) -> Rows:
    """Sequences as one batch, padded on the right with numbers that would be noticed."""
    padded = [
        [mx.pad(a, [(0, 0), (0, 0), (0, width - one.tokens), (0, 0)], constant_values=_PADDING) for a in one.arrays]
        for one in members
    ]
    return Rows(*(mx.concatenate(list(arrays), axis=0) for arrays in zip(*padded, strict=True)))


def _prompts(batch: BatchLayerCache, members: Sequence[Rows], chunk: int) -> list[list[mx.array]]:
    """Feed prompts of different lengths as mlx-lm's batch generator does; returns each sequence's outputs."""
    lengths = [one.tokens - 1 for one in members]
    longest = max(lengths)
    batch.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
    stacked = _stacked([one.part(0, one.tokens - 1) for one in members], longest)
    outputs: list[list[mx.array]] = [[] for _ in members]
    for start in range(0, longest, chunk):
        got = step(batch, stacked.part(start, min(start + chunk, longest)))
        mx.eval(got.output, batch.state)
        for index, length in enumerate(lengths):
            real = max(0, min(length - start, got.output.shape[2]))
            outputs[index].append(got.output[index : index + 1, :, :real])
    batch.finalize()
    last = step(batch, _stacked([one.part(one.tokens - 1) for one in members], 1))
    for index in range(len(members)):
        outputs[index].append(last.output[index : index + 1])
    return outputs


def _alone(subject: Subject, rows: Rows, chunk: int) -> tuple[LayerCache, list[Step]]:
    left, cuts = rows.tokens - 1, []
    while left:
        cuts.append(min(chunk, left))
        left -= cuts[-1]
    cache = subject.cache()
    return cache, feed(cache, rows, [*cuts, 1])


def _members(subject: Subject) -> list[Rows]:
    return [subject.rows(tokens, seed=seed) for seed, tokens in enumerate((3, 40, subject.tokens))]


def _merged(caches: Sequence[Any]) -> BatchLayerCache:
    return MergeableLayerCache.merge(list(caches))


@when(routed)
def check_batch_like_alone(subject: Subject) -> None:
    """Prompts of 3, 40 and many tokens in one padded batch give each sequence what it gets alone."""
    members = _members(subject)
    # The shortest member ends in the first chunk; no chunk may leave one token of a member for the next.
    for chunk in (subject.tokens, 64):
        batch = _merged([subject.cache() for _ in members])
        outputs = _prompts(batch, members, chunk)
        found = batch.offset
        require(isinstance(found, mx.array) and found.shape == (3,), f"the offset of a batch is {found!r}")
        expected = [one.tokens for one in members]
        require(found.tolist() == expected, f"offsets {found.tolist()} for prompts of {expected} tokens")
        for index, rows in enumerate(members):
            what = f"sequence {index} of {expected} tokens, in chunks of {chunk}"
            alone, steps = _alone(subject, rows, chunk)
            require_equal(contents(batch.extract(index)), contents(alone), what)
            own = mx.concatenate([one.output for one in steps], axis=2)
            require_like(mx.concatenate(outputs[index], axis=2), own, f"{what}: attention", _ROUNDING)


@when(routed)
def check_batch_steps(subject: Subject) -> None:
    """Steps of a batch give each sequence, with or without history, what it gets alone; bytes are the sum."""
    lone = [subject.used(steps, seed=steps)[0] for steps in (1, 4)]
    short = subject.cache()
    feed(short, subject.rows(3, seed=7), [2, 1])
    lone.append(short)
    batch = _merged(lone)
    rows = [subject.rows(6, seed=10 + index) for index in range(3)]
    for token in range(6):
        parts = [one.part(token, token + 1) for one in rows]
        together = step(batch, _stacked(parts, 1))
        for index, cache in enumerate(lone):
            own = step(cache, parts[index])
            what = f"sequence {index}, step {token}"
            require_like(together.output[index : index + 1], own.output, f"{what}: attention", _ROUNDING)
    total = sum(batch.extract(index).nbytes for index in range(3))
    require(batch.nbytes == total, f"the batch reports {batch.nbytes} bytes and its members {total}")
    for index, cache in enumerate(lone):
        taken = batch.extract(index)
        require(type(taken) is type(cache), f"extract gives a {type(taken).__name__}")
        require_equal(contents(taken), contents(cache), f"sequence {index}, taken out")


@when(routed)
def check_batch_join_and_leave(subject: Subject) -> None:
    """Sequences join, leave and change places without touching the others; what was taken out is independent."""
    caches = [subject.used(steps, seed=steps)[0] for steps in (1, 2, 3)]
    before = [contents(cache) for cache in caches]
    batch = _merged(caches[:2])
    batch.extend(_merged(caches[2:]))
    split = copy.deepcopy(batch)
    batch.filter(mx.array([2, 0]))
    split.filter([1])
    step(batch, _stacked([subject.rows(1, seed=20 + index) for index in (2, 0)], 1))
    require_equal(contents(split.extract(0)), before[1], "the sequence split off, after the others went on")
    taken = batch.extract(1)
    feed(taken, subject.rows(1, seed=30))
    for index, cache in enumerate(caches):
        require_equal(contents(cache), before[index], f"cache {index}, after the batch merged from it went on")
    for place, index in enumerate((2, 0)):
        feed(caches[index], subject.rows(1, seed=20 + index))
        require_equal(contents(batch.extract(place)), contents(caches[index]), f"sequence {index} after a step")
    require(batch.offset.tolist() == [caches[2].offset, caches[0].offset], f"offsets are {batch.offset.tolist()}")


@when(routed)
def check_batch_empty(subject: Subject) -> None:
    """Empty caches make an empty batch, alone and together, whose members are equal to new caches."""
    for count in (1, 2):
        batch = _merged([subject.cache() for _ in range(count)])
        require(batch.empty() and batch.nbytes == 0, f"a batch of {count} empty caches holds {batch.nbytes} bytes")
        require_equal(contents(batch.extract(0)), contents(subject.cache()), "an empty cache taken out of a batch")
