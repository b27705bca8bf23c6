"""What a shell may complete, and what the user is told to look up when it was typed wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from veloxquant.errors import ConfigError
from veloxquant.errors import VeloxQuantError

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
    """``OPTION=`` for the options of the method that stands on the line already."""
    from veloxquant.config import describe_options
    from veloxquant.registry import default_registry

    method = context.params.get("method") or context.params.get("name")
    if not method:
        return []
    try:
        options = describe_options(default_registry().get(method).info.config)
    except VeloxQuantError:  # a shell has no place for messages
        return []
    return [f"{option.name}=" for option in options if option.name.startswith(incomplete)]


@contextlib.contextmanager
def pointing_to_info(method: str) -> Iterator[None]:
    """Add to what is wrong with the options of a method where they are listed."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; 'veloxquant info {method}' lists the options") from error
