"""The options of mlx-lm's server, read by mlx-lm's own parser."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

from mlx_lm import server

from veloxquant.config import suggest
from veloxquant.errors import VeloxQuantError

__all__ = ["parse_server_options", "rebound"]


def parse_server_options(words: Sequence[str], own_options: Sequence[str] = ()) -> argparse.Namespace:
    """Read options as ``mlx_lm.server`` does; also sets up logging, which its ``main`` does on the way.

    Args:
        words: The options, the model's among them.
        own_options: Names of options that are not mlx-lm's, for suggestions.

    Raises:
        VeloxQuantError: An option is unknown or its value cannot be used.
    """
    found: list[argparse.Namespace] = []

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        raise VeloxQuantError(_sentence(message, [*known, *own_options]))

    # main() parses, sets up logging, and hands over to run(host, port, ModelProvider(args)).
    with (
        rebound(argparse.ArgumentParser, error=refuse),
        rebound(server, ModelProvider=found.append, run=lambda *_: None),
        rebound(sys, argv=["mlx_lm.server", *words]),
    ):
        server.main()
    return found[0]


@contextlib.contextmanager
def rebound(owner: Any, **names: Any) -> Iterator[None]:
    """Let names of a module or class mean something else for a while."""
    before = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _sentence(message: str, known: Sequence[str]) -> str:
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown == message:
        return f"{message} (options of mlx-lm's server: python -m mlx_lm server --help)"
    word = unknown.split()[0].split("=")[0]
    return (
        f"there is no option '{word}'{suggest(word, known)} (veloxquant serve --help shows ours, "
        "python -m mlx_lm server --help those of mlx-lm's server, which pass through)"
    )
