"""One decode step of A2ATS against the plain cache, and against veloxquant-mlx's a2ats where that is installed.

``python plugins/a2ats/benchmarks/steps.py [length ...]``: compress at 4,096 rows and retrieve at 32,768, timed as
``veloxquant bench speed`` does, which does not know this method of veloxquant-mlx. Codebooks are random: they take as
long as learned ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from veloxquant import LayerSpec
from veloxquant.bench.arm_options import chosen_arms
from veloxquant.bench.arms import Arm
from veloxquant.bench.arms import plain_arm
from veloxquant.bench.race import LeftOut
from veloxquant.bench.records import Writer
from veloxquant.bench.records import new_run
from veloxquant.bench.speed import SpeedPlan
from veloxquant.bench.speed import measure_speed
from veloxquant.bench.speed_blas import Measured
from veloxquant.cli.bench_progress import bench_progress
from veloxquant.cli.bench_speed_table import show_speed

LENGTHS = (4096, 32768)
COMPRESS = "compress=a2ats:allow_uncalibrated=true"
RETRIEVE = "retrieve, fraction 0.1=a2ats:allow_uncalibrated=true,mode=retrieve,retrieval_fraction=0.1,codebook_bits=12"


def peer() -> list[Arm]:
    """The a2ats of veloxquant-mlx, if it is installed."""
    if importlib.util.find_spec("veloxquant_mlx") is None:
        return []

    def one(layer: LayerSpec) -> Any:
        config = importlib.import_module("veloxquant_mlx.cache.base").KVCacheConfig
        cache = importlib.import_module("veloxquant_mlx.cache.a2ats_cache").A2ATSKVCache
        base = 10000.0 if layer.rope is None else layer.rope.base
        return cache(config(method="a2ats", head_dim=layer.head_dim, a2ats_rope_base=base))

    return [Arm(name="veloxquant-mlx a2ats", method="veloxquant-mlx a2ats", role="peer", make=one, make_layer=one)]


def main() -> None:
    """Measure and print."""
    lengths = tuple(int(word) for word in sys.argv[1:]) or LENGTHS
    plan = SpeedPlan(lengths=lengths, steps=15, prefill_rows=0)
    arms = {
        length: [plain_arm(), *chosen_arms(None, arms=[COMPRESS]), *peer()]
        if length <= LENGTHS[0]
        else [plain_arm(), *chosen_arms(None, arms=[RETRIEVE])]
        for length in lengths
    }
    run = new_run("speed", dtype=plan.shape.dtype, arguments={"shape": str(plan.shape)})
    left_out: list[LeftOut] = []
    with Writer(run) as writer, bench_progress() as progress:
        measure_speed(arms, plan, writer, progress.track, left_out)
    show_speed(
        [Measured(run, left_out=[{"arm": one.arm, "where": one.where, "reason": one.reason} for one in left_out])]
    )


if __name__ == "__main__":
    main()
