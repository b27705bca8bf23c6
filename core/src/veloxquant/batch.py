"""Several sequences in one call of the model, each with a cache of its own.

mlx-lm's batch generator pads prompts on the right, joins and drops sequences, and takes them out again. A batched
cache here is a list of the very caches that lone runs would have: each sequence gets its own rows, its own offset and
its own attention, and padding never reaches a store. This is the one place with a Python loop over sequences.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import NoReturn
from typing import cast

import mlx.core as mx

from veloxquant.errors import RoutingError
from veloxquant.errors import UnsupportedShapeError
from veloxquant.errors import VeloxQuantError
from veloxquant.routed import RoutedLayerCache

if TYPE_CHECKING:
    pass

__all__ = ["BatchLayerCache", "MergeableLayerCache"]


class MergeableLayerCache(RoutedLayerCache):
    """A routed cache that can join a batch.

    mlx-lm asks for the attribute ``merge`` to learn whether a model can be batched, so caches that cannot (proxy
    caches, and caches beside plain ones that share a mask) are of classes without it.
    """

    @classmethod
    def merge(cls, caches: Sequence[RoutedLayerCache]) -> BatchLayerCache:
        """Join the caches of several sequences for the same layer; the originals stay as they are.

        Args:
            caches: One cache per sequence, empty or used.

        Returns:
            A batched cache over copies of them.
        """
        # One by one: the same cache given twice must become two sequences.
        return BatchLayerCache([copy.deepcopy(cache) for cache in caches])


class BatchLayerCache:
    """The caches of several sequences for one layer, driven by mlx-lm's batch generator.

    Args:
        sequences: One routed cache of batch size 1 per sequence.

    Raises:
        UnsupportedShapeError: A cache holds more than one sequence already.
        VeloxQuantError: The caches are of different methods, options or layers.
    """

    def __init__(self, sequences: Sequence[RoutedLayerCache]) -> None:
        self.sequences: list[RoutedLayerCache] = list(sequences)
        # Tokens of the right-padded prompt that are still to come, per sequence; None outside such a prompt.
        self._remaining: list[int] | None = None
        # What the last update gave each sequence: its real rows, and the keys and values to attend over.
        self._pending: list[tuple[int, mx.array, mx.array] | None] = []
        # Rows of a step that the method takes for all sequences at once, when their queries come.
        self._rows: tuple[mx.array, mx.array] | None = None
        self._check_alike()

    def _check_alike(self) -> None:
        for one in self.sequences:
            first = self.sequences[0]
            if not isinstance(one, RoutedLayerCache):
                raise VeloxQuantError(f"a batch is made of routed caches, not of a {type(one).__name__}")
            if (one.method.name, one.config, one.layer) != (first.method.name, first.config, first.layer):
                raise VeloxQuantError(
                    f"{one!r} and {first!r} cannot be in one batch: all sequences need one method, the same options "
                    "and the same layer"
                )
            if not one.empty() and one.row_shape[0] != 1:
                raise UnsupportedShapeError(
                    f"{one!r} holds {one.row_shape[0]} sequences already; batches are made of caches of one sequence"
                )
        used = [one for one in self.sequences if not one.empty()]
        if len({(one.row_shape, one.row_dtype) for one in used}) > 1:
            raise UnsupportedShapeError(f"the sequences of a batch need rows of one shape and dtype: {used!r}")

    # ------------------------------------------------------------ attention

    @property
    def offset(self) -> mx.array:
        """Tokens seen by each sequence ``[B]``, int32; padding does not count."""
        return mx.array([cache.offset for cache in self.sequences], dtype=mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the new rows of each sequence, without its padding.

        Args:
            keys: Rotated keys ``[B, Hkv, S, Dk]``.
            values: Values ``[B, Hkv, S, Dv]``.

        Returns:
            ``keys`` and ``values`` as they came. What a sequence attends over is its own and goes to ``attend``.

        Raises:
            UnsupportedShapeError: B is not the number of sequences.
            RoutingError: The queries of the previous call did not arrive.
        """
        if keys.shape[0] != len(self.sequences):
            raise UnsupportedShapeError(
                f"the batch holds {len(self.sequences)} sequences and was given keys for {keys.shape[0]}"
            )
        if self._rows is not None:
            self.sequences[0].refuse_unattended()
        if self._steps_together(keys, values):
            self._rows = keys, values
        else:
            self._store(keys, values)
        return keys, values

    def _steps_together(self, keys: mx.array, values: mx.array) -> bool:
        """Whether the method stores and attends to these rows for all sequences at once."""
        if self._remaining is not None or self.sequences[0].method.ops.step is None:
            return False
        return all(cache.takes_step(keys, values) for cache in self.sequences)

    def _store(self, keys: mx.array, values: mx.array) -> None:
        counts = self._take(keys.shape[2])
        parts = zip(self.sequences, counts, _apart(keys, counts), _apart(values, counts), strict=True)
        self._pending = [
            (count, *cache.update_and_fetch(own_keys, own_values)) if count else None
            for cache, count, own_keys, own_values in parts
        ]

    def _take(self, rows: int) -> list[int]:
        """How many of the next ``rows`` positions are real, per sequence."""
        if self._remaining is None:
            return [rows] * len(self.sequences)
        counts = [min(rows, left) for left in self._remaining]
        self._remaining = [left - count for left, count in zip(self._remaining, counts, strict=True)]
        return counts

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend sequence by sequence; the output at padding is zero.

        Args:
            queries: ``[B, Hq, S, Dk]``.
            keys: What ``update_and_fetch`` returned.
            values: What ``update_and_fetch`` returned.
            scale: Factor on the logits.
            mask: None or "causal": each sequence is causal over its own rows.
            sinks: Sink logits ``[Hq]`` of models that have them.

        Returns:
            ``[B, Hq, S, Dv]`` in the dtype of the queries.

        Raises:
            RoutingError: No rows were stored before, or the model brings a mask of its own.
        """
        if isinstance(mask, mx.array):
            raise RoutingError(
                f"layer {self.sequences[0].layer.index} got a mask array from the model, which sequences of different "
                "lengths cannot share; run them one by one"
            )
        rows, self._rows = self._rows, None
        if rows is not None:
            output = self._step(rows, queries, scale, sinks)
            if output is not None:
                return output
            self._store(*rows)
        if len(self._pending) != queries.shape[0]:
            raise RoutingError("attention was asked for before rows were stored; call update_and_fetch first")
        length, outputs = queries.shape[2], []
        counts = [0 if pending is None else pending[0] for pending in self._pending]
        for cache, pending, own_queries in zip(self.sequences, self._pending, _apart(queries, counts), strict=True):
            if pending is None:
                outputs.append(mx.zeros((1, queries.shape[1], length, values.shape[3]), dtype=queries.dtype))
                continue
            count, own_keys, own_values = pending
            output = cache.attend(own_queries, own_keys, own_values, scale, cache.make_mask(count), sinks)
            outputs.append(mx.pad(output, [(0, 0), (0, 0), (0, length - count), (0, 0)]) if count < length else output)
        self._pending = []
        return mx.concatenate(outputs, axis=0)

    def _step(
        self, rows: tuple[mx.array, mx.array], queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array | None:
        """One token of every sequence in one call of the method, or None where it wants them one by one."""
        step = self.sequences[0].method.ops.step
        assert step is not None  # else no rows wait
        output: mx.array | None = step([cache.method_state for cache in self.sequences], queries, *rows, scale, sinks)
        if output is None:
            return None
        for cache in self.sequences:
            cache.offset += 1
        arrays = [array for cache in self.sequences for array in cache.uncomputed()]
        return mx.depends(output, arrays) if arrays else output

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name that mlx-lm uses
        return_array: bool = False,
        window_size: int | None = None,
    ) -> str | None:
        """The word "causal", or None for one token: each sequence makes its own mask.

        Args:
            N: Number of new tokens.
            return_array: Not honoured; the model's mask is not used.
            window_size: Size of a sliding window. Refused.

        Raises:
            RoutingError: A window was asked for.
        """
        if window_size is not None:
            raise RoutingError(
                f"a layer attends within a window of {window_size} tokens, and compressed caches serve full attention "
                "only; leave such layers to the model"
            )
        return None if N == 1 else "causal"

    # ------------------------------------------------------------- sequences

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a right-padded prompt.

        Args:
            left_padding: Refused when not zero: padding is never stored.
            lengths: Real tokens that each sequence will get until ``finalize``.
            right_padding: Padding behind them.

        Raises:
            VeloxQuantError: Padding on the left, or padding without lengths.
        """
        if left_padding is not None and any(left_padding):
            raise VeloxQuantError("compressed batches take prompts padded on the right; pass lengths and right_padding")
        self._remaining = None
        if right_padding is not None and any(right_padding):
            count = len(self.sequences)
            if lengths is None or len(lengths) != count or len(right_padding) != count or min(lengths) < 0:
                raise VeloxQuantError(f"padding needs the length and the padding of each of the {count} sequences")
            if len({length + padding for length, padding in zip(lengths, right_padding, strict=True)}) > 1:
                raise VeloxQuantError(
                    f"lengths {list(lengths)} and padding {list(right_padding)} do not add up to one width"
                )
            self._remaining = [int(length) for length in lengths]

    def finalize(self) -> None:
        """End a right-padded prompt."""
        self._remaining = None

    def filter(self, batch_indices: Any) -> None:
        """Keep the sequences with the given indices, in that order.

        Args:
            batch_indices: A list of integers or an integer array.

        Raises:
            VeloxQuantError: The indices are truth values.
        """
        kept = _integers(batch_indices)
        chosen = [self.sequences[index] for index in kept]
        # A sequence that is asked for twice becomes two.
        self.sequences = [
            copy.deepcopy(one) if index in kept[:place] else one
            for place, (index, one) in enumerate(zip(kept, chosen, strict=True))
        ]
        if self._remaining is not None:
            self._remaining = [self._remaining[index] for index in kept]
        self._pending, self._rows = [], None

    def extend(self, other: BatchLayerCache) -> None:
        """Append the sequences of another batch of the same layer, which must not be used any more.

        Raises:
            VeloxQuantError: The two do not belong together, or one is in the middle of a padded prompt.
        """
        if other is self or not isinstance(other, BatchLayerCache):
            raise VeloxQuantError("a batch is extended by another batch; make one with merge([cache])")
        if self._remaining is not None or other._remaining is not None:
            raise VeloxQuantError("finalize the padded prompt of a batch before joining it with another")
        joined = BatchLayerCache([*self.sequences, *other.sequences])
        self.sequences, self._pending, self._rows = joined.sequences, [], None

    def extract(self, idx: int) -> RoutedLayerCache:
        """Take out a copy of one sequence: equal to the cache that a lone run would have.

        Raises:
            VeloxQuantError: There is no such sequence.
        """
        if not -len(self.sequences) <= idx < len(self.sequences):
            raise VeloxQuantError(f"the batch holds {len(self.sequences)} sequences; there is no sequence {idx}")
        return copy.deepcopy(self.sequences[idx])

    @classmethod
    def merge(cls, caches: Sequence[RoutedLayerCache]) -> BatchLayerCache:
        """Join the caches of several sequences, see ``MergeableLayerCache.merge``."""
        return MergeableLayerCache.merge(caches)

    # -------------------------------------------------------------- protocol

    @property
    def nbytes(self) -> int:
        """Bytes held by all sequences."""
        return sum(cache.nbytes for cache in self.sequences)

    @property
    def plain_nbytes(self) -> int:
        """Bytes that plain caches of the sequences would hold, without padding."""
        return sum(cache.plain_nbytes for cache in self.sequences)

    def size(self) -> int:
        """Tokens seen by the longest sequence."""
        return max((cache.offset for cache in self.sequences), default=0)

    def empty(self) -> bool:
        """Whether no sequence has seen a token."""
        return all(cache.empty() for cache in self.sequences)

    def is_trimmable(self) -> bool:
        """Whether every sequence can be trimmed; never in the middle of a padded prompt."""
        return self._remaining is None and all(cache.is_trimmable() for cache in self.sequences)

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens of every sequence, all of a shorter one; returns the most forgotten."""
        if not self.is_trimmable():
            return 0
        return max((cache.trim(n) for cache in self.sequences), default=0)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Refuse mlx-lm's ``kv_bits``."""
        raise VeloxQuantError("this batch is already compressed; leave kv_bits (--kv-bits) out")

    @property
    def state(self) -> list[Any]:
        """What remains of a padded prompt, as JSON, then the states of the sequences."""
        return [json.dumps(self._remaining), *(cache.state for cache in self.sequences)]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self.__dict__.update(type(self).from_state(state).__dict__)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> BatchLayerCache:
        """Rebuild a batch from what ``state`` gave."""
        remaining, *states = state
        batch = cls([RoutedLayerCache.from_state(one) for one in states])  # type: ignore[misc]
        batch._remaining = json.loads(remaining)
        return batch

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchLayerCache:
        other = type(self)(copy.deepcopy(self.sequences, memo))
        other._remaining = None if self._remaining is None else list(self._remaining)
        return other

    def __repr__(self) -> str:
        return f"BatchLayerCache({self.sequences!r})"


def _apart(rows: mx.array, counts: Sequence[int]) -> list[mx.array]:
    """The first rows of each sequence, without its padding; in one operation when there is none."""
    if all(count == rows.shape[2] for count in counts):
        return list(mx.split(rows, len(counts))) if len(counts) > 1 else [rows] * len(counts)
    return [rows[index : index + 1, :, :count] for index, count in enumerate(counts)]


def _integers(indices: Any) -> list[int]:
    if isinstance(indices, mx.array) and indices.dtype == mx.bool_:
        raise VeloxQuantError("sequences are chosen by their indices, not by truth values")
    return [int(index) for index in (cast("list[int]", indices.tolist()) if isinstance(indices, mx.array) else indices)]
