"""Pictures of large matrices: the whole in pixels, a part of it in squares, the storage in bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparsetir.formats.converted import ConvertedFormat
from sparsetir.plotting.layout import Part, Pixels, Window, locate, sample
from sparsetir.plotting.marks import COLOURS, in_squares, matrix_labels, outline, rgb, squares, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SAMPLE = 2**21  # most slots that are searched for padding; of more, a random sample
FAINTEST = 0.65  # share of a part's colour in that of pixels with the fewest elements
FROM = 0.3  # start of the colour map of shares; colours below are too light for white paper
HEIGHT = 4.2  # inches of the picture of a matrix


def large_figure(shape: tuple[int, ...], bars: int = 0) -> tuple[Figure, list[Axes]]:
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


def density(ax: Axes, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, ...]) -> None:
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


def matrix_image(ax: Axes, converted: ConvertedFormat, parts: list[Part]) -> None:
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


def crop(axes: list[Axes], window: Window) -> None:
    """Draw title and axes of a part of the matrix, and its position in the whole.

    axes : axes of the whole and of the window, which has been drawn
    """
    low, high = zip(window.rows, window.cols, strict=True)
    outline(axes[0], low, high, edgecolor="black", linewidth=1.2)
    matrix_labels(axes[1], "rows from {:,}, columns from {:,}".format(*low))
    in_squares(axes[1], low, high)


def part_squares(
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


def storage_bars(ax: Axes, parts: list[Part]) -> None:
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
