"""SnapKV for veloxquant: keep the prompt rows that its last queries look at, forget the others.

The selection functions are public; other methods build on them.
"""

from veloxquant_snapkv.config import SnapKVConfig
from veloxquant_snapkv.selection import append_recent
from veloxquant_snapkv.selection import keep_indices
from veloxquant_snapkv.selection import pool_scores
from veloxquant_snapkv.selection import window_scores

__all__ = ["SnapKVConfig", "append_recent", "keep_indices", "pool_scores", "window_scores"]
