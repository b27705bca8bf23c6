"""``veloxquant calibrate``: commands that methods bring."""

import sys

import pytest

from veloxquant.cli import main
from veloxquant.registry import BLOCK_VARIABLE
from veloxquant.registry import default_registry

COMMAND = '''
from typing import Annotated
import typer
from veloxquant import VeloxQuantError

def calibrate(output: Annotated[str, typer.Option("-o")], tokens: int = 8) -> None:
    """Learn [something]."""
    if tokens < 1:
        raise VeloxQuantError("--tokens must be at least 1")
    print(f"wrote {output} from {tokens} tokens")
'''


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch):
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that puts a distribution with a calibration on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name="toy", distribution="learner-dist", source=COMMAND):
        module = f"{distribution.replace('-', '_')}_command"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[veloxquant.calibrations]\n{name} = {module}:calibrate\n")

    default_registry.cache_clear()
    before = set(sys.modules)
    yield write
    default_registry.cache_clear()
    for module in set(sys.modules) - before:
        if module.endswith("_dist_command"):
            del sys.modules[module]


def test_what_follows_the_name_is_for_the_method(install, capsys):
    install()
    assert main(["calibrate", "toy", "-o", "file", "--tokens", "5"]) == 0
    assert capsys.readouterr().out == "wrote file from 5 tokens\n"


def test_help_of_the_command_and_of_a_method(install, capsys):
    install()
    for words in (["calibrate"], ["calibrate", "--help"]):
        assert main(words) == 0
        assert "methods that can be calibrated:" in (out := capsys.readouterr().out)
        assert "toy" in out
    assert main(["calibrate", "toy", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: veloxquant calibrate toy" in out
    assert "--tokens" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["toi"], "there is no calibration for 'toi'; did you mean 'toy'?"),
        (["toy"], "Missing option '-o'"),
        (["toy", "-o", "f", "--token", "3"], "--token"),
        (["toy", "-o", "f", "--tokens", "0"], "--tokens must be at least 1"),
    ],
)
def test_wrong_words_get_one_line_and_code_2(words, said, install, capsys):
    install()
    assert main(["calibrate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_blocked_method_is_not_calibrated(install, monkeypatch, capsys):
    install()
    monkeypatch.setenv(BLOCK_VARIABLE, "toy")
    default_registry.cache_clear()
    assert main(["calibrate", "toy", "-o", "f"]) == 2
    assert "blocked" in capsys.readouterr().err


def test_two_claimants_are_named(install, capsys):
    install()
    install(distribution="second-dist")
    assert main(["calibrate", "toy", "-o", "f"]) == 2
    error = capsys.readouterr().err
    assert "learner-dist" in error
    assert "second-dist" in error


def test_a_broken_calibration_is_told_with_its_distribution(install, capsys):
    install(source="import nothing_of_this_name")
    assert main(["calibrate", "toy", "-o", "f"]) == 2
    assert "learner-dist 1.5" in capsys.readouterr().err
