"""Numbers that break things: extremes, NaN, chance."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import contents
from veloxquant.testing.driver import feed
from veloxquant.testing.driver import numbers
from veloxquant.testing.driver import require_equal
from veloxquant.testing.driver import step
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import returning_all
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject


def check_deterministic(subject: Subject) -> None:
    """Two runs over the same rows are equal bit for bit, whatever the global random state is."""
    rows, found = subject.rows(subject.tokens + 3), []
    for _ in range(2):
        # Moves the global random state on.
        mx.eval(mx.random.uniform(shape=(3,)))
        cache = subject.cache()
        outputs = feed(cache, rows, [*subject.prompt, 1, 1, 1])
        found.append({**contents(cache), "output": numbers(outputs[-1].output)})
    require_equal(found[1], found[0], "a second run over the same rows")


def _finite(subject: Subject, rows: Rows, what: str) -> None:
    cuts = [*subject.prompt, 1, 1, 1]
    for number, got in enumerate(feed(subject.cache(), rows, cuts)):
        for name, array in (("keys", got.keys), ("values", got.values), ("output", got.output)):
            found = int(np.sum(~numbers(mx.isfinite(array))))
            require(found == 0, f"{what}: {found} numbers of the {name} of call {number} are inf or NaN")


def check_extreme_values(subject: Subject) -> None:
    """Very large, very small and zero rows, in fp16 and bf16 too, come back finite and leave attention finite."""
    total = subject.tokens + 3
    rows = subject.rows(total)
    zero = Rows(rows.queries, mx.zeros_like(rows.keys), mx.zeros_like(rows.values))
    _finite(subject, zero, "rows of zeros")
    place = mx.arange(total).reshape(1, 1, -1, 1)
    for dtype, size in (("float16", 6e4), ("float32", 1e-7), ("float32", 1e4)):
        keys, values = (
            mx.where((place == 7) | (place == total - 2), size, array) for array in (rows.keys, rows.values)
        )
        one = subject.shaped(dtype=dtype)
        # Small queries: the logits of plain attention stay finite as well.
        _finite(one, Rows(rows.queries * 1e-3, keys, values).cast(dtype), f"two rows of {size:g} in {dtype}")
    large = Rows(rows.queries, rows.keys * 20000.0, rows.values * 20000.0).cast("bfloat16")
    _finite(subject.shaped(dtype="bfloat16"), large, "rows scaled by 20,000 in bfloat16")


@when(returning_all)
def check_nan_visible(subject: Subject) -> None:
    """A NaN stays in its head, and is not hidden there."""
    one = subject.shaped(kv_heads=2)
    bad, total = one.tokens, one.tokens + 3
    rows = one.rows(total)
    place = (mx.arange(total).reshape(1, 1, -1, 1) == bad) & (mx.arange(2).reshape(1, 2, 1, 1) == 1)
    spoilt = Rows(rows.queries, mx.where(place, mx.nan, rows.keys), mx.where(place, mx.nan, rows.values))
    clean_cache, cache = one.cache(), one.cache()
    feed(clean_cache, rows.part(0, bad), one.prompt)
    feed(cache, spoilt.part(0, bad), one.prompt)
    group = one.shape.query_heads // 2
    for token in range(bad, total):
        expected, got = (step(c, r.part(token, token + 1)) for c, r in ((clean_cache, rows), (cache, spoilt)))
        what = f"{token - bad} steps after a NaN in head 1"
        require_equal(got.values[:, :1], expected.values[:, :1], f"{what}: the values of head 0")
        require_equal(got.output[:, :group], expected.output[:, :group], f"{what}: the attention of head 0")
        hidden = not bool(np.isnan(numbers(got.values)[:, 1, -1 - (token - bad)]).any())
        require(not hidden, f"{what}: the NaN row came back as numbers")
