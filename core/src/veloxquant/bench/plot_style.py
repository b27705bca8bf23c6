"""One look for all pictures of the bench: colours that colour-blind readers tell apart, markers, labels at the data."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from veloxquant.errors import VeloxQuantError

__all__ = ["GREY", "Look", "Looks", "log_ticks", "new_figure", "place_labels", "save", "spread_labels"]

# Okabe and Ito's palette without black and yellow, which serve for references and are pale on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">")
_BLACK = "#000000"
GREY = "#6E6E6E"
"""Colour of what stands beside the data: references, frames, notes."""

# Behind letters, which lines may run behind.
_PATCH = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}

_STYLE = {
    "figure.figsize": (8.0, 5.2),
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 7,
    "svg.hashsalt": "veloxquant",
}


@attrs.frozen
class Look:
    """How an arm is drawn.

    Args:
        colour: Its colour.
        marker: Its marker.
        dashed: Whether its lines are dashed.
    """

    colour: str
    marker: str
    dashed: bool = False


class Looks:
    """Looks of methods: the same for all arms of a method, other ones for other methods."""

    def __init__(self) -> None:
        self._known: dict[str, Look] = {}

    def of(self, method: str, role: str) -> Look:
        """The look of a method.

        Args:
            method: Its name.
            role: ``method``, ``reference`` (black or grey) or ``peer`` (dashed).
        """
        if method not in self._known:
            place = len([look for look in self._known.values() if look.colour != _BLACK])
            colour = _BLACK if role == "reference" else _COLOURS[place % len(_COLOURS)]
            self._known[method] = Look(colour, _MARKERS[len(self._known) % len(_MARKERS)], role == "peer")
        return self._known[method]


def new_figure(title: str, note: str) -> tuple[Any, Any]:
    """A figure with one pair of axes.

    Args:
        title: Stands above.
        note: Small print below: what the figures depend on.

    Raises:
        VeloxQuantError: matplotlib is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
        importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise VeloxQuantError("drawing needs matplotlib; run: pip install 'veloxquant[bench]'") from error
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        figure.supxlabel(note, fontsize=8, color=GREY, x=0.01, ha="left")
    return figure, axes


def log_ticks(axes: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade where few decades are shown: at least two of them can be read then."""
    ticker = importlib.import_module("matplotlib.ticker")
    low, high = axes.get_ylim()
    if high < 200 * low:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))


def place_labels(
    figure: Any,
    axes: Any,
    points: Sequence[tuple[float, float, str, str]],
    marks: Sequence[tuple[float, float, float]] = (),
) -> None:
    """Write a label beside each point, where it covers neither another label nor a point.

    Args:
        figure: The figure, with all else drawn.
        axes: Its axes.
        points: x, y, text and colour.
        marks: What labels should not cover: x, and the y between which it lies.
    """
    figure.draw_without_rendering()
    renderer = figure._get_renderer()
    taken = [_box(axes, x, y, y) for x, y, _, _ in points] + [_box(axes, *mark) for mark in marks]
    frame = axes.get_window_extent(renderer)
    for x, y, text, colour in points:
        best: tuple[float, tuple[float, float, str], Any] | None = None
        for place in _OFFSETS:
            label = _beside_point(axes, (x, y), text, colour, place)
            box = label.get_window_extent(renderer)
            label.remove()
            cost = sum(_overlap(box, other) for other in taken) + 3 * _outside(box, frame) + 0.1 * abs(place[1])
            if best is None or cost < best[0]:
                best = (cost, place, box)
        assert best is not None
        far = abs(best[1][1]) > _NEAR
        _beside_point(axes, (x, y), text, colour, best[1], arrowprops=_leader(colour) if far else None)
        taken.append(best[2])


def _beside_point(
    axes: Any, point: tuple[float, float], text: str, colour: str, place: tuple[float, float, str], **more: Any
) -> Any:
    dx, dy, side = place
    return axes.annotate(
        text,
        point,
        xytext=(dx, dy),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=9,
        color=colour,
        bbox=_PATCH,
        zorder=1.5,
        **more,
    )


# Right, left, above, below, then farther away; in points.
_OFFSETS = tuple(
    (dx, dy, side)
    for dy in (0, *(sign * height for height in range(11, 100, 11) for sign in (1, -1)))
    for dx, side in ((9, "left"), (-9, "right"), (0, "center"))
    if dy or side != "center"
)
_NEAR = 12
"""Labels farther from what they name, in points, are joined to it by a thin line."""


def _leader(colour: str) -> dict[str, Any]:
    return {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.7, "shrinkA": 1, "shrinkB": 3}


def spread_labels(figure: Any, axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write labels at the right ends of lines, moved apart where lines end close together.

    Args:
        figure: The figure, with all else drawn.
        axes: Its axes.
        points: x, y, text and colour of each end.
    """
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    ends = [(axes.transData.transform((x, y))[1] * scale, x, y, text, colour) for x, y, text, colour in points]
    ends.sort()
    frame = axes.get_window_extent()
    low, high = frame.y0 * scale, frame.y1 * scale - 4  # not into the title
    height = min(11.5, (high - low) / max(1, len(ends) - 1))
    places = _apart([end[0] for end in ends], height, low, high)
    for place, (own, x, y, text, colour) in zip(places, ends, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(14, place - own),
            textcoords="offset points",
            va="center",
            fontsize=min(9, 0.8 * height),
            color=colour,
            annotation_clip=False,
            arrowprops={**_leader(colour), "relpos": (0, 0.5)} if abs(place - own) > height / 2 else None,
        )


def _apart(places: Sequence[float], height: float, low: float, high: float) -> list[float]:
    """Move sorted places apart until no two are closer than ``height``, between two ends."""
    found = list(places)
    for _ in range(200):
        for one in range(len(found) - 1):
            gap = height - (found[one + 1] - found[one])
            if gap > 0:
                found[one] -= gap / 2
                found[one + 1] += gap / 2
    for one in range(len(found)):
        least = low if one == 0 else found[one - 1] + height
        found[one] = max(found[one], least)
    for one in reversed(range(len(found))):
        most = high if one == len(found) - 1 else found[one + 1] - height
        found[one] = min(found[one], most)
    return found


def _box(axes: Any, x: float, low: float, high: float, reach: float = 5) -> Any:
    """A box around a mark, in pixels."""
    transforms = importlib.import_module("matplotlib.transforms")
    (left, bottom), (right, top) = axes.transData.transform([(x, low), (x, high)])
    return transforms.Bbox.from_extents(left - reach, bottom - reach, right + reach, top + reach)


def _overlap(one: Any, other: Any) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0, width) * max(0, height))


def _outside(box: Any, frame: Any) -> float:
    over = max(0, frame.x0 - box.x0) + max(0, box.x1 - frame.x1) + max(0, frame.y0 - box.y0) + max(0, box.y1 - frame.y1)
    return float(over * box.height)


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG.

    Args:
        figure: The figure.
        folder: Where to; made if it is not there.
        name: Name of the files, without what follows the dot.

    Raises:
        VeloxQuantError: They cannot be written.
    """
    matplotlib = importlib.import_module("matplotlib")
    files = [folder / f"{name}.png", folder / f"{name}.svg"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            for file in files:
                # Without a date, so that the same figures give the same file.
                figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise VeloxQuantError(f"cannot write the pictures to {folder}: {error.strerror or error}") from error
    return files
