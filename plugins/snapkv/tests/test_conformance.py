"""The conformance kit of the core, run on SnapKV."""

from veloxquant.testing import MethodTests
from veloxquant_snapkv import SnapKVConfig

DENSE = {"budget": 10**6}
PER_CHUNK = "eviction per chunk bounds memory at the price of choosing before the prompt is complete"
BY_DESIGN = {
    "prompt_attended_whole": PER_CHUNK,
    "chunk_parity": PER_CHUNK,
    "later_prompt_whole": PER_CHUNK,
    "later_prompt_stored": PER_CHUNK,
    "trim_in_prompt": "a rewound block has voted, and what it evicted stays gone",
}


class TestRatio(MethodTests):
    """As it comes: a quarter of the prompt."""

    method = "snapkv"
    dense_config = DENSE


class TestBudget(MethodTests):
    """A budget, a short window and other pooling."""

    method = "snapkv"
    config = SnapKVConfig(budget=48, window=16, sinks=2, pooling="avg", kernel_size=5)
    dense_config = DENSE


class TestChunkEviction(MethodTests):
    """Evicting after every chunk, which depends on the chunks by design."""

    method = "snapkv"
    config = SnapKVConfig(budget=64, eviction="chunk")
    dense_config = SnapKVConfig(budget=10**6, eviction="chunk")
    expected_failures = BY_DESIGN
