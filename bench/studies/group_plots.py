"""Pictures of the study of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench import plots
from bench.studies.sgap import COLUMNS, ONE, ORIGINAL, PART_OF_ROW, TABLE_3, Point
from bench.studies.sgap_tables import gain

# Of a way in a cell, over the elements times N.
PANELS = {
    "conflicts of atomics": "conflicts", "atomics": "atomics", "shuffles": "shuffles",
    "sectors of 32 bytes": "sectors",
}  # fmt: skip
STYLES = ("--", "-.", ":")
MOST_NAMES = 12  # of matrices that stand below a picture; more of them are told by density


def draw(path: Path) -> Path:
    """Counts by r; of times the gain by density, as in figure 11 of the paper, or by name."""
    plt, record, results = plots.load(path)
    if results["what"] == "counts":
        figure = _counts(plt, results)
    else:
        figure = _gains(plt, record, results)
    return plots.save(plt, figure, path)


def _counts(plt: Any, results: dict[str, Any]) -> Any:
    cells, points = results["cells"], _points(results)
    work = sum(c["nnz"] * c["N"] for c in cells)
    sizes = sorted({p.r for p in points})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(3.1 * len(PANELS), 3.4))
    for axis, (label, name) in zip(axes, PANELS.items(), strict=True):

        def value(point: Point, name: str = name) -> float:
            return sum(c["ways"][point.name][name] for c in cells) / work

        found = {}
        for kind, size in ((ONE, 1), (PART_OF_ROW, 32)):
            for c in sorted({p.c for p in points}):
                by_r = {p.r: value(p) for p in points if (p.kind, p.size, p.c) == (kind, size, c)}
                title = Point(kind, size, c).name.replace(", 1}", ", r}")
                found[title] = [by_r.get(r, np.nan) for r in sizes]
        plots.lines(axis, sizes, found)
        for style, kind in zip((":", "--"), ORIGINAL, strict=True):
            best = min((p for p in points if p.kind == kind), key=value)
            axis.axhline(value(best), label=_best(kind), color="#444444", linestyle=style,
                         linewidth=1)  # fmt: skip
        axis.set_ylim(0, None)
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("r", fontsize=9)
    axes[0].set_ylabel("count / (elements N)", fontsize=9)
    names = {c["matrix"] for c in cells}
    title = (
        f"SpMM, {len(names)} matrices together, N = {_columns(cells)}; counted on the CUDA text, "
        "not timed"
    )
    plots.legend_on_top(figure, axes[0], title)
    return figure


def _best(kind: str) -> str:
    return f"least of {{<{kind}, c col>, 1}}"


def _gains(plt: Any, record: dict[str, Any], results: dict[str, Any]) -> Any:
    cells, points = results["cells"], _points(results)
    families = results["families"]

    def speedup(cell: dict[str, Any]) -> float:
        if families:
            return _least(cell, families["old"]) / _least(cell, families["new"])
        return gain(cell, points)

    what = "best new algorithm / best of TACO's"
    if families:
        what = f"best {families['new']} / best {families['old']}"
    columns = sorted({c["N"] for c in cells})
    names = list(dict.fromkeys(c["matrix"] for c in cells))
    named = len(names) <= MOST_NAMES
    wide = 0.3 * len(names) + 1 if named else 2.6
    figure, axes = plt.subplots(1, len(columns), squeeze=False, sharey=True,
                                figsize=(max(5.5, wide * len(columns) + 0.8), 3.4))  # fmt: skip
    for axis, n in zip(axes.flat, columns, strict=True):
        here = [c for c in cells if c["N"] == n]
        at = [names.index(c["matrix"]) if named else c["density"] for c in here]
        axis.scatter(at, [speedup(c) for c in here], s=24, color="#c8102e", zorder=3)
        axis.axhline(1, color="#1f5fa8", linewidth=1.1, zorder=2)
        paper = TABLE_3 if n == COLUMNS and not families else {}
        for style, (hardware, mean) in zip(STYLES, paper.items(), strict=False):
            label = f"Sgap's mean on {hardware}"
            axis.axhline(mean, color="#8a8a8a", linewidth=1, linestyle=style, zorder=1, label=label)
        axis.set_ylim(0, 1.15 * max(1.1, *map(speedup, cells)))
        axis.set_title(f"N = {n}", fontsize=9)
        plots.plain(axis)
        if named:
            axis.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
            axis.set_xlim(-0.5, len(names) - 0.5)
        else:
            axis.set_xscale("log")
            axis.set_xlabel("density", fontsize=9)
    axes[0, 0].set_ylabel(f"speed-up,\n{what}", fontsize=8.5)
    told = axes.flat[columns.index(COLUMNS) if COLUMNS in columns else 0]
    plots.legend_on_top(figure, told, f"SpMM, float32, {plots.place(record)}")
    return figure


def _least(cell: dict[str, Any], family: str) -> float:
    return min(times["min"] for way, times in cell["ways"].items() if way.startswith(family))


def _columns(cells: list[dict[str, Any]]) -> str:
    return ", ".join(str(n) for n in sorted({c["N"] for c in cells}))


def _points(results: dict[str, Any]) -> list[Point]:
    return [Point(**about) for about in results["points"].values()]
