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
from sparsetir.plotting.layout import (
    Layout,
    Part,
    Pixels,
    Window,
    joined,
    locate,
    sample,
    storage_layout,
)
from sparsetir.plotting.marks import COLOURS, in_squares, matrix_labels, outline, rgb, squares, tint
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.texts import many

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = ["plot_format", "plot_pattern"]

SMALL = 64  # rows and columns up to which every element is drawn as a square
OVERHANG = 8  # rows and columns beyond a small matrix in which its blocks' padding is shown
COLUMN = 3  # most parts for which the legend has one column
DARK = 0.78  # end of the colour map for more parts than colours; colours beyond are too light
HEIGHT = 4.2  # inches of a panel
SAMPLE = 2**21  # most slots that are searched for padding; of more, a random sample
FAINTEST = 0.65  # share of a part's colour in that of pixels with the fewest elements
FROM = 0.3  # start of the colour map of shares; colours below are too light for white paper


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
        figure, axes = _new_figure(1) if small else _large_figure(shape)
    if small:
        squares(axes[0], cols, rows, COLOURS[0])
        _frame(axes[0], *shape)
    else:
        _density(axes[0], rows, cols, shape)
    matrix_labels(axes[0], title)
    if figure is None:
        return axes[0]
    if small:
        _set_size(figure, axes)
        return figure
    window = Window.of(rows, cols, shape)
    inside = window.holds(rows, cols)
    squares(axes[1], cols[inside], rows[inside], COLOURS[0])
    _crop(axes, window)
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
        figure, axes = _new_figure(2) if small else _large_figure((m, n), max(1, len(shown)))
    title = f"{converted.name}: matrix" if name is None else f"{name} as {converted.name}"
    if small:
        around = Window((-OVERHANG, m + OVERHANG), (-OVERHANG, n + OVERHANG))
        _frame(axes[0], m, n, *_part_squares(axes[0], converted, parts, around))
    else:
        _matrix_image(axes[0], converted, parts)
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
    _storage_bars(axes[-1], shown)
    if small:
        _set_size(figure, axes, by_places=False)
        return figure
    rows, columns = converted.pattern.coords
    window = Window.of(rows, columns, (m, n))
    _part_squares(axes[1], converted, parts, window)
    _crop(axes, window)
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


# -- large matrices: the whole in pixels, a part of it in squares, the storage in bars ------------


def _large_figure(shape: tuple[int, ...], bars: int = 0) -> tuple[Figure, list[Axes]]:
    """A figure, and its axes for the whole, for a part, and below for `bars` bars, if any."""
    from matplotlib.figure import Figure

    wide = HEIGHT * min(2.0, max(0.5, max(1, shape[1]) / max(1, shape[0])))
    below = 0.8 + 0.24 * bars if bars else 0.0
    width = max(8.5, wide + HEIGHT + (1.2 if bars else 2.2))
    figure: Any = Figure(figsize=(width, HEIGHT + 0.8 + below))
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    top, bottom = figure, None
    if bars:
        top, bottom = figure.subfigures(2, 1, height_ratios=[HEIGHT + 0.8, below])
    # The whole has a colour bar beside it, unless colours stand for parts.
    axes = list(top.subplots(1, 2, width_ratios=[wide + (0 if bars else 1), HEIGHT]))
    return figure, axes if bottom is None else [*axes, bottom.subplots()]


def _density(ax: Axes, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, ...]) -> None:
    """Draw the share of stored coordinates in each pixel."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm

    pixels = Pixels.of(shape)
    each, count = pixels.each, pixels.count
    stored = np.bincount(pixels.number(rows, cols), minlength=count[0] * count[1]).reshape(count)
    high, wide = (
        np.minimum(e, n - e * np.arange(c)) for e, n, c in zip(each, shape, count, strict=True)
    )
    share = stored / np.maximum(1, np.outer(high, wide))
    if each == (1, 1) or not stored.any():
        image = np.where(stored[:, :, None] > 0, rgb(COLOURS[0]), 1.0)
        _show(ax, image, each, shape)
        return
    dark = ListedColormap(colormaps["viridis_r"](np.linspace(FROM, 1, 256)))
    least, most = share[stored > 0].min(), share.max()
    norm = LogNorm(least if least < most else most / 10, most)
    shown = _show(ax, np.ma.masked_equal(share, 0), each, shape, cmap=dark, norm=norm)
    label = f"share stored of {each[0]} x {each[1]} coordinates"
    ax.figure.colorbar(shown, ax=ax, label=label, shrink=0.85)


def _matrix_image(ax: Axes, converted: ConvertedFormat, parts: list[Part]) -> None:
    """Draw each pixel in the colour of the part with most elements, or else most padding, there."""
    shape = converted.pattern.shape
    pixels = Pixels.of(shape)
    size = pixels.count[0] * pixels.count[1]
    colour = np.ones((size, 3))
    most = np.zeros(size)
    for part in parts:
        if part.arrays.full:
            continue
        limit = SAMPLE * part.arrays.size // converted.places + 1
        places = sample(part.arrays, limit)
        weight = part.arrays.size / len(places)
        places = places[part.arrays.mask.reshape(-1)[places] == 0]
        where = locate(part.arrays, places)
        inside = where.valid & (where.rows >= 0) & (where.rows < shape[0])
        inside &= (where.cols >= 0) & (where.cols < shape[1])
        numbers = pixels.number(where.rows[inside], where.cols[inside])
        counts = np.bincount(numbers, minlength=size) * weight
        more = counts > most
        most[more] = counts[more]
        colour[more] = tint(part.colour)
    flat, most, total = pixels.number(*converted.pattern.coords), np.zeros(size), np.zeros(size)
    element = np.zeros((size, 3))
    for part in parts:
        counts = np.bincount(flat[part.arrays.places >= 0], minlength=size)
        total += counts
        more = counts > most
        most[more] = counts[more]
        element[more] = part.colour
    strength = FAINTEST + (1 - FAINTEST) * np.log1p(total) / max(1e-9, np.log1p(total.max()))
    stored = total > 0
    colour[stored] = tint(element[stored], strength[stored, None])
    _show(ax, colour.reshape(*pixels.count, 3), pixels.each, shape)


def _show(
    ax: Axes, image: np.ndarray, each: tuple[int, int], shape: tuple[int, ...], **style: Any
) -> AxesImage:
    """Draw an image with pixels of `each` coordinates, cut at the edge of the matrix."""
    right, bottom = image.shape[1] * each[1] - 0.5, image.shape[0] * each[0] - 0.5
    shown = ax.imshow(image, extent=(-0.5, right, bottom, -0.5), **style)
    ax.set_xlim(-0.5, max(1, shape[1]) - 0.5)
    ax.set_ylim(max(1, shape[0]) - 0.5, -0.5)
    long = max(shape) > 4 * max(1, min(shape))
    ax.set_aspect("auto" if long else "equal")
    return shown


def _crop(axes: list[Axes], window: Window) -> None:
    """Draw title and axes of a part of the matrix, and its position in the whole.

    axes : axes of the whole and of the window, which has been drawn
    """
    low, high = zip(window.rows, window.cols, strict=True)
    outline(axes[0], low, high, edgecolor="black", linewidth=1.2)
    matrix_labels(axes[1], "rows from {:,}, columns from {:,}".format(*low))
    in_squares(axes[1], low, high)


def _part_squares(
    ax: Axes, converted: ConvertedFormat, parts: list[Part], window: Window
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the elements of each part in a window, and its padding if all of its slots are searched.

    Returns the least coordinates of padding, and the greatest plus one, also outside the matrix.
    """
    low, high = np.zeros(2, int), np.array(converted.pattern.shape)
    for part in parts:
        if part.arrays.full or part.arrays.size > SAMPLE:
            continue
        where = locate(part.arrays, np.flatnonzero(part.arrays.mask.reshape(-1) == 0))
        shown = where.valid & window.holds(where.rows, where.cols)
        padding = np.unique(np.stack([where.rows[shown], where.cols[shown]]), axis=1)
        if padding.size:
            low, high = np.minimum(low, padding.min(1)), np.maximum(high, padding.max(1) + 1)
        squares(ax, padding[1], padding[0], tint(part.colour), part.colour)
    rows, cols = converted.pattern.coords
    inside = window.holds(rows, cols)
    for part in parts:
        shown = inside & (part.arrays.places >= 0)
        squares(ax, cols[shown], rows[shown], part.colour, part.colour)
    return low, high


def _storage_bars(ax: Axes, parts: list[Part]) -> None:
    """Draw a bar for each part, of elements and, lighter, of padding."""
    from matplotlib.ticker import EngFormatter

    for n, part in enumerate(parts):
        ax.barh(n, part.stored, color=part.colour, edgecolor=part.colour)
        padding = part.places - part.stored
        ax.barh(n, padding, left=part.stored, color=tint(part.colour), edgecolor=part.colour)
    ax.set_yticks(range(len(parts)), [e.text for e in parts], fontsize="small")
    room = max(0, 5 - len(parts)) / 2 + 0.5
    ax.set_ylim(len(parts) - 1 + room, -room)
    ax.set_xlim(0, 1.04 * max((e.places for e in parts), default=1))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.set_xlabel("places: elements, and lighter padding")
    ax.spines[["top", "right"]].set_visible(False)
