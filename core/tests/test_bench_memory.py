"""``veloxquant bench memory``: bytes held, peaks, and a process for each arm."""

import json

import mlx.core as mx
import pytest
from core_test_helpers import save_byte_model

from veloxquant import VeloxQuantError
from veloxquant.bench import memory
from veloxquant.bench import memory_arm
from veloxquant.bench.arms import method_arm
from veloxquant.bench.arms import plain_arm
from veloxquant.bench.environment import back_end
from veloxquant.bench.layer_work import Shape
from veloxquant.bench.memory import in_fresh_process
from veloxquant.bench.memory_arm import Request
from veloxquant.bench.memory_arm import layer_figures
from veloxquant.bench.memory_arm import model_figures
from veloxquant.bench.records import read_runs
from veloxquant.cli import main
from veloxquant.registry import default_registry
from veloxquant.testing.toys import tiny_llama

pytestmark = pytest.mark.usefixtures("packed_products")

SHAPE = Shape(query_heads=4, kv_heads=2, head_dim=32)
ROW = 2 * 2 * 32 * 4
SMALL = ["--lengths", "20,40", "--query-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--tokens", "3"]


@pytest.fixture(autouse=True)
def _toys(toys, plain_output, register_alone, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    register_alone(["coarse"], toys.Coarse, toys.Evictor, toys.NoOp, toys.Refuser)


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command; arms are measured in this process, where the toys are."""

    def here(request):
        try:
            return memory_arm.measure(Request(**json.loads(json.dumps(memory.attrs.asdict(request)))))
        except ValueError as error:
            raise VeloxQuantError(str(error)) from error

    monkeypatch.setattr(memory, "in_fresh_process", here)

    def call(*words):
        code = main(["bench", "memory", *SMALL, *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_bytes_held_are_those_of_the_arrays():
    figures = layer_figures(plain_arm(), SHAPE, 300, 5, 128)
    assert figures["bytes_held"] == 512 * ROW  # mlx-lm's steps of 256
    assert figures["at_end"]["bytes_plain"] == 305 * ROW
    assert figures["after_prompt"]["bytes_plain"] == 300 * ROW
    assert figures["peak_bytes"] >= figures["prompt_peak_bytes"]
    assert figures["prompt_peak_bytes"] >= figures["after_prompt"]["bytes_total"]
    assert figures["decode_transient_bytes"] == figures["decode_peak_bytes"] - figures["bytes_held"]


def test_a_block_that_takes_memory_for_a_moment_shows_it(toys):
    size = 4 * 1024 * 1024

    class Greedy(toys.NoOp):
        name = "greedy"

        def veloxquant_prefill(self, state, keys, values):
            mx.eval(mx.ones((size // 4,)) + 1)
            return super().veloxquant_prefill(state, keys, values)

        veloxquant_prefill.__dict__.update(toys.NoOp.veloxquant_prefill.__dict__)

    default_registry().register(Greedy())
    usual = layer_figures(method_arm("noop"), SHAPE, 40, 2, 16)
    greedy = layer_figures(method_arm("greedy"), SHAPE, 40, 2, 16)
    assert greedy["bytes_held"] == usual["bytes_held"]
    assert greedy["prompt_peak_bytes"] >= size > usual["prompt_peak_bytes"]
    assert greedy["prompt_transient_bytes"] == greedy["prompt_peak_bytes"] - greedy["after_prompt"]["bytes_total"]
    assert greedy["decode_transient_bytes"] < size


def test_on_a_model_the_weights_do_not_count():
    model = tiny_llama(head_dim=32)
    tokens = [(7 * place) % 61 for place in range(45)]
    plain = model_figures(plain_arm(), model, tokens, 40, 16)
    assert plain["bytes_held"] == 2 * 256 * ROW
    assert plain["at_end"]["bytes_plain"] == 2 * 45 * ROW
    kept = model_figures(method_arm("evictor", {"keep": 8}), model, tokens, 40, 16)
    assert kept["bytes_held"] < plain["bytes_held"]
    assert kept["after_prompt"]["bytes_plain"] == 2 * 40 * ROW


def test_a_process_of_its_own():
    wanted = {"methods": ["nonexistent"], "settings": [], "arms": [], "peer": None}
    request = Request(arm="plain", wanted=wanted, length=20, tokens=2, shape=memory.attrs.asdict(SHAPE))
    with pytest.raises(VeloxQuantError, match="nonexistent"):
        in_fresh_process(request)
    figures = in_fresh_process(memory.attrs.evolve(request, wanted={**wanted, "methods": []}))
    assert figures["bytes_held"] == 256 * ROW
    assert figures["rss_peak_bytes"] > 0


def test_tables(run):
    code, out, err = run("--arm", "tiny=evictor:keep=7", "--arm", "rough=coarse")
    assert code == 0, err
    lines = [line.strip() for line in out.splitlines()]
    for name in ("plain", "QuantizedKVCache 4 bits", "tiny", "rough"):
        assert sum(line.startswith(name) for line in lines) == 2
    assert "20 + 3" in out
    assert f"back end {back_end()}" in out
    assert "in a process of its own" in out


def test_records(run, tmp_path):
    code, out, _ = run("--json", "--methods", "coarse", "--output", str(tmp_path / "run.jsonl"))
    assert code == 0
    record = json.loads(out)
    assert record["command"] == "memory"
    [left] = read_runs(tmp_path / "run.jsonl")
    assert [(result.arm, result.figures["length"]) for result in left.results] == [
        (arm, length)
        for length in (20, 40)
        for arm in ("plain", "QuantizedKVCache 8 bits", "QuantizedKVCache 4 bits", "coarse")
    ]
    plain = left.results[0].figures
    assert plain["share"] == pytest.approx(256 / 23)
    assert left.results[1].figures["share"] == pytest.approx(256 / 23 * 10 / 32)


def test_on_a_model(run, tmp_path):
    folder, text = tmp_path / "tiny", tmp_path / "text.txt"
    save_byte_model(folder, tiny_llama(head_dim=32, vocab=260))
    text.write_text("The quick brown fox jumps over the lazy dog. " * 2)
    code, out, err = run("--model", str(folder), "--text", str(text), "--json")
    assert code == 0, err
    record = json.loads(out)
    assert record["text"]
    assert {result["arm"] for result in record["results"]} >= {"plain", "coarse"}
    code, _, err = run("--model", str(folder), "--text", str(text), "--lengths", "90")
    assert (code, "the text has 90 tokens and 93 are needed" in err) == (2, True)


def test_an_arm_that_fails_is_left_out(run, tmp_path):
    words = ["--lengths", "20", "--head-dim", "36", "--output", str(tmp_path / "run.jsonl")]
    code, out, _ = run("--methods", "refuser", "--arm", "rough=coarse", *words)
    assert code == 0
    [left] = read_runs(tmp_path / "run.jsonl")
    assert [(one.arm, one.where) for one in left.left_out] == [("refuser", "20 tokens")]
    assert "left out refuser at 20 tokens: " in out
    assert any(line.strip().startswith("rough") for line in out.splitlines())


def test_an_interruption_leaves_what_was_measured(run, monkeypatch):
    usual = memory.in_fresh_process

    def stopped(request):
        if request.arm == "coarse":
            raise KeyboardInterrupt
        return usual(request)

    monkeypatch.setattr(memory, "in_fresh_process", stopped)
    code, out, err = run("--json")
    assert code == 130
    assert next(result["arm"] for result in json.loads(out)["results"]) == "plain"
    assert "interrupted" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", ""], "there is nothing to measure"),
        (["--tokens", "-1"], "--tokens must be at least 0"),
        (["--head-dim", "1"], "--head-dim must be at least 2"),
        (["--methods", "coarze"], "did you mean 'coarse'"),
        (["--model", "/nonexistent/model"], "there is no model folder"),
        (["--output", "/nonexistent/run.jsonl"], "cannot write"),
    ],
)
def test_errors_are_one_sentence(run, words, message):
    code, out, err = run(*words)
    assert code == 2
    assert message in err
    [line] = err.splitlines()
    assert line.startswith("error: ")
    assert "held" not in out


def test_a_peer_is_set_for_the_length_in_both_processes(run, monkeypatch):
    from veloxquant.bench import line_up

    def peers(name, tokens):
        return [memory.attrs.evolve(plain_arm(), name=f"other {tokens}", role="peer")]

    monkeypatch.setattr(line_up, "peer_arms", peers)
    code, out, err = run("--methods", "coarse", "--peer", "other", "--json")
    assert code == 0, err
    found = [result["arm"] for result in json.loads(out)["results"] if result["role"] == "peer"]
    assert found == ["other 20", "other 40"]
