"""``veloxquant bench speed``: what is timed, in turns, and how it is told. No figure of time is tested."""

import contextlib
import json
import os
import sys

import mlx.core as mx
import numpy as np
import pytest
from core_test_helpers import save_byte_model
from mlx_lm.models.cache import KVCache

from veloxquant import VeloxQuantError
from veloxquant.attention import is_routed
from veloxquant.bench import speed
from veloxquant.bench import speed_blas
from veloxquant.bench import speed_model
from veloxquant.bench.arms import method_arm
from veloxquant.bench.arms import plain_arm
from veloxquant.bench.environment import back_end
from veloxquant.bench.held import Held
from veloxquant.bench.layer_work import Shape
from veloxquant.bench.layer_work import blocks
from veloxquant.bench.layer_work import read_block
from veloxquant.bench.layer_work import store
from veloxquant.bench.quality import prefill
from veloxquant.bench.race import Race
from veloxquant.bench.records import Writer
from veloxquant.bench.records import new_run
from veloxquant.bench.records import read_runs
from veloxquant.bench.speed import SpeedPlan
from veloxquant.bench.speed import measure_speed
from veloxquant.bench.speed_model import measure_generation
from veloxquant.cli import main
from veloxquant.cli.bench_progress import BenchProgress
from veloxquant.testing.toys import tiny_gemma3
from veloxquant.testing.toys import tiny_llama

pytestmark = pytest.mark.usefixtures("packed_products")

SHAPE = Shape(query_heads=4, kv_heads=2, head_dim=32)
SMALL = ["--lengths", "20,40", "--query-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--steps", "2",
         "--prefill-rows", "16"]  # fmt: skip
HERE = ["--blas", "here"]


@pytest.fixture(autouse=True)
def _toys(toys, plain_output, register_alone, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    register_alone(["coarse", "evictor"], toys.Coarse, toys.Evictor, toys.NoOp, toys.NoOpAttend, toys.Refuser)


@contextlib.contextmanager
def quiet(label, total):
    yield lambda amount: None


@pytest.fixture
def run(capsys):
    def call(*words, small=True):
        code = main(["bench", "speed", *(SMALL if small else []), *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# ------------------------------------------------------------------ the prompt


def test_a_prompt_is_handed_over_as_mlx_lm_does():
    sizes = [rows[1].shape[2] for rows in blocks(SHAPE, 22, 10)]
    assert sizes[-1] == 1
    assert sum(sizes) == 22
    assert 1 not in sizes[:-1]


def test_a_filled_cache_has_seen_the_prompt_and_its_queries(registry):
    arm = method_arm("evictor", {"keep": 6}, registry=registry)
    cache, plain = arm.make_layer(SHAPE.layer()), KVCache()
    for rows in blocks(SHAPE, 22, 10):
        read_block(cache, rows, SHAPE.scale)
        read_block(plain, rows, SHAPE.scale)
    assert (cache.offset, cache.rows) == (22, 6)  # evicted: the prompt is complete
    assert plain.offset == 22
    assert not cache.queries_missing


def test_a_step_is_update_and_attention():
    cache = KVCache()
    queries, keys, values = (np.array(array, np.float64) for array in SHAPE.rows(9, 3))
    for part in (slice(0, 8), slice(8, 9)):
        output = store(cache, tuple(mx.array(one[:, :, part], mx.float32) for one in (queries, keys, values)), 0.25)
    for head in range(4):
        logits = 0.25 * keys[0, head // 2] @ queries[0, head, -1]
        weights = np.exp(logits - logits.max())
        np.testing.assert_allclose(output[0, head, 0], weights / weights.sum() @ values[0, head // 2], atol=1e-5)


def test_rows_repeat_and_have_the_dtype():
    shape = Shape(query_heads=2, kv_heads=1, head_dim=8, dtype="bfloat16")
    first, second = shape.rows(3, 5), shape.rows(3, 5)
    assert {array.dtype for array in first} == {mx.bfloat16}
    assert all(mx.array_equal(*pair) for pair in zip(first, second, strict=True))
    assert not mx.array_equal(first[1], shape.rows(3, 6)[1])


# ---------------------------------------------------------------------- race


def laps(seconds, log=None):
    def lap(name):
        def one(number):
            if log is not None:
                log.append((number, name))
            return {"seconds": seconds[name][number]}

        return one

    return {name: lap(name) for name in seconds}


def test_medians_ratios_and_quartiles():
    race = Race(laps({"plain": [9, 1, 2, 4], "other": [9, 3, 2, 2]}))
    race.run(3, lambda amount: None, warm_up=1)
    figures = race.figures("other")
    assert figures["rounds"] == 3
    assert figures["seconds"] == 2
    assert figures["seconds_ratio"] == 1.0
    assert figures["seconds_quartiles"] == [2.0, 2.5]
    assert figures["seconds_ratio_quartiles"] == [0.75, 2.0]  # of 3, 1 and 0.5
    assert figures["seconds_over_plain"] == 0


def test_arms_take_turns_in_changing_order():
    log = []
    race = Race(laps({name: [1.0] * 12 for name in ("plain", "a", "b")}, log))
    race.run(12, lambda amount: None, warm_up=0)
    rounds = [[name for number, name in log if number == this] for this in range(12)]
    assert all(sorted(names) == ["a", "b", "plain"] for names in rounds)
    assert [number for number, _ in log] == sorted(number for number, _ in log)
    assert len({tuple(names) for names in rounds}) > 1


def test_an_arm_that_fails_leaves_and_the_plain_one_may_not():
    def broken(number):
        raise ValueError("no\nkernel")

    race = Race({**laps({"plain": [1.0] * 3}), "bad": broken})
    race.run(3, lambda amount: None, warm_up=0)
    assert race.failed == {"bad": "ValueError: no kernel"}
    assert race.finished() == ["plain"]
    with pytest.raises(VeloxQuantError, match="plain: ValueError: no kernel"):
        Race({"plain": broken}).run(3, lambda amount: None)


# ----------------------------------------------------------------- one layer


def test_every_arm_at_every_length(registry):
    arms = [plain_arm(), method_arm("coarse", registry=registry), method_arm("refuser", registry=registry)]
    shape = Shape(query_heads=4, kv_heads=2, head_dim=36)  # which one of the toys refuses
    plan = SpeedPlan(lengths=(20, 40), shape=shape, steps=2, prefill_rows=16, prefill_rounds=2, step=16)
    with Writer(new_run("speed")) as writer:
        left = measure_speed(dict.fromkeys((16, 20, 40), arms), plan, writer, quiet)
    found = [(result.kind, result.arm, result.figures["length"]) for result in writer.run.results]
    expected = [("speed", name, length) for length in (20, 40) for name in ("plain", "coarse")]
    assert found == [*expected, ("prefill", "plain", 16), ("prefill", "coarse", 16)]
    assert [(one.arm, one.where) for one in left] == [
        ("refuser", "20 rows"), ("refuser", "40 rows"), ("refuser", "a block of 16 rows")
    ]  # fmt: skip
    plain = writer.run.results[0].figures
    assert plain["seconds"] > 0
    assert plain["seconds_ratio"] == 1.0
    assert plain["bytes_held"] == 2 * 2 * 256 * 36 * 4
    assert {"update_seconds", "with_attention_seconds", "last_token_seconds"} <= set(writer.run.results[-1].figures)


def test_the_first_step_after_other_arms_counts_apart(registry, monkeypatch):
    clock, durations = [0.0], iter([9.0, 1.0, 3.0, 2.0] * 100)

    def stored(*given):
        clock[0] += next(durations)
        return mx.zeros(1)

    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(speed, "_filled", lambda *given: object())
    monkeypatch.setattr(speed, "held", lambda cache: Held(keys=0, values=0, auxiliary=0, static=0, plain=0))
    monkeypatch.setattr(speed, "store", stored)
    plan = SpeedPlan(lengths=(20,), shape=Shape(query_heads=2, kv_heads=1, head_dim=8), steps=7, prefill_rows=0)
    with Writer(new_run("speed")) as writer:
        measure_speed({20: [plain_arm(), method_arm("coarse", registry=registry)]}, plan, writer, quiet)
    for result in writer.run.results:
        assert (result.figures["seconds"], result.figures["first_seconds"]) == (2.0, 9.0)
        assert result.figures["rounds"] == 3  # of three steps that count


# --------------------------------------------------------------- on a model

PROMPT = [(7 * place) % 61 for place in range(40)]


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_one_prompt_fills_every_cache_as_reading_it_would(make, registry):
    model = make(head_dim=32)
    arms = [plain_arm(), method_arm("noop_attend", registry=registry), method_arm("noop", registry=registry)]
    lanes, first = speed_model._read(model, arms, PROMPT, 16, lambda amount: None)
    assert [lane.failure for lane in lanes] == [None] * 3
    own = plain_arm().make(model)
    logits = prefill(model, own, PROMPT, step=16)
    assert first.item() == mx.argmax(logits).item()
    expected = np.array(model(mx.array([[5]]), cache=own)[0, -1])
    for lane in lanes:
        output = model(mx.array([[5]]), cache=lane.caches)[0, -1]
        np.testing.assert_allclose(np.array(output), expected, atol=1e-4, err_msg=lane.name)


def test_generation(registry):
    model = tiny_llama(head_dim=36)
    arms = [
        plain_arm(),
        method_arm("evictor", {"keep": 8}, registry=registry),
        method_arm("refuser", registry=registry),
    ]
    with Writer(new_run("speed")) as writer:
        left = measure_generation(model, arms, PROMPT, writer, quiet, steps=2, step=16)
    assert [(result.kind, result.arm) for result in writer.run.results] == [
        ("generation", "plain"), ("generation", "evictor")
    ]  # fmt: skip
    figures = writer.run.results[1].figures
    assert figures["prompt_tokens"] == 40
    assert figures["tokens_per_second"] == pytest.approx(1 / figures["seconds"])
    assert figures["bytes_held"] < 40 * 2 * 2 * 2 * 36 * 4
    assert [one.arm for one in left] == ["refuser"]
    assert not is_routed(model)


# ---------------------------------------------------------------------- BLAS


@pytest.fixture
def linux(monkeypatch):
    """A Linux machine with OpenBLAS, not preloaded."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(speed_blas, "back_end", lambda: "cpu")
    monkeypatch.setattr(speed_blas, "blas", lambda: "as mlx's wheel brings it")
    monkeypatch.setattr(speed_blas, "_library", lambda: "libopenblas.so.0")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return monkeypatch


def test_which_blas(linux):
    assert speed_blas.which("both", "float32") == (["own", "openblas"], None)
    assert speed_blas.which("own", "float32") == (["own"], None)
    assert speed_blas.which("openblas", "float32") == (["openblas"], None)
    assert speed_blas.which("both", "bfloat16") == ([None], None)
    assert speed_blas.has("own")
    assert not speed_blas.has("openblas")
    with pytest.raises(VeloxQuantError, match="in float32"):
        speed_blas.which("openblas", "bfloat16")
    with pytest.raises(VeloxQuantError, match="must be both, own or openblas"):
        speed_blas.which("mkl", "float32")


def test_no_openblas_is_said(linux):
    linux.setattr(speed_blas, "_library", lambda: None)
    kinds, note = speed_blas.which("both", "float32")
    assert kinds == ["own"]
    assert "OpenBLAS was not found" in note
    with pytest.raises(VeloxQuantError, match="libopenblas0-pthread"):
        speed_blas.which("openblas", "float32")


def test_openblas_that_is_preloaded_and_one_that_mlx_brings(linux):
    linux.setattr(speed_blas, "blas", lambda: "OpenBLAS, 1 thread(s)")
    kinds, note = speed_blas.which("both", "float32")
    assert kinds == [None]
    assert "no other BLAS" in note
    linux.setenv("LD_PRELOAD", "/usr/lib/libopenblas.so.0")
    assert speed_blas.which("both", "float32") == (["own", "openblas"], None)
    assert speed_blas.has("openblas")
    assert not speed_blas.has("own")


def test_what_else_is_preloaded_stays(linux):
    given = {"LD_PRELOAD": "liba.so:/usr/lib/libopenblas.so.0 libb.so", "HOME": "h"}
    assert speed_blas.environment_with("own", given) == {"LD_PRELOAD": "liba.so libb.so", "HOME": "h"}
    assert speed_blas.environment_with("openblas", given)["LD_PRELOAD"] == "libopenblas.so.0 liba.so libb.so"


def test_a_child_measures_the_same(run, monkeypatch, tmp_path):
    """A process that knows no toys: the references alone."""
    monkeypatch.setattr(speed_blas, "which", lambda choice, dtype: (["own"], "a note"))
    monkeypatch.setattr(speed_blas, "has", lambda kind: False)
    file = tmp_path / "run.jsonl"
    code, out, err = run("--lengths", "24", "--json", "--output", str(file))
    assert code == 0, err
    answer = json.loads(out)
    [record] = answer["runs"]
    # On CUDA MLX has no product that mlx-lm's quantized cache could use.
    found = {one["arm"] for one in record["left_out" if back_end() == "cuda" else "results"]}
    assert "QuantizedKVCache 8 bits" in found
    assert "plain" in {result["arm"] for result in record["results"]}
    assert record["arguments"]["lengths"] == [24]
    assert answer["note"] == "a note"
    [left] = read_runs(file)
    assert left.id == record["id"]
    assert len(left.results) == len(record["results"])


def test_a_child_that_fails_and_one_that_was_stopped(monkeypatch):
    with pytest.raises(VeloxQuantError, match="BLAS 'own' ended with the code 2"):
        speed_blas._read("", 2, "own", False)
    assert speed_blas._read("", 130, "own", True) is None
    record = new_run("speed").to_dict()
    found = speed_blas._read(json.dumps({"runs": [record], "skipped": [], "left_out": []}), 130, "own", True)
    assert (found.run.id, found.whole) == (record["id"], False)


def test_ctrl_c_reaches_the_child_once(monkeypatch, tmp_path):
    script = tmp_path / "child"
    script.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\n"
        'def stop(*_):\n    print(\'{"runs": [], "skipped": [], "left_out": []}\'); sys.stdout.flush(); os._exit(130)\n'
        f"signal.signal(signal.SIGINT, stop)\nos.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(30)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(
        speed_blas, "_read", lambda text, code, kind, interrupted: (json.loads(text), code, interrupted)
    )
    found = speed_blas.measure_in_child(["bench", "speed"], "own")
    assert found == ({"runs": [], "skipped": [], "left_out": []}, 130, True)


# ------------------------------------------------------------------- command


def test_tables(run):
    code, out, err = run(*HERE, "--methods", "coarse", "--set", "coarse.levels=9", "--arm", "tiny=evictor:keep=7")
    assert code == 0, err
    lines = [line.strip() for line in out.splitlines()]
    for heading in ("20 rows", "40 rows", "prompt, 16 rows"):
        assert any(line.startswith(heading) for line in lines)
    for name in ("plain", "QuantizedKVCache 4 bits", "coarse", "tiny"):
        assert sum(line.startswith(name) for line in lines) >= 3
    assert f"back end {back_end()}, BLAS:" in out
    assert "layer: 4 query heads, 2 KV heads, head dim 32" in out
    assert "x plain" in out
    assert "\x1b" not in out + err


def test_on_a_model(run, tmp_path):
    folder, text = tmp_path / "tiny", tmp_path / "text.txt"
    save_byte_model(folder, tiny_llama(head_dim=32, vocab=260))
    text.write_text("The quick brown fox jumps over the lazy dog. " * 4)
    words = ["--lengths", "", "--prefill-rows", "0", "--model", str(folder), "--text", str(text)]
    code, out, err = run(*HERE, *words, "--prompt-tokens", "60", "--json")
    assert code == 0, err
    [record] = json.loads(out)["runs"]
    assert {result["kind"] for result in record["results"]} == {"generation"}
    assert {"plain", "coarse", "evictor"} <= {result["arm"] for result in record["results"]}
    assert record["dtype"] == "float32"
    assert record["text"]
    assert "loading the model" in err
    code, out, _ = run(*HERE, *words, "--prompt-tokens", "60")
    assert "after 60 tokens" in out
    assert "tokens/s" in out
    code, _, err = run(*HERE, *words, "--prompt-tokens", "600")
    assert (code, "the text has 180 tokens and 600 are needed" in err) == (2, True)


def test_an_interruption_leaves_what_was_measured(run, monkeypatch, tmp_path):
    @contextlib.contextmanager
    def track(self, label, total):
        if label.startswith("40 rows"):
            raise KeyboardInterrupt
        yield lambda amount: None

    monkeypatch.setattr(BenchProgress, "track", track)
    code, out, err = run(*HERE, "--methods", "coarse", "--output", str(tmp_path / "run.jsonl"))
    assert code == 130
    assert "20 rows" in out
    assert "interrupted" in err
    [left] = read_runs(tmp_path / "run.jsonl")
    assert {(result.kind, result.figures["length"]) for result in left.results} == {("speed", 20)}


def test_an_interruption_among_the_steps_counts_whole_rounds(run, monkeypatch):
    @contextlib.contextmanager
    def track(self, label, total):
        done = []

        def advance(amount):
            done.append(amount)
            if label.endswith("steps") and len(done) == 4:  # three of them warm up
                raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(BenchProgress, "track", track)
    code, out, _ = run(*HERE, "--methods", "coarse", "--json")
    assert code == 130
    results = json.loads(out)["runs"][0]["results"]
    assert {result["figures"]["rounds"] for result in results} == {1}


def test_methods_that_cannot_be_used_are_passed_over_with_the_reason(run, monkeypatch):
    from veloxquant.bench import line_up

    usual = line_up.chosen_arms
    monkeypatch.setattr(line_up, "chosen_arms", lambda *given: usual(["coarse", "evictor"], ["evictor.storage=noop"]))
    code, out, _ = run(*HERE, "--prefill-rows", "0")
    assert code == 0
    assert "skipped evictor: storage='noop' cannot be used" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "1"], "--lengths takes whole numbers from 2"),
        (["--lengths", "", "--prefill-rows", "0"], "there is nothing to measure"),
        (["--query-heads", "3"], "--query-heads must be a multiple of --kv-heads"),
        (["--dtype", "float64"], "--dtype must be float32, float16 or bfloat16, not 'float64'"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--prefill-rows", "1"], "--prefill-rows must be at least 2"),
        (["--blas", "mkl"], "--blas must be both, own or openblas"),
        (["--methods", "coarze"], "did you mean 'coarse'"),
        (["--methods", "evictor", "--set", "evictor.storage=noop"], "noop offers no row store"),
        (["--peer", "veloxquant-mxl"], "did you mean 'veloxquant-mlx'"),
        (["--output", "/nonexistent/run.jsonl"], "cannot write"),
        (["--model", "/nonexistent/model"], "there is no model folder"),
    ],
)
def test_errors_are_one_sentence(run, words, message):
    code, out, err = run(*HERE, *words)
    assert code == 2
    assert message in err
    [line] = [line for line in err.splitlines() if not line.startswith("loading")]
    assert line.startswith("error: ")
    assert "ms a step" not in out


def test_a_peer_is_set_for_the_length(run, monkeypatch):
    from veloxquant.bench import line_up

    asked = []
    monkeypatch.setattr(line_up, "peer_arms", lambda name, tokens: asked.append(tokens) or [])
    assert run(*HERE, "--methods", "coarse", "--peer", "other")[0] == 0
    assert asked == [20, 40, 16]
