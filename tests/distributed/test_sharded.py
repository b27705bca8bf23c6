"""Sharded models: several processes say what one process says, method by method, and hold their heads of its rows."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.testing.sample import sample_tokens
from veloxquant.testing.toys import tiny_llama

VOCABULARY = 512  # of the toy in sharded_run.py
pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PACKED = {"storage": "turboquant_rvq", "storage_config": {"bits": 2, "value_bits": 4}}
TOY_RUNS = {
    "plain": (None, None),
    "snapkv": ("snapkv", {"budget": 48, "window": 16}),
    "snapkv-packed": ("snapkv", {"budget": 48, "window": 16, **PACKED}),
    "rocketkv": ("rocketkv", {"compression_ratio": 8.0, "window": 16, "sinks": 2, "kernel_size": 7, "topk": 8}),
    "rocketkv-turns": ("rocketkv", {"compression_ratio": 8.0, "window": 16, "topk": 16, "multi_turn": True}),
    "rocketkv-packed": ("rocketkv", {"stage1": False, "page_size": 4, "topk": 64, "summary_bits": 4, **PACKED}),
    "turboquant_rvq": ("turboquant_rvq", {"bits": 2, "value_bits": 4, "sinks": 0, "recent": 0}),
    "turboquant_rvq-matched": ("turboquant_rvq", {"bits": 2, "codebook": "matched", "recent": 16}),
    "a2ats-random": ("a2ats", {"window": 16, "sinks": 2, "allow_uncalibrated": True}),
}
SAMPLE_RUNS = {
    "plain": (None, None),
    "snapkv": ("snapkv", {"compression_ratio": 4}),
    "rocketkv": ("rocketkv", {"compression_ratio": 4}),
    "turboquant_rvq": ("turboquant_rvq", {"bits": 2, "value_bits": 4}),
}
A2ATS_RUNS = ("a2ats-compress", "a2ats-retrieve")


def learn(model, tokens, path, **plan):
    """A small codebook of a whole model."""
    from veloxquant_a2ats.calibration import calibrate_model
    from veloxquant_a2ats.codebook_file import write_codebook
    from veloxquant_a2ats.fitting import Plan

    settings = {"tokens": len(tokens), "stretch": 128, "far_position": 64, "iterations": 4, **plan}
    write_codebook(path, *calibrate_model(model, tokens, Plan(**settings), on_stage=_quiet, on_progress=_quiet))


def _quiet(*_):
    pass


def a2ats_runs(model, tokens, folder, bits):
    """A run for each mode of a2ats, with codebooks that were learned from the whole model."""
    runs = {}
    for mode in ("compress", "retrieve"):
        path = folder / f"{mode}.safetensors"
        learn(model, tokens, path, mode=mode, bits=bits)
        options = {"mode": mode, "codebook": str(path), "codebook_bits": bits, "far_position": 64}
        runs[f"a2ats-{mode}"] = ("a2ats", {**options, "window": 16, "sinks": 2})
    return runs


@pytest.fixture(scope="module")
def toy(run_job, tmp_path_factory):
    """Results of one process and of two, with the folders of their arrays."""
    model = tiny_llama(kv_heads=8, query_heads=16, layers=3, head_dim=32, vocab=VOCABULARY)
    tokens = mx.random.randint(0, VOCABULARY, (2048,), key=mx.random.key(7)).tolist()
    runs = {**TOY_RUNS, **a2ats_runs(model, tokens, tmp_path_factory.mktemp("codebooks"), bits=5)}
    job = {"model": "toy", "prompt": 200, "tokens": 32, "runs": runs, "files": list(runs), "calibrate": True}
    return run_job(job, 1), run_job(job, 2)


@pytest.fixture(scope="module")
def sample(run_job, tmp_path_factory):
    """The same for the sample model, which has three KV heads, and three processes."""
    from veloxquant.testing.sample import load_sample_model

    model, tokenizer = load_sample_model("float32")
    tokens = sample_tokens(tokenizer, 1280)
    runs = {**SAMPLE_RUNS, **a2ats_runs(model, tokens, tmp_path_factory.mktemp("codebooks"), bits=6)}
    del model
    job = {"model": "sample", "prompt": 96, "tokens": 12, "runs": runs}
    return run_job(job, 1), run_job(job, 3)


def same_tokens(label, one, several):
    """Everybody generated the tokens of the one process, with log probabilities that rounding allows."""
    ((alone,), _), (shards, _) = one, several
    expected = alone["runs"][label]["generated"]
    assert len({token for token, _ in expected}) > 5, "the text says nothing"
    for rank, shard in enumerate(shards):
        found = shard["runs"][label]["generated"]
        assert [token for token, _ in found] == [token for token, _ in expected], f"process {rank}"
        np.testing.assert_allclose([p for _, p in found], [p for _, p in expected], atol=5e-2)
        assert found == shards[0]["runs"][label]["generated"], f"process {rank} computes something of its own"


def same_rows(label, one, several):
    """The rows that the processes hold are, head after head, those of one process."""
    (_, alone), (shards, folder) = one, several
    whole = mx.load(str(alone / f"0-{label}.safetensors"))
    parts = [mx.load(str(folder / f"{rank}-{label}.safetensors")) for rank in range(len(shards))]
    compared = 0
    for name, array in whole.items():
        pieces = [part[name] for part in parts]
        if pieces[0].shape == array.shape:
            continue  # nothing that belongs to single heads
        together = mx.concatenate(pieces, axis=1)
        assert together.shape == array.shape, name
        if array.dtype in (mx.float32, mx.bfloat16, mx.float16):
            assert mx.isclose(together, array, rtol=1e-2, atol=1e-3).mean().item() > 0.99, name
        else:
            # A value on the edge of two codes may fall to the other side, and take its word along.
            assert (together == array).mean().item() > 0.98, name
        compared += 1
    assert compared, "no array of a head"


@pytest.mark.parametrize("label", [*TOY_RUNS, *A2ATS_RUNS])
def test_two_processes_say_what_one_says(label, toy):
    same_tokens(label, *toy)


@pytest.mark.parametrize("label", [label for label in (*TOY_RUNS, *A2ATS_RUNS) if label != "plain"])
def test_two_processes_hold_the_rows_of_one(label, toy):
    same_rows(label, *toy)
    (shards, _), ((alone,), _) = toy[1], toy[0]
    held = sum(shard["runs"][label]["bytes_held"] for shard in shards)
    # Positions that are common to all heads, and the spare rows of buffers, are held by each.
    assert alone["runs"][label]["bytes_held"] <= held < 1.1 * alone["runs"][label]["bytes_held"]


@pytest.mark.parametrize("label", [label for label in (*TOY_RUNS, *A2ATS_RUNS) if label != "plain"])
def test_every_process_reads_its_own_file_and_no_other(label, toy):
    shards, _ = toy[1]
    for rank, shard in enumerate(shards):
        found = shard["runs"][label]["file"]
        assert found["alike"], f"process {rank}"
        assert f"holds the heads of process {1 - rank} of 2, and this is process {rank} of 2" in found["refused"]


def test_a_sharded_model_is_not_calibrated(toy):
    assert all("calibrate in one process" in shard["calibration"] for shard in toy[1][0])


def test_heads_that_cannot_be_divided_are_refused(run_job):
    job = {"model": "uneven", "prompt": 8, "tokens": 1, "runs": {"snapkv": ("snapkv", None)}}
    shards, _ = run_job(job, 2)
    for shard in shards:
        assert (
            "sharded over 2 processes, among which its KV heads cannot be divided" in shard["runs"]["snapkv"]["refused"]
        )


@pytest.mark.parametrize("label", [*SAMPLE_RUNS, *A2ATS_RUNS])
def test_three_processes_say_what_one_says_on_the_sample_model(label, sample):
    same_tokens(label, *sample)


def test_a_quantized_model_is_loaded_in_shards(run_job):
    runs = {"plain": (None, None), "snapkv": ("snapkv", {"budget": 40, "window": 16})}
    job = {"model": "sample-quantized", "prompt": 80, "tokens": 12, "runs": runs}
    one, three = run_job(job, 1), run_job(job, 3)
    for label in runs:
        same_tokens(label, one, three)
