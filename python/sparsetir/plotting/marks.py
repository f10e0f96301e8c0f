"""Parts of pictures: colours, squares, titles and axes of a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sparsetir.runtime.file_errors import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colour: TypeAlias = Any  # any colour of matplotlib; for mixing an array of red, green, blue
# Okabe and Ito's colours, which the colour-blind can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
TINT = 0.3  # share of a part's colour in the colour of its padding; the rest is white


def rgb(colour: str) -> Colour:
    """Red, green and blue in [0, 1]."""
    from matplotlib.colors import to_rgb

    return np.array(to_rgb(colour))


def tint(colour: Colour, strength: float | np.ndarray = TINT) -> Colour:
    """A colour mixed with white."""
    return 1 - strength * (1 - colour)


def squares(
    ax: Axes, x: np.ndarray, y: np.ndarray, face: Colour, edge: Colour = "none", hatch: str = ""
) -> None:
    """Draw a square around each centre."""
    from matplotlib.collections import PolyCollection

    if not len(x):
        return
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.42
    centres = np.stack([x, y], axis=1)[:, None, :]
    style = {"facecolors": [face], "edgecolors": [edge], "hatch": hatch or None}
    ax.add_collection(PolyCollection(list(centres + corners), linewidths=0.6, **style))


def outline(ax: Axes, low: tuple[int, int], high: tuple[int, int], **style: Any) -> None:
    """Draw the border of a part of a matrix, from one (row, column) to before another."""
    from matplotlib.patches import Rectangle

    (top, left), (bottom, right) = low, high
    ax.add_patch(
        Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, **style)
    )


def in_squares(
    ax: Axes, low: tuple[float, float], high: tuple[float, float], margin: float = 0.3
) -> None:
    """Limit axes to a range of (row, column), and make squares as wide as they are high."""
    ax.set_xlim(low[1] - 0.5 - margin, high[1] - 0.5 + margin)
    ax.set_ylim(high[0] - 0.5 + margin, low[0] - 0.5 - margin)
    ax.set_aspect("equal")


def matrix_labels(ax: Axes, title: str) -> None:
    """Title, and axes that count rows and columns."""
    from matplotlib.ticker import MaxNLocator

    # File names are not formulas, and unprintable characters are invalid in XML.
    ax.set_title(printable(title), fontsize="medium", parse_math=False)
    ax.set_xlabel("column")
    ax.set_ylabel("row")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
