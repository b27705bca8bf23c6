"""The cache of one layer: mlx-lm's protocol outside, a method's hooks inside.

``LayerCache`` decides when a prompt ends, keeps the true position, and checks that nothing is silently dropped;
everything about rows is the method's. It does not derive from mlx-lm's caches: what those inherit (``bits``,
``merge`` into fp16 caches, two meanings of ``offset``) is what breaks compressed caches in public.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import NoReturn

import mlx.core as mx

from veloxquant.attention import causal_mask
from veloxquant.errors import FileFormatError
from veloxquant.errors import RoutingError
from veloxquant.errors import UnsupportedShapeError
from veloxquant.errors import VeloxQuantError
from veloxquant.layers import remember_layer
from veloxquant.row_shape import one_row
from veloxquant.row_shape import shape_of_rows
from veloxquant.types import Snapshot

if TYPE_CHECKING:
    from veloxquant.method import Method
    from veloxquant.types import ByteCount
    from veloxquant.types import LayerSpec
    from veloxquant.types import QueryMode

__all__ = ["LayerCache"]

DEFAULT_WINDOW = 32
"""Rows from which a block counts as prompt, for methods that name no option for it."""

EXACT_CODEC_TRIM = 64
"""Tokens that a codec with exact newest rows can forget without leaving some of them as codes, see ``MethodInfo``."""


class LayerCache:
    """A compressed cache of one layer, for mlx-lm's models, generators and servers.

    Made by ``veloxquant.get_cache`` and ``veloxquant.make_prompt_cache``. ``offset`` is the number of tokens seen,
    whatever number of rows is held.

    Args:
        method: The loaded method.
        config: Its config.
        layer: The layer served.
        state: A state to go on with; by default an empty one.
    """

    def __init__(self, method: Method, config: Any, layer: LayerSpec, state: Any = None) -> None:
        self.method = method
        self.config = config
        self.layer = layer
        self.offset = 0
        """Tokens seen."""
        ops = method.ops
        self.method_state: Any = ops.create(config, layer) if state is None else state
        remember_layer(self.method_state, layer)
        # Bound once: the adapter runs for every layer of every step.
        self._prefill: Callable[..., tuple[mx.array, mx.array]] = ops.prefill
        self._decode: Callable[..., tuple[mx.array, mx.array]] = ops.decode
        self._unread: Callable[..., Sequence[mx.array]] | None = ops.unread
        option = method.info.prompt_window
        self._window: int = DEFAULT_WINDOW if option is None else max(2, getattr(config, option))
        # Whatever comes first is prompt.
        self._prompt_open = True
        self._block = 0
        # Tokens seen when a prompt was last completed.
        self._completed = 0
        self._shape: list[Any] | None = None
        # Shapes and dtypes of the one row of a decode step, which needs no further look.
        self._step: tuple[Any, ...] | None = None

    # ------------------------------------------------------------ attention

    @property
    def query_mode(self) -> QueryMode | None:
        """``routed``, ``proxy``, or None for a method that needs no queries."""
        return self.layer.query_mode if self.method.ops.attend is not None else None

    @property
    def queries_missing(self) -> bool:
        """Whether true queries should have come for the last rows and did not."""
        return False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows.

        Args:
            keys: Rotated keys ``[B, Hkv, S, Dk]``.
            values: Values ``[B, Hkv, S, Dv]``.

        Returns:
            The rows held before this call followed by the new ones, in the input dtype.

        Raises:
            UnsupportedShapeError: Shapes or dtypes do not fit each other or the rows held.
        """
        in_prompt, (keys, values) = self._store(keys, values)
        return self._computing_state(keys, in_prompt), values

    def _store(self, keys: mx.array, values: mx.array) -> tuple[bool, tuple[mx.array, mx.array]]:
        """Let the method store new rows; returns whether they are of a prompt, and what the method answers."""
        shape = self._shape
        if (keys.shape, values.shape, keys.dtype, values.dtype) != self._step:
            shape = self._checked(keys, values)
        rows = keys.shape[2]
        if not self._prompt_open and rows < self._window:
            result = self._decode(self.method_state, keys, values)
            self.offset += rows
            return False, result
        result = self._prefill(self.method_state, keys, values)
        # Only now: a block that the method refuses changes nothing.
        self._remember(shape)
        self._prompt_open = True
        self.offset += rows
        self._block = rows
        if rows == 1:
            self._prompt_attended()
        return True, result

    def _computing_state(self, output: mx.array, in_prompt: bool) -> mx.array:
        """``output``, with which all is computed that the method holds.

        What is left lazy holds all that it is made of, and cannot be computed in another thread.
        """
        arrays = self.uncomputed(in_prompt)
        return mx.depends(output, arrays) if arrays else output

    def uncomputed(self, in_prompt: bool = False) -> list[mx.array]:
        """Arrays of the state that the output of a call may not depend on."""
        unread = self._unread
        if unread is not None and not in_prompt:
            return list(unread(self.method_state))
        snapshot: Snapshot = self.method.ops.serialize(self.method_state)
        return [*snapshot.arrays.values(), *(() if unread is None else unread(self.method_state))]

    def _prompt_attended(self) -> None:
        """The last prompt token was stored; without routed attention nothing has to be waited for."""
        self._finish_prompt()

    def _finish_prompt(self) -> None:
        self._prompt_open = False
        self._completed = self.offset
        finish = self.method.ops.finish_prompt
        if finish is not None:
            finish(self.method_state)

    def _checked(self, keys: mx.array, values: mx.array) -> list[Any]:
        name = f"layer {self.layer.index} ({self.method.name})"
        shape = shape_of_rows(keys, values, name)
        if self._shape is None:
            return [*shape, (keys.nbytes + values.nbytes) // keys.shape[2]]
        if self._shape[:-1] != shape:
            raise UnsupportedShapeError(
                f"{name} holds rows of [B, Hkv, Dk, Dv, dtypes] {self._shape[:-1]} and was given {shape}; "
                "make a new cache for other shapes"
            )
        return self._shape

    def _remember(self, shape: list[Any] | None) -> None:
        if shape is not self._shape:
            self._shape = shape
            self._step = None if shape is None else one_row(shape)

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name that mlx-lm uses
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The mask for the next ``N`` tokens; right for whatever rows each layer and head holds.

        Args:
            N: Number of new tokens.
            return_array: Ask for an array where the word "causal" would do. The array fits layers that hold as
                many rows as this one.
            window_size: Size of a sliding window. Refused: compressed caches serve full attention.

        Returns:
            None for one token, ``"causal"`` for more, or a bool array ``[N, rows + N]``.

        Raises:
            RoutingError: A window was asked for.
        """
        if window_size is not None:
            raise RoutingError(
                f"layer {self.layer.index} attends within a window of {window_size} tokens, and compressed caches "
                "serve full attention only; leave such layers to the model (make_prompt_cache does, or use layers=)"
            )
        if N == 1:
            return None
        return causal_mask(N, self.rows + N) if return_array else "causal"

    # ----------------------------------------------------------- protocol

    @property
    def rows(self) -> int:
        """Rows held per KV head."""
        rows = self.account().rows
        return self.offset if rows is None else rows

    def account(self) -> ByteCount:
        """Bytes of the arrays that the method holds for this layer."""
        count: ByteCount = self.method.ops.account(self.method_state)
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that this cache alone holds; 0 when empty."""
        return self.account().held

    @property
    def plain_nbytes(self) -> int:
        """Bytes that a plain cache would hold for the tokens seen, in the dtypes that came in."""
        return 0 if self._shape is None else int(self._shape[-1]) * self.offset

    @property
    def row_shape(self) -> tuple[int, int, int, int]:
        """B, Hkv, Dk and Dv of the rows that came in; only after the first."""
        batch, heads, key_dim, value_dim = self._seen()[:4]
        return batch, heads, key_dim, value_dim

    @property
    def row_dtype(self) -> str:
        """Name of the dtype of the keys that came in; only after the first."""
        return str(self._seen()[4])

    def _seen(self) -> list[Any]:
        if self._shape is None:
            raise VeloxQuantError(f"layer {self.layer.index} has seen no rows yet, so their shape is not known")
        return self._shape

    def size(self) -> int:
        """Tokens seen, as mlx-lm counts."""
        return self.offset

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Whether ``trim`` works; the same answer on an empty and on a used cache."""
        return self.method.trimmable(self.query_mode, self.config)

    @property
    def prompt_open(self) -> bool:
        """Whether the prompt is still coming in: a method that evicts holds every row of it."""
        return self._prompt_open

    @property
    def exact_trim(self) -> int:
        """The most tokens that ``trim`` forgets without loss; a deeper one is approximate. 0 when it is refused."""
        if not self.is_trimmable():
            return 0
        info = self.method.info
        if info.exact_rows is not None and getattr(self.config, info.exact_rows) > 0:
            return min(self.offset, EXACT_CODEC_TRIM)
        if not info.evicts:
            return self.offset
        if self._prompt_open and 0 < self._block < self._window:
            # The trim would complete the prompt early, and what it evicts would not have seen the rest.
            return 0
        return self.offset if self.rows >= self.offset else self.offset - self._completed

    def trim(self, n: int) -> int:
        """Forget the last tokens.

        Args:
            n: Number of tokens; more than were seen means all of them.

        Returns:
            Tokens forgotten; 0, with nothing changed, when the cache is not trimmable.

        Raises:
            VeloxQuantError: ``n`` is negative.
        """
        if n < 0:
            raise VeloxQuantError(f"trim takes the number of tokens to forget, at least 0, not {n}")
        if not self.is_trimmable():
            return 0
        n = min(n, self.offset)
        if n and n == self.offset:
            self._reset()
            return n
        if n:
            trim = self.method.ops.trim
            assert trim is not None  # is_trimmable said so
            trim(self.method_state, n)
            self.offset -= n
            self._completed = min(self._completed, self.offset)
        # The rest of a prompt that came in one block with a draft: the block has been attended, and what the
        # trim left of it is the end of the prompt.
        ends = self._prompt_open and 0 < self._block < self._window
        if ends:
            self._finish_prompt()
        if n or ends:
            # Whoever goes on may be another thread. Nothing waits for this.
            mx.async_eval(self.uncomputed(in_prompt=True))  # type: ignore[no-untyped-call]
        return n

    def _reset(self) -> None:
        self.method_state = self.method.ops.create(self.config, self.layer)
        remember_layer(self.method_state, self.layer)
        self.offset = self._block = self._completed = 0
        self._prompt_open = True
        self._remember(None)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Refuse mlx-lm's ``kv_bits``, which would otherwise be ignored in silence."""
        raise VeloxQuantError(
            f"this cache is already compressed by {self.method.name}; leave kv_bits (--kv-bits) out, "
            "or use mlx-lm's own cache for it"
        )

    # ------------------------------------------------------ state and copies

    @property
    def state(self) -> list[Any]:
        """The whole cache as a flat list: a JSON text that describes it, then the arrays that it names."""
        snapshot: Snapshot = self.method.ops.serialize(self.method_state)
        from veloxquant.state import describe

        return [json.dumps(describe(self, snapshot)), *snapshot.arrays.values()]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        from veloxquant.state import rebuild

        other = rebuild(state, method=self.method)
        if (other.method.name, other.config, other.layer) != (self.method.name, self.config, self.layer):
            raise FileFormatError(
                f"the state belongs to {other.method.name} with {other.config} in layer {other.layer.index}, this "
                f"cache is {self.method.name} with {self.config} in layer {self.layer.index}"
            )
        self.__dict__.update(other.__dict__)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> LayerCache:
        """Rebuild a cache from what ``state`` gave, in any process that has the method installed.

        Args:
            state: The list.

        Returns:
            A cache that goes on exactly as the original would have.

        Raises:
            FileFormatError: The state cannot be read here.
            UnknownMethodError: The method is not installed.
        """
        from veloxquant.state import rebuild

        return rebuild(state)

    def _session(self) -> dict[str, Any]:
        """The plain values of the cache itself, for ``state``."""
        return {
            "offset": self.offset,
            "prompt_open": self._prompt_open,
            "block": self._block,
            "completed": self._completed,
            "shape": self._shape,
        }

    def _resume(self, session: dict[str, Any]) -> None:
        self.offset, self._prompt_open = int(session["offset"]), bool(session["prompt_open"])
        self._block = int(session["block"])
        # States of earlier versions do not say: then no rewind counts as exact.
        self._completed = int(session.get("completed", self.offset))
        self._remember(session["shape"])

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache:
        other = type(self)(self.method, self.config, self.layer, copy.deepcopy(self.method_state, memo))
        other._resume(copy.deepcopy(self._session()))
        return other

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.method.name}, layer {self.layer.index}, {self.query_mode or 'no queries'}, "
            f"{self.offset} tokens)"
        )
