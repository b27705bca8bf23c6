"""Options of A2ATS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from typing import Literal

import attrs
from attrs.validators import and_
from attrs.validators import ge
from attrs.validators import gt
from attrs.validators import in_
from attrs.validators import instance_of
from attrs.validators import le
from attrs.validators import lt
from attrs.validators import optional

from veloxquant import ConfigError

__all__ = ["A2ATSConfig"]


def _count(minimum: int) -> Any:
    # Beyond a million rows nothing is a window; sizes of arrays end at 2^31.
    return and_(instance_of(int), ge(minimum), le(2**20))


def _mapping(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"'{attribute.name}' must be a mapping (got {value!r})")


def _share(default: float, text: str) -> Any:
    return attrs.field(default=default, converter=float, validator=[ge(0.0), le(1.0)], metadata={"help": text})


@attrs.frozen(kw_only=True)
class A2ATSConfig:
    """What A2ATS stores, what it attends to, and with which codebook.

    Raises:
        ConfigError: Options contradict each other.
    """

    codebook_bits: int = attrs.field(
        default=8,
        validator=[instance_of(int), ge(2), le(12)],
        metadata={"help": "compress: bits of a code; codes of up to 8 take a byte, longer ones two"},
    )
    sub_dim: int = attrs.field(
        default=8,
        validator=[instance_of(int), ge(1), le(64)],
        metadata={"help": "compress: channels that share a code; must divide the head dim"},
    )
    window: int = attrs.field(
        default=128, validator=_count(1), metadata={"help": "distance from which a token is far; nearer ones are exact"}
    )
    far_position: int = attrs.field(
        default=2048, validator=_count(0), metadata={"help": "the one distance at which every far token is seen"}
    )
    use_query_aware: bool = attrs.field(
        default=True,
        validator=instance_of(bool),
        metadata={"help": "choose codes by the error of the logits; false: by the nearest centroid"},
    )
    beta: float = _share(0.5, "compress: how much queries count in the query-aware metric (0: not at all)")
    retrieval_fraction: float = _share(
        0.20, "compress: share of tokens coded query-aware; retrieve: share of rows attended in a step"
    )
    sinks: int = attrs.field(default=8, validator=_count(0), metadata={"help": "first tokens, always exact"})
    rope_base: float = attrs.field(
        default=10000.0,
        converter=float,
        validator=[gt(1.0), lt(math.inf)],
        metadata={"help": "base of the rotary embedding, where no model is at hand to read it from"},
    )
    rope_scaling: Mapping[str, Any] | None = attrs.field(
        default=None,
        validator=optional(_mapping),
        metadata={"help": "rope_scaling of the model's config.json, where no model is at hand"},
    )
    codebook: str | None = attrs.field(
        default=None,
        validator=optional(instance_of(str)),
        metadata={
            "help": "file that 'veloxquant calibrate a2ats' wrote for this model",
            "example": "codebook.safetensors",
            "calibrated": True,
        },
    )
    allow_uncalibrated: bool = attrs.field(
        default=False,
        validator=instance_of(bool),
        metadata={"help": "run with a random codebook, which is noise; for tests"},
    )
    mode: Literal["compress", "retrieve"] = attrs.field(
        default="compress",
        validator=in_(("compress", "retrieve")),
        metadata={"help": "compress stores codes in place of rows; retrieve keeps rows and reads few of them"},
    )
    per_head: bool = attrs.field(
        default=False,
        validator=instance_of(bool),
        metadata={"help": "retrieve: every query head chooses its own rows, and all are read (the paper's union)"},
    )
    storage: str | None = attrs.field(
        default=None,
        validator=optional(instance_of(str)),
        metadata={"help": "retrieve: method that stores the rows; None stores them as they came"},
    )
    storage_config: Mapping[str, Any] | None = attrs.field(
        default=None, validator=optional(_mapping), metadata={"help": "options of the storage method"}
    )

    def __attrs_post_init__(self) -> None:
        if self.mode == "compress" and (self.storage is not None or self.per_head):
            raise ConfigError(
                "a2ats: storage and per_head are for mode='retrieve'; in compress mode the codes are the store"
            )

    @property
    def exact_rows(self) -> int:
        """Newest rows attended as they came and as codes later; in retrieve mode rows never change."""
        return self.window if self.mode == "compress" else 0

    @property
    def needs(self) -> tuple[str, ...]:
        """What these options cannot do without: choosing rows to read takes true queries."""
        return ("queries",) if self.mode == "retrieve" else ()
