"""The program itself, and the commands that only look at plugins."""

import builtins
import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

import veloxquant_command
from veloxquant.cli import doctor
from veloxquant.cli import main
from veloxquant.registry import BLOCK_VARIABLE
from veloxquant.registry import default_registry

PLUGIN = """
import attrs
import veloxquant
from veloxquant import MethodInfo, hookimpl

@attrs.frozen(kw_only=True)
class Config:
    rows: int | None = attrs.field(default=None, metadata={"help": "rows [of text] to keep"})

@hookimpl
def veloxquant_method():
    return MethodInfo(name=NAME, config=Config, summary="keeps [some] rows", kind="toy", evicts=True)

@hookimpl
def veloxquant_create(config, layer): ...
@hookimpl
def veloxquant_prefill(state, keys, values): return keys, values
@hookimpl
def veloxquant_decode(state, keys, values): return keys, values
@hookimpl
def veloxquant_account(state): return veloxquant.ByteCount()
@hookimpl
def veloxquant_serialize(state): return veloxquant.Snapshot()
@hookimpl
def veloxquant_restore(config, layer, snapshot): ...
"""
ATTEND = """
@hookimpl
def veloxquant_attend(state, queries, keys, values): ...
@hookimpl
def veloxquant_trim(state, count): return count
"""


@pytest.fixture(autouse=True)
def _plain_output(plain_output):
    pass


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that puts a distribution with one plugin on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))

    def write(name, source, distribution="toy-dist"):
        module = f"{distribution.replace('-', '_')}_{name}"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        with (info / "entry_points.txt").open("a") as file:
            file.write(f"[veloxquant.methods]\n{name} = {module}\n" if file.tell() == 0 else f"{name} = {module}\n")
        default_registry.cache_clear()
        return module

    default_registry.cache_clear()
    before = set(sys.modules)
    yield write
    default_registry.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith(("toy_dist", "second_dist", "fine_dist")):
            del sys.modules[module]


def good(name="toy"):
    return f"NAME = {name!r}\n{PLUGIN}"


def parse(capsys):
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------ program


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"veloxquant {version('veloxquant')}\n"


def test_without_arguments_there_is_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("Usage", "list", "info", "doctor", "generate"))


def test_a_group_without_a_command_gives_help(capsys):
    assert main(["bench"]) == 0
    captured = capsys.readouterr()
    assert "Usage" in captured.out
    assert "memory" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["genrate"], "there is no command 'genrate'; did you mean 'generate'?"),
        (["nonsense"], "there is no command 'nonsense' (commands: list, info, doctor, "),
        (["list", "--jsn"], "--json"),
        (["info"], "Missing argument"),
        (["info", "a", "b"], "unexpected extra argument"),
        (["generate"], "Missing option '--method'"),
    ],
)
def test_wrong_words_get_one_line_and_code_2(words, said, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_interrupted(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_versions", interrupt)
    assert main(["doctor"]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == "interrupted"


def test_interrupted_while_the_program_is_imported(monkeypatch, capsys):
    def interrupt(name, *rest):
        if name == "veloxquant.cli":
            raise KeyboardInterrupt
        return importing(name, *rest)

    importing = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupt)
    assert veloxquant_command.main() == 130
    assert capsys.readouterr().err.strip() == "interrupted"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["--help"]])
def test_no_room_for_the_output_is_one_sentence(words):
    program = [sys.executable, "-c", "import sys; from veloxquant.cli import main; sys.exit(main())", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "error: cannot write: No space left on device; make room, or send the output elsewhere\n"
    assert done.returncode == 2


def test_bugs_are_shown(monkeypatch):
    monkeypatch.setattr(doctor, "_versions", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["--help"]])
def test_a_closed_pipe_gives_no_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", "import sys; from veloxquant.cli import main; sys.exit(main())", *words]
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


# --------------------------------------------------------------------- list


def test_list_names_distributions_and_versions(install, capsys):
    install("toy", good())
    assert main(["list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "toy" in line)
    assert line.split() == ["toy", "toy-dist", "1.5", "installed"]


def test_list_as_json_marks_blocked_and_duplicate_names(install, monkeypatch, capsys):
    for name in ("toy", "other", "twice"):
        install(name, good(name))
    install("twice", good("twice"), "second-dist")
    monkeypatch.setenv(BLOCK_VARIABLE, "other")
    assert main(["list", "--json"]) == 0
    found = [entry for entry in parse(capsys) if entry["distribution"] in ("toy-dist", "second-dist")]
    assert all(entry["version"] == "1.5" for entry in found)
    assert [(entry["name"], entry["state"]) for entry in found] == [
        ("other", "blocked"),
        ("toy", "installed"),
        ("twice", "duplicate"),
        ("twice", "duplicate"),
    ]


def test_list_imports_neither_mlx_lm_nor_plugins(install):
    module = install("toy", "raise SystemExit('imported')")
    code = (
        "import sys; from veloxquant.cli import main; assert main(['list']) == 0; "
        f"sys.exit(' '.join({{'mlx_lm', 'transformers', {module!r}}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    assert "toy-dist" in done.stdout


# --------------------------------------------------------------------- info


def test_info_of_a_method_without_queries(install, capsys):
    install("toy", good())
    assert main(["info", "toy"]) == 0
    out = capsys.readouterr().out
    for part in ("keeps [some] rows", "looks at no queries", "toy-dist 1.5", "int or None", "rows [of text] to keep"):
        assert part in out


def test_info_as_json(install, capsys):
    install("toy", good() + ATTEND)
    assert main(["info", "toy", "--json"]) == 0
    assert parse(capsys) == {
        "name": "toy",
        "distribution": "toy-dist",
        "version": "1.5",
        "summary": "keeps [some] rows",
        "kind": "toy",
        "paper": None,
        "needs": [],
        "query_modes": ["routed", "proxy"],
        "trimmable": {"routed": True, "proxy": False},
        "options": [
            {
                "name": "rows",
                "type": "int or None",
                "default": "None",
                "help": "rows [of text] to keep",
                "example": None,
                "calibrated": False,
            }
        ],
        "examples": ["veloxquant generate --method toy --compare"],
    }


def test_info_says_when_caches_can_be_trimmed(install, capsys):
    install("toy", good() + ATTEND)
    main(["info", "toy"])
    assert "routed: yes, proxy: no" in capsys.readouterr().out


def test_info_of_an_unknown_method(install, capsys):
    install("toybox", good("toybox"))
    assert main(["info", "toybx"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "did you mean 'toybox'?" in captured.err


def test_info_of_a_broken_method(install, capsys):
    install("toy", "raise SystemExit('not here')")
    assert main(["info", "toy"]) == 2
    assert "toy-dist 1.5" in capsys.readouterr().err


# ------------------------------------------------------------------- doctor


def test_doctor_is_content(install, capsys):
    install("toy", good())
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "all is well" in out
    assert "toy 1.5" in out
    for name in ("python", "mlx", "mlx-lm", "back end"):
        assert name in out


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("import no_such_module_at_all", "broken", "no_such_module_at_all"),
        ("raise SystemExit('goodbye')", "broken", "goodbye"),
        (good("another"), "misnamed", "another"),
    ],
)
def test_doctor_reports_a_plugin_that_cannot_be_used(source, kind, reason, install, capsys):
    module = install("toy", source)
    install("fine", good("fine"), "fine-dist")
    assert main(["doctor", "--json"]) == 1
    record = parse(capsys)
    [problem] = [p for p in record["problems"] if p["name"] == "toy"]
    assert problem["kind"] == kind
    assert reason in problem["reason"]
    assert (problem["distribution"], problem["version"], problem["target"]) == ("toy-dist", "1.5", module)
    assert "fine" in [method["name"] for method in record["methods"]]
    assert main(["doctor"]) == 1
    assert f"{kind}: toy of toy-dist 1.5" in capsys.readouterr().out


def test_doctor_names_both_claimants(install, capsys):
    install("toy", good())
    install("toy", good(), "second-dist")
    assert main(["doctor", "--json"]) == 1
    problems = parse(capsys)["problems"]
    assert {problem["distribution"] for problem in problems} == {"toy-dist", "second-dist"}
    assert {problem["kind"] for problem in problems} == {"duplicate"}


def test_doctor_reports_blocked_methods(install, monkeypatch, capsys):
    install("toy", good())
    monkeypatch.setenv(BLOCK_VARIABLE, "toy")
    assert main(["doctor", "--json"]) == 1
    assert [problem["kind"] for problem in parse(capsys)["problems"]] == ["blocked"]


def test_a_plugin_that_prints_does_not_spoil_json(install, capsys):
    install("toy", "print('hello')\n" + good())
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["problems"] == []
    assert "hello" in captured.err


# --------------------------------------------------------------- completion


def offered(line):
    """What bash is offered at the end of a line."""
    words = {"_VELOXQUANT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    code = "import sys; from veloxquant_command import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **words}, timeout=120
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("veloxquant info to", ["toy"]),
        ("veloxquant check to", ["toy"]),
        ("veloxquant generate --method to", ["toy"]),
        ("veloxquant generate --method toy --set ro", ["rows=", "rows=none"]),
        ("veloxquant check toy --set ", ["rows=", "rows=none"]),
        ("veloxquant generate --set ro", []),
        ("veloxquant generate --method broken --set ro", []),
    ],
)
def test_names_of_methods_and_options_are_completed(line, words, install):
    install("toy", good())
    install("broken", "raise SystemExit('not here')", distribution="second-dist")
    assert offered(line) == words


def test_a_wrong_option_points_to_the_list_of_options(install, capsys):
    install("toy", good())
    assert main(["generate", "--method", "toy", "--set", "row=3"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'rows'?" in said
    assert said.endswith("; 'veloxquant info toy' lists the options\n")


def test_a_broken_plugin_points_to_the_doctor(install, capsys):
    install("toy", "raise SystemExit('not here')")
    assert main(["info", "toy"]) == 2
    assert capsys.readouterr().err.endswith("; 'veloxquant doctor' looks at all plugins\n")
