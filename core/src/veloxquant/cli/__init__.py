"""The command ``veloxquant``: one module a command, each importing what is heavy only when it runs."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated
from typing import Any

import typer

from veloxquant.cli import bench
from veloxquant.cli import calibrate
from veloxquant.cli import check
from veloxquant.cli import doctor
from veloxquant.cli import generate
from veloxquant.cli import info
from veloxquant.cli import list as list_command
from veloxquant.cli import new
from veloxquant.cli import serve
from veloxquant.cli import show
from veloxquant.cli.output import help_style
from veloxquant.cli.output import say_error
from veloxquant.config import suggest
from veloxquant.errors import INTERRUPTED
from veloxquant.errors import PluginError
from veloxquant.errors import VeloxQuantError

__all__ = ["app", "main"]

# Wrong arguments: typer brings a click of its own in new versions and uses the installed one in old versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

BAD_INPUT = 2

# A disk, or the share of it that the user may have, is full.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app = typer.Typer(
    name="veloxquant",
    help="KV-cache compression methods for mlx-lm models.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("list")(list_command.list_methods)
app.command("info")(info.info)
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("calibrate", context_settings=calibrate.PASS_ON)(calibrate.calibrate)
app.command("generate")(generate.generate)
app.command("serve", context_settings=serve.PASS_ON)(serve.serve)
app.command("show")(show.show)
app.command("new")(new.new)
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"veloxquant {version('veloxquant')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _refuse_unknown_command(words: Sequence[str]) -> None:
    # Old versions of typer make no suggestion.
    known = [command.name or "" for command in app.registered_commands]
    known += [group.name or "" for group in app.registered_groups if isinstance(group.name, str)]
    _refuse_unknown(words, known, "command")
    if words and words[0] == "bench":
        _refuse_unknown(words[1:], [command.name or "" for command in bench.app.registered_commands], "benchmark")


def _refuse_unknown(words: Sequence[str], known: list[str], kind: str) -> None:
    if words and not words[0].startswith("-") and words[0] not in known:
        raise VeloxQuantError(
            f"there is no {kind} '{words[0]}'{suggest(words[0], known)} ({kind}s: {', '.join(known)}); "
            "see 'veloxquant --help'"
        )


def _with_help(error: Any, words: Sequence[str]) -> str:
    """The message of a usage error, and the command that shows what would be right."""
    # What cannot even be split into options carries no context.
    path = " ".join(["veloxquant", *words[:1]]) if error.ctx is None else error.ctx.command_path
    return f"{error.format_message().rstrip('.')}; see '{path} --help'"


def _drop_output() -> None:
    # What is still buffered would fail again when Python closes stdout.
    with contextlib.suppress(OSError):  # what stands in for stdout may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: The words after the program's name; by default those it was started with.

    Returns:
        The exit code: 0, 1 when ``doctor`` or ``check`` found problems, 2 for bad input, 130 when interrupted.
    """
    # Not list(...): in this package that name is the module of the command.
    words = [*(sys.argv[1:] if args is None else args)]
    # Generated text must not end the program on a terminal that cannot show it.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        _refuse_unknown_command(words)
        app.rich_markup_mode = help_style()
        # A group without a command would be a usage error, whose message is the whole help.
        alone = words in ([], ["bench"])
        code = app([*words, "--help"] if alone else words, prog_name="veloxquant", standalone_mode=False)
        sys.stdout.flush()
    except VeloxQuantError as error:
        hint = "; 'veloxquant doctor' looks at all plugins" if isinstance(error, PluginError) else ""
        say_error(f"{error}{hint}")
        return BAD_INPUT
    except _UsageError as error:
        say_error(_with_help(error, words))
        return BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        say_error(f"cannot write: {error.strerror}; make room, or send the output elsewhere")
        return BAD_INPUT
    if code == INTERRUPTED:  # what typer itself makes of Ctrl-C in new versions
        print("\ninterrupted", file=sys.stderr)
    return int(code or 0)
