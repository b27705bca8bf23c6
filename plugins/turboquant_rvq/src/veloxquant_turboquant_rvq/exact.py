"""Rows that stay as they came beside the packed ones: keys, and values where those are quantized too."""

from __future__ import annotations

import attrs
import mlx.core as mx

__all__ = ["ExactRows"]


@attrs.frozen(eq=False)
class ExactRows:
    """Consecutive rows.

    Args:
        keys: ``[B, Hkv, n, Dk]``.
        values: ``[B, Hkv, n, Dv]``, or None where the packed store keeps values as they came.
    """

    keys: mx.array
    values: mx.array | None

    @property
    def count(self) -> int:
        """Rows held per KV head."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of keys and of values."""
        return self.keys.nbytes, 0 if self.values is None else self.values.nbytes

    def part(self, start: int, end: int) -> ExactRows:
        """Rows ``start`` to ``end`` as copies: a view would hold all of them."""
        values = None if self.values is None else mx.contiguous(self.values[:, :, start:end])
        return ExactRows(mx.contiguous(self.keys[:, :, start:end]), values)

    def first(self, count: int) -> ExactRows:
        """The first ``count`` rows as a view, for as long as a call lasts."""
        return ExactRows(self.keys[:, :, :count], None if self.values is None else self.values[:, :, :count])

    def last(self, count: int) -> ExactRows:
        """The last ``count`` rows as a view, for as long as a call lasts."""
        start = self.count - count
        return ExactRows(self.keys[:, :, start:], None if self.values is None else self.values[:, :, start:])

    def followed_by(self, other: ExactRows) -> ExactRows:
        """These rows and then the others."""
        keys = mx.concatenate([self.keys, other.keys], axis=2)
        if self.values is None or other.values is None:
            return ExactRows(keys, None)
        return ExactRows(keys, mx.concatenate([self.values, other.values], axis=2))
