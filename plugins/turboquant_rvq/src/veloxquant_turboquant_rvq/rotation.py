"""Seeded rotations that spread every vector's energy evenly over its coordinates.

Two rounds of random signs and a Hadamard transform where ``mx.hadamard_transform`` serves the dimension (one round
leaves sparse vectors far from uniform), a dense random orthogonal matrix elsewhere. TurboQuant, arXiv:2504.19874,
uses the dense one throughout.
"""

from __future__ import annotations

import functools
from typing import Literal

import attrs
import mlx.core as mx
import numpy as np

__all__ = ["Rotation", "rotation"]

# mx.hadamard_transform takes these times a power of two and is symmetric for them, so that it undoes itself. It also
# takes 20 and 28, where it is not, and computes nonsense for all other sizes; 12 itself does not compile on CUDA.
_FACTORS = (1, 12)


@attrs.frozen(eq=False)
class Rotation:
    """An orthogonal matrix, applied from the right to row vectors.

    Args:
        dim: Dimension.
        signs: Two rows of random signs ``[2, dim]`` fp32 for the Hadamard rounds, or None.
        matrix: The dense matrix ``[dim, dim]`` fp32, or None.
    """

    dim: int
    signs: mx.array | None
    matrix: mx.array | None
    # The rows of ``signs``: taking one out costs as much as the product with it.
    _rounds: tuple[mx.array, ...] = attrs.field(init=False)

    @_rounds.default
    def _split(self) -> tuple[mx.array, ...]:
        return () if self.signs is None else tuple(mx.array(row) for row in np.array(self.signs))

    def apply(self, rows: mx.array) -> mx.array:
        """Rotate rows ``[..., dim]``; the result is fp32."""
        rows = rows.astype(mx.float32)
        if self.matrix is not None:
            return rows @ self.matrix
        first, second = self._rounds
        return mx.hadamard_transform(mx.hadamard_transform(rows * first) * second)

    def undo(self, rows: mx.array) -> mx.array:
        """Rotate rows back; the result is fp32."""
        rows = rows.astype(mx.float32)
        if self.matrix is not None:
            return rows @ self.matrix.T
        first, second = self._rounds
        return mx.hadamard_transform(mx.hadamard_transform(rows) * second) * first

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, which all caches of a model share per layer."""
        return sum(array.nbytes for array in (self.signs, self.matrix, *self._rounds) if array is not None)

    def __deepcopy__(self, memo: object) -> Rotation:
        return self


@functools.lru_cache(maxsize=256)
def rotation(dim: int, seed: int, part: Literal["keys", "values"] = "keys") -> Rotation:
    """The rotation of a dimension and a seed, shared by all who ask for it.

    Args:
        dim: Dimension.
        seed: Seed of the signs or of the dense matrix.
        part: Keys and values are rotated independently.
    """
    random = np.random.default_rng([seed, dim, part == "values"])
    if _hadamard_serves(dim):
        return Rotation(dim, mx.array(random.choice(np.array([-1, 1], dtype=np.float32), size=(2, dim))), None)
    orthogonal, upper = np.linalg.qr(random.standard_normal((dim, dim)))
    # The signs of the diagonal make it uniform over all rotations.
    return Rotation(dim, None, mx.array((orthogonal * np.sign(np.diag(upper))).astype(np.float32)))


def _hadamard_serves(dim: int) -> bool:
    return dim != 12 and any(dim % factor == 0 and (dim // factor).bit_count() == 1 for factor in _FACTORS)
