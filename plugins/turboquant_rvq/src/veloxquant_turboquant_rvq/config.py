"""Options of TurboQuant-RVQ."""

from __future__ import annotations

from typing import Any
from typing import Literal

import attrs
from attrs.validators import and_
from attrs.validators import ge
from attrs.validators import in_
from attrs.validators import instance_of
from attrs.validators import le
from attrs.validators import lt
from attrs.validators import optional

__all__ = ["TurboQuantRVQConfig"]


def _count(maximum: int) -> Any:
    return and_(instance_of(int), ge(0), le(maximum))


@attrs.frozen(kw_only=True)
class TurboQuantRVQConfig:
    """How many bits keys and values take, and what stays as it came."""

    bits: int = attrs.field(
        default=1,
        validator=[instance_of(int), ge(1), le(4)],
        metadata={
            "help": "bits of each of the two stages of a key coordinate: 1 stores 2 bits, 4 stores 8",
            "example": 2,
        },
    )
    seed: int = attrs.field(
        default=42,
        validator=[instance_of(int), ge(0), lt(2**63)],
        metadata={"help": "seed of the random rotations"},
    )
    codebook: Literal["uniform", "matched", "laplace"] = attrs.field(
        default="uniform",
        validator=in_(("uniform", "matched", "laplace")),
        metadata={"help": "levels of the two stages; uniform is stored as one stream and attended to fastest"},
    )
    value_bits: int | None = attrs.field(
        default=None,
        validator=optional([instance_of(int), in_((2, 3, 4, 8))]),
        metadata={"help": "bits of a value coordinate: 2, 3, 4 or 8; None keeps values as they came", "example": 4},
    )
    sinks: int = attrs.field(
        default=4, validator=_count(2**16), metadata={"help": "first tokens that are also kept as they came"}
    )
    recent: int = attrs.field(
        default=32,
        validator=_count(2**16),
        metadata={"help": "newest tokens that are attended to as they came; 0 makes every rewind exact"},
    )
