"""Pictures of JSON files, beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#1f5fa8", "#c8102e", "#8a8a8a", "#2e7d4f", "#e08a1e", "#6a4c93")
WIDEST_LINEAR = 8.0
MARKERS = ("o", "s", "^", "D", "v", "P")


def load(path: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(pyplot, the record, its results)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    record = json.loads(path.read_text())
    return plt, record, record["results"]


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


def bars(
    axis: Any, names: Sequence[str], ways: Mapping[str, Sequence[float]], marked: str = "",
    colours: Mapping[str, str] | None = None, lying: bool = False, form: str = "{:.1f}",
    told: Container[str] | None = None,
) -> None:  # fmt: skip
    """A bar for each way at each name, side by side, with its number; NaN is left out.

    marked : of the names, in a colour of its own where there is one way
    lying : to the right, names from top to bottom
    told : ways whose numbers are written; None: all
    """
    draw, wide = axis.barh if lying else axis.bar, 0.8 / len(ways)
    for n, (way, values) in enumerate(ways.items()):
        at = [i + (n - (len(ways) - 1) / 2) * wide for i in range(len(names))]
        colour: Any = (colours or {}).get(way, COLORS[n % len(COLORS)])
        if marked:
            colour = [COLORS[1] if name == marked else COLORS[2] for name in names]
        drawn = draw(at, values, 0.94 * wide, label=way, color=colour, zorder=3)
        texts = ["" if math.isnan(v) else form.format(v) for v in values]
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


def lines(axis: Any, at: Sequence[Any], ways: Mapping[str, Sequence[float]]) -> None:
    """A line with markers for each way, over places that are spread evenly; NaN is left out."""
    for i, (way, values) in enumerate(ways.items()):
        axis.plot(range(len(at)), values, label=way, color=COLORS[i % 6], marker=MARKERS[i % 6],
                  markersize=7.5 - 0.8 * i, linewidth=1.4, zorder=3)  # fmt: skip
    axis.set_xticks(range(len(at)), [str(x) for x in at])
    plain(axis)


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
    figure.legend(handles, labels, ncols=columns, frameon=False, loc="upper center", fontsize=8.5,
                  bbox_to_anchor=(0.5, 1 - top / height))  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 1 - (top + 0.08 + 0.2 * rows) / height))
