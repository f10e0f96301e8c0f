"""Pictures: which coordinates a matrix stores, and what a format makes of them.

Needs matplotlib, which is imported when a function is called. Figures are made without pyplot: no
window opens and no backend is chosen. A notebook shows them after `%matplotlib inline`;
`figure.savefig(path)` writes them anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import issparse

from sparsetir.extras import need
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.formats.pattern import Pattern
from sparsetir.plot_layout import (
    Entry,
    Layout,
    Part,
    Pixels,
    count_elements,
    entries_of,
    locate,
    sample,
    storage_layout,
)

__all__ = ["plot_format", "plot_pattern"]

SMALL = 64  # rows and columns up to which every element is a square of its own
OVERHANG = 8  # how far beyond a small matrix the padding of its blocks is shown
SAMPLE = 2**21  # places looked at to see where padding lies; all of them up to this number
COLUMN = 3  # parts up to which the legend has one column
# Okabe and Ito's colours, which stay apart for the colour-blind; more parts get a colour map.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
TINT = 0.22  # share of a part's colour in the colour of its padding; the rest is white
FAINTEST = 0.65  # the same for pixels with the fewest elements
HEIGHT = 4.2  # of a panel, in inches


def plot_pattern(pattern: Any, ax: Any = None) -> Any:
    """A picture of the stored coordinates of a matrix, rows going down.

    pattern : a Pattern of two axes, a SparseMatrix, or a scipy sparse matrix
    ax : matplotlib Axes to draw on; by default a new figure

    A square per element up to 64 x 64. A larger matrix is divided into at most 256 x 256 equal
    pixels; colour shows which share of a pixel's coordinates is stored, on a logarithmic scale.
    Returns the new Figure, or `ax` if given. Raises ValueError for a pattern that has not two axes,
    and ImportError without matplotlib.
    """
    need("plot_pattern", "matplotlib", "plot")
    pattern = getattr(pattern, "pattern", pattern)
    if not isinstance(pattern, Pattern) and not issparse(pattern):
        raise TypeError(
            "plot_pattern: argument 'pattern': expected a Pattern, a SparseMatrix or a scipy "
            f"sparse matrix, got {type(pattern).__name__}"
        )
    _check_order("plot_pattern", "pattern", pattern)
    shape = pattern.shape
    if isinstance(pattern, Pattern):
        rows, cols = pattern.coords
    else:
        found = pattern.tocoo(copy=True)
        found.sum_duplicates()
        rows, cols = found.row, found.col
    figure, axes = (None, [ax]) if ax is not None else _new_figure(1)
    if max(shape) <= SMALL:
        _squares(axes[0], cols, rows, COLOURS[0])
        _frame(axes[0], shape)
    else:
        _density(axes[0], rows, cols, shape)
    _matrix_labels(axes[0], f"{shape[0]:,} x {shape[1]:,}: {count_elements(len(rows))}")
    if figure is not None:
        _set_size(figure, axes, shape)
    return ax if figure is None else figure


def plot_format(converted: ConvertedFormat, ax: Any = None) -> Any:
    """A picture of what each rule of a format stores: a colour per part, lighter where padded.

    converted : a pattern of two axes in a format
    ax : matplotlib Axes for the picture of the matrix; by default a new figure that also has one of
        the storage

    Up to 64 x 64, the matrix has a square per element and per padded coordinate, and the storage
    one per place, where what rows become goes down and what columns become to the right. A larger
    matrix is divided into at most 256 x 256 pixels, in the colour of the part that has most
    elements there, stronger where there are more of them; its storage is a bar per part. Where
    padding lies is then seen from at most 2**21 places, drawn at random.
    Returns the new Figure, or `ax` if given. Raises ValueError for a pattern that has not two axes,
    and ImportError without matplotlib.
    """
    need("plot_format", "matplotlib", "plot")
    _check_order("plot_format", "converted", converted.pattern)
    shape, parts = converted.pattern.shape, _parts(converted)
    small = max(shape) <= SMALL
    layout = storage_layout([p.arrays for p in parts], shape[0]) if small else None
    entries = entries_of(parts)
    figure = storage = None
    if ax is None:
        figure, (ax, storage) = _new_figure(2)
    if small:
        _matrix_squares(ax, parts, shape)
    else:
        _matrix_image(ax, converted, parts)
    _matrix_labels(ax, f"{converted.name}: matrix, {shape[0]:,} x {shape[1]:,}")
    if layout is not None and storage is not None:
        _storage_squares(storage, parts, layout)
    elif storage is not None:
        _storage_bars(storage, entries)
    drawn = layout.parts if storage is not None and layout is not None else []
    _legend(figure, ax, entries, any((~(s.stored | s.valid)).any() for s in drawn))
    if figure is not None:
        _set_size(figure, [ax, storage], shape, layout is not None, len(entries) + 2)
    return ax if figure is None else figure


def _parts(converted: ConvertedFormat) -> list[Part]:
    from matplotlib import colormaps

    found = [p for p in converted.parts if p.size]
    if len(found) <= len(COLOURS):
        colours = np.array([_rgb(c) for c in COLOURS])
    else:
        colours = colormaps["viridis"](np.linspace(0, 0.92, len(found)))[:, :3]
    return [Part(p.rule.name, c, p) for p, c in zip(found, colours, strict=False)]


def _tint(colour: Any, strength: Any = TINT) -> Any:
    """A colour mixed with white."""
    return 1 - strength * (1 - colour)


def _squares(ax: Any, x: Any, y: Any, face: Any, edge: Any = "none", hatch: str = "") -> None:
    from matplotlib.collections import PolyCollection

    if not len(x):
        return
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.42
    centres = np.stack([x, y], axis=1)[:, None, :]
    ax.add_collection(
        PolyCollection(
            list(centres + corners), facecolors=[face], edgecolors=[edge],
            linewidths=0.6, hatch=hatch or None,
        )
    )  # fmt: skip


def _matrix_squares(ax: Any, parts: list[Part], shape: tuple[int, ...]) -> None:
    over, wide = OVERHANG, shape[1] + 2 * OVERHANG
    low, high = np.zeros(2, int), np.array(shape)
    for part in parts:
        places = sample(part.arrays, SAMPLE)
        where = locate(part.arrays, places)
        padded = where.valid & (part.arrays.mask.reshape(-1)[places] == 0)
        for c, length in ((where.rows, shape[0]), (where.cols, shape[1])):
            padded &= (c >= -over) & (c < length + over)
        key = np.unique((where.rows[padded] + over) * wide + where.cols[padded] + over)
        if len(key):
            at = np.stack(np.divmod(key, wide)) - over
            low, high = np.minimum(low, at.min(1)), np.maximum(high, at.max(1) + 1)
            _squares(ax, at[1], at[0], _tint(part.colour), part.colour)
    for part in parts:
        where = locate(part.arrays, np.flatnonzero(part.arrays.mask))
        _squares(ax, where.cols, where.rows, part.colour, part.colour)
    _frame(ax, shape, low, high)


def _frame(ax: Any, shape: tuple[int, ...], low: Any = (0, 0), high: Any = None) -> None:
    """The edge of a small matrix, and room for what lies beyond it."""
    from matplotlib.patches import Rectangle

    high = shape if high is None else high
    ax.add_patch(
        Rectangle((-0.5, -0.5), shape[1], shape[0], fill=False, edgecolor="0.3", linewidth=0.8)
    )
    ax.set_xlim(low[1] - 0.8, max(high[1], 1) - 0.2)
    ax.set_ylim(max(high[0], 1) - 0.2, low[0] - 0.8)
    ax.spines[:].set_visible(False)
    ax.set_aspect("equal")


def _density(ax: Any, rows: Any, cols: Any, shape: tuple[int, ...]) -> None:
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
        image = np.where(stored[:, :, None] > 0, _rgb(COLOURS[0]), 1.0)
        _show(ax, image, each, shape)
        return
    dark = ListedColormap(colormaps["viridis_r"](np.linspace(0.12, 1, 256)))
    least, most = share[stored > 0].min(), share.max()
    norm = LogNorm(least if least < most else most / 10, most)
    shown = _show(ax, np.ma.masked_equal(share, 0), each, shape, cmap=dark, norm=norm)
    label = f"share stored of {each[0]} x {each[1]} coordinates"
    ax.figure.colorbar(shown, ax=ax, label=label, shrink=0.85)


def _rgb(colour: str) -> np.ndarray:
    from matplotlib.colors import to_rgb

    return np.array(to_rgb(colour))


def _show(ax: Any, image: Any, each: tuple[int, int], shape: tuple[int, ...], **style: Any) -> Any:
    """An image of pixels of `each` coordinates, cut at the edge of the matrix."""
    right, bottom = image.shape[1] * each[1] - 0.5, image.shape[0] * each[0] - 0.5
    shown = ax.imshow(image, extent=(-0.5, right, bottom, -0.5), **style)
    ax.set_xlim(-0.5, max(1, shape[1]) - 0.5)
    ax.set_ylim(max(1, shape[0]) - 0.5, -0.5)
    long = max(shape) > 4 * max(1, min(shape))
    ax.set_aspect("auto" if long else "equal")
    return shown


def _matrix_image(ax: Any, converted: ConvertedFormat, parts: list[Part]) -> None:
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
        at = pixels.number(where.rows[inside], where.cols[inside])
        found = np.bincount(at, minlength=size) * weight
        more = found > most
        most[more] = found[more]
        colour[more] = _tint(part.colour)
    flat, most, total = pixels.number(*converted.pattern.coords), np.zeros(size), np.zeros(size)
    element = np.zeros((size, 3))
    for part in parts:
        found = np.bincount(flat[part.arrays.places >= 0], minlength=size)
        total += found
        more = found > most
        most[more] = found[more]
        element[more] = part.colour
    strength = FAINTEST + (1 - FAINTEST) * np.log1p(total) / max(1e-9, np.log1p(total.max()))
    stored = total > 0
    colour[stored] = _tint(element[stored], strength[stored, None])
    _show(ax, colour.reshape(*pixels.count, 3), pixels.each, shape)


def _matrix_labels(ax: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, fontsize="medium")
    ax.set_xlabel("column")
    ax.set_ylabel("row")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _storage_squares(ax: Any, parts: list[Part], layout: Layout) -> None:
    for part, squares in zip(parts, layout.parts, strict=True):
        stored, valid = squares.stored, squares.valid
        for what, face, hatch in (
            (~stored & ~valid, "white", "////"),
            (~stored & valid, _tint(part.colour), ""),
            (stored, part.colour, ""),
        ):
            _squares(ax, squares.x[what], squares.y[what], face, part.colour, hatch)
    ax.set_xlim(-0.8, layout.width - 0.2)
    ax.set_ylim(layout.height - 0.2, -0.8)
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.set_title("storage", fontsize="medium")


def _storage_bars(ax: Any, entries: list[Entry]) -> None:
    from matplotlib.ticker import EngFormatter

    for n, entry in enumerate(entries):
        ax.barh(n, entry.stored, color=entry.colour, edgecolor=entry.colour)
        padding = entry.places - entry.stored
        ax.barh(n, padding, left=entry.stored, color=_tint(entry.colour), edgecolor=entry.colour)
    ax.set_yticks(range(len(entries)), [e.name for e in entries])
    room = max(0, 5 - len(entries)) / 2 + 0.5
    ax.set_ylim(len(entries) - 1 + room, -room)
    ax.set_xlim(0, 1.04 * max((e.places for e in entries), default=1))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.set_xlabel("places")
    ax.set_title("storage", fontsize="medium")


def _legend(figure: Any, ax: Any, entries: list[Entry], hollow: bool) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    texts = [e.text for e in entries] or ["nothing stored"]
    handles: list[Any] = [
        (Patch(color=e.colour), Patch(facecolor=_tint(e.colour), edgecolor=e.colour))
        for e in entries
    ] or [(Patch(visible=False),)]
    if hollow:
        handles.append((Patch(facecolor="white", edgecolor="0.4", hatch="////"),))
        texts.append("slots without a coordinate")
    style: dict[str, Any] = {
        "handler_map": {tuple: HandlerTuple(ndivide=None)}, "fontsize": "small", "frameon": False,
        "title": "elements and padding of each part", "title_fontsize": "small",
    }  # fmt: skip
    if figure is None:
        ax.legend(handles, texts, loc="upper left", bbox_to_anchor=(1.02, 1), **style)
    else:
        columns = 2 if len(entries) > COLUMN else 1
        figure.legend(handles, texts, loc="outside lower center", ncols=columns, **style)


def _new_figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for ax in axes:
        ax.set_anchor("N")
    return figure, axes


def _set_size(
    figure: Any, axes: list[Any], shape: tuple[int, ...], squares: bool = True, lines: int = 0
) -> None:
    """Size of a figure with a picture of a matrix, one of its storage, and lines below.

    squares : whether the storage is drawn by places; these are then as large as in the matrix
    """
    height = HEIGHT
    if max(shape) <= SMALL and squares:
        wide, high = (
            [abs(end - start) for start, end in limits]
            for limits in ([ax.get_xlim() for ax in axes], [ax.get_ylim() for ax in axes])
        )
        each = min(0.3, HEIGHT / max(high), 2.5 * HEIGHT / sum(wide))
        widths, height = [max(1.2, w * each) for w in wide], max(high) * each
        for ax, width in zip(axes[1:], widths[1:], strict=True):
            ax.set_xlim(-0.8, width / each - 0.8)
            ax.set_ylim(max(high) - 0.8, -0.8)
    else:
        ratio = max(1, shape[1]) / max(1, shape[0])
        # Beside the picture are a colour bar, or the names of the parts in front of their bars.
        widths = [HEIGHT * min(2.0, max(0.5, ratio)) + (len(axes) == 1), HEIGHT + 0.8][: len(axes)]
    axes[0].get_gridspec().set_width_ratios(widths)
    lines = lines if lines <= COLUMN + 2 else (lines + 3) // 2
    width = sum(widths) + 0.8 * len(axes)
    figure.set_size_inches(max(width, 6.5 if lines else 3.5), height + 1 + 0.21 * lines)


def _check_order(who: str, argument: str, pattern: Any) -> None:
    if len(pattern.shape) != 2:
        raise ValueError(
            f"{who}: argument '{argument}': expected 2 axes, got shape {tuple(pattern.shape)}"
        )
