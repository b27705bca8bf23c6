"""``veloxquant bench``: words in, tables and records out."""

import contextlib
import json
import sys

import pytest
from core_test_helpers import save_byte_model

from veloxquant.bench.environment import back_end
from veloxquant.bench.records import read_runs
from veloxquant.cli import main
from veloxquant.cli.bench_progress import BenchProgress
from veloxquant.registry import default_registry
from veloxquant.testing.toys import tiny_llama

pytestmark = pytest.mark.usefixtures("packed_products")

SMALL = ["--prompt-tokens", "60", "--tokens", "8", "--needle-lengths", "160", "--needle-depths", "50"]


@pytest.fixture(autouse=True)
def _toys(toys, plain_output, register_alone, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    register_alone(["coarse", "evictor"], toys.Coarse, toys.Evictor, toys.NoOp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_byte_model(path, tiny_llama(head_dim=32, vocab=260))
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 12)
    return file


@pytest.fixture
def run(folder, text, capsys):
    """Returns a function that runs ``bench quality`` on the tiny model; it gives code, stdout and stderr."""

    def call(*words, small=True):
        code = main(
            ["bench", "quality", "--model", str(folder), "--text", str(text), *(SMALL if small else []), *words]
        )
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_tables(run):
    code, out, err = run("--methods", "coarse", "--set", "coarse.levels=9", "--arm", "tiny=evictor:keep=7")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["plain", "4.267"] in [row[:2] for row in rows]
    names = ["coarse", "newest rows, same bytes", "tiny", "exact top rows, same reads"]
    assert all(any(line.strip().startswith(name) for line in out.splitlines()) for name in names)
    assert "beats newest" in out
    assert "does not beat" in out
    assert f"back end {back_end()}, BLAS:" in out
    assert "skipped" not in out
    assert "\x1b" not in out + err
    assert "loading the model" in err


def test_json_alone_is_on_stdout(run):
    code, out, _ = run("--json", "--methods", "coarse")
    assert code == 0
    record = json.loads(out)
    assert record["command"] == "quality"
    assert record["dtype"] == "float32"
    assert record["arguments"]["prompt_tokens"] == 60
    assert {"quality", "needle"} == {result["kind"] for result in record["results"]}
    assert {verdict["arm"] for verdict in record["verdicts"]} == {"coarse"}
    assert record["skipped"] == []


def test_the_run_is_added_to_a_file(run, tmp_path):
    file = tmp_path / "runs.jsonl"
    for _ in range(2):
        assert run("--methods", "coarse", "--output", str(file))[0] == 0
    first, second = read_runs(file)
    assert first.results == second.results
    assert first.text == second.text
    assert first.id != second.id


def test_methods_that_cannot_be_used_are_listed_with_the_reason(run, monkeypatch):
    monkeypatch.setattr(default_registry(), "names", lambda: ["coarse", "evictor"])
    _, out, _ = run()
    assert "skipped" not in out
    from veloxquant.bench import arm_options

    usual = arm_options.chosen_arms
    monkeypatch.setattr(
        arm_options,
        "chosen_arms",
        lambda methods, settings, arms: usual(["coarse", "evictor"], ["evictor.storage=noop"]),
    )
    code, out, _ = run()
    assert code == 0
    assert "skipped evictor: storage='noop' cannot be used" in out


def test_an_interruption_shows_what_was_measured(run, monkeypatch, tmp_path):
    @contextlib.contextmanager
    def track(self, label, total):
        if label.startswith("coarse"):
            raise KeyboardInterrupt
        yield lambda amount: None

    monkeypatch.setattr(BenchProgress, "track", track)
    code, out, err = run("--methods", "coarse", "--output", str(tmp_path / "run.jsonl"))
    assert code == 130
    assert "QuantizedKVCache 4 bits" in out
    assert "interrupted" in err
    [left] = read_runs(tmp_path / "run.jsonl")
    assert [result.arm for result in left.results] == ["plain", "QuantizedKVCache 8 bits", "QuantizedKVCache 4 bits"]


def test_nothing_measured_is_said(run, monkeypatch):
    @contextlib.contextmanager
    def track(self, label, total):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(BenchProgress, "track", track)
    code, out, _ = run("--methods", "coarse")
    assert (code, "nothing was measured" in out) == (130, True)


def test_no_needles_and_no_tokens(run):
    _, out, _ = run("--methods", "coarse", "--needle-lengths", "")
    assert "passkeys found" not in out
    _, out, _ = run("--methods", "coarse", "--tokens", "0")
    assert "perplexity" not in out
    assert "passkeys found" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", ","], "--methods names no method"),
        (["--methods", "coarze"], "did you mean 'coarse'"),
        (["--methods", "coarse", "--set", "levels=3"], "METHOD.KEY=VALUE"),
        (["--methods", "evictor", "--set", "evictor.storage=noop"], "noop offers no row store"),
        (["--arm", "coarse"], "--arm NAME=METHOD"),
        (["--prompt-tokens", "1"], "--prompt-tokens must be at least 2"),
        (["--prompt-tokens", "5000"], "the text has 540 tokens and 5,008 are needed"),
        (["--start", "540"], "--start 540 is beyond the text"),
        (["--needle-depths", "10,101"], "--needle-depths takes whole numbers from 0 to 100"),
        (["--needle-lengths", "20"], "no room for text"),
        (["--peer", "veloxquant-mxl"], "did you mean 'veloxquant-mlx'"),
        (["--output", "/nonexistent/run.jsonl"], "cannot write"),
        (["--text", "/nonexistent.txt"], "cannot be read"),
        (["--model", "/nonexistent/model"], "there is no model folder"),
    ],
)
def test_errors_are_one_sentence(run, words, message):
    code, out, err = run(*words)
    assert code == 2
    assert message in err
    [line] = [line for line in err.splitlines() if not line.startswith("loading")]
    assert line.startswith("error: ")
    assert "perplexity" not in out


def test_a_peer_that_is_not_installed_is_one_sentence_with_the_command(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "veloxquant_mlx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("--peer", "veloxquant-mlx")
    assert code == 2
    assert "pip install --no-deps veloxquant-mlx==0.94.15" in err


def test_unknown_benchmarks(capsys):
    assert main(["bench", "qualitty"]) == 2
    assert "there is no benchmark 'qualitty'; did you mean 'quality'?" in capsys.readouterr().err
    assert main(["bench", "--help"]) == 0
    assert "quality" in capsys.readouterr().out
