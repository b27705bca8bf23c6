"""Decoding after a long prompt with RocketKV's settings: ``veloxquant bench speed --model``, ``python bench_model.py``.

Words are options of the command, such as ``--prompt-tokens 16000``. ``nox -s bench`` runs this file.
"""

from __future__ import annotations

import sys

from veloxquant.cli import main

ARMS = (
    "rocketkv 4=rocketkv:compression_ratio=4",
    "rocketkv 8=rocketkv:compression_ratio=8",
    "rocketkv 8, stage 1 off=rocketkv:stage1=false",
)
WORDS = ("--model", "sample", "--prompt-tokens", "8000", "--lengths", "", "--prefill-rows", "0", "--steps", "12")

if __name__ == "__main__":
    arms = [word for arm in ARMS for word in ("--arm", arm)]
    # With the BLAS that this process has: another prompt with the slow one would take many minutes.
    sys.exit(main(["bench", "speed", *WORDS, "--blas", "here", *arms, *sys.argv[1:]]))
