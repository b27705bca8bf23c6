"""RocketKV for veloxquant: evict the prompt a little, then read a little of what is left at every decode step.

The functions that split a ratio and that rank pages are public; other methods can build on them.
"""

from veloxquant_rocketkv.config import RocketKVConfig
from veloxquant_rocketkv.probe import select_indices
from veloxquant_rocketkv.sparse import choose_channels
from veloxquant_rocketkv.sparse import page_bounds
from veloxquant_rocketkv.sparse import page_scores
from veloxquant_rocketkv.sparse import rank
from veloxquant_rocketkv.split import BudgetSplit
from veloxquant_rocketkv.split import split_budget
from veloxquant_rocketkv.split import split_compression_ratio
from veloxquant_rocketkv.split import split_pages_and_channels

__all__ = [
    "BudgetSplit",
    "RocketKVConfig",
    "choose_channels",
    "page_bounds",
    "page_scores",
    "rank",
    "select_indices",
    "split_budget",
    "split_compression_ratio",
    "split_pages_and_channels",
]
