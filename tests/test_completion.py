"""What a shell is offered for the options of installed methods."""

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "import sys; from veloxquant_command import main; sys.exit(main())"]


def completed(line, shell="bash"):
    """What the shell is offered at the end of a line."""
    changes = {"_VELOXQUANT_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    changes |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(COMMAND, capture_output=True, text=True, env={**os.environ, **changes}, timeout=120)
    return done.stdout.split()


def test_the_options_of_the_method_are_completed():
    line = "veloxquant generate --method snapkv --set "
    assert {"budget=", "window="} <= set(completed(line))
    # With one offer bash and zsh would end the word with a space, and "budget= 4" is refused.
    assert completed(line + "budg") == ["budget=", "budget=none"]
    assert {"window=", "window=32"} == set(completed(line + "wi"))


@pytest.mark.parametrize(
    ("written", "offers"),
    [
        ("pooling=", {"pooling=max", "pooling=avg"}),
        ("pooling=m", {"pooling=max"}),
        ("storage=turbo", {"storage=turboquant_rvq"}),
        ("nothing=", set()),
    ],
)
def test_values_are_completed_where_they_can_be_counted(written, offers):
    # fish and zsh hand over the whole word, bash splits it at the sign.
    assert set(completed(f"veloxquant generate --method snapkv --set {written}", "fish")) == offers
