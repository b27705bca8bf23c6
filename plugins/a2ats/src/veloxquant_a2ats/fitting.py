"""Centroids of one layer, learned from what it saw of a text, and how wrong its logits are with them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from typing import Literal
from typing import cast

import attrs
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from veloxquant_a2ats.codebook import QUANTILES
from veloxquant_a2ats.codebook import Codebook
from veloxquant_a2ats.codebook import compress_codebook
from veloxquant_a2ats.codebook import metric_blocks
from veloxquant_a2ats.codebook import retrieve_codebook
from veloxquant_a2ats.kmeans import centroid_count
from veloxquant_a2ats.kmeans import kmeans
from veloxquant_a2ats.recorder import LayerData
from veloxquant_a2ats.scoring import rebuild_keys

__all__ = ["Plan", "fit_layer"]


@attrs.frozen(kw_only=True)
class Plan:
    """What to learn, and how.

    Args:
        mode: The mode to learn for.
        sub_dim: Channels of a sub-vector in compress mode.
        bits: Bits of a code.
        beta: Weight of the queries in the metric of compress mode.
        fraction: Share of keys coded query-aware, for the errors that are measured.
        far_position: Distance of far tokens.
        stretch: Tokens read in one piece.
        tokens: Tokens to read in all.
        iterations: Lloyd iterations.
        seed: Seed of everything random.
    """

    mode: Literal["compress", "retrieve"] = "compress"
    sub_dim: int = 8
    bits: int = 8
    beta: float = 0.5
    fraction: float = 0.2
    far_position: int = 2048
    stretch: int = 1024
    tokens: int = 16384
    iterations: int = 20
    seed: int = 0


def fit_layer(
    data: LayerData, held: LayerData, plan: Plan, index: int, *, compared: bool = True
) -> tuple[dict[str, mx.array], dict[str, float]]:
    """Learn the codebook of one layer, and measure it.

    Args:
        data: What the layer saw of the text to learn from.
        held: What it saw of the text to measure on.
        plan: What to learn.
        index: Index of the layer, for the seed.
        compared: Also learn an ordinary codebook and measure both; it is not kept.

    Returns:
        Arrays for ``compress_codebook`` or ``retrieve_codebook``, and mean squared errors of held-out logits:
        ``plain`` of an ordinary codebook of the same size, ``query_aware`` of this one; none when not compared.
    """
    seed = plan.seed + 1000 * index
    arrays = (_fit_compress if plan.mode == "compress" else _fit_retrieve)(data, plan, seed)
    if not compared:
        return arrays, {}
    width = plan.sub_dim if plan.mode == "compress" else data.keys.shape[2]
    ordinary = {**arrays, "keys": _learn(data.keys, None, width, plan, seed)}
    if plan.mode == "retrieve":
        books = retrieve_codebook(ordinary, aware=False), retrieve_codebook(arrays, aware=True)
    else:
        books = (
            compress_codebook(ordinary, beta=plan.beta, fraction=0.0, aware=False),
            compress_codebook(arrays, beta=plan.beta, fraction=plan.fraction, aware=True),
        )
    return arrays, {"plain": _error(books[0], held), "query_aware": _error(books[1], held)}


def _moment(data: LayerData) -> npt.NDArray[np.float64]:
    """H in units of the RMS of its entries, a little away from singular."""
    rms = np.sqrt((data.moment**2).mean(axis=(1, 2), keepdims=True))
    moment: npt.NDArray[np.float64] = data.moment / np.maximum(rms, 1e-30) + 1e-6 * np.eye(data.moment.shape[1])
    return moment


def _spread(rows: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean of rows ``[H, N, D]`` and their largest distance from it, by channel ``[H, D]``."""
    center = rows.mean(axis=1, dtype=np.float64).astype(np.float32)
    return center, np.abs(rows - center[:, None]).max(axis=1)


def _learn(
    rows: npt.NDArray[np.float32],
    factors: npt.NDArray[Any] | None,
    width: int,
    plan: Plan,
    seed: int,
) -> mx.array:
    """Centroids ``[H, M, K, width]`` of the sub-vectors of rows ``[H, N, D]``.

    Args:
        rows: The rows.
        factors: Cholesky factors of the metrics ``[H, M, width, width]``, or None for the plain distance.
        width: Channels of a sub-vector.
        plan: How.
        seed: Seed.
    """
    heads, count, dim = rows.shape
    parts = dim // width
    wanted = centroid_count(count, 2**plan.bits)

    def one(place: int) -> npt.NDArray[np.float64]:
        head, part = divmod(place, parts)
        points = rows[head, :, part * width : (part + 1) * width].astype(np.float64)
        center = points.mean(axis=0)
        points -= center
        # In the space of k L the metric is the plain distance.
        factor = None if factors is None else factors[head, part]
        turned = points if factor is None else points @ factor
        found, _ = kmeans(turned.astype(np.float32), wanted, seed=seed + place, iterations=plan.iterations)
        back: npt.NDArray[np.float64] = found.astype(np.float64)
        if factor is not None:
            back = np.linalg.solve(factor.T, back.T).T
        back += center
        return back

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = np.stack(list(pool.map(one, range(heads * parts))))
    return mx.array(found.reshape(heads, parts, wanted, width).astype(np.float32))


def _fit_compress(data: LayerData, plan: Plan, seed: int) -> dict[str, mx.array]:
    assert data.values is not None
    moment = _moment(data)
    center, reach = _spread(data.keys)
    value_center, value_reach = _spread(data.values)
    blocks = np.array(metric_blocks(mx.array(moment.astype(np.float32)), plan.sub_dim, plan.beta), dtype=np.float64)
    arrays = {
        "keys": _learn(data.keys, np.linalg.cholesky(blocks), plan.sub_dim, plan, seed),
        "values": _learn(data.values, None, plan.sub_dim, plan, seed + 500),
        "key_center": mx.array(center),
        "key_reach": mx.array(reach),
        "value_center": mx.array(value_center),
        "value_reach": mx.array(value_reach),
        "moment": mx.array(moment.astype(np.float32)),
        "factor": mx.array(np.linalg.cholesky(moment).astype(np.float32)),
        "energies": mx.zeros((center.shape[0], QUANTILES)),
    }
    energy = compress_codebook(arrays, beta=plan.beta, fraction=1.0, aware=True).energy
    assert energy is not None
    energies = np.array(energy.of(mx.array(data.keys)[None]))[0, :, :, 0]
    arrays["energies"] = mx.array(np.quantile(energies, np.linspace(0, 1, QUANTILES), axis=1).T.astype(np.float32))
    return arrays


def _fit_retrieve(data: LayerData, plan: Plan, seed: int) -> dict[str, mx.array]:
    moment = _moment(data)
    center, reach = _spread(data.keys)
    dim = data.keys.shape[2]
    return {
        "keys": _learn(data.keys, np.linalg.cholesky(moment)[:, None], dim, plan, seed),
        "key_center": mx.array(center),
        "key_reach": mx.array(reach),
        "moment": mx.array(moment.astype(np.float32)),
    }


def _error(codebook: Codebook, held: LayerData) -> float:
    """Mean of (q.k - q.c)^2 over held-out queries and keys, logits scaled: e H e^T with the held-out queries' H."""
    keys = mx.array(held.keys)[None]
    codes, _ = codebook.encode_keys(keys)
    wrong = (keys - rebuild_keys(codebook.keys, codes))[0] * held.scale
    moment = mx.array(held.moment.astype(np.float32))
    return cast(float, ((wrong @ moment) * wrong).sum(axis=-1).mean().item())
