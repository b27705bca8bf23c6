"""``veloxquant bench memory`` with settings of TurboQuant on the sample model: ``python bench_memory_model.py``.

A prompt of 4,000 tokens and 100 more. Words are options of the command. ``nox -s bench`` runs this file.
"""

from __future__ import annotations

import sys

from veloxquant.cli import main

SETTINGS = ("bits=1", "bits=2", "bits=2,value_bits=4", "bits=4,value_bits=8")

if __name__ == "__main__":
    arms = [word for text in SETTINGS for word in ("--arm", f"{text.replace('=', ' ')}=turboquant_rvq:{text}")]
    sys.exit(main(["bench", "memory", "--model", "sample", "--lengths", "4000", *arms, *sys.argv[1:]]))
