"""Fixtures of the core's tests: a registry of toy methods, random rows, and caches made of both."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest

from veloxquant.bench.environment import back_end
from veloxquant.build import get_cache
from veloxquant.registry import Registry
from veloxquant.registry import default_registry
from veloxquant.types import LayerSpec


def _load(name):
    # Test folders are no packages, so a plain import would not find a sibling.
    spec = importlib.util.spec_from_file_location(f"core_test_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_load("helpers")
_toys = _load("toy_methods")


@pytest.fixture(scope="session")
def toys():
    """The module of toy methods."""
    return _toys


@pytest.fixture
def plugins(toys):
    """One fresh instance of every toy method, by name."""
    return {kind.name: kind() for kind in toys.ALL}


@pytest.fixture
def registry(plugins):
    """A registry that knows the toy methods and nothing that is installed."""
    registry = Registry(entry_points=[], blocked=[])
    for plugin in plugins.values():
        registry.register(plugin)
    return registry


@pytest.fixture
def proxy(registry):
    """Make a cache in proxy mode: ``proxy(name, config)``."""
    return lambda name, config=None: get_cache(name, config, registry=registry)


@pytest.fixture
def routed(registry):
    """Make a cache in routed mode: ``routed(name, config)``."""
    return lambda name, config=None: get_cache(name, config, layer=LayerSpec(query_mode="routed"), registry=registry)


@pytest.fixture
def rows():
    """Draw random keys and values: ``rows(S, batch=, heads=, key_dim=, value_dim=, dtype=)``."""
    generator = np.random.default_rng(7)

    def draw(count, *, batch=1, heads=2, key_dim=8, value_dim=8, dtype="float32"):
        def one(dim):
            return mx.array(generator.standard_normal((batch, heads, count, dim)).astype(np.float32)).astype(
                getattr(mx, dtype)
            )

        return one(key_dim), one(value_dim)

    return draw


@pytest.fixture
def queries():
    """Draw random queries: ``queries(S, heads=, dim=)``."""
    generator = np.random.default_rng(11)
    return lambda count, *, batch=1, heads=4, dim=8: mx.array(
        generator.standard_normal((batch, heads, count, dim)).astype(np.float32)
    )


@pytest.fixture
def as_numpy():
    """Turn an array into numpy, exactly (bf16 has no numpy type)."""
    return lambda array: np.array(array.astype(mx.float32))


@pytest.fixture
def attend_numpy():
    """Plain softmax attention in float64: ``attend_numpy(queries, keys, values, scale, mask)``."""

    def attend(queries, keys, values, scale, mask):
        q, k, v = (np.array(array.astype(mx.float32), dtype=np.float64) for array in (queries, keys, values))
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        logits = np.where(mask, np.einsum("bhld,bhnd->bhln", q, k) * scale, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.einsum("bhln,bhnd->bhld", weights / weights.sum(axis=-1, keepdims=True), v)

    return attend


@pytest.fixture
def reachable_bytes():
    """Sum the bytes of every distinct array that can be reached from an object."""

    def walk(item, seen, found):
        if id(item) in seen:
            return
        seen[id(item)] = item
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, Mapping):
            for value in item.values():
                walk(value, seen, found)
        elif isinstance(item, list | tuple):
            for value in item:
                walk(value, seen, found)
        elif attrs.has(type(item)):
            for field in attrs.fields(type(item)):
                walk(getattr(item, field.name), seen, found)
        elif hasattr(item, "__dict__"):
            walk(vars(item), seen, found)

    def total(item):
        found = []
        walk(item, {}, found)
        return sum(array.nbytes for array in found)

    return total


@pytest.fixture(scope="module")
def packed_products():
    """Lets mlx-lm's quantized cache work on CUDA, where MLX has no product with views, nor with rows for a group.

    The tests are of the bench, which leaves such arms out there.
    """
    if back_end() != "cuda":
        yield
        return
    usual = mx.quantized_matmul

    def with_copies(x, *packed, **options):
        return usual(
            mx.contiguous(x),
            *(mx.contiguous(mx.broadcast_to(one, (*x.shape[:-2], *one.shape[-2:]))) for one in packed),
            **options,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "quantized_matmul", with_copies)
        yield


@pytest.fixture
def plain_output(monkeypatch):
    """Output without colour, 100 columns wide, wherever the tests run."""
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def register_alone(monkeypatch):
    """Registers plugins with the default registry, which then lists just the names given, whatever is installed."""
    default_registry.cache_clear()

    def register(names, *kinds):
        registry = default_registry()
        monkeypatch.setattr(registry, "names", lambda: names)
        for kind in kinds:
            registry.register(kind())

    yield register
    default_registry.cache_clear()
