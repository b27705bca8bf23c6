"""The two markers of the plugin protocol: ``hookspec`` for the core, ``hookimpl`` for methods."""

import pluggy

__all__ = ["PROJECT", "PROTOCOL", "hookimpl", "hookspec"]

PROJECT = "veloxquant"

PROTOCOL = 1
"""Version of the hook protocol; a method built for another one is refused with advice."""

hookspec = pluggy.HookspecMarker(PROJECT)

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook with the same name."""
