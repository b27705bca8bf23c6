"""``veloxquant bench speed`` with settings of TurboQuant: ``python bench_step.py [--peer veloxquant-mlx ...]``.

Words are options of the command, such as ``--dtype bfloat16``. ``nox -s bench`` runs this file.
"""

from __future__ import annotations

import sys

from veloxquant.cli import main

SETTINGS = (
    "bits=1",
    "bits=2",
    "bits=2,value_bits=4",
    "bits=4,value_bits=8",
    "codebook=laplace,bits=1",
    "codebook=laplace,bits=2",
    "codebook=matched,bits=1",
    "codebook=matched,bits=2",
)

if __name__ == "__main__":
    arms = [word for text in SETTINGS for word in ("--arm", f"{text.replace('=', ' ')}=turboquant_rvq:{text}")]
    sys.exit(main(["bench", "speed", *arms, *sys.argv[1:]]))
