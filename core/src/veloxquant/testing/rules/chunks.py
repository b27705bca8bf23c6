"""A prompt may come in any number of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import blocks
from veloxquant.testing.driver import contents
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import require_equal
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import in_layers
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject


def _same_in_blocks(subject: Subject, rows: Rows, cuts: Sequence[Sequence[int]]) -> None:
    """The first way of cutting the rows sets what all others must give."""
    expected = None
    for sizes in cuts:
        cache = subject.cache()
        feed(cache, rows, sizes)
        found = contents(cache)
        if expected is None:
            expected = found
        shown = f"{sizes[0]} + {sizes[1]} + ..." if len(sizes) > 4 else " + ".join(map(str, sizes))
        require_equal(found, expected, f"{rows.tokens} tokens in blocks of {shown}, against one block")


@in_layers(0, 1)
def check_chunk_parity(subject: Subject) -> None:
    """What is stored of a prompt does not depend on the blocks in which it came."""
    tokens = subject.tokens
    sizes = (tokens, 128, 64, 33, 7)
    ways = [blocks(tokens, size) for size in sizes]
    _same_in_blocks(subject, subject.rows(), [*ways, [tokens - 5, 4, 1], [2, tokens - 3, 1]])


def check_odd_lengths(subject: Subject) -> None:
    """Lengths around multiples of 32 and short ones are stored alike in one block and in several."""
    for tokens in (3, 5, 8, 17, 31, 32, 33, 63, 64, 65):
        cuts = [blocks(tokens, tokens), blocks(tokens, 16), blocks(tokens, 2)]
        _same_in_blocks(subject, subject.rows(tokens), cuts)


def check_first_token_alone(subject: Subject) -> None:
    """A first call of one token freezes nothing: the block after it is stored as if both had come at once."""
    tokens = max(subject.tokens, subject.window + 2)
    _same_in_blocks(subject, subject.rows(tokens), [[tokens - 1, 1], [1, tokens - 2, 1]])


def check_budget_with_chunks(subject: Subject) -> None:
    """As many rows are held after a long prompt in many blocks as after the same in one."""
    tokens = 2 * subject.tokens
    rows, counts = subject.rows(tokens), {}
    for size in (tokens, subject.tokens, 128, 64):
        cache = subject.cache()
        feed(cache, rows, blocks(tokens, size))
        counts[size] = cache.rows
    require(
        len(set(counts.values())) == 1,
        f"rows held of {tokens} tokens by size of block: {', '.join(f'{s}: {n}' for s, n in counts.items())}",
    )


def _no_prompt_end(subject: Subject) -> str | None:
    """Nothing happens when the prompt ends."""
    return None if subject.method.ops.finish_prompt is None else "the method treats the end of the prompt"


@when(_no_prompt_end)
def check_streamed_like_prompt(subject: Subject) -> None:
    """Tokens that come one by one are stored as in a prompt, if nothing happens when a prompt ends."""
    steps = 70
    _same_in_blocks(
        subject,
        subject.rows(subject.tokens + steps),
        [[subject.tokens + steps - 1, 1], [*subject.prompt, *[1] * steps], [32, *[1] * (subject.tokens + steps - 32)]],
    )
