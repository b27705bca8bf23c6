"""Options of RocketKV."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from typing import Literal

import attrs
from attrs.validators import and_
from attrs.validators import ge
from attrs.validators import in_
from attrs.validators import instance_of
from attrs.validators import le
from attrs.validators import optional

from veloxquant import ConfigError
from veloxquant_rocketkv.split import split_compression_ratio
from veloxquant_rocketkv.split import split_pages_and_channels

__all__ = ["DENSE_ROWS", "RocketKVConfig"]

DENSE_ROWS = 384
"""Rows that are read sooner than chosen from; the method's page has figures."""


def _count(minimum: int, maximum: int = 2**20) -> Any:
    return and_(instance_of(int), ge(minimum), le(maximum))


def _mapping(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"'{attribute.name}' must be a mapping (got {value!r})")


def _flag(default: bool, text: str) -> Any:
    return attrs.field(default=default, validator=instance_of(bool), metadata={"help": text})


@attrs.frozen(kw_only=True)
class RocketKVConfig:
    """How much RocketKV keeps of a prompt, and how much of that a decode step reads.

    Raises:
        ConfigError: An option is out of range, or options contradict each other.
    """

    compression_ratio: float = attrs.field(
        default=8.0,
        converter=float,
        metadata={
            "help": "rows seen over rows read at a decode step, above 1; split between the two stages",
            "example": 8,
        },
    )
    page_size: int | None = attrs.field(
        default=None,
        validator=optional(_count(1)),
        metadata={"help": "rows of a page, which are chosen together; follows from the ratio when not given"},
    )
    head_topk1: int | None = attrs.field(
        default=None,
        validator=optional(_count(1)),
        metadata={"help": "channels by which pages are ranked; follows from the ratio when not given"},
    )
    window: int = attrs.field(
        default=32, validator=_count(1), metadata={"help": "last prompt tokens whose queries vote, always kept"}
    )
    kernel_size: int = attrs.field(
        default=31, validator=_count(1), metadata={"help": "width of the max pooling over votes, odd"}
    )
    sinks: int = attrs.field(
        default=4, validator=_count(0), metadata={"help": "first tokens of the prompt, always kept"}
    )
    keep_recent: int = attrs.field(
        default=1, validator=_count(0), metadata={"help": "newest rows, always attended; part of topk"}
    )
    topk: int | None = attrs.field(
        default=None,
        validator=optional(_count(1, 2**31 - 1)),
        metadata={"help": "rows attended per KV head at a step; tokens seen / (2 * ratio) when not given"},
    )
    dense_rows: int | None = attrs.field(
        default=None,
        validator=optional(_count(0)),
        metadata={
            "help": "rows held up to which a step reads all of them, for choosing would cost more; 384 when not given, "
            "and 0 with topk"
        },
    )
    exact_recent: int = attrs.field(
        default=32,
        validator=_count(0),
        metadata={"help": "over storage: newest rows, at most window, held and attended as they came; part of topk"},
    )
    stage1: bool = _flag(True, "evict the prompt; False keeps it whole and only reads less of it")
    multi_turn: bool = _flag(
        False, "keep every row and choose among them anew at each turn: same reads, no memory saved"
    )
    ranking: Literal["pages", "rows"] = attrs.field(
        default="pages",
        validator=in_(("pages", "rows")),
        metadata={"help": "rank pages by a summary of their keys, or single rows by exact scores (no summary held)"},
    )
    summary_bits: Literal[4] | None = attrs.field(
        default=None,
        validator=in_((None, 4)),
        metadata={"help": "4: hold the summary of pages in 4 bits a number; None: as the keys came"},
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
        if not 1 < self.compression_ratio < math.inf:
            raise ConfigError(
                f"rocketkv: compression_ratio must be a finite number above 1, not {self.compression_ratio}"
            )
        if self.kernel_size % 2 == 0:
            raise ConfigError(f"rocketkv: kernel_size must be odd, not {self.kernel_size}")
        if self.topk is not None and self.topk <= self.newest_rows:
            name = "keep_recent" if self.newest_rows == self.keep_recent else "exact_recent"
            raise ConfigError(
                f"rocketkv: topk must exceed {name} = {self.newest_rows}, whose rows are part of it, not {self.topk}"
            )
        if self.multi_turn and not self.stage1:
            raise ConfigError("rocketkv: multi_turn filters the history by stage 1; leave stage1=False out")
        if self.ranking == "rows":
            self._check_row_ranking()
        elif self.summary_bits is not None and self.pages_and_channels(1)[0] == 1:
            raise ConfigError("rocketkv: summary_bits=4 holds minima and maxima; give a page_size of at least 2")

    def _check_row_ranking(self) -> None:
        if self.page_size not in (None, 1) or self.head_topk1 is not None or self.summary_bits is not None:
            raise ConfigError("rocketkv: ranking='rows' uses no pages; leave page_size, head_topk1, summary_bits out")
        if self.multi_turn:
            raise ConfigError("rocketkv: ranking='rows' scores every row held; leave multi_turn=True out")

    @property
    def evicts(self) -> bool:
        """Whether what a prompt leaves out stays out; in several turns it does so until the next filter."""
        return self.stage1

    @property
    def exact_rows(self) -> int:
        """Newest rows attended as they came over a store that loses something; stage 1 never cuts into them."""
        return 0 if self.storage is None else min(self.exact_recent, self.window)

    @property
    def newest_rows(self) -> int:
        """Newest rows that are attended in any case."""
        return max(self.keep_recent, self.exact_rows)

    @property
    def stage1_ratio(self) -> float:
        """Tokens seen over rows kept of a prompt; 1 when stage 1 is off."""
        return split_compression_ratio(self.compression_ratio)[0] if self.stage1 else 1.0

    def rows_to_keep(self, tokens_seen: int) -> int:
        """Rows that stage 1 keeps per KV head, never fewer than sinks + window.

        Args:
            tokens_seen: Every token that passed through, however the prompt was chunked.
        """
        return max(int(tokens_seen / self.stage1_ratio), self.sinks + self.window)

    def rows_to_read(self, tokens_seen: int) -> int:
        """Rows attended per KV head at a step (k2).

        Args:
            tokens_seen: Every token that passed through, that of the step included.
        """
        if self.topk is not None:
            return self.topk
        return max(int(tokens_seen / (2 * self.compression_ratio)), self.sinks + self.newest_rows + 1)

    @property
    def all_read_up_to(self) -> int:
        """Rows held up to which a step reads all of them."""
        if self.dense_rows is not None:
            return self.dense_rows
        return DENSE_ROWS if self.topk is None else 0

    def pages_and_channels(self, head_dim: int) -> tuple[int, int]:
        """Rows of a page, and channels by which pages are ranked.

        Args:
            head_dim: Channels of a key.
        """
        if self.ranking == "rows":
            return 1, head_dim
        stage2 = split_compression_ratio(self.compression_ratio)[1]
        page_size, channels = split_pages_and_channels(stage2, head_dim, self.page_size)
        return page_size, channels if self.head_topk1 is None else min(self.head_topk1, head_dim)
