"""Scalar codebooks for the coordinates of a random unit vector, computed once per dimension in float64.

A coordinate of a uniformly random unit vector in d dimensions, times sqrt(d), has the density
``(1 - x^2 / d)^((d - 3) / 2)`` and tends to a standard normal. All levels here are in that scale.
Sources: Max 1960 and Lloyd 1982 for the conditions; TurboQuant, arXiv:2504.19874, section 3, for the density.
"""

from __future__ import annotations

import functools
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Codebook",
    "distortion",
    "gaussian_levels",
    "key_codebook",
    "laplace_levels",
    "matched_levels",
    "uniform_codebook",
    "uniform_step",
    "value_codebook",
]

Floats = NDArray[np.float64]

_GRID = 200_001
_LAST = 12.0
_MOST_STEPS = 5000


Kind = Literal["laplace", "matched", "uniform"]


@attrs.frozen(eq=False)
class Codebook:
    """Levels of a quantizer in two stages, or in one.

    Args:
        first: Levels of stage 1, ascending.
        second: Levels of stage 2, ascending, or None.
        folded: Whether stage 2 describes the residual times the sign of the stage-1 level; its index is then
            mirrored where that sign is negative, so that codes ascend with their levels.
        step: Distance of all levels of a uniform grid, else None.
    """

    first: Floats
    second: Floats | None = None
    folded: bool = False
    step: float | None = None

    @property
    def levels(self) -> Floats:
        """The level of every code; a code is the index of stage 1 followed by that of stage 2."""
        if self.second is None:
            return self.first
        if not self.folded:
            return (self.first[:, None] + self.second).reshape(-1)
        signs = np.sign(self.first)[:, None]
        return (self.first[:, None] + np.where(signs > 0, self.second, -self.second[::-1])).reshape(-1)


@functools.cache
def key_codebook(kind: Kind, bits: int, dim: int) -> Codebook:
    """The codebook for keys: two stages of ``bits`` bits.

    Args:
        kind: ``laplace``: stage 2 is a Laplacian Lloyd-Max quantizer with the variance of the residual.
            ``matched``: stage 2 is trained on the residual itself, folded by sign. ``uniform``: both stages are
            halves of the indices of one uniform grid.
        bits: Bits of each stage.
        dim: Dimension of the vectors.
    """
    if kind == "uniform":
        return uniform_codebook(2 * bits, dim)
    first = gaussian_levels(bits, dim)
    if kind == "matched":
        return Codebook(first, matched_levels(bits, dim), folded=True)
    return Codebook(first, laplace_levels(bits) * np.sqrt(distortion(Codebook(first), dim)))


@functools.cache
def value_codebook(kind: Kind, bits: int, dim: int) -> Codebook:
    """The codebook for values: the uniform grid, or Lloyd-Max levels where keys have separate stages."""
    return uniform_codebook(bits, dim) if kind == "uniform" else Codebook(gaussian_levels(bits, dim))


@functools.cache
def uniform_codebook(bits: int, dim: int) -> Codebook:
    """The best uniform grid of ``2^bits`` levels that lie symmetric around zero."""
    step = uniform_step(bits, dim)
    return Codebook((np.arange(2**bits) - (2**bits - 1) / 2) * step, step=step)


@functools.cache
def distortion(book: Codebook, dim: int | None = None) -> float:
    """Mean squared error per coordinate, for unit variance."""
    points, weights = _half_density(dim)
    rest = points - book.first[np.searchsorted(_thresholds(book.first), points)]
    if book.second is not None:
        # Points are positive, and so are their stage-1 levels: folding changes nothing here.
        rest = rest - book.second[np.searchsorted(_thresholds(book.second), rest)]
    return float((weights * rest**2).sum())


@functools.cache
def gaussian_levels(bits: int, dim: int | None = None) -> Floats:
    """Lloyd-Max levels for a coordinate of a random unit vector times sqrt(dim); None: the normal limit."""
    points, weights = _half_density(dim)
    half = _lloyd(points, weights, 2 ** (bits - 1))
    return np.concatenate([-half[::-1], half])


@functools.cache
def laplace_levels(bits: int) -> Floats:
    """Lloyd-Max levels for a Laplace variable of unit variance."""
    points = np.linspace(0.0, 40.0, 4 * _GRID)
    half = _lloyd(points, np.exp(-np.sqrt(2.0) * points), 2 ** (bits - 1))
    return np.concatenate([-half[::-1], half])


@functools.cache
def matched_levels(bits: int, dim: int | None = None) -> Floats:
    """Lloyd-Max levels for the stage-1 residual times the sign of its level."""
    points, weights = _half_density(dim)
    half = gaussian_levels(bits, dim)[2 ** (bits - 1) :]
    residual = points - half[np.searchsorted(_thresholds(half), points)]
    order = np.argsort(residual, kind="stable")
    return _lloyd(residual[order], weights[order], 2**bits)


@functools.cache
def uniform_step(bits: int, dim: int | None = None) -> float:
    """The step of the best uniform grid of ``2^bits`` levels that lie symmetric around zero."""
    points, weights = _half_density(dim)
    top = 2 ** (bits - 1) - 1

    def error(step: float) -> float:
        level = (np.minimum(np.floor(points / step), top) + 0.5) * step
        return float(np.sum(weights * (points - level) ** 2))

    low: float = 0.5 / 2**bits
    high: float = 16.0 / 2**bits
    for _ in range(80):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if error(left) < error(right) else (left, high)
    return float(low + high) / 2


def _half_density(dim: int | None) -> tuple[Floats, Floats]:
    """Points x >= 0 and their probabilities, which sum to one: the density is symmetric."""
    # Below three dimensions the density has poles; the normal one serves there.
    normal = dim is None or dim < 3
    last = _LAST if dim is None or normal else min(_LAST, dim**0.5)
    edges = np.linspace(0.0, last, _GRID)
    points = (edges[:-1] + edges[1:]) / 2
    if dim is None or normal:
        weights = np.exp(-(points**2) / 2)
    else:
        weights = np.exp((dim - 3) / 2 * np.log1p(-np.minimum(points**2 / dim, 1 - 1e-15)))
    return points, weights / weights.sum()


def _thresholds(levels: Floats) -> Floats:
    return (levels[:-1] + levels[1:]) / 2


def _lloyd(points: Floats, weights: Floats, count: int) -> Floats:
    """Levels that are the means of their cells, cells being bounded by the midpoints; points ascend."""
    edges = np.concatenate([points[:1], (points[1:] + points[:-1]) / 2, points[-1:]])
    mass = np.concatenate([[0.0], np.cumsum(weights)])
    moment = np.concatenate([[0.0], np.cumsum(weights * points)])
    quantiles = (np.arange(count) + 0.5) / count * mass[-1]
    levels: Floats = np.interp(quantiles, mass, edges)
    for _ in range(_MOST_STEPS):
        # Between two points of the grid, so that levels settle to more than its resolution.
        cuts = np.concatenate([edges[:1], _thresholds(levels), edges[-1:]])
        cells = np.maximum(np.diff(np.interp(cuts, edges, mass)), 1e-300)
        moved: Floats = np.diff(np.interp(cuts, edges, moment)) / cells
        if np.abs(moved - levels).max() < 1e-10:
            return moved
        levels = moved
    return levels
