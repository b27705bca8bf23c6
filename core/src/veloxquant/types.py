"""Plain records that pass between the core and the methods."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Literal

import attrs
from attrs.validators import deep_iterable
from attrs.validators import ge
from attrs.validators import in_
from attrs.validators import instance_of

from veloxquant.hooks import PROTOCOL

if TYPE_CHECKING:
    import mlx.core as mx

    from veloxquant.rows import RowStore

__all__ = ["ByteCount", "LayerSpec", "MethodInfo", "Need", "QueryMode", "Rope", "Scalar", "Snapshot"]

QueryMode = Literal["routed", "proxy"]
"""``routed``: the model's attention call brings the true queries. ``proxy``: keys stand in for queries."""

Need = Literal["queries", "rope"]
"""``queries``: the method refuses proxy mode. ``rope``: it needs a model whose RoPE the core can describe."""

Scalar = int | float | str | bool | None


def _needs(given: Iterable[Need]) -> tuple[Need, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class MethodInfo:
    """What a method says about itself.

    Args:
        name: The name users type; the entry point carries the same one.
        config: The frozen attrs class of the method's options.
        summary: One line for lists.
        kind: The family in one word, for example ``eviction``, ``codec`` or ``sparse``.
        paper: Where the algorithm comes from, or None.
        needs: What the method cannot do without, see ``Need``.
        evicts: True when prompt rows are dropped for good; a proxy cache of such a method cannot be trimmed. A config
            with a property ``evicts`` that is False says that its options keep every row.
        prompt_window: Name of the config option that says how many of the prompt's last queries the method looks
            at; a block of at least that many rows counts as prompt. None: blocks of 32 rows do.
        exact_rows: Name of the option or property of the config that says how many of the newest rows a codec attends
            to as they came; unless that is 0, a rewind of more than 64 tokens is approximate, for older rows are left
            as codes.
        protocol: Version of the hook protocol that the plugin was written for.
    """

    name: str = attrs.field(validator=instance_of(str))
    config: type = attrs.field(validator=instance_of(type))
    summary: str = attrs.field(validator=instance_of(str))
    kind: str = attrs.field(validator=instance_of(str))
    paper: str | None = attrs.field(default=None)
    needs: tuple[Need, ...] = attrs.field(
        default=(), converter=_needs, validator=deep_iterable(in_(("queries", "rope")), instance_of(tuple))
    )
    evicts: bool = attrs.field(default=False, validator=instance_of(bool))
    prompt_window: str | None = attrs.field(default=None)
    exact_rows: str | None = attrs.field(default=None)
    protocol: int = attrs.field(default=PROTOCOL, validator=instance_of(int))


@attrs.frozen(kw_only=True)
class Rope:
    """The rotary embedding of one layer, in the terms of ``mx.fast.rope``.

    Args:
        dims: Number of leading channels that are rotated.
        traditional: True when pairs are interleaved, False when the two halves are paired.
        base: Base of the frequencies, or None when ``frequencies`` is given.
        scale: Factor on positions (1 / factor for linear scaling).
        frequencies: Wavelength divisors, one per pair, for schemes that are not a plain power of the base.
        magnitude: Factor on the rotated channels that some long-context schemes apply (1.0: none).
    """

    dims: int
    traditional: bool = False
    base: float | None = 10000.0
    scale: float = 1.0
    frequencies: tuple[float, ...] | None = None
    magnitude: float = 1.0


@attrs.frozen(kw_only=True)
class LayerSpec:
    """What a method learns of the layer that it serves; shared by copies of a cache and never changed.

    Fields that a bare ``get_cache`` cannot know are None until the first keys arrive; methods then go by those.

    Args:
        index: Position of the layer's cache in the model's cache list.
        query_mode: Whether true queries will arrive.
        query_heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Channels of a key.
        scale: Factor on the attention logits.
        mixed: True when plain caches of full attention stay beside compressed ones, which then share a mask with
            them; such caches cannot be batched.
        rope: The layer's rotary embedding, or None when there is none or it cannot be described.
        layer_count: Number of caches of the model, or None when no model is at hand.
        shard_index: Which of the processes that share a sharded model this is; head counts are those of this process,
            and its KV heads come after those of the processes before it.
        shard_count: Number of those processes; 1 when the model is whole.
        make_rows: Makes an empty row store for this layer, dense unless ``config.storage`` names a codec.
    """

    index: int = 0
    query_mode: QueryMode = "proxy"
    query_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    scale: float | None = None
    mixed: bool = False
    rope: Rope | None = None
    layer_count: int | None = None
    shard_index: int = 0
    shard_count: int = 1
    make_rows: Callable[[], RowStore] = attrs.field(eq=False, repr=False)

    @make_rows.default
    def _dense(self) -> Callable[[], RowStore]:
        from veloxquant.rows import DenseRows

        return DenseRows

    @property
    def routed(self) -> bool:
        """True when true queries will arrive."""
        return self.query_mode == "routed"

    def __deepcopy__(self, memo: object) -> LayerSpec:
        return self


def _non_negative() -> int:
    return attrs.field(default=0, validator=[instance_of(int), ge(0)])


@attrs.frozen(kw_only=True)
class ByteCount:
    """Bytes of the arrays that a state holds, added up from the arrays themselves.

    Args:
        keys: Whatever represents keys.
        values: Whatever represents values.
        auxiliary: All else that belongs to this state alone: positions, summaries, buffers.
        static: Arrays shared by all caches of a model, such as codebooks; never part of ``held``.
        rows: Rows held per KV head, or None when a row is held for every token seen.
        details: Named figures of the method for the report.
    """

    keys: int = _non_negative()
    values: int = _non_negative()
    auxiliary: int = _non_negative()
    static: int = _non_negative()
    rows: int | None = None
    details: Mapping[str, Scalar] = attrs.field(factory=dict)

    @property
    def held(self) -> int:
        """Bytes that this state alone holds."""
        return self.keys + self.values + self.auxiliary


@attrs.frozen(eq=False)
class Snapshot:
    """The whole content of a state: named arrays, live rows only, and plain values."""

    arrays: Mapping[str, mx.array] = attrs.field(factory=dict)
    values: Mapping[str, Scalar] = attrs.field(factory=dict)
