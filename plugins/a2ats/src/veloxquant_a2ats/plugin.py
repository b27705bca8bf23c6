"""A2ATS: keys without position, one distance for all far tokens, and codes that keep the logits right.

Two modes. ``compress`` stores codes of keys and values in place of rows and attends to what the codes stand for; near
tokens and the first ones stay as they came. ``retrieve``, the paper's method, keeps all rows, ranks them by one code a
key, and attends exactly to the best.

Paper: He et al., A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and Query-Aware
Vector Quantization, ACL 2025 Findings, arXiv:2502.12665.
Differs from the paper in: compress mode is not in it; retrieve mode ranks by the summed softmax of a group of query
heads and reads a fixed number of rows (``per_head=True`` is the paper's union); no centroid stays dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant import ByteCount
from veloxquant import LayerSpec
from veloxquant import MethodInfo
from veloxquant import Snapshot
from veloxquant import hookimpl
from veloxquant_a2ats.compress_state import CompressState
from veloxquant_a2ats.config import A2ATSConfig
from veloxquant_a2ats.retrieve_state import RetrieveState
from veloxquant_a2ats.together import step_together

INFO = MethodInfo(
    name="a2ats",
    config=A2ATSConfig,
    summary="store codes of keys and values (compress), or read only the rows that codes rank best (retrieve)",
    kind="codec",
    paper="arXiv:2502.12665",
    needs=("rope",),
    exact_rows="exact_rows",
)

State = CompressState | RetrieveState


def _kind(config: A2ATSConfig) -> Any:
    return CompressState if config.mode == "compress" else RetrieveState


@hookimpl
def veloxquant_method() -> MethodInfo:
    """Describe A2ATS."""
    return INFO


@hookimpl
def veloxquant_create(config: A2ATSConfig, layer: LayerSpec) -> State:
    """Make an empty state."""
    state: State = _kind(config).empty(config, layer)
    return state


@hookimpl
def veloxquant_prefill(state: State, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Store prompt rows."""
    return state.append(keys, values, in_prompt=True)


@hookimpl
def veloxquant_decode(state: State, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Store rows after the prompt."""
    return state.append(keys, values, in_prompt=False)


@hookimpl
def veloxquant_attend(
    state: State,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Attend with true queries, over codes or over the rows that codes rank best."""
    return state.attend(queries, scale, mask, sinks)


@hookimpl
def veloxquant_step(
    states: Sequence[State],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array | None:
    """Take a token of several sequences at once in compress mode, but for models with sink logits."""
    compressed = [state for state in states if isinstance(state, CompressState)]
    if sinks is not None or len(compressed) < len(states):
        return None
    return step_together(compressed, queries, keys, values, scale)


@hookimpl
def veloxquant_unread(state: State) -> list[mx.array]:
    """Everything: not all codes and counts are read at a step."""
    return state.arrays()


@hookimpl
def veloxquant_account(state: State) -> ByteCount:
    """Count the arrays held."""
    return state.account()


@hookimpl
def veloxquant_trim(state: State, count: int) -> int:
    """Forget the last tokens."""
    state.trim(count)
    return count


@hookimpl
def veloxquant_serialize(state: State) -> Snapshot:
    """Take everything."""
    return state.snapshot()


@hookimpl
def veloxquant_restore(config: A2ATSConfig, layer: LayerSpec, snapshot: Snapshot) -> State:
    """Rebuild a state."""
    state: State = _kind(config).restored(config, layer, snapshot)
    return state
