"""SnapKV: evict a prompt once, right after it was attended, keeping the rows that its last queries voted for.

The queries of the last ``window`` prompt tokens attend to all rows; each row's weights are summed over the window and
over the query heads of its KV head, pooled over neighbours, and the best rows stay, with the first tokens (sinks) and
the window itself. Decoded tokens are stored and not evicted; a long later block opens a new prompt and a new choice.

Paper: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv:2404.14469.
Differs from the paper in: one set of rows per KV head (votes are summed over the group before pooling) instead of one
per query head; sinks are always kept; indices are kept in ascending order; a later long turn chooses anew.
"""

from __future__ import annotations

import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import MethodInfo
from veloxquant import Snapshot
from veloxquant import hookimpl
from veloxquant.attention import live_attention
from veloxquant_snapkv.config import SnapKVConfig
from veloxquant_snapkv.state import SnapKVState

INFO = MethodInfo(
    name="snapkv",
    config=SnapKVConfig,
    summary="evict the prompt once, keeping the rows that its last queries look at",
    kind="eviction",
    paper="arXiv:2404.14469",
    evicts=True,
    prompt_window="window",
)


@hookimpl
def veloxquant_method() -> MethodInfo:
    """Describe SnapKV."""
    return INFO


@hookimpl
def veloxquant_create(config: SnapKVConfig, layer: LayerSpec) -> SnapKVState:
    """Make an empty state."""
    return SnapKVState.empty(config, layer)


@hookimpl
def veloxquant_prefill(state: SnapKVState, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Store prompt rows; in proxy mode the keys stand in for the queries that vote."""
    result = state.rows.append(keys, values)
    state.collecting = True
    if not state.layer.routed:
        state.observe(keys)
        _evict_chunk(state, keys.shape[2])
    return result


@hookimpl
def veloxquant_decode(state: SnapKVState, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Store a decoded row; it is never evicted before the next prompt."""
    return state.rows.append(keys, values)


@hookimpl
def veloxquant_attend(
    state: SnapKVState,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Remember the queries of an open prompt; attend densely, or around rows that a rewind left dead."""
    output = live_attention("snapkv", state.rows.valid(), queries, keys, values, scale, mask, sinks)
    # Only now: attention may refuse a mask, and then nothing must have changed.
    if state.collecting:
        state.scale, state.sinks = scale, sinks
        state.observe(queries)
        _evict_chunk(state, queries.shape[2])
    return output


@hookimpl
def veloxquant_finish_prompt(state: SnapKVState) -> None:
    """Evict, and free the queries."""
    state.finish()


@hookimpl
def veloxquant_unread(state: SnapKVState) -> list[mx.array]:
    """Rows in the store of another method; otherwise a step reads all that it changes."""
    return state.rows.unread()


@hookimpl
def veloxquant_account(state: SnapKVState) -> ByteCount:
    """Count the arrays held."""
    return state.account()


@hookimpl
def veloxquant_trim(state: SnapKVState, count: int) -> int:
    """Forget the last tokens; rows that were evicted stay gone."""
    state.trim(count)
    return count


@hookimpl
def veloxquant_serialize(state: SnapKVState) -> Snapshot:
    """Take everything."""
    return state.snapshot()


@hookimpl
def veloxquant_restore(config: SnapKVConfig, layer: LayerSpec, snapshot: Snapshot) -> SnapKVState:
    """Rebuild a state."""
    return SnapKVState.restored(config, layer, snapshot)


def _evict_chunk(state: SnapKVState, rows: int) -> None:
    if state.config.eviction == "chunk" and rows >= state.config.window:
        state.evict()
