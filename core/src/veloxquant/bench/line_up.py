"""Who takes part in a run: the plain cache and mlx-lm's quantized ones, the chosen methods, and another library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.bench.arm_options import Skipped
from veloxquant.bench.arm_options import chosen_arms
from veloxquant.bench.arm_options import split_usable
from veloxquant.bench.arms import GROUP_SIZES
from veloxquant.bench.arms import Arm
from veloxquant.bench.arms import plain_arm
from veloxquant.bench.arms import quantized_arm
from veloxquant.bench.companions import quantized_arms
from veloxquant.bench.layer_work import Shape
from veloxquant.bench.peers import peer_arms
from veloxquant.build import native_caches

__all__ = ["Wanted", "line_up_layer", "line_up_model"]


@attrs.frozen(kw_only=True)
class Wanted:
    """What the user chose, as words.

    Args:
        methods: Names of methods, or None for all that are installed.
        settings: ``method.key=value``.
        arms: ``name=method:key=value,key=value``.
        peer: Another library, or None.
    """

    methods: Sequence[str] | None = None
    settings: Sequence[str] = ()
    arms: Sequence[str] = ()
    peer: str | None = None

    @property
    def tolerant(self) -> bool:
        """Whether what cannot be used is passed over: the user named nothing."""
        return self.methods is None and not (self.arms or self.settings)

    def words(self) -> list[str]:
        """The same as options of the command line."""
        found = [] if self.methods is None else ["--methods", ",".join(self.methods)]
        found += [word for text in self.settings for word in ("--set", text)]
        found += [word for text in self.arms for word in ("--arm", text)]
        return found + ([] if self.peer is None else ["--peer", self.peer])


def line_up_layer(wanted: Wanted, shape: Shape, tokens: int) -> tuple[list[Arm], list[Skipped]]:
    """Arms for a layer without a model, the plain one first.

    Args:
        wanted: What was chosen.
        shape: The shape of the layer.
        tokens: Tokens of the prompt, for peers that take a number of rows.

    Returns:
        Arms that can be used, and methods that cannot, with the reason.

    Raises:
        VeloxQuantError: What the user named cannot be used.
    """
    chosen = chosen_arms(wanted.methods, wanted.settings, wanted.arms)
    peers = [] if wanted.peer is None else peer_arms(wanted.peer, tokens)
    usable, skipped = split_usable(
        [attrs.evolve(arm, make=arm.make_layer) for arm in chosen], shape.layer(), tolerant=wanted.tolerant
    )
    group = next((size for size in GROUP_SIZES if shape.head_dim % size == 0), None)
    quantized = [] if group is None else [quantized_arm(bits, group) for bits in (8, 4)]
    return [plain_arm(), *quantized, *usable, *peers], skipped


def line_up_model(wanted: Wanted, model: Any, tokens: int) -> tuple[list[Arm], list[Skipped]]:
    """As ``line_up_layer``, for a model."""
    chosen = chosen_arms(wanted.methods, wanted.settings, wanted.arms)
    peers = [] if wanted.peer is None else peer_arms(wanted.peer, tokens)
    usable, skipped = split_usable(chosen, model, tolerant=wanted.tolerant)
    peers = split_usable(peers, model, tolerant=False)[0]
    plain = native_caches(model)
    mx.eval(model(mx.array([[0]]), cache=plain))  # only rows show the head dim
    return [plain_arm(), *quantized_arms(plain), *usable, *peers], skipped
