"""Pictures of recorded runs, each in the smaller of two forms."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from results_page.page import Recorded
from results_page.page import picture_name
from veloxquant.bench.plot import draw
from veloxquant.bench.plot_style import Looks
from veloxquant.errors import VeloxQuantError

__all__ = ["SUFFIXES", "drawn", "pictures"]

SUFFIXES = (".svg", ".png")


def pictures(folder: Path) -> list[str]:
    """Names of the pictures of a folder."""
    return sorted(path.name for path in folder.glob("*") if path.suffix in SUFFIXES)


def drawn(found: Sequence[Recorded], folder: Path) -> list[str]:
    """Draw the runs anew; pictures that were there go.

    Args:
        found: The runs.
        folder: Where to write.

    Returns:
        Names of the pictures.

    Raises:
        VeloxQuantError: matplotlib is not installed.
    """
    made: dict[str, bytes] = {}
    looks = Looks()  # of all runs, so that a method looks the same in each
    for recorded in found:
        results = recorded.run.results
        if any(result.kind in ("quality", "speed", "memory") for result in results):
            made |= _of_one(recorded, looks)
    for name in pictures(folder):
        (folder / name).unlink()
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return sorted(made)


def _of_one(recorded: Recorded, looks: Looks) -> dict[str, bytes]:
    made = {}
    with tempfile.TemporaryDirectory() as place:
        try:
            files = draw([recorded.run], place, looks)
        except VeloxQuantError as error:
            if "nothing to draw" not in str(error):
                raise
            return {}
        for stem in dict.fromkeys(file.stem for file in files):
            forms = {file.suffix: file.read_bytes() for file in files if file.stem == stem}
            suffix = min(SUFFIXES, key=lambda suffix: len(forms[suffix]))
            made[picture_name(recorded, stem) + suffix] = forms[suffix]
    return made
