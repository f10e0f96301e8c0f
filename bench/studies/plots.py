"""Pictures of studies, beside their JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    print(f"drawn: {picture.name}")
    return picture


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


def draw_balance(path: Path) -> Path:
    """Figure 8-7 of Senanayake's thesis; with counts, a panel for each of some."""
    plt, record, results = load(path)
    cells = results["cells"]
    ways = list(cells[0]["ways"])
    longest = [c["longest_over_mean"] for c in cells]
    shown = [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in longest]
    at = [f"{1 + c['c_minus_1']:.7g}\n{x}" for c, x in zip(cells, shown, strict=True)]
    if results["what"] == "times":
        panels = {"time in ms": lambda w: 1e3 * w["min"]}
    else:
        nnz = cells[0]["nnz"]
        panels = {
            "longest block / mean block": lambda w: w["imbalance"],
            "longest warp / mean warp": lambda w: w["warp_imbalance"],
            "sectors of 32 bytes / element": lambda w: w["sectors"] / nnz,
        }
    figure, axes = plt.subplots(1, len(panels), squeeze=False,
                                figsize=(max(5.8, 4.1 * len(panels) + 0.8), 3.3))  # fmt: skip
    for axis, (label, value) in zip(axes.flat, panels.items(), strict=True):
        found = {w: [value(c["ways"][w]) for c in cells] for w in ways}
        lines(axis, at, found)
        axis.set_ylabel(label, fontsize=9)
        axis.set_xlabel("c, and below it the longest row / the mean row", fontsize=8.5)
        axis.tick_params(axis="x", labelsize=7)
        everything = [v for values in found.values() for v in values]
        scale(axis, everything)
    size = f"{cells[0]['rows']:,} rows, {cells[0]['nnz']:,} elements"
    device = record.get("gpu") or f"{record['cpu']}, threads: {record['threads']}"
    where = device if results["what"] == "times" else "counted, not timed"
    between = "\n" if len(panels) == 1 else "; "
    title = f"{results['operator']}, k c^i elements in row i, {size}{between}{where}"
    legend_on_top(figure, axes.flat[0], title)
    return save(plt, figure, path)
