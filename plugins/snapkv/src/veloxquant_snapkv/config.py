"""Options of SnapKV."""

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

__all__ = ["SnapKVConfig"]

DEFAULT_RATIO = 4.0


def _count(minimum: int) -> Any:
    # Beyond a million rows nothing is a window; sizes of arrays end at 2^31.
    return and_(instance_of(int), ge(minimum), le(2**20))


def _mapping(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"'{attribute.name}' must be a mapping (got {value!r})")


@attrs.frozen(kw_only=True)
class SnapKVConfig:
    """How much of a prompt SnapKV keeps, and how it chooses.

    Raises:
        ConfigError: Options contradict each other.
    """

    budget: int | None = attrs.field(
        default=None,
        validator=optional([instance_of(int), ge(1), lt(2**31)]),
        metadata={"help": "rows kept per KV head when the prompt is complete; give this or compression_ratio"},
    )
    compression_ratio: float | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(float),
        validator=optional([gt(1.0), lt(math.inf)]),
        metadata={"help": "budget = tokens seen / ratio; 4 when neither this nor budget is given", "example": 4},
    )
    window: int = attrs.field(
        default=32, validator=_count(1), metadata={"help": "last prompt tokens whose queries vote, always kept"}
    )
    kernel_size: int = attrs.field(
        default=7, validator=_count(1), metadata={"help": "width of the pooling over votes, odd; 1 turns it off"}
    )
    pooling: Literal["max", "avg"] = attrs.field(
        default="max", validator=in_(("max", "avg")), metadata={"help": "how votes of neighbours are pooled"}
    )
    sinks: int = attrs.field(default=4, validator=_count(0), metadata={"help": "first tokens, always kept"})
    eviction: Literal["prompt_end", "chunk"] = attrs.field(
        default="prompt_end",
        validator=in_(("prompt_end", "chunk")),
        metadata={"help": "evict once when the prompt is complete, or after every prompt chunk (bounded memory)"},
    )
    storage: str | None = attrs.field(
        default=None,
        validator=optional(instance_of(str)),
        metadata={"help": "method that stores the kept rows; None stores them as they came"},
    )
    storage_config: Mapping[str, Any] | None = attrs.field(
        default=None, validator=optional(_mapping), metadata={"help": "options of the storage method"}
    )

    def __attrs_post_init__(self) -> None:
        if self.budget is not None and self.compression_ratio is not None:
            raise ConfigError("snapkv: give budget or compression_ratio, not both")
        if self.kernel_size % 2 == 0:
            raise ConfigError(f"snapkv: kernel_size must be odd, not {self.kernel_size}")
        if self.budget is not None and self.budget <= self.sinks + self.window:
            raise ConfigError(
                f"snapkv: budget must exceed sinks + window = {self.sinks + self.window}, not {self.budget}"
            )

    def rows_to_keep(self, tokens_seen: int) -> int:
        """Rows kept per KV head of a prompt.

        Args:
            tokens_seen: Every token that passed through, however the prompt was chunked.

        Returns:
            The budget, never less than sinks + window.
        """
        if self.budget is not None:
            return self.budget
        ratio = DEFAULT_RATIO if self.compression_ratio is None else self.compression_ratio
        return max(int(tokens_seen / ratio), self.sinks + self.window)
