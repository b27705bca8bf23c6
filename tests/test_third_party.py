"""A method that is no part of this project: written, built, installed beside the core in a new place, and used."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from veloxquant.cli import main

ROOT = Path(__file__).parents[1]
NAME = "sink_window"
BIN = "Scripts" if os.name == "nt" else "bin"
SAMPLE = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["dependency-groups"]["sample"]


def run(*words, cwd=None):
    """Run a program as a user would, without this process's own packages."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "COLUMNS")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def uv():
    """The command of uv, or None: with it the environment is ready in seconds."""
    if find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    found = shutil.which("uv")
    return [found] if found else None


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new virtual environment with the core and the plugin, both from wheels; a function that runs its programs."""
    place = tmp_path_factory.mktemp("third_party")
    assert main(["new", NAME, "--dir", str(place)]) == 0
    project, wheels, home = place / "veloxquant-sink-window", place / "wheels", place / "home"
    if uv():
        build = [*uv(), "build", "--wheel", "--quiet", "--out-dir", wheels]
        install = [*uv(), "pip", "install", "--quiet", "--no-sources", "--python", home / BIN / "python"]
        run(*uv(), "venv", "--quiet", "--python", sys.executable, home)
    else:
        run(sys.executable, "-m", "venv", home)
        pip = [home / BIN / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
        build, install = [*pip, "wheel", "--no-deps", "--wheel-dir", wheels], [*pip, "install"]
    run(*build, ROOT / "core")
    run(*build, project)
    core, plugin = (next(wheels.glob(f"{name}-*.whl")) for name in ("veloxquant", "veloxquant_sink_window"))
    run(*install, f"veloxquant[cpu] @ {core.as_uri()}", f"veloxquant-sink-window[test] @ {plugin.as_uri()}")
    run(*install, "--no-deps", *SAMPLE)
    return lambda program, *words: run(home / BIN / program, *words, cwd=project)


def test_it_is_listed_and_described(environment):
    assert json.loads(environment("veloxquant", "list", "--json")) == [
        {"name": NAME, "distribution": "veloxquant-sink-window", "version": "0.1.0", "state": "installed"}
    ]
    described = json.loads(environment("veloxquant", "info", NAME, "--json"))
    assert [option["name"] for option in described["options"]] == ["sinks", "window"]
    assert described["query_modes"] == ["routed", "proxy"]
    assert NAME in environment("veloxquant", "list")


def test_the_doctor_finds_nothing(environment):
    record = json.loads(environment("veloxquant", "doctor", "--json"))
    assert record["problems"] == []
    assert [method["name"] for method in record["methods"]] == [NAME]


def test_it_generates(environment):
    words = ("--prompt", "What is the capital of France?", "--set", "window=16", "--max-tokens", "8", "--compare")
    record = json.loads(environment("veloxquant", "generate", "--method", NAME, *words, "--profile", "--json"))
    ours, plain = record["runs"]
    assert "Paris" in plain["text"]
    assert ours["query_mode"] == "routed"
    assert ours["tokens_seen"] == plain["tokens_seen"]
    # 4 sinks, the window, and the tokens after the prompt.
    assert ours["tokens_kept"] == 4 + 16 + ours["tokens_seen"] - record["prompt_tokens"]
    assert ours["tokens"][0] == plain["tokens"][0]
    assert {row["layer"] for row in record["profile"]["layers"]} == set(range(30))


def test_it_passes_the_conformance_kit(environment):
    # A small window, so that rows are really dropped.
    small, large = ("--set", "sinks=2", "--set", "window=8"), ("--dense-set", "window=1000000")
    found = json.loads(environment("veloxquant", "check", NAME, *small, *large, "--json"))
    outcomes = {one["rule"]: one["outcome"] for one in found}
    assert set(outcomes.values()) == {"passed", "not applicable"}
    assert {outcomes[rule] for rule in ("dense_equality", "trim_state", "file_in_new_process")} == {"passed"}


def test_its_own_tests_run(environment):
    # Some of the rules; the whole kit has run already.
    shown = environment("pytest", "-q", "-k", "own_rows_exact or dense_equality or trim_forgets", "tests")
    assert "3 passed" in shown


def test_its_wheel_holds_what_it_should(environment):
    code = (
        "import importlib.metadata, json; dist = importlib.metadata.distribution('veloxquant-sink-window'); "
        "print(json.dumps([str(path) for path in dist.files]))"
    )
    files = json.loads(environment("python", "-c", code))
    assert "veloxquant_sink_window/py.typed" in files
    assert any(path.endswith("licenses/LICENSE") for path in files)
    assert not [path for path in files if path.startswith("tests/")]
