"""Pictures of patterns, and of their storage in formats.

Needs matplotlib, which is imported when a function is called. Figures are made without pyplot: no
window opens and no backend is chosen. A notebook shows them after `%matplotlib inline`;
`figure.savefig(path)` writes them anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from sparsetir.extras import need
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.formats.pattern import Pattern
from sparsetir.plotting.large import (
    crop,
    density,
    large_figure,
    matrix_image,
    part_squares,
    storage_bars,
)
from sparsetir.plotting.layout import Layout, Part, Window, joined, storage_layout
from sparsetir.plotting.marks import COLOURS, in_squares, matrix_labels, outline, rgb, squares, tint
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.texts import many

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_format", "plot_pattern"]

SMALL = 64  # rows and columns up to which every element is drawn as a square
OVERHANG = 8  # rows and columns beyond a small matrix in which its blocks' padding is shown
COLUMN = 3  # most parts for which the legend has one column
DARK = 0.78  # end of the colour map for more parts than colours; colours beyond are too light
HEIGHT = 4.2  # inches of a panel


def plot_pattern(pattern: Any, ax: Axes | None = None, name: str | None = None) -> Any:
    """A picture of the stored coordinates of a matrix, rows going down.

    Parameters
    ----------
    pattern : Pattern, SparseMatrix or scipy sparse matrix
        A matrix of two axes.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on; by default a new figure.
    name : str, optional
        The matrix's name, for the title.

    Returns
    -------
    matplotlib.figure.Figure or matplotlib.axes.Axes
        The new figure, or `ax` if given.

    Raises
    ------
    ValueError
        If the pattern does not have two axes.
    ImportError
        Without matplotlib.

    Notes
    -----
    Up to 64 x 64, each element is a square. A larger matrix is divided into at most 256 x 256 equal
    pixels; colour shows which share of a pixel's coordinates is stored, on a logarithmic scale. A
    new figure also shows the 48 x 48 coordinates that store most, with a square per element.
    """
    need("plot_pattern", "matplotlib", "plot")
    pattern = getattr(pattern, "pattern", pattern)
    if not isinstance(pattern, Pattern) and not sp.issparse(pattern):
        expected = "a Pattern, a SparseMatrix or a scipy sparse matrix"
        raise wrong("plot_pattern", "pattern", expected, type(pattern).__name__, TypeError)
    _check_order("plot_pattern", "pattern", pattern)
    shape = pattern.shape
    if isinstance(pattern, Pattern):
        rows, cols = pattern.coords
    else:
        coo = pattern.tocoo(copy=True)
        coo.sum_duplicates()
        rows, cols = coo.row, coo.col
    title = f"{shape[0]:,} x {shape[1]:,}: {many(len(rows), 'element')}"
    title = title if name is None else f"{name}, {title}"
    small = max(shape) <= SMALL
    if ax is not None:
        figure, axes = None, [ax]
    else:
        figure, axes = _new_figure(1) if small else large_figure(shape)
    if small:
        squares(axes[0], cols, rows, COLOURS[0])
        _frame(axes[0], *shape)
    else:
        density(axes[0], rows, cols, shape)
    matrix_labels(axes[0], title)
    if figure is None:
        return axes[0]
    if small:
        _set_size(figure, axes)
        return figure
    window = Window.of(rows, cols, shape)
    inside = window.holds(rows, cols)
    squares(axes[1], cols[inside], rows[inside], COLOURS[0])
    crop(axes, window)
    return figure


def plot_format(converted: ConvertedFormat, ax: Axes | None = None, name: str | None = None) -> Any:
    """A picture of a format's storage: a colour per part, lighter where padded.

    Parameters
    ----------
    converted : ConvertedFormat
        A pattern of two axes in a format.
    ax : matplotlib.axes.Axes, optional
        Axes for the picture of the matrix; by default a new figure with the storage, too.
    name : str, optional
        The matrix's name, for the title.

    Returns
    -------
    matplotlib.figure.Figure or matplotlib.axes.Axes
        The new figure, or `ax` if given.

    Raises
    ------
    ValueError
        If the pattern does not have two axes.
    ImportError
        Without matplotlib.

    Notes
    -----
    Up to 64 x 64, the matrix has a square per element and per padded coordinate, and the storage
    one per slot, with axes from rows downwards and axes from columns to the right. A larger matrix
    is divided into at most 256 x 256 pixels, in the colour of the part with most elements there,
    stronger for more of them; its storage is a bar per part. A new figure also shows the 48 x 48
    coordinates that store most, with a square per element. Padding of the whole is then sampled
    from at most 2**21 random slots, and in the 48 x 48 coordinates shown only for parts with no
    more slots.
    """
    need("plot_format", "matplotlib", "plot")
    if not isinstance(converted, ConvertedFormat):
        expected, kind = "a pattern in a format, as A.to(CSR())", type(converted).__name__
        raise wrong("plot_format", "converted", expected, kind, TypeError)
    _check_order("plot_format", "converted", converted.pattern)
    (m, n), parts = converted.pattern.shape, _parts(converted)
    shown, small = joined(parts), max(m, n) <= SMALL
    if ax is not None:
        figure, axes = None, [ax]
    else:
        figure, axes = _new_figure(2) if small else large_figure((m, n), max(1, len(shown)))
    title = f"{converted.name}: matrix" if name is None else f"{name} as {converted.name}"
    if small:
        around = Window((-OVERHANG, m + OVERHANG), (-OVERHANG, n + OVERHANG))
        _frame(axes[0], m, n, *part_squares(axes[0], converted, parts, around))
    else:
        matrix_image(axes[0], converted, parts)
    matrix_labels(axes[0], f"{title}, {m:,} x {n:,}")
    if figure is None:
        _legend(None, axes[0], shown, False)
        return axes[0]
    layout = storage_layout([p.arrays for p in parts], m) if small else None
    if layout is not None:
        _storage_squares(axes[1], parts, layout)
        _legend(figure, axes[0], shown, any((~(s.stored | s.valid)).any() for s in layout.parts))
        _set_size(figure, axes, lines=len(shown) + 2)
        return figure
    storage_bars(axes[-1], shown)
    if small:
        _set_size(figure, axes, by_places=False)
        return figure
    rows, columns = converted.pattern.coords
    window = Window.of(rows, columns, (m, n))
    part_squares(axes[1], converted, parts, window)
    crop(axes, window)
    return figure


def _parts(converted: ConvertedFormat) -> list[Part]:
    from matplotlib import colormaps

    stored = [p for p in converted.parts if p.size]
    if len(stored) <= len(COLOURS):
        colours = np.array([rgb(c) for c in COLOURS])
    else:
        colours = colormaps["viridis"](np.linspace(0, DARK, len(stored)))[:, :3]
    labels = converted.labels
    return [
        Part(labels[p.rule.name], colour, p.stored, p.size, p)
        for p, colour in zip(stored, colours, strict=False)
    ]


def _frame(ax: Axes, m: int, n: int, low: Any = (0, 0), high: Any = None) -> None:
    """Draw the border of a small matrix, with a margin for slots beyond it."""
    outline(ax, (0, 0), (m, n), edgecolor="0.3", linewidth=0.8)
    bottom, right = (m, n) if high is None else high
    in_squares(ax, low, (max(bottom, 1), max(right, 1)))
    ax.spines[:].set_visible(False)


def _storage_squares(ax: Axes, parts: list[Part], layout: Layout) -> None:
    for part, places in zip(parts, layout.parts, strict=True):
        stored, valid = places.stored, places.valid
        for chosen, face, hatch in (
            (~stored & ~valid, "white", "////"),
            (~stored & valid, tint(part.colour), ""),
            (stored, part.colour, ""),
        ):
            squares(ax, places.x[chosen], places.y[chosen], face, part.colour, hatch)
    in_squares(ax, (0, 0), (layout.height, layout.width))
    ax.set_axis_off()
    ax.set_title("storage", fontsize="medium")


def _legend(figure: Figure | None, ax: Axes, parts: list[Part], hollow: bool) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    texts = [p.text for p in parts] or ["nothing stored"]
    handles: list[Any] = [
        (Patch(color=p.colour), Patch(facecolor=tint(p.colour), edgecolor=p.colour)) for p in parts
    ] or [(Patch(visible=False),)]
    if hollow:
        handles.append((Patch(facecolor="white", edgecolor="0.4", hatch="////"),))
        texts.append("slots without a coordinate")
    style: dict[str, Any] = {
        "handler_map": {tuple: HandlerTuple(ndivide=None)}, "fontsize": "small",
        "title_fontsize": "small", "frameon": False, "title": "elements and padding of each part",
    }  # fmt: skip
    if figure is None:
        ax.legend(handles, texts, loc="upper left", bbox_to_anchor=(1.02, 1), **style)
    else:
        columns = 2 if len(parts) > COLUMN else 1
        figure.legend(handles, texts, loc="outside lower center", ncols=columns, **style)


def _new_figure(panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for ax in axes:
        ax.set_anchor("N")
    return figure, axes


def _set_size(figure: Figure, axes: list[Axes], by_places: bool = True, lines: int = 0) -> None:
    """Set the size of a figure with pictures of a small matrix and its storage, and lines below.

    by_places : whether the storage is drawn slot by slot, in squares as large as the matrix's
    """
    widths, height = [HEIGHT, HEIGHT + 3], HEIGHT  # with the texts of bars
    if by_places:
        wide, high = (
            [abs(end - start) for start, end in limits]
            for limits in ([ax.get_xlim() for ax in axes], [ax.get_ylim() for ax in axes])
        )
        each = min(0.3, HEIGHT / max(high), 2.5 * HEIGHT / sum(wide))
        widths, height = [max(1.2, w * each) for w in wide], max(high) * each
        for ax, width in zip(axes[1:], widths[1:], strict=True):
            ax.set_xlim(-0.8, width / each - 0.8)
            ax.set_ylim(max(high) - 0.8, -0.8)
    grid = axes[0].get_gridspec()
    assert grid is not None
    grid.set_width_ratios(widths)
    least = 3.5 if not lines else 6.5 if lines <= COLUMN + 2 else 8.5  # for one column, for two
    lines = lines if lines <= COLUMN + 2 else (lines + 3) // 2
    width = sum(widths) + 0.8 * len(axes)
    figure.set_size_inches(max(width, least), height + 1 + 0.21 * lines)


def _check_order(caller: str, argument: str, pattern: Pattern | sp.sparray) -> None:
    if len(pattern.shape) != 2:
        raise wrong(caller, argument, "2 axes", f"shape {tuple(pattern.shape)}")
