"""Records of runs: written line by line, read back, refused when broken."""

import json

import pytest

from veloxquant import VeloxQuantError
from veloxquant.bench import environment
from veloxquant.bench.environment import back_end
from veloxquant.bench.environment import blas
from veloxquant.bench.race import LeftOut
from veloxquant.bench.records import Result
from veloxquant.bench.records import Writer
from veloxquant.bench.records import new_run
from veloxquant.bench.records import read_runs
from veloxquant.bench.records import text_hash
from veloxquant.errors import FileFormatError


def result(kind="quality", **figures):
    return Result(kind=kind, arm="a", method="m", role="method", config={"bits": 2}, figures=figures)


def written(file, *results, **fields):
    run = new_run("quality", model="tiny", dtype="float32", text=text_hash("x"), arguments={"tokens": 4}, **fields)
    with Writer(run, file) as writer:
        for one in results:
            writer.add(one)
    return run


def test_a_run_comes_back_as_it_was_written(tmp_path):
    file = tmp_path / "runs.jsonl"
    run = written(file, result(mean_kl=0.25), result("needle", found=1))
    assert read_runs(file) == [run]
    assert [one.figures for one in run.of_kind("needle")] == [{"found": 1}]


def test_arms_that_could_not_be_measured_are_recorded_with_the_reason(tmp_path):
    file = tmp_path / "runs.jsonl"
    run = new_run("quality")
    with Writer(run, file) as writer:
        writer.add(result(mean_kl=0.25))
        writer.leave_out([LeftOut("b", "1,024 tokens", "no kernel")])
        assert len(file.read_text().splitlines()) == 3
    [found] = read_runs(file)
    assert found == run
    assert found.left_out == [LeftOut("b", "1,024 tokens", "no kernel")]
    assert [json.loads(line) for line in file.read_text().splitlines()] == found.lines()
    assert found.to_dict()["left_out"] == [{"arm": "b", "where": "1,024 tokens", "reason": "no kernel"}]
    assert "left_out" not in found.header()


def test_the_header_says_what_figures_depend_on(tmp_path):
    header = written(None).header()
    assert header["text"] == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert {"veloxquant", "mlx", "mlx-lm", "python"} <= header["environment"]["versions"].keys()
    assert header["environment"]["back_end"] == back_end() in ("cpu", "metal", "cuda")
    assert header["environment"]["blas"] == blas()
    assert header["environment"]["machine"]["cores"] >= 1
    assert (header["model"], header["dtype"], header["arguments"]) == ("tiny", "float32", {"tokens": 4})
    json.dumps(header)


def test_on_cuda_it_says_in_what_fp32_products_are_made(monkeypatch):
    monkeypatch.setattr(environment, "back_end", lambda: "cuda")
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    assert blas() == "cuBLAS, TF32 on"
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert blas() == "cuBLAS, TF32 off"


def test_every_line_is_there_as_soon_as_it_is_added(tmp_path):
    file = tmp_path / "runs.jsonl"
    with Writer(new_run("quality"), file) as writer:
        assert len(file.read_text().splitlines()) == 1
        writer.add(result(mean_kl=1.0))
        assert len(file.read_text().splitlines()) == 2


def test_runs_are_added_to_a_file(tmp_path):
    file = tmp_path / "runs.jsonl"
    first, second = written(file, result()), written(file)
    assert [run.id for run in read_runs(file)] == [first.id, second.id]
    assert [len(run.results) for run in read_runs(file)] == [1, 0]


def test_a_cut_last_line_is_left_out_and_does_not_spoil_the_next_run(tmp_path):
    file = tmp_path / "runs.jsonl"
    written(file, result(mean_kl=1.0), result(mean_kl=2.0))
    whole = file.read_bytes()
    for length in range(1, 30):
        file.write_bytes(whole[:-length])
        [run] = read_runs(file)
        assert [one.figures["mean_kl"] for one in run.results] == [1.0]
    written(file, result(mean_kl=3.0))
    assert [len(run.results) for run in read_runs(file)] == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: ["nonsense", *lines], "line 1 of .* is not JSON"),
        (lambda lines: ["[1]", *lines], "line 1 of .* has no kind"),
        (lambda lines: lines[1:], "line 1 of .* does not come before it"),
        (lambda lines: [lines[0].replace('"format": 1', '"format": 99'), *lines[1:]], "format 99"),
        (lambda lines: [lines[0], *lines], "a second time"),
        (lambda lines: [lines[0], lines[1].replace('"quality"', '"taste"')], "line 2 of .* no record"),
        (lambda lines: [lines[0], lines[1].replace('"arm"', '"leg"')], "line 2 of .* no record"),
        (lambda lines: [lines[0], lines[1].replace('"quality"', '"left out"')], "line 2 of .* no record"),
        (lambda lines: [], "holds no benchmark results"),
    ],
)
def test_broken_files_are_refused_in_one_sentence(tmp_path, change, message):
    file = tmp_path / "runs.jsonl"
    written(file, result(mean_kl=1.0))
    file.write_text("".join(f"{line}\n" for line in change(file.read_text().splitlines())))
    with pytest.raises(FileFormatError, match=message) as caught:
        read_runs(file)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_runs(tmp_path / "absent.jsonl")
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\n")
    with pytest.raises(FileFormatError, match="not text"):
        read_runs(tmp_path / "picture")
    with pytest.raises(VeloxQuantError, match="cannot write"):
        written(tmp_path / "absent" / "runs.jsonl")
    (tmp_path / "letter.txt").write_text("Dear reader\n")
    with pytest.raises(VeloxQuantError, match="holds something else"):
        written(tmp_path / "letter.txt")
    assert (tmp_path / "letter.txt").read_text() == "Dear reader\n"


def test_a_figure_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        written(tmp_path / "runs.jsonl", result(mean_kl=float("nan")))
