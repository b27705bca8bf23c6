"""TurboQuant-RVQ: every token is kept; keys, and values if asked for, are rotated and packed to a few bits each.

A seeded rotation spreads each vector evenly over its coordinates, which can then share one small codebook. Attention
rotates the query instead of the keys and reads the packed codes as they are.

Paper: Zandieh et al., TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate, arXiv:2504.19874, for
rotation and codebook; the residual stage is a variant of it that is not in the paper.
Differs from the paper in: two stages; the scale of a vector is the one with the least error for its codes, not its
norm; the newest tokens stay in full precision too; two rounds of signs and Hadamard where they serve the dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import MethodInfo
from veloxquant import Snapshot
from veloxquant import hookimpl
from veloxquant_turboquant_rvq import cuda
from veloxquant_turboquant_rvq.config import TurboQuantRVQConfig
from veloxquant_turboquant_rvq.state import TurboQuantRVQState
from veloxquant_turboquant_rvq.store import TurboQuantRows
from veloxquant_turboquant_rvq.together import attend_packed
from veloxquant_turboquant_rvq.together import step_together

INFO = MethodInfo(
    name="turboquant_rvq",
    config=TurboQuantRVQConfig,
    summary="keep every token, with keys (and values) rotated and packed to 2 to 8 bits a coordinate",
    kind="codec",
    paper="arXiv:2504.19874",
    exact_rows="recent",
)

MOST_QUERIES = 8
"""Longest block that is attended to on the packed form; for longer ones rebuilding the keys once is cheaper."""


@hookimpl
def veloxquant_method() -> MethodInfo:
    """Describe TurboQuant-RVQ."""
    return INFO


@hookimpl
def veloxquant_create(config: TurboQuantRVQConfig, layer: LayerSpec) -> TurboQuantRVQState:
    """Make an empty state."""
    return TurboQuantRVQState.empty(config, layer)


@hookimpl
def veloxquant_prefill(state: TurboQuantRVQState, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Pack prompt rows."""
    return state.append(keys, values)


@hookimpl
def veloxquant_decode(state: TurboQuantRVQState, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Pack decoded rows."""
    return state.append(keys, values)


@hookimpl
def veloxquant_attend(
    state: TurboQuantRVQState,
    queries: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Attend on the packed form where that is faster than over rebuilt rows."""
    fresh, state.fresh = state.fresh, None
    if fresh is None or queries.shape[2] > MOST_QUERIES or fresh.count == state.rows.count:
        return None
    stored = state.rows.stored()
    if stored is not None:
        leading = state.leading(state.rows.count - fresh.count)
        fused = cuda.attend(stored, queries, fresh, scale, mask, sinks, leading)
        if fused is not None:
            return fused
    return attend_packed(state, fresh, queries, scale, mask, sinks)


@hookimpl
def veloxquant_step(
    states: Sequence[TurboQuantRVQState],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array | None:
    """Take a token of several sequences at once, but where a kernel serves each of them better."""
    return step_together(states, queries, keys, values, scale, sinks) if states[0].rows.blocked else None


@hookimpl
def veloxquant_unread(state: TurboQuantRVQState) -> list[mx.array]:
    """Everything: packed rows that are also held as they came are read as those."""
    return state.arrays()


@hookimpl
def veloxquant_account(state: TurboQuantRVQState) -> ByteCount:
    """Count the arrays held."""
    return state.account()


@hookimpl
def veloxquant_trim(state: TurboQuantRVQState, count: int) -> int:
    """Forget the last tokens.

    Exact for any number without recent rows. With them the rows that are still held as they came must reach back to
    ``recent`` rows before the new end: up to 64 tokens after ``recent + 64`` new rows, fewer after another rewind.
    """
    state.trim(count)
    return count


@hookimpl
def veloxquant_serialize(state: TurboQuantRVQState) -> Snapshot:
    """Take everything."""
    return state.snapshot()


@hookimpl
def veloxquant_restore(config: TurboQuantRVQConfig, layer: LayerSpec, snapshot: Snapshot) -> TurboQuantRVQState:
    """Rebuild a state."""
    return TurboQuantRVQState.restored(config, layer, snapshot)


@hookimpl
def veloxquant_rows(config: TurboQuantRVQConfig) -> TurboQuantRows:
    """Make a store whose rows can be gathered without being rebuilt."""
    return TurboQuantRows(config)
