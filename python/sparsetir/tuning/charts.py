"""Charts and pictures of a report, as images embedded in HTML."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats import Format
from sparsetir.records.task import OK, PRUNED
from sparsetir.tuning.tuned import Search, Trial, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours by Okabe and Ito, which the colour-blind can distinguish.
MEASURED, BEST, DEFAULT, FAILED = "#56b4e9", "#0072b2", "#e69f00", "#d55e00"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "image.interpolation": "none",  # keeps images small
}
WIDTH = 10.5  # inches
PIXELS = 96  # per inch, on a page
DPI = 130  # of an image that consists of pixels
MOST_TEXT = 150_000  # characters of an SVG; longer ones become pixels
MOST_BARS = 15


def history(tuned: Search) -> str:
    """Draw the time of each trial by number, the best so far as a line, failures at the top.

    The default's time, if it was tried, is a horizontal line.
    """
    first = next((t for t in tuned.trials if t.config == tuned.default), None)
    default = None if first is None else first.outcome.seconds
    right, slow = ([t for t in tuned.trials if t.outcome.state == state] for state in (OK, PRUNED))

    def draw() -> Figure:
        figure, ax = _axes(3.6)
        ax.set_yscale("log")
        ax.scatter(*_points(right), c=MEASURED, s=26, label="measured")
        ax.scatter(*_points(slow), facecolors="none", edgecolors=MEASURED, label="given up as slow")
        numbers, times = _points(right)
        ax.step(numbers, list(accumulate(times, min)), where="post", c=BEST, label="best so far")
        if default:
            ax.axhline(1e6 * default, c=DEFAULT, linestyle="--", label="default")
        failed = [t.number for t in tuned.failures]
        if failed:  # above all times, in units of the axes
            across = ax.get_xaxis_transform()
            ax.scatter(failed, [1.03] * len(failed), c=FAILED, marker="x", label="failed",
                       transform=across, clip_on=False)  # fmt: skip
        ax.set_xlabel("trial")
        ax.set_ylabel("time of a call (µs)")
        ax.grid(axis="y", linewidth=0.7)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=5, fontsize=9)
        return figure

    return _image("Time of each trial", draw)


def importances(shares: Mapping[str, float]) -> str:
    """Draw the importance of the most important parameters."""
    shown = dict(sorted(shares.items(), key=lambda item: -item[1])[:MOST_BARS])

    def draw() -> Figure:
        figure, ax = _axes(0.9 + 0.3 * len(shown))
        bars = ax.barh(list(shown), list(shown.values()), color=MEASURED, height=0.62)
        ax.bar_label(bars, fmt="%.2f", padding=5, fontsize=9)
        ax.invert_yaxis()
        ax.set_xlabel("share of what times depend on")
        ax.grid(axis="x", linewidth=0.7)
        return figure

    return _image("Parameter importance", draw)


def picture_of_pattern(matrix: SparseMatrix, name: str) -> str:
    """Draw the pattern of a matrix; name : for the title, if any."""
    return _image("Stored elements", lambda: matrix.plot(name=name or None))


def picture_of_format(matrix: SparseMatrix, fmt: Format, name: str) -> str:
    """Draw the matrix in a format; name : for the title, if any."""
    return _image(f"Storage in {fmt}", lambda: matrix.plot(fmt, name=name or None))


def _points(trials: Sequence[Trial]) -> tuple[list[int], list[float]]:
    """The numbers of trials, and their times in µs."""
    return [t.number for t in trials], [1e6 * seconds(t) for t in trials]


def _axes(height: float) -> tuple[Figure, Axes]:
    """A figure of the page's width, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _image(title: str, make: Callable[[], Figure]) -> str:
    """A figure as an embedded image: SVG, or PNG if that is long."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = make()
        data, kind = _saved(figure, "svg"), "svg+xml"
        if len(data) > MOST_TEXT:
            data, kind = _saved(figure, "png"), "png"
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    width = f"max-width:{figure.get_figwidth() * PIXELS:.0f}px"
    return f'<img alt="{escape(title)}" src="{source}" style="{width}">'


def _saved(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=DPI, facecolor="white")
    return file.getvalue()
