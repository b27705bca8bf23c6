"""Look-ups and sums by code, against plain numpy loops in fp64."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_a2ats.scoring import query_table
from veloxquant_a2ats.scoring import rebuild_values
from veloxquant_a2ats.scoring import scores_from
from veloxquant_a2ats.scoring import sum_by_code
from veloxquant_a2ats.scoring import weights_by_code

SHAPES = [(1, 1, 1, 1, 2, 1, 1), (2, 2, 3, 50, 5, 3, 4), (1, 3, 1, 300, 256, 2, 7), (1, 2, 4, 9, 700, 1, 8)]


def drawn(shape, seed=3):
    """Weights, codes and centroids for B, Hkv, G, rows, K, M and d."""
    batch, heads, group, rows, count, parts, dim = shape
    rng = np.random.default_rng(seed)
    weights = rng.random((batch, heads, group, rows)).astype(np.float32)
    codes = rng.integers(0, count, (batch, heads, rows, parts)).astype(np.uint8 if count <= 256 else np.uint16)
    return weights, codes, rng.standard_normal((heads, parts, count, dim)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_add_up_by_code(shape):
    weights, codes, _ = drawn(shape)
    batch, heads, group, rows, count, parts, _ = shape
    expected = np.zeros((batch, heads, parts, group, count))
    for b, h, r, m in np.ndindex(batch, heads, rows, parts):
        expected[b, h, m, :, codes[b, h, r, m]] += weights[b, h, :, r]
    found = weights_by_code(mx.array(weights), mx.array(codes), count)
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_by_code_are_those_of_the_values_that_codes_stand_for(shape):
    weights, codes, centroids = drawn(shape)
    batch, heads, _, rows, count, parts, dim = shape
    values = np.zeros((batch, heads, rows, parts * dim))
    for b, h, r, m in np.ndindex(batch, heads, rows, parts):
        values[b, h, r, m * dim : (m + 1) * dim] = centroids[h, m, codes[b, h, r, m]]
    expected = weights.astype(np.float64) @ values
    by_code = weights_by_code(mx.array(weights), mx.array(codes), count)
    np.testing.assert_allclose(np.array(sum_by_code(by_code, mx.array(centroids))), expected, rtol=1e-4, atol=1e-4)
    rebuilt = rebuild_values(mx.array(centroids), mx.array(codes))
    np.testing.assert_allclose(np.array(rebuilt), values, atol=1e-6)


def test_codes_that_are_not_computed_yet_serve_as_well():
    weights, codes, _ = drawn(SHAPES[1])
    fresh = (mx.array(codes).astype(mx.int32) + 3 - 3).astype(mx.uint8)
    found = weights_by_code(mx.array(weights) * 1.0, fresh, 5)
    assert mx.array_equal(found, weights_by_code(mx.array(weights), mx.array(codes), 5))


def test_one_table_serves_the_queries_of_several_sequences():
    heads, parts, count, dim, group, sequences = 2, 3, 6, 4, 2, 3
    rng = np.random.default_rng(4)
    queries = rng.standard_normal((sequences, heads, group, parts * dim)).astype(np.float32)
    centroids = rng.standard_normal((heads, parts, count, dim)).astype(np.float32)
    stacked = mx.array(queries).swapaxes(0, 1).reshape(1, heads, -1, parts * dim)
    tables = mx.split(query_table(stacked, mx.array(centroids)), sequences, axis=3)
    for sequence, table in enumerate(tables):
        codes = rng.integers(0, count, (1, heads * parts, 5 + sequence, 1)).astype(np.uint8)
        split = codes[0, :, :, 0].reshape(heads, parts, -1)
        keys = np.stack(
            [np.concatenate([centroids[h, m, split[h, m]] for m in range(parts)], axis=-1) for h in range(heads)]
        )
        expected = queries[sequence].astype(np.float64) @ keys.swapaxes(-1, -2)
        np.testing.assert_allclose(np.array(scores_from(table, mx.array(codes)))[0], expected, rtol=1e-4, atol=1e-5)
