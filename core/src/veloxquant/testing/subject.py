"""What the rules examine: a method with a config, in one query mode, and rows to feed it."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from veloxquant.build import get_cache
from veloxquant.cache import DEFAULT_WINDOW
from veloxquant.cache import LayerCache
from veloxquant.config import parse_config
from veloxquant.errors import ConfigError
from veloxquant.registry import Method
from veloxquant.registry import Registry
from veloxquant.registry import default_registry
from veloxquant.testing.driver import Rows
from veloxquant.testing.driver import blocks
from veloxquant.testing.driver import feed
from veloxquant.types import LayerSpec
from veloxquant.types import QueryMode
from veloxquant.types import Rope

__all__ = ["LATER", "Shape", "Subject", "make_subject"]

TOKENS = (200, 300, 450, 600, 900, 1300, 1800)
LATER = 150
"""Steps after which a method that evicts now and then while decoding has done so."""


@attrs.frozen(kw_only=True)
class Shape:
    """Sizes of the rows that a layer is fed."""

    batch: int = 1
    query_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    dtype: str = "float32"


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """A method under examination.

    Args:
        method: The loaded method.
        registry: Where it and its row stores are found.
        config: Its options.
        dense_config: Options with which it keeps every row as it came, or None if there are none.
        mode: The query mode of the layers made; without meaning for a method that needs no queries.
        tokens: Length of the usual prompt: long enough for an evicting method to evict.
        shape: Sizes of the usual rows.
        index: The layer whose caches are made.
    """

    method: Method
    registry: Registry
    config: Any
    dense_config: Any = None
    mode: QueryMode = "proxy"
    tokens: int = TOKENS[0]
    shape: Shape = attrs.field(factory=Shape)
    index: int = 0

    @property
    def modes(self) -> tuple[QueryMode, ...]:
        """The query modes that the method has with this config; ``("proxy",)`` if it needs no queries."""
        modes = self.method.query_modes or ("proxy",)
        return ("routed",) if "queries" in self.method.needs(self.config) else modes

    @property
    def routed(self) -> bool:
        """Whether its caches get true queries."""
        return self.mode == "routed" and self.method.ops.attend is not None

    @property
    def trimmable(self) -> bool:
        """Whether its caches can be trimmed."""
        return self.cache().is_trimmable()

    @property
    def evicts(self) -> bool:
        """Whether the method drops rows for good with this config."""
        return self.method.evicts(self.config)

    @property
    def window(self) -> int:
        """Rows from which a block opens the prompt phase."""
        option = self.method.info.prompt_window
        return DEFAULT_WINDOW if option is None else max(2, getattr(self.config, option))

    @property
    def prompt(self) -> list[int]:
        """The usual prompt in mlx-lm's blocks: all of it but the last token, and that."""
        return [self.tokens - 1, 1]

    @property
    def later_prompt(self) -> int:
        """Length of a later turn: long enough to be a prompt, and for an evicting method to evict again."""
        return max(2 * self.window, self.tokens)

    def in_mode(self, mode: QueryMode) -> Subject:
        """The same in another query mode."""
        return attrs.evolve(self, mode=mode)

    def in_layer(self, index: int) -> Subject:
        """The same in another layer."""
        return attrs.evolve(self, index=index)

    def shaped(self, **changes: Any) -> Subject:
        """The same with other sizes of rows."""
        return attrs.evolve(self, shape=attrs.evolve(self.shape, **changes))

    def dense(self) -> Subject:
        """The same with the config that keeps everything."""
        return attrs.evolve(self, config=self.dense_config)

    def layer(self, index: int | None = None) -> LayerSpec:
        """What the method is told of the layer ``index``, by default the subject's."""
        shape = self.shape
        return LayerSpec(
            index=self.index if index is None else index,
            query_mode=self.mode,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.key_dim,
            scale=shape.key_dim**-0.5,
            rope=Rope(dims=shape.key_dim),
        )

    def cache(self, index: int | None = None) -> LayerCache:
        """An empty cache of the layer ``index``, by default the subject's."""
        return get_cache(self.method.name, self.config, layer=self.layer(index), registry=self.registry)

    def rows(self, tokens: int | None = None, *, seed: int = 0) -> Rows:
        """Random rows; the same for the same number of tokens, seed and shape.

        Args:
            tokens: How many; by default the usual prompt.
            seed: Seed.
        """
        shape, tokens = self.shape, self.tokens if tokens is None else tokens
        sizes = ((shape.query_heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
        keys = mx.random.split(mx.random.key(seed), 3)
        arrays = [
            mx.random.normal((shape.batch, heads, tokens, dim), key=keys[part]).astype(getattr(mx, shape.dtype))
            for part, (heads, dim) in enumerate(sizes)
        ]
        mx.eval(arrays)
        return Rows(*arrays)

    def used(self, steps: int = 0, *, seed: int = 0) -> tuple[LayerCache, Rows]:
        """A cache that has seen the usual prompt and ``steps`` single tokens, and what it was fed."""
        cache, rows = self.cache(), self.rows(self.tokens + steps, seed=seed)
        feed(cache, rows, [*self.prompt, *[1] * steps])
        return cache, rows

    def moments(self) -> dict[str, LayerCache]:
        """Caches in every phase of their life, by a name for messages."""
        rows = self.rows(self.tokens + LATER)
        cuts = {
            "empty": [],
            "after a first token": [1],
            "in the middle of a prompt": [self.tokens // 2],
            "after a prompt": self.prompt,
            "after some steps": [*self.prompt, 1, 1, 1],
            "after a short block": [*self.prompt, 1, 1, min(4, self.window - 1)],
            "long after a prompt": [*self.prompt, *[1] * LATER],
        }
        made = {}
        for name, sizes in cuts.items():
            made[name] = self.cache()
            if sizes:
                feed(made[name], rows.part(0, sum(sizes)), sizes)
        return made


def make_subject(
    method: object,
    *,
    config: object = None,
    dense_config: object = None,
    registry: Registry | None = None,
    tokens: int | None = None,
) -> Subject:
    """Prepare a method for the rules.

    Args:
        method: Its name, a loaded ``Method`` of the registry, or a plugin (module or object) that is not installed.
        config: Its options, as for ``get_cache``.
        dense_config: Options with which it keeps every row as it came. None: there are none, or nobody said.
        registry: Where to find it; by default the installed ones.
        tokens: Length of the usual prompt; by default 200, or what it takes to evict something, up to 1,800.

    Returns:
        The subject, in the method's first query mode.

    Raises:
        UnknownMethodError: There is no such method.
        PluginError: The plugin cannot be used.
        ConfigError: An option cannot be used, or the method refuses to make a cache with those given.
    """
    if not isinstance(method, str | Method):
        registry = registry or Registry()
        method = registry.register(method)
    registry = registry or default_registry()
    found = registry.get(method if isinstance(method, str) else method.name)
    subject = Subject(
        method=found,
        registry=registry,
        config=parse_config(found.info.config, config, method=found.name),
        dense_config=None if dense_config is None else parse_config(found.info.config, dense_config, method=found.name),
    )
    subject = subject.in_mode(subject.modes[0])
    _refuse(subject)
    return attrs.evolve(subject, tokens=_enough_tokens(subject) if tokens is None else tokens)


def _refuse(subject: Subject) -> None:
    """Raise what the method says against its options when a cache is made, before every rule says it."""
    try:
        subject.cache()
    except ConfigError:
        raise
    except Exception:  # what breaks here breaks in a rule, which can say more about it
        return


def _enough_tokens(subject: Subject) -> int:
    """The shortest prompt that makes an evicting method evict."""
    if not subject.evicts:
        return TOKENS[0]
    for tokens in TOKENS:
        longer = attrs.evolve(subject, tokens=tokens)
        try:
            cache = longer.cache()
            feed(cache, longer.rows(), blocks(tokens, tokens))
            if cache.rows < cache.offset:
                return tokens
        except Exception:  # what breaks here breaks in a rule, which can say more about it
            break
    return TOKENS[0]
