"""What a state knows of its layer: how to undo its rotation, and its codebook."""

from __future__ import annotations

import attrs
import mlx.core as mx

from veloxquant import ConfigError
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant import UnsupportedShapeError
from veloxquant_a2ats.codebook import Codebook
from veloxquant_a2ats.codebook import uncalibrated_codebook
from veloxquant_a2ats.codebook_file import load_codebook
from veloxquant_a2ats.config import A2ATSConfig
from veloxquant_a2ats.rotation import check_rope
from veloxquant_a2ats.rotation import check_scaling
from veloxquant_a2ats.rotation import rope_from_options

__all__ = ["Layer"]


@attrs.define(eq=False)
class Layer:
    """Rotation and codebook of one layer; what shapes decide is settled by the first rows.

    Args:
        config: Options of the method.
        spec: What the core knows of the layer.
    """

    config: A2ATSConfig
    spec: LayerSpec
    _rope: Rope | None = None
    _codebook: Codebook | None = None
    _checked: bool = False

    @classmethod
    def of(cls, config: A2ATSConfig, spec: LayerSpec) -> Layer:
        """Look up what can be known before any rows.

        Raises:
            ConfigError: There is no codebook, or it is not for this layer.
            UnsupportedModelError: The rotation cannot be undone.
        """
        layer = cls(config, spec)
        if spec.rope is None:
            check_scaling(config.rope_scaling)
        if spec.head_dim is not None:
            layer._settle_rope(spec.head_dim)
        elif spec.rope is not None:
            check_rope(spec.rope, None)
        if config.codebook is not None:
            layer._codebook = load_codebook(config, spec, layer._rope)
            # Here and not on the path of the first token.
            mx.eval(layer._codebook.arrays())
        elif not config.allow_uncalibrated:
            raise ConfigError(
                "a2ats needs a codebook of the model: make one with 'veloxquant calibrate a2ats "
                f"--mode {config.mode} --model MODEL -o FILE' and give codebook=FILE; for tests "
                "allow_uncalibrated=true makes a random one"
            )
        elif spec.kv_heads is not None and spec.head_dim is not None:
            # Values are as wide as keys in most models; for others another one is made when they come.
            layer._prepare_random(spec.kv_heads, spec.head_dim)
        return layer

    def _settle_rope(self, head_dim: int) -> Rope:
        if head_dim % 2:
            raise UnsupportedShapeError(f"a2ats serves keys with an even number of channels, not {head_dim}")
        options = self.config
        rope = self.spec.rope or rope_from_options(options.rope_base, options.rope_scaling, head_dim)
        check_rope(rope, head_dim)
        self._rope = rope
        return rope

    @property
    def codebook(self) -> Codebook | None:
        """The codebook, or None while it is not known."""
        return self._codebook

    @property
    def rope(self) -> Rope:
        """The rotation, known once rows have come."""
        assert self._rope is not None
        return self._rope

    def prepare(self, keys: mx.array, values: mx.array) -> Codebook:
        """Settle what the shapes of the first rows decide, and refuse rows that cannot be served.

        Args:
            keys: ``[B, Hkv, S, Dk]``.
            values: ``[B, Hkv, S, Dv]``.

        Returns:
            The codebook.

        Raises:
            UnsupportedShapeError: The codebook or the options are for other shapes.
        """
        if self._checked and self._codebook is not None:
            return self._codebook
        if self._rope is None:
            self._settle_rope(keys.shape[3])
        if self._codebook is None:
            self._codebook = self._random(keys.shape[1], keys.shape[3], values.shape[3])
        self._codebook.check_rows(keys, values)
        self._checked = True
        return self._codebook

    def _prepare_random(self, heads: int, dim: int) -> None:
        if self.config.mode == "retrieve" or dim % self.config.sub_dim == 0:
            mx.eval(self._random(heads, dim, dim).arrays())

    def _random(self, heads: int, key_dim: int, value_dim: int) -> Codebook:
        options = self.config
        compress = options.mode == "compress"
        if compress and (key_dim % options.sub_dim or value_dim % options.sub_dim):
            raise UnsupportedShapeError(
                f"a2ats: sub_dim {options.sub_dim} does not divide keys of {key_dim} and values of {value_dim} "
                "channels; choose a divisor of both"
            )
        return uncalibrated_codebook(
            self.spec.index,
            heads,
            self.spec.shard_index,
            self.spec.shard_count,
            key_dim,
            value_dim if compress else None,
            options.sub_dim,
            2**options.codebook_bits,
            options.beta,
            options.retrieval_fraction,
            options.use_query_aware,
        )
