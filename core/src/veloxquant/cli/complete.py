"""What a shell may complete, and what the user is told to look up when it was typed wrong."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from veloxquant.errors import ConfigError
from veloxquant.errors import VeloxQuantError

if TYPE_CHECKING:
    from veloxquant.config import Option

__all__ = ["complete_calibration", "complete_method", "complete_setting", "pointing_to_info"]


def complete_method(incomplete: str) -> list[str]:
    """Names of installed methods; no plugin is imported."""
    from veloxquant.registry import default_registry

    return [name for name in default_registry().names() if name.startswith(incomplete)]


def complete_calibration(incomplete: str) -> list[str]:
    """Names of methods that can be calibrated."""
    from veloxquant.discovery import CALIBRATIONS
    from veloxquant.discovery import discover

    return sorted(name for name in discover(group=CALIBRATIONS) if name.startswith(incomplete))


def complete_setting(context: typer.Context, incomplete: str) -> list[str]:
    """``OPTION=`` for the options of the method that stands on the line already; of a sole one also values."""
    from veloxquant.config import describe_options
    from veloxquant.registry import default_registry

    # A line that ends with an option in want of a value is not parsed to its end, so look among its words too.
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    names = default_registry().names()
    found = [context.params.get("method"), context.params.get("name"), *(one for one in line.split() if one in names)]
    method = next((name for name in found if name), None)
    if method is None:
        return []
    try:
        options = describe_options(default_registry().get(method).info.config)
    except VeloxQuantError:  # a shell has no place for messages
        return []
    name, given, _ = incomplete.partition("=")
    fitting = [option for option in options if option.name == name or (not given and option.name.startswith(name))]
    if len(fitting) != 1:
        return [f"{option.name}=" for option in fitting]
    # Of a single offer bash and zsh take it that the word is complete, and put a space where the value should follow.
    offered = [f"{fitting[0].name}=", *(f"{fitting[0].name}={value}" for value in _values(fitting[0]))]
    return [one for one in offered if one.startswith(incomplete) and one != incomplete]


def _values(option: Option) -> list[str]:
    """Values to offer: all of them where they can be counted, else one that is right."""
    from veloxquant.registry import default_registry

    if option.name == "storage":
        return default_registry().names()
    if option.type.startswith("'"):
        return [value.strip("'") for value in option.type.split(" or ")]
    if option.type == "bool":
        return ["true", "false"]
    return [option.example or option.default.lower()] if option.default not in ("required", "computed") else []


@contextlib.contextmanager
def pointing_to_info(method: str) -> Iterator[None]:
    """Add to what is wrong with the options of a method where they are listed."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; 'veloxquant info {method}' lists the options") from error
