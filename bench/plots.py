"""Pictures of JSON files, beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLORS = ("#1f5fa8", "#c8102e", "#8a8a8a", "#2e7d4f", "#e08a1e", "#6a4c93")
WIDEST_LINEAR = 8.0


@dataclass(frozen=True)
class Panel:
    """Bars of ways at names, one of a figure's.

    marked : of the names, in a colour of its own where there is one way
    form : of numbers; told : ways whose numbers are written, None: all
    """

    title: str
    names: Sequence[str]
    ways: Mapping[str, Sequence[float]]
    marked: str = ""
    form: str = "{:.2f}"
    told: Container[str] | None = None
    colours: Mapping[str, str] = field(default_factory=dict)


def read(path: Path) -> tuple[dict[str, Any], Any]:
    """The record of a JSON file, and its results."""
    record = json.loads(path.read_text())
    return record, record["results"]


def pyplot() -> Any:
    """matplotlib's, that draws into files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def grid(
    path: Path, rows: Sequence[Sequence[Panel]], below: str, left: str = "", lying: bool = False
) -> Path:
    """The picture of a JSON file, of panels in rows, with a text below and one on the left."""
    plt, across = pyplot(), max(map(len, rows))
    counts = [max(len(p.names) * len(p.ways) for p in row) for row in rows]
    if lying:
        height, wide = 0.2 * sum(counts) + 1.2 * len(rows) + 0.8, 3.0 * across + 2
    else:
        height, wide = 2.9 * len(rows) + 0.6, max(4.0, 0.3 * max(counts) + 1) * across
    figure, axes = plt.subplots(
        len(rows), across, squeeze=False, figsize=(wide, height), height_ratios=counts
    )
    for axis, panel in zip(axes.flat, (p for row in rows for p in row), strict=True):
        bars(axis, panel, lying)
        axis.set_title(panel.title, fontsize=9)
    if len(rows[0][0].ways) > 1:
        axes.flat[0].legend(fontsize=7, frameon=False)
    figure.supxlabel(below, fontsize=8)
    figure.supylabel(left, fontsize=8)
    return save(plt, figure, path)


def save(plt: Any, figure: Any, path: Path) -> Path:
    """The picture of a JSON file."""
    picture = path.with_suffix(".png")
    if not figure.legends:  # else it is laid out with the legend
        figure.tight_layout()
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    print(f"drawn: {picture.name}")
    return picture


def place(record: Mapping[str, Any]) -> str:
    """Where a record was made: the threads of a CPU, and its name, or that of the GPU."""
    threads = f"{record['threads']} thread{'s' if record['threads'] != 1 else ''}"
    return record.get("gpu") or f"{threads}, {record['cpu']}"


def ratio(times: Mapping[str, Any], base: str, name: str) -> float:
    """How many times as long the base takes; not a number where one is missing."""
    if base not in times or name not in times:
        return math.nan
    return times[base]["min"] / times[name]["min"]


def bars(axis: Any, panel: Panel, lying: bool = False) -> None:
    """A bar for each way at each name, side by side, with its number; NaN is left out.

    lying : to the right, names from top to bottom
    """
    names, ways, marked, told = panel.names, panel.ways, panel.marked, panel.told
    draw, wide = axis.barh if lying else axis.bar, 0.8 / len(ways)
    for n, (way, values) in enumerate(ways.items()):
        at = [i + (n - (len(ways) - 1) / 2) * wide for i in range(len(names))]
        colour: Any = panel.colours.get(way, COLORS[n % len(COLORS)])
        if marked:
            colour = [COLORS[1] if name == marked else COLORS[2] for name in names]
        drawn = draw(at, values, 0.94 * wide, label=way, color=colour, zorder=3)
        texts = ["" if math.isnan(v) else panel.form.format(v) for v in values]
        if told is None or way in told:
            axis.bar_label(drawn, texts, fontsize=6.5, padding=2)
    if lying:
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.margins(x=0.2)
    else:
        axis.set_xticks(range(len(names)), names)
    plain(axis)
    if lying:
        axis.grid(visible=False)


def plain(axis: Any) -> None:
    """No frame; a grid behind."""
    axis.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def scale(axis: Any, values: Sequence[float]) -> None:
    """A scale of heights that shows all: from 0 on, or logarithmic where they differ much."""
    from matplotlib.ticker import LogLocator

    values = [v for v in values if not math.isnan(v)]
    if min(values) <= 0 or max(values) < WIDEST_LINEAR * min(values):
        axis.set_ylim(0, 1.08 * max(values) or 1)
        return
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.yaxis.set_minor_locator(LogLocator(subs=(1,)))
    axis.yaxis.set_major_formatter(lambda v, _: f"{v:g}")


def legend_on_top(figure: Any, axis: Any, title: str, columns: int = 4) -> None:
    """The title, below it the legend of an axis, below that the axes."""
    height = figure.get_figheight()
    handles, labels = axis.get_legend_handles_labels()
    rows = -(-len(labels) // columns)
    columns = min(columns, max(1, len(labels)))
    top = 0.1 + 0.16 * (title.count("\n") + 1)  # inches
    figure.suptitle(title, fontsize=9.5, y=1 - 0.08 / height).set_in_layout(False)
    at = {"loc": "upper center", "bbox_to_anchor": (0.5, 1 - top / height)}
    figure.legend(handles, labels, ncols=columns, frameon=False, fontsize=8.5, **at)
    figure.tight_layout(rect=(0, 0, 1, 1 - (top + 0.08 + 0.2 * rows) / height))
