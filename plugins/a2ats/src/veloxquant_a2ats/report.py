"""The bytes of a state, and its figures for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import cast

import attrs
import mlx.core as mx

from veloxquant import ByteCount
from veloxquant.types import Scalar

if TYPE_CHECKING:
    from veloxquant_a2ats.compress_state import CompressState
    from veloxquant_a2ats.layer import Layer
    from veloxquant_a2ats.retrieve_state import RetrieveState

__all__ = ["compress_details", "retrieve_details"]


def compress_details(state: CompressState) -> ByteCount:
    """Count what compress mode holds: codes, rows as they came, and the shared codebook."""
    codes = state.codes.nbytes("keys"), state.codes.nbytes("values")
    pairs = [state.ring.arrays(), *([] if state.sinks is None else [state.sinks])]
    exact = [sum(pair[part].nbytes for pair in pairs if pair) for part in (0, 1)]
    extra = 0 if state.aware is None else state.aware.nbytes
    if state.block is not None:
        extra += sum(array.nbytes for array in state.block[1])
    dense = _dense(state)
    static = _static(state.model)
    held = sum(codes) + sum(exact) + extra
    details: dict[str, Scalar] = {
        "codebook": _codebook(state.model),
        "compressed_key_bytes": codes[0],
        "compressed_value_bytes": codes[1],
        "exact_bytes": sum(exact),
        "codebook_bytes": static,
        "dense_bytes_keys": dense[0],
        "dense_bytes_values": dense[1],
        "ratio": sum(dense) / held if held else 1.0,
        "assigned_avg_bits": _assigned(state, codes),
        "tokens_seen": state.count,
        "tokens_retrieved": _mean(state.aware),
    }
    return ByteCount(
        keys=codes[0] + exact[0], values=codes[1] + exact[1], auxiliary=extra, static=static, details=details
    )


def retrieve_details(state: RetrieveState) -> ByteCount:
    """Count what retrieve mode holds: rows, codes, how often they occur, and the shared codebook."""
    count = state.rows.account()
    codes = state.codes.nbytes("keys")
    extra = codes + sum(array.nbytes for array in (state.counts, *(state.fresh or ())) if array is not None)
    codebook = state.model.codebook
    static = _static(state.model)
    held = count.held + extra
    dense = [size * state.count for size in state.row_bytes]
    details: dict[str, Scalar] = {
        **count.details,
        "codebook": _codebook(state.model),
        "compressed_key_bytes": codes,
        "codebook_bytes": static,
        "dense_bytes_keys": dense[0],
        "dense_bytes_values": dense[1],
        "ratio": sum(dense) / held if held else 1.0,
        "centroids": 0 if codebook is None else codebook.keys.shape[2],
        "tokens_seen": state.count,
        "tokens_retrieved": state.attended,
        "rows_read": state.attended,
    }
    return attrs.evolve(
        count, auxiliary=count.auxiliary + extra, static=count.static + static, rows=None, details=details
    )


def _mean(counts: mx.array | None) -> float:
    return 0.0 if counts is None else cast(float, counts.astype(mx.float32).mean().item())


def _codebook(model: Layer) -> str:
    return "uncalibrated" if model.config.codebook is None else model.config.codebook


def _static(model: Layer) -> int:
    return 0 if model.codebook is None else model.codebook.nbytes


def _dense(state: CompressState) -> tuple[int, int]:
    """Bytes of keys and values of all tokens seen, as they came."""
    rows = state.ring.arrays()
    if not rows:
        return 0, 0
    keys, values = (array.nbytes // array.shape[2] * state.count for array in rows)
    return keys, values


def _assigned(state: CompressState, codes: tuple[int, int]) -> float:
    """Bits that a number takes in the codes, spare capacity apart."""
    if not state.coded:
        return 0.0
    dense = state.ring.arrays()
    numbers = sum(array.size // array.shape[2] for array in dense) * state.coded
    held = sum(array.nbytes for array in state.codes.arrays().values())
    return 8 * held / numbers
