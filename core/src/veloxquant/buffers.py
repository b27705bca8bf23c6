"""Arrays of rows that grow together: spare capacity, whole-row reads, and no trace of what was dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Mapping

import attrs
import mlx.core as mx

from veloxquant.errors import UnsupportedShapeError
from veloxquant.halves import Stream
from veloxquant.halves import second_stream

__all__ = ["GrowingArrays", "flat_rows", "take_rows"]


def flat_rows(index: mx.array, rows: int) -> mx.array:
    """Turn row numbers ``[B, H, k]`` into those of the ``[B * H * rows, D]`` view, in the same shape."""
    return index.astype(mx.int32) + _first_rows(*index.shape[:2], rows)


@functools.lru_cache(maxsize=256)
def _first_rows(batch: int, heads: int, rows: int) -> mx.array:
    """Number of the first row of every head ``[B, H, 1]`` int32."""
    # From Python numbers: nothing is left to compute, whichever thread asks first. A step of every layer needs it.
    return mx.array([[[(one * heads + head) * rows] for head in range(heads)] for one in range(batch)], mx.int32)


def take_rows(buffer: mx.array, numbers: mx.array, stream: Stream = None) -> mx.array:
    """Read whole rows through one take.

    Args:
        buffer: ``[B, H, rows, D]``.
        numbers: Numbers in the flat view ``[B, heads, k]``, as ``flat_rows`` gives them, of all heads or some.
        stream: Where to read them; by default where all else is computed.

    Returns:
        ``[B, heads, k, D]``.
    """
    dim = buffer.shape[3]
    return mx.take(buffer.reshape(-1, dim), numbers.reshape(-1), axis=0, stream=stream).reshape(*numbers.shape, dim)


def _step(capacity: int) -> int:
    """Rows to grow by: a sixteenth, in multiples of 16, so that a small budget has little slack."""
    return min(256, max(16, capacity // 16 // 16 * 16))


def _capacity(capacity: int, needed: int) -> int:
    while capacity < needed:
        capacity += _step(capacity)
    return capacity


@attrs.define(eq=False)
class GrowingArrays:
    """Named arrays ``[B, H, rows, D]``, any D and dtype, that hold the same number of rows."""

    count: int = attrs.field(default=0, init=False)
    """Rows held."""
    _buffers: dict[str, mx.array] = attrs.field(factory=dict, init=False)
    # Capacity right after the last exact fit. Capacity follows from it and the count alone, so that rows that were
    # appended and dropped again leave no trace in it.
    _base: int = attrs.field(default=0, init=False)

    def append(self, rows: Mapping[str, mx.array]) -> None:
        """Store new rows, the same number under every name."""
        end = self.count + next(iter(rows.values())).shape[2]
        for name, new in rows.items():
            self._buffers[name] = self._written(self._buffers.get(name), new, end)
        self.count = end

    def _written(self, buffer: mx.array | None, rows: mx.array, end: int) -> mx.array:
        capacity = 0 if buffer is None else buffer.shape[2]
        if buffer is None or capacity < end:
            grown = _capacity(capacity, end)
            batch, heads, _, dim = rows.shape
            spare = mx.zeros((batch, heads, grown - self.count, dim), dtype=rows.dtype)
            buffer = spare if buffer is None else mx.concatenate([buffer[..., : self.count, :], spare], axis=2)
        buffer[..., self.count : end, :] = rows
        return buffer

    def live(self, name: str) -> mx.array:
        """The rows held under a name.

        Raises:
            UnsupportedShapeError: No rows are held.
        """
        # Always a view, also of a full buffer: the buffer object itself is written to after a drop_last.
        return self.whole(name)[..., : self.count, :]

    def whole(self, name: str) -> mx.array:
        """The buffer itself, spare rows behind those held included: for kernels that would copy a view.

        Raises:
            UnsupportedShapeError: No rows are held.
        """
        if name not in self._buffers:
            raise UnsupportedShapeError("no rows are held yet; append some first")
        return self._buffers[name]

    def gather(self, name: str, index: mx.array) -> mx.array:
        """Rows by number, read through one take over whole rows.

        Args:
            name: The array.
            index: ``[B, H, k]`` int32.

        Returns:
            ``[B, H, k, D]``.
        """
        return take_rows(self.whole(name), flat_rows(index, self.whole(name).shape[2]))

    def gather_all(self, index: mx.array) -> dict[str, mx.array]:
        """As ``gather`` for every array, by name."""
        if not self._buffers:
            return {}
        numbers = self._numbers(index)
        rows: dict[str, mx.array] = {}
        for place, (name, buffer) in enumerate(self._buffers.items()):
            # What is read first is used first; the others are read meanwhile.
            stream = second_stream(self._size(name, index)) if place else None
            rows[name] = take_rows(buffer, numbers, stream)
        return rows

    def reader(self, index: mx.array) -> tuple[Callable[[slice], dict[str, mx.array]], int]:
        """What reads the rows ``index`` ``[B, H, k]`` of the heads of a slice, and how many bytes all heads have.

        Raises:
            UnsupportedShapeError: No rows are held.
        """
        if not self._buffers:
            raise UnsupportedShapeError("no rows are held yet; append some first")
        numbers, buffers = self._numbers(index), dict(self._buffers)

        def read(heads: slice) -> dict[str, mx.array]:
            return {name: take_rows(buffer, numbers[:, heads]) for name, buffer in buffers.items()}

        return read, sum(self._size(name, index) for name in buffers)

    def _numbers(self, index: mx.array) -> mx.array:
        return flat_rows(index, next(iter(self._buffers.values())).shape[2])

    def _size(self, name: str, index: mx.array) -> int:
        buffer = self._buffers[name]
        return buffer.nbytes // buffer.shape[2] * index.shape[2]

    def select(self, index: mx.array) -> GrowingArrays:
        """The rows ``index`` of every array, as an instance of their own that fits exactly."""
        chosen = GrowingArrays()
        chosen.load(self.gather_all(index))
        return chosen

    def keep(self, index: mx.array) -> None:
        """Drop all rows but ``index``; the buffers then fit exactly."""
        self._buffers = self.gather_all(index)
        self.count = self._base = index.shape[2]

    def drop_last(self, count: int) -> None:
        """Forget the last ``count`` rows; capacity falls to what it would be without them."""
        self.count -= count
        if self.count == 0:
            self._buffers, self._base = {}, 0
            return
        self._base = min(self._base, self.count)
        capacity = _capacity(self._base, self.count)
        for name, buffer in self._buffers.items():
            if capacity < buffer.shape[2]:
                # A copy: a view would hold the whole buffer.
                self._buffers[name] = mx.contiguous(buffer[..., :capacity, :])

    def arrays(self) -> dict[str, mx.array]:
        """The rows held, by name; empty when there are none."""
        return {name: self.live(name) for name in self._buffers}

    def buffers(self) -> list[mx.array]:
        """The buffers themselves, spare rows included; empty when no row is held."""
        return list(self._buffers.values())

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Take over what ``arrays`` gave; the buffers then fit exactly."""
        # Arrays of their own: these buffers are written to.
        self._buffers = {name: mx.array(array) for name, array in arrays.items()}
        if arrays:
            self.count = self._base = next(iter(arrays.values())).shape[2]

    def nbytes(self, name: str) -> int:
        """Bytes of one buffer, spare capacity included; 0 when nothing is held."""
        return self._buffers[name].nbytes if name in self._buffers else 0
