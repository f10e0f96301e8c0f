"""Parts of pictures: colours, squares, titles and axes of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.runtime.file_errors import printable

# Okabe and Ito's colours, which stay apart for the colour-blind.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
TINT = 0.3  # share of a part's colour in the colour of its padding; the rest is white


def rgb(colour: str) -> np.ndarray:
    """Red, green and blue in [0, 1]."""
    from matplotlib.colors import to_rgb

    return np.array(to_rgb(colour))


def tint(colour: Any, strength: Any = TINT) -> Any:
    """A colour mixed with white."""
    return 1 - strength * (1 - colour)


def squares(ax: Any, x: Any, y: Any, face: Any, edge: Any = "none", hatch: str = "") -> None:
    """A square around each centre."""
    from matplotlib.collections import PolyCollection

    if not len(x):
        return
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.42
    centres = np.stack([x, y], axis=1)[:, None, :]
    ax.add_collection(
        PolyCollection(
            list(centres + corners),
            facecolors=[face],
            edgecolors=[edge],
            linewidths=0.6,
            hatch=hatch or None,
        )
    )


def matrix_labels(ax: Any, title: str) -> None:
    """Title, and axes that count rows and columns."""
    from matplotlib.ticker import MaxNLocator

    # Names of files are no formulas, and what cannot be printed is no XML.
    ax.set_title(printable(title), fontsize="medium", parse_math=False)
    ax.set_xlabel("column")
    ax.set_ylabel("row")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
