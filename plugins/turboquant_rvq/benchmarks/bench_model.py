"""What each setting costs in quality, and holds, on the sample model: ``python bench_model.py [arm ...]``.

512 tokens after a 1,024-token prompt, as ``veloxquant bench quality`` measures, without the references that it puts
beside every arm: of so many settings they would take an hour. OpenBLAS makes this several times faster.
"""

from __future__ import annotations

import sys

import veloxquant
from veloxquant.bench.arm_options import chosen_arms
from veloxquant.bench.arms import Arm
from veloxquant.bench.arms import quantized_arm
from veloxquant.bench.quality_run import QualityPlan
from veloxquant.bench.quality_run import measure_quality
from veloxquant.bench.records import Writer
from veloxquant.bench.records import new_run
from veloxquant.cli.bench_progress import bench_progress
from veloxquant.cli.bench_quality_table import show_quality
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_tokens

PLAN = QualityPlan(prompt_tokens=1024, tokens=512, needle_lengths=(), references=False)
NAKED = "sinks=0,recent=0"
SETTINGS = (
    "bits=1",
    "bits=1,recent=0",
    "bits=1,sinks=0",
    f"bits=1,{NAKED}",
    "bits=1,codebook=matched",
    "bits=1,codebook=laplace",
    "bits=2",
    "bits=2,sinks=0",
    "bits=2,recent=16",
    "bits=2,recent=128",
    f"bits=2,{NAKED}",
    "bits=2,codebook=matched",
    "bits=2,codebook=laplace",
    "bits=2,value_bits=4",
    f"bits=2,value_bits=4,{NAKED}",
    "bits=2,value_bits=3",
    "bits=2,value_bits=2",
    "bits=3",
    f"bits=3,value_bits=3,{NAKED}",
    f"bits=3,value_bits=2,{NAKED}",
    "bits=4,value_bits=8",
)
PACKED = "storage=turboquant_rvq,storage_config.bits=2,storage_config.value_bits=4"
SNAPKV = ("snapkv:compression_ratio=2", f"snapkv:compression_ratio=2,{PACKED}")


def arms() -> list[Arm]:
    """Every setting, mlx-lm's quantized caches, and snapkv over plain and packed rows where it is installed."""
    words = [f"{text.replace('=', ' ')}=turboquant_rvq:{text}" for text in SETTINGS]
    if "snapkv" in veloxquant.methods():
        words += [f"{name}={text}" for name, text in zip(("snapkv 2", "snapkv 2, packed"), SNAPKV, strict=True)]
    return [quantized_arm(8), quantized_arm(4), *chosen_arms(None, arms=words)]


def main() -> None:
    """Measure and print."""
    chosen = [arm for arm in arms() if not sys.argv[1:] or arm.name in sys.argv[1:]]
    model, tokenizer = load_sample_model("float32")
    text = sample_tokens(tokenizer, PLAN.prompt_tokens + PLAN.tokens)
    run = new_run("quality", model="sample", dtype="float32")
    with Writer(run) as writer, bench_progress() as progress:
        measure_quality(model, tokenizer, text, chosen, PLAN, writer, progress.track)
    show_quality(run)


if __name__ == "__main__":
    main()
