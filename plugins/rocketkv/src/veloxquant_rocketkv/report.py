"""The bytes of a state, itemised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from veloxquant import ByteCount

if TYPE_CHECKING:
    from veloxquant.types import Scalar
    from veloxquant_rocketkv.state import RocketKVState

__all__ = ["byte_count"]


def byte_count(state: RocketKVState) -> ByteCount:
    """Add up the arrays that a state holds.

    Args:
        state: State of a layer, possibly empty.

    Returns:
        The bytes, with what the two stages hold among the details.
    """
    count = state.rows.account()
    summary, queries = state.selector.nbytes, 0 if state.recent is None else state.recent.nbytes
    exact = state.exact.nbytes
    # The sink logits are the model's own array.
    static = count.static + (0 if state.sinks is None else state.sinks.nbytes)
    seen, kept = state.rows.end, state.selector.filtered_rows
    details: dict[str, Scalar] = {
        **count.details,
        "stage1_bytes": count.held,
        "stage2_aux_bytes": summary,
        "query_bytes": queries,
        "exact_bytes": exact,
        "dense_bytes": state.row_bytes * seen,
        "compression_ratio": state.config.compression_ratio,
        "tokens_kept": kept,
        "tokens_seen": seen,
        "rows_read": state.selector.rows_read,
        "keep_rate": kept / seen if seen else 1.0,
        "stage1_ratio": state.config.stage1_ratio,
        **state.selector.details(),
    }
    if state.config.multi_turn:
        details["memory_saved"] = "none: multi_turn keeps every row and filters what is read"
    return attrs.evolve(count, auxiliary=count.auxiliary + summary + queries + exact, static=static, details=details)
