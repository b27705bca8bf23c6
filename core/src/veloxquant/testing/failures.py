"""How a rule says that a method breaks it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from veloxquant.errors import VeloxQuantError

__all__ = ["RuleFailure", "refusing", "require"]


class RuleFailure(AssertionError):  # noqa: N818 - a failed rule is a finding, not an error of the kit
    """A method does not keep the contract; the text is one sentence with the figures that were found."""


def require(condition: bool, message: str) -> None:
    """Raise ``RuleFailure(message)`` unless ``condition`` holds."""
    if not condition:
        raise RuleFailure(message)


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Require that the block raises a VeloxQuantError.

    Args:
        what: What must be refused, for the message.

    Raises:
        RuleFailure: Nothing was raised, or something else.
    """
    try:
        yield
    except VeloxQuantError:
        return
    except Exception as error:
        raise RuleFailure(f"{what} must raise a VeloxQuantError, not {type(error).__name__}: {error}") from error
    raise RuleFailure(f"{what} must be refused with a VeloxQuantError and was accepted")
