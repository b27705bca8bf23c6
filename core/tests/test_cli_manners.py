"""What a terminal, a pipe and a shell see of the command line: colours, completion, and the next thing to type."""

import os
import pty
import re
import select
import subprocess
import sys

import pytest

from veloxquant.cli import main

ESCAPE = "\x1b"
COMMAND = [sys.executable, "-c", "import sys; from veloxquant_command import main; sys.exit(main())"]


def environment(**changes):
    """The tests' own environment without what decides on colours."""
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS")}
    plain.pop("GITHUB_ACTIONS", None)
    return {**plain, "TERM": "xterm-256color", "COLUMNS": "100", **changes}


def in_a_pipe(*words, **changes):
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=environment(**changes), timeout=120)
    return done.stdout + done.stderr


def on_a_terminal(*words, **changes):
    """Run the command with a pseudo terminal for stdin, stdout and stderr."""
    main_end, other_end = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *words], stdin=other_end, stdout=other_end, stderr=other_end, env=environment(**changes)
    )
    os.close(other_end)
    text = b""
    while select.select([main_end], [], [], 120)[0]:
        try:
            piece = os.read(main_end, 4096)
        except OSError:  # how Linux tells the end of a terminal
            break
        if not piece:
            break
        text += piece
    process.wait(timeout=60)
    os.close(main_end)
    return text.decode()


WORDS = [["--help"], ["generate", "--help"], ["list"], ["doctor"], ["info", "nothing"], ["lst"], ["generate"]]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_pipe_gets_plain_text(words):
    text = in_a_pipe(*words)
    assert text.strip()
    assert ESCAPE not in text


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_no_color_makes_a_terminal_get_plain_text(words):
    text = on_a_terminal(*words, NO_COLOR="1")
    assert text.strip()
    assert ESCAPE not in text


def test_a_terminal_gets_more_than_plain_text():
    assert ESCAPE in on_a_terminal("--help")


def test_an_empty_no_color_is_none():
    assert ESCAPE in on_a_terminal("--help", NO_COLOR="")


def test_no_color_counts_more_than_force_color():
    assert ESCAPE in in_a_pipe("--help", FORCE_COLOR="1")
    assert ESCAPE not in in_a_pipe("--help", FORCE_COLOR="1", NO_COLOR="1")


# ------------------------------------------------------------------ completion


def completed(line, shell="bash"):
    """What the shell is offered at the end of a line."""
    words = line.split(" ")
    changes = {"_VELOXQUANT_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    changes |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return in_a_pipe(**changes).split()


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_commands_are_completed(shell):
    assert {"generate"} <= set(completed("veloxquant gen", shell))
    assert "list" not in completed("veloxquant gen", shell)


def test_options_are_completed():
    assert "--max-tokens" in completed("veloxquant generate --max")


def test_there_is_a_script_for_the_shell():
    text = in_a_pipe("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_VELOXQUANT_COMPLETE=complete_bash" in text


# ------------------------------------------------------------------ the next command


@pytest.mark.parametrize(
    ("words", "next_command"),
    [
        (["genrate"], "veloxquant --help"),
        (["info"], "veloxquant info --help"),
        (["generate"], "veloxquant generate --help"),
        (["generate", "--method"], "veloxquant generate --help"),
        (["list", "--jsn"], "veloxquant list --help"),
        (["info", "nothing"], "pip install veloxquant-NAME"),
        (["generate", "--method", "snpkv"], "pip install veloxquant-NAME"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_error_names_the_next_command(words, next_command, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert re.search(re.escape(next_command), said), said
