"""Small pieces of Markdown, and of words for figures."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence

__all__ = ["DASH", "code", "mib", "ms", "span", "table"]

DASH = "-"
"""What stands in a cell that has no figure."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table as lines: names at the left, figures at the right."""
    rules = ["---", *("--:" for _ in columns[1:])]
    return [_row(columns), _row(rules), *(_row(row) for row in rows), ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def code(text: str) -> str:
    """A code span."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def ms(seconds: float) -> str:
    """Seconds as milliseconds, with as many digits as say something."""
    return f"{1e3 * seconds:.3f}" if seconds < 1e-2 else f"{1e3 * seconds:,.1f}"


def mib(count: int | None) -> str:
    """Bytes as MiB."""
    return DASH if count is None else f"{count / 2**20:,.2f}"


def span(ends: Sequence[float], digits: int = 2) -> str:
    """Two ends of a range."""
    low, high = ends
    return f"{low:.{digits}f}-{high:.{digits}f}"
