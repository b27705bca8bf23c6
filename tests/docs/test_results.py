"""docs/results.md says what the recorded runs say."""

import importlib
import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from veloxquant import VeloxQuantError
from veloxquant.bench.race import LeftOut
from veloxquant.bench.records import Result
from veloxquant.bench.records import Run
from veloxquant.bench.records import Writer
from veloxquant.bench.records import read_runs
from veloxquant.bench.verdicts import verdicts

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "results"


def _module(name):
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(f"results_page.{name}")
    finally:
        sys.path.remove(str(DOCS))


INTAKE, PAGE, PICTURES, COMMAND, SUITES = map(_module, ("intake", "page", "pictures", "command", "suites"))

# ------------------------------------------------------- what is in the repository


def test_the_page_is_what_the_records_give():
    wanted = PAGE.page(PAGE.read(FOLDER), PICTURES.pictures(FOLDER), SUITES.read(FOLDER))
    assert (DOCS / "results.md").read_text() == wanted, "run nox -s results"


def test_there_is_a_picture_for_what_can_be_drawn_and_no_other(tmp_path):
    pytest.importorskip("matplotlib")
    stems = {Path(name).stem for name in PICTURES.drawn(PAGE.read(FOLDER), tmp_path)}
    assert {Path(name).stem for name in PICTURES.pictures(FOLDER)} == stems, "run nox -s results"


def test_records_are_small_and_say_nothing_of_where_they_were_made():
    for file in FOLDER.glob("*.jsonl"):
        assert file.stat().st_size < INTAKE.LARGEST, file.name
        for run in read_runs(file):
            assert INTAKE.keep(run).to_dict() == run.to_dict(), f"{file.name}: take it in with docs/make_results.py"


# --------------------------------------------------------------- invented runs

CPU = {
    "versions": {"python": "3.11.7", "veloxquant": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"},
    "back_end": "cpu",
    "blas": "OpenBLAS, 1 thread(s)",
    "machine": {"cpu": "Some CPU", "cores": 2, "memory_bytes": 8 * 2**30, "system": "Linux-6"},
}
CUDA = {**CPU, "back_end": "cuda", "blas": "unknown", "machine": {**CPU["machine"], "gpu": "Some GPU"}}
SHAPE = "8 query heads, 2 KV heads, head dim 64"


def a_run(command, results, name="r1", environment=CPU, **fields):
    return Run(
        command=command,
        id=name,
        time="2026-11-29T23:30:16+00:00",
        environment=environment,
        results=results,
        **{"dtype": "float32", **fields},
    )


def quality_result(arm, share, kl, method=None, role="method", config=None, **more):
    held = {"bytes_total": int(1000 * share), "bytes_plain": 1000, "share": share}
    figures = {
        "mean_kl": sum(kl) / len(kl),
        "mean_kl_interval": [min(kl), max(kl)],
        "p95_kl": max(kl),
        "top1_agreement": 0.9,
        "perplexity": 11.0,
        "after_prompt": held,
        "at_end": held,
        "kl": kl,
    }
    return Result(kind="quality", arm=arm, method=method or arm, role=role, config=config or {}, figures=figures | more)


def needle(arm, found, depth=0.5, **more):
    figures = {"length": 64, "depth": depth, "key": "12345", "answer": "a long answer", "found": found, **more}
    return Result(kind="needle", arm=arm, method=arm, config={"long": "options"}, figures=figures)


LOW, HIGH = [0.01, 0.02] * 32, [0.3, 0.4] * 32
CODEBOOK = {"codebook": "/home/somebody/codebooks/one.safetensors"}
QUALITY = [
    quality_result("plain", 1.0, [0.0] * 64, role="reference"),
    quality_result("QuantizedKVCache 8 bits", 0.2812, LOW, "QuantizedKVCache", "reference", {"bits": 8}),
    quality_result("fine", 0.15, LOW, config=CODEBOOK),
    quality_result("newest of fine", 0.15, HIGH, "recent rows", "reference", beside="fine"),
    quality_result("top of fine", 1.0, [0.005, 0.01] * 32, "top rows", "reference", beside="fine"),
    quality_result("poor", 0.1799, HIGH),
    quality_result("newest of poor", 0.18, LOW, "recent rows", "reference", beside="poor"),
    quality_result("at 0.18", 0.18, LOW),
    quality_result("at 0.35", 0.35, LOW),
    quality_result("at 0.7", 0.7, LOW),
    needle("plain", True),
    needle("fine", True),
    needle("fine", False, 0.1),
    needle("newest of fine", False, beside="fine"),
]
ASKED = {
    "start": 5,
    "prompt_tokens": 1024,
    "tokens": 64,
    "needle_lengths": [64],
    "needle_depths": [10, 50],
    "prefill_step": 2048,
    "methods": ["fine", "poor"],
    "set": ["fine.codebook=/home/somebody/codebooks/one.safetensors"],
    "arm": ["two words=fine:bits=2"],
    "peer": None,
}


def a_quality_run(**fields):
    return a_run("quality", QUALITY, model="/srv/models/tiny-model/", text="0" * 64, arguments=ASKED, **fields)


def timed(kind, arm, length, seconds, ratio, names=("seconds",), **more):
    figures = {"length": length, "rounds": 9, **more}
    for name in names:
        figures |= {name: seconds, f"{name}_ratio": ratio, f"{name}_ratio_quartiles": [0.9 * ratio, 1.1 * ratio]}
        figures |= {f"{name}_over_plain": 0.00064}
    config = {"bits": 2} if arm == "fine" else {}
    return Result(kind=kind, arm=arm, method=arm, config=config, figures=figures)


PREFILL = ("update_seconds", "with_attention_seconds", "last_token_seconds")


def a_speed_run(name="s1", environment=CPU, dtype="float32"):
    results = [
        timed("speed", "plain", 4096, 0.002, 1.0, bytes_held=1000),
        timed("speed", "fine", 4096, 0.001, 0.5, bytes_held=300),
        timed("speed", "plain", 32768, 0.02, 1.0, bytes_held=8000),
        timed("prefill", "plain", 64, 0.5, 1.0, PREFILL),
        timed("prefill", "fine", 64, 0.75, 1.5, PREFILL),
        timed("generation", "plain", None, 0.1, 1.0, prompt_tokens=4096, tokens_per_second=10.0),
        timed("generation", "fine", None, 0.05, 0.5, prompt_tokens=4096, tokens_per_second=20.0),
    ]
    asked = {"lengths": [4096, 32768], "shape": SHAPE, "steps": 9, "prefill_rows": 64, "arms": ["fine=fine:bits=2"]}
    return a_run("speed", results, name, environment, dtype=dtype, arguments=asked)


def a_memory_run(name="m1", dtype="float32", config=None):
    def result(arm, held, config):
        part = {"bytes_total": held, "bytes_plain": 2**21, "share": held / 2**21}
        figures = {"length": 4096, "bytes_held": held, "after_prompt": part, "at_end": part, "share": held / 2**21}
        figures |= {"prompt_peak_bytes": 3 * 2**20, "decode_peak_bytes": 4 * 2**20, "rss_bytes": None}
        figures |= {"prompt_transient_bytes": 5 * 2**20, "decode_transient_bytes": 6 * 2**20}
        return Result(kind="memory", arm=arm, method=arm, config=config, figures=figures)

    results = [result("plain", 2**21 + 999, {}), result("fine", 2**20, config or {})]
    asked = {"lengths": [4096], "tokens": 100, "shape": SHAPE, "set": [], "arms": []}
    return a_run("memory", results, name, dtype=dtype, arguments=asked)


def written(file, *runs):
    for run in runs:
        results, run.results = list(run.results), []
        with Writer(run, file) as writer:
            for result in results:
                writer.add(result)
    return file


def page_of(*runs, pictures=()):
    found = [PAGE.Recorded(run, "file.jsonl", number if len(runs) > 1 else 0) for number, run in enumerate(runs, 1)]
    return PAGE.page(found, list(pictures))


def cells(text, arm):
    """The rows of a page that begin with an arm."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row[1:] for row in rows if row[0] == arm]


# ---------------------------------------------------------------- taking in


@pytest.fixture
def taken(tmp_path):
    file = written(tmp_path / "runs.jsonl", a_quality_run())
    return INTAKE.take([file], tmp_path / "results" / "q.jsonl", text="notes.txt")


def test_what_is_taken_in_has_no_lists_answers_or_folders(taken):
    text = taken.read_text()
    for word in ('"kl"', "a long answer", "/home/somebody", "/srv/", '"long"'):
        assert word not in text, word
    (run,) = read_runs(taken)
    assert run.model == "tiny-model"
    assert run.arguments["text"] == "notes.txt"
    assert run.arguments["set"] == ["fine.codebook=one.safetensors"]


def test_verdicts_survive_the_loss_of_their_lists(taken):
    wanted = [(v.arm, v.reference, v.words) for v in verdicts(QUALITY)]
    (run,) = read_runs(taken)
    assert [(v.arm, v.reference, v.words) for v in INTAKE.stored_verdicts(run)] == wanted
    assert ("poor", "newest of poor", "no (1.01)") in wanted


def test_taking_in_twice_changes_nothing(taken, tmp_path):
    again = INTAKE.take([taken], tmp_path / "again.jsonl")
    assert again.read_text() == taken.read_text()


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    file = written(tmp_path / "runs.jsonl", a_quality_run())
    monkeypatch.setattr(INTAKE, "LARGEST", 1000)
    with pytest.raises(VeloxQuantError, match="take fewer runs"):
        INTAKE.take([file], tmp_path / "q.jsonl")
    assert not (tmp_path / "q.jsonl").exists()


# ---------------------------------------------------------------- the page


def test_without_runs_it_says_so():
    text = page_of()
    assert "No runs are recorded yet" in text
    assert "Nothing was measured on Apple silicon" in text
    assert "|" not in text


def test_apple_silicon_is_named_only_while_nothing_was_measured_on_it():
    assert "Nothing was measured on Apple silicon" in page_of(a_speed_run(environment=CUDA))
    metal = {**CPU, "back_end": "metal"}
    assert "Nothing was measured on Apple silicon" not in page_of(a_speed_run(environment=metal))


def test_arms_stand_in_groups_by_measured_bytes():
    text = page_of(a_quality_run())
    places = [text.index(f"**{name}**") for _, name in _module("quality").GROUPS]
    places.append(len(text))
    groups = [text[start:end] for start, end in itertools.pairwise(places)]
    tables = [[line.split("|")[1].strip() for line in re.findall(r"^\|.*\d$|^\|.*", group, re.M)] for group in groups]
    firsts = [list(dict.fromkeys(name for name in table if name not in ("arm", "---"))) for table in tables]
    assert firsts == [["at 0.7"], ["at 0.35"], ["QuantizedKVCache 8 bits", "at 0.18"], ["poor", "fine"]]


def test_the_figures_of_an_arm_and_its_verdicts(taken):
    (run,) = read_runs(taken)
    text = page_of(run)
    figures, found = cells(text, "fine")
    assert figures == ["0.150", "0.150", "0.0150", "0.0100-0.0200", "0.020", "0.900", "11.00", "1/2"]
    assert found == ["yes (1.00)", "0.3500", "0/1", "level (1.87)", "2.0 x"]
    assert cells(text, "poor")[1][0] == "no (1.01)"
    assert "These do not beat the newest rows at their bytes: poor." in text
    assert "it finds 1/1 passkeys" in text


def test_arms_that_were_left_out_are_named_with_the_reason(tmp_path):
    run = a_quality_run(environment=CUDA)
    run.left_out += [
        LeftOut("best", where, "no kernel in /home/somebody/mlx.so") for where in ("64 tokens", "a passkey")
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.lines()))
    INTAKE.take([tmp_path / "r.jsonl"], tmp_path / "kept.jsonl")
    [kept] = read_runs(tmp_path / "kept.jsonl")
    assert [one.where for one in kept.left_out] == ["64 tokens", "a passkey"]
    wanted = "**best**, which could not be measured at 64 tokens, and 1 more of the kind: `no kernel in mlx.so`"
    assert f"- Left out: {wanted}" in page_of(kept)
    assert "Left out" not in page_of(a_quality_run())
    kept.left_out[:] = [LeftOut("best", "64 tokens", "[quantized_matmul] No implementation for problem shape: 1x2x3x4")]
    assert "MLX has no kernel on CUDA for what mlx-lm's cache multiplies with" in page_of(kept)


JUNIT = """<testsuites><testsuite timestamp="2026-11-30T02:55:01.5+00:00">
<testcase name="test_good"/><testcase name="test_fine"/>
<testcase name="test_threads"><skipped type="pytest.skip" message="CUDA bears no threads"/></testcase>
<testcase name="test_rows"><skipped type="pytest.skip" message="it has no rows"/></testcase>
<testcase name="test_known"><skipped type="pytest.xfail" message="it is known"/></testcase>{more}
</testsuite></testsuites>"""
FAILED = '<testcase name="test_bad"><failure message="no"/></testcase>'


def test_what_passed_elsewhere_is_counted_and_what_did_not_is_explained(tmp_path):
    (tmp_path / "one.xml").write_text(JUNIT.format(more=FAILED))
    (tmp_path / "two.xml").write_text(JUNIT.format(more=""))
    (tmp_path / "here.json").write_text(json.dumps(CUDA))
    files = [f"core={tmp_path / 'one.xml'}", f"core={tmp_path / 'two.xml'}", f"other={tmp_path / 'two.xml'}"]
    given = (files, str(tmp_path / "here.json"), "0123abc", tmp_path / "tests-there.json")
    with pytest.raises(VeloxQuantError, match="test_bad failed; say why"):
        SUITES.take(*given, {})
    SUITES.take(*given, {"test_bad": "it is slow."}, ["Some did not run."])
    text = PAGE.page([PAGE.Recorded(a_speed_run(), "file.jsonl", 0)], [], SUITES.read(tmp_path))
    assert "### CUDA, Some GPU" in text
    assert "veloxquant 0.1.0, mlx 0.32.4" in text
    assert "2026-11-30 02:55 UTC; commit `0123abc`" in text
    assert cells(text, "core") == [["4", "4", "2", "1"]]
    assert cells(text, "other") == [["2", "2", "1", "0"]]
    for line in (
        "Some did not run.",
        "Skipped there, 3 times: CUDA bears no threads.",
        "Failed, of core: `test_bad`: it is slow.",
    ):
        assert f"- {line}" in text
    assert "it has no rows" not in text
    assert "Tests on other back ends" not in page_of(a_speed_run())


def test_what_a_run_depends_on_is_said():
    text = page_of(a_quality_run(environment=CUDA))
    for part in ("Some GPU", "Some CPU", "2 cores", "8 GiB", "Back end: cuda", "float32", "mlx-lm 0.32.2", "0" * 64):
        assert part in text, part
    assert "2026-11-29 23:30 UTC; run `r1` of [file.jsonl](results/file.jsonl)" in text
    assert "OpenBLAS, 1 thread(s)" in page_of(a_quality_run())


def test_shares_in_16_bits_come_from_a_run_that_measured_them_or_not_at_all():
    quality = a_quality_run()
    assert "so they leave it out" in page_of(quality, a_memory_run("m1"))
    text = page_of(quality, a_memory_run("m2", "bfloat16", CODEBOOK))
    assert "so they leave it out" not in text
    assert cells(text, "fine")[0][:2] == ["0.150", "0.500"]
    assert cells(text, "poor")[0][:2] == ["0.180", "-"]
    assert f"another run, `m2`: one layer of random rows ({SHAPE}), right after 4,096 tokens" in text
    other_options = page_of(quality, a_memory_run("m3", "bfloat16", {"codebook": "another"}))
    assert cells(other_options, "fine")[0][:2] == ["0.150", "-"]


def test_speed_prefill_and_generation():
    text = page_of(a_speed_run())
    steps, prefill, generation = cells(text, "fine")
    assert steps == ["1.000", "0.50 (0.45-0.55)", "-", "-", "-"]
    assert prefill == ["750.0", "10.00", "750.0", "1.50 (1.35-1.65)", "750.0"]
    assert generation == ["20.0", "50.0", "0.50 (0.45-0.55)"]
    assert "All runs side by side" not in text


def test_speed_runs_stand_side_by_side():
    stock = {**CPU, "blas": "as mlx's wheel brings it"}
    text = page_of(a_speed_run("s1", stock), a_speed_run("s2"), a_speed_run("s3", CUDA, "bfloat16"))
    assert cells(text, "fine")[0] == ["0.50", "-"] * 3
    for name in ("CPU,<br>mlx's own BLAS<br>float32<br>4,096", "CPU,<br>OpenBLAS<br>float32<br>32,768"):
        assert name in text
    assert "CUDA,<br>Some GPU<br>bfloat16<br>4,096" in text


def test_memory():
    assert cells(page_of(a_memory_run()), "fine") == [["1.00", "0.500", "3.00", "4.00", "5.00", "6.00", "-"]]


def test_only_pictures_that_are_there_are_shown():
    assert "![" not in page_of(a_quality_run())
    text = page_of(a_quality_run(), pictures=["file-quality.svg", "file-memory.svg"])
    assert re.findall(r"!\[.*\]\((.*)\)", text) == ["results/file-quality.svg"]


def test_pictures_are_drawn_in_one_form_and_old_ones_go(tmp_path):
    pytest.importorskip("matplotlib")
    written(tmp_path / "a.jsonl", a_memory_run(), a_speed_run())
    (tmp_path / "old-speed.svg").write_text("")
    names = PICTURES.drawn(PAGE.read(tmp_path), tmp_path)
    assert names == PICTURES.pictures(tmp_path)
    assert [Path(name).stem for name in names] == ["a-1-memory", "a-2-speed"]


# ----------------------------------------------------------- the command line


@pytest.mark.parametrize("run", [a_quality_run(), a_speed_run(), a_memory_run()], ids=lambda run: run.command)
def test_the_command_of_a_run_can_be_typed(run):
    from veloxquant.cli.bench import app

    group = typer.main.get_command(app)
    words = shlex.split(" ".join(line.removesuffix("\\") for line in COMMAND.command_lines(run)))
    words = words[words.index("veloxquant") + 1 :]
    assert words[:2] == ["bench", run.command]
    command = group.commands[run.command]
    asked = command.make_context(run.command, words[2:]).params
    for name, value in run.arguments.items():
        option = asked.get({"set": "settings", "arms": "arm"}.get(name, name))
        if name == "shape":
            assert (asked["query_heads"], asked["kv_heads"], asked["head_dim"], asked["dtype"]) == (8, 2, 64, run.dtype)
        elif isinstance(value, list) and isinstance(option, str):
            assert option == ",".join(map(str, value)), name
        else:
            assert (list(option) if isinstance(value, list) else option) == value, name


def test_the_command_says_which_text_and_which_blas(taken):
    (run,) = read_runs(taken)
    lines = COMMAND.command_lines(run)
    assert lines[0].startswith("OPENBLAS_NUM_THREADS=1 LD_PRELOAD=libopenblas.so.0 veloxquant bench quality")
    assert any(line.strip().startswith("--text notes.txt") for line in lines)
    run.arguments["text"] = INTAKE.SAMPLE
    assert "--text" not in " ".join(COMMAND.command_lines(run))
    assert COMMAND.command_lines(a_speed_run())[-1].strip() == "--blas openblas"
    assert "--blas" not in " ".join(COMMAND.command_lines(a_speed_run(environment=CUDA, dtype="bfloat16")))
    exact = {**CUDA, "blas": "cuBLAS, TF32 off"}
    assert COMMAND.command_lines(a_speed_run(environment=exact))[0].startswith("MLX_ENABLE_TF32=0 veloxquant bench")


def test_records_are_lines_of_json(taken):
    assert len([json.loads(line) for line in taken.read_text().splitlines()]) == 1 + len(QUALITY)
