"""``veloxquant bench speed`` with RocketKV's settings: ``python bench_step.py [--peer veloxquant-mlx ...]``.

Words are options of the command. ``nox -s bench`` runs this file.
"""

from __future__ import annotations

import sys

from veloxquant.cli import main

RATIOS = (
    "rocketkv 8=rocketkv:compression_ratio=8",
    "rocketkv 16=rocketkv:compression_ratio=16",
    "rocketkv 8, stage 1 off=rocketkv:compression_ratio=8,stage1=false",
)
# Rows in 4 bits on average; an eighth of them is read.
PACKED = "stage1=false,compression_ratio=4,storage=turboquant_rvq,storage_config.bits=2,storage_config.value_bits=4"
COMPACT = f"{PACKED},summary_bits=4,head_topk1=64"
OVER_CODES = (
    f"packed, keys ranked=rocketkv:{PACKED},ranking=rows",
    f"packed, pages of 2=rocketkv:{COMPACT},page_size=2",
    f"packed, pages of 4=rocketkv:{COMPACT},page_size=4",
)


def speed(*words: str, arms: tuple[str, ...]) -> int:
    """Run the command."""
    return main(["bench", "speed", *(word for arm in arms for word in ("--arm", arm)), *words, *sys.argv[1:]])


if __name__ == "__main__":
    code = speed("--lengths", "1024,4096,32768", arms=(*RATIOS, *OVER_CODES))
    # Without groups: as many rows as four times the tokens under 8 heads.
    code = code or speed("--query-heads", "128", "--kv-heads", "32", "--lengths", "1024", arms=RATIOS[:1])
    sys.exit(code)
