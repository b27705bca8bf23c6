"""Every error that veloxquant raises on purpose; ``str(error)`` is a sentence for the user."""

__all__ = [
    "INTERRUPTED",
    "ConfigError",
    "FileFormatError",
    "PluginError",
    "RoutingError",
    "UnknownMethodError",
    "UnsupportedModelError",
    "UnsupportedShapeError",
    "VeloxQuantError",
]

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


class VeloxQuantError(Exception):
    """Base class of all errors of this project."""


class UnknownMethodError(VeloxQuantError, LookupError):
    """No installed method has the name that was asked for."""


class PluginError(VeloxQuantError):
    """A plugin is broken, misnamed, blocked, or its name is claimed twice."""


class ConfigError(VeloxQuantError, ValueError):
    """An option is unknown, has the wrong type, or a value that the method cannot use."""


class RoutingError(VeloxQuantError):
    """True queries should have reached a cache and did not, or came with a mask that cannot be honoured."""


class UnsupportedModelError(VeloxQuantError):
    """The model, or one of its layers, cannot be served by compressed caches."""


class UnsupportedShapeError(VeloxQuantError, ValueError):
    """Keys or values have a shape or dtype that the cache or the method cannot take."""


class FileFormatError(VeloxQuantError):
    """A cache file or a saved state cannot be read here; nothing was loaded."""
