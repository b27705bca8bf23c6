"""RocketKV: evict the prompt a little, then read a little of what is left at every decode step.

Stage 1 is SnapKV with wide pooling, down to the stage's share of the ratio. Stage 2 summarises the surviving keys in
pages of a few rows (minimum and maximum of every channel), ranks the pages for each query by a few large channels, and
attends to the rows of the best pages and to the newest rows: no other row is read.

Paper: Behnam et al., RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression,
arXiv:2502.14051.
Differs from the paper in: whole pages are chosen; the newest rows, and those of a page that is not complete, are always
attended; sinks are always kept; the budget follows from the tokens seen so far.
"""

from __future__ import annotations

import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import MethodInfo
from veloxquant import Snapshot
from veloxquant import hookimpl
from veloxquant_rocketkv.attend import attend_all
from veloxquant_rocketkv.attend import attend_chosen
from veloxquant_rocketkv.attend import read_chosen
from veloxquant_rocketkv.config import RocketKVConfig
from veloxquant_rocketkv.state import RocketKVState

INFO = MethodInfo(
    name="rocketkv",
    config=RocketKVConfig,
    summary="evict the prompt a little, then read only the pages that each query looks at",
    kind="sparse",
    paper="arXiv:2502.14051",
    evicts=True,
    prompt_window="window",
    exact_rows="exact_rows",
)


@hookimpl
def veloxquant_method() -> MethodInfo:
    """Describe RocketKV."""
    return INFO


@hookimpl
def veloxquant_create(config: RocketKVConfig, layer: LayerSpec) -> RocketKVState:
    """Make an empty state."""
    return RocketKVState.empty(config, layer)


@hookimpl
def veloxquant_prefill(state: RocketKVState, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Store prompt rows; in proxy mode the keys stand in for the queries that vote."""
    state.open_prompt()
    result = state.append(keys, values)
    state.exact.fresh = None
    if not state.layer.routed:
        state.observe(keys)
    return result


@hookimpl
def veloxquant_decode(state: RocketKVState, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Store decoded rows, which are never dropped; in proxy mode a single key chooses the rows that are returned."""
    result = state.append(keys, values)
    if not state.layer.routed:
        if keys.shape[2] == 1:
            result = read_chosen(state, keys) or result
        elif not state.collecting:
            # As a rewind leaves it, which a rejected draft must not be told from.
            state.selector.summarise()
        state.exact.fresh = None
    return result


@hookimpl
def veloxquant_attend(
    state: RocketKVState,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Attend to a prompt densely, remembering its queries; afterwards to the rows that each query chooses."""
    if not state.collecting:
        return attend_chosen(state, queries, keys, values, scale, mask, sinks)
    output = attend_all(state, queries, keys, values, scale, mask, sinks)
    # Only now: attention may refuse a mask, and then nothing must have changed.
    state.scale, state.sinks = scale, sinks
    state.observe(queries)
    return output


@hookimpl
def veloxquant_finish_prompt(state: RocketKVState) -> None:
    """Evict, summarise, and free the queries."""
    state.finish()


@hookimpl
def veloxquant_unread(state: RocketKVState) -> list[mx.array]:
    """Everything that a step may change but rows as they came, which it reads."""
    return state.unread()


@hookimpl
def veloxquant_account(state: RocketKVState) -> ByteCount:
    """Count the arrays held."""
    return state.account()


@hookimpl
def veloxquant_trim(state: RocketKVState, count: int) -> int:
    """Forget the last tokens; rows that were evicted stay gone."""
    state.trim(count)
    return count


@hookimpl
def veloxquant_serialize(state: RocketKVState) -> Snapshot:
    """Take everything."""
    return state.snapshot()


@hookimpl
def veloxquant_restore(config: RocketKVConfig, layer: LayerSpec, snapshot: Snapshot) -> RocketKVState:
    """Rebuild a state."""
    return RocketKVState.restored(config, layer, snapshot)
