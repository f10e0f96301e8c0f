"""A picture of a sparse convolution's kernel map, made without pyplot as those of `plot.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.extras import need
from sparsetir.plotting.marks import COLOURS, rgb, tint
from sparsetir.runtime.file_errors import printable

OUTPUTS = 512  # most outputs that have a column of pixels each


def plot_kernel_map(found: Any, ax: Any = None, name: str | None = None) -> object:
    """A picture of a sparse convolution's kernel map: offsets going down, outputs to the right.

    Parameters
    ----------
    found : KernelMap
        A :class:`sparsetir.nn.KernelMap`.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on; by default a new figure.
    name : str, optional
        The cloud's name, for the title.

    Returns
    -------
    matplotlib.figure.Figure or matplotlib.axes.Axes
        The new figure, or `ax` if given.

    Raises
    ------
    ImportError
        Without matplotlib.

    Notes
    -----
    Colour shows where an offset has an input for an output; beyond 512 outputs, for which share of
    the outputs in a column of pixels. The bars show the number of pairs of each offset.
    """
    need("plot_kernel_map", "matplotlib", "plot")
    offsets, outputs = found.offsets, found.m
    counts = np.diff(np.asarray(found.row_ptr.cpu(), np.int64))
    of_pair, each = np.repeat(np.arange(offsets), counts), max(1, -(-outputs // OUTPUTS))
    pixels = max(1, -(-outputs // each))
    place = of_pair * pixels + np.asarray(found.rows.cpu()) // each
    stored = np.bincount(place, minlength=offsets * pixels).reshape(offsets, pixels)
    together = np.minimum(each, outputs - each * np.arange(pixels)).clip(1)
    share, bars = stored / together, None
    figure = None
    if ax is None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5, 1.4 + 0.13 * offsets), layout="constrained")
        ax, bars = figure.subplots(1, 2, width_ratios=(5, 1), sharey=True)
    image = np.where(share[..., None] > 0, tint(rgb(COLOURS[0]), np.sqrt(share)[..., None]), 1)
    edges = (-0.5, outputs - 0.5, offsets - 0.5, -0.5)
    ax.imshow(image, aspect="auto", interpolation="nearest", extent=edges)
    ax.set(xlabel="output", ylabel="offset, z fastest")
    title = f"{offsets} offsets, {outputs:,} outputs: {len(of_pair):,} pairs"
    title = title if name is None else f"{printable(name)}, {title}"
    ax.set_title(title, fontsize=9, parse_math=False)
    if bars is not None:
        bars.barh(np.arange(offsets), counts, color=COLOURS[0])
        bars.set_xlabel("pairs")
        bars.spines[["top", "right"]].set_visible(False)
    return ax if figure is None else figure
