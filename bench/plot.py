"""Bars of speed-ups over the vendor's library, as in figures 13 and 14 of the SparseTIR paper."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench import plots
from bench.peers.libraries import FLOAT32, OURS
from bench.summary import group

# Held against: the first one that most cells have.
BASELINES = ("mkl", "cusparse", "torch", "scipy", FLOAT32)
COLORS = {OURS: "#c8102e", FLOAT32: "#e9a0a8", "mkl": "#1f5fa8", "cusparse": "#1f5fa8"}
COLORS |= {"dense": "#6a4c93", "torch": "#e08a1e", "scipy": "#8a8a8a", "torch_sparse": "#9c6b30"}
BARS_IN_A_ROW = 60


def run(args: argparse.Namespace) -> None:
    """The command."""
    draw(args.file)


def draw(path: Path) -> list[Path]:
    """A PNG file for each operator, dtype and number of threads, beside the JSON file of a run."""
    record, results = plots.read(path)
    cells = [c for c in results["cells"] if c.get("peers")]
    out = []
    for key in dict.fromkeys(map(group, cells)):
        op, dtype, threads = key
        mine = [c for c in cells if group(c) == key]
        title = f"{op}, {dtype}, {plots.place({**record, 'threads': threads})}"
        figure = _drawn(mine, title)
        if figure is not None:
            name = f"{path.stem}-{op}-{dtype}-{threads}.json"
            out.append(plots.save(plots.pyplot(), figure, path.with_name(name)))
    return out


def _drawn(cells: list[dict[str, Any]], title: str) -> Any:
    """The figure of some cells; None where nothing can be held against anything."""
    baseline = max(BASELINES, key=lambda b: sum(b in c["peers"] for c in cells))
    cells = [c for c in cells if baseline in c["peers"]]
    found = dict.fromkeys(n for c in cells for n in c["peers"] if n != baseline)
    names = list(dict.fromkeys(n for n in (OURS, *found) if n in found))
    if not names:
        return None
    problems = list(dict.fromkeys(c["problem"] for c in cells))
    features = sorted({c["feat"] for c in cells})
    plt = plots.pyplot()
    # A row for each number of features; beside each other where there are few bars.
    columns = max(1, min(len(features), BARS_IN_A_ROW // (len(problems) * (len(names) + 1))))
    rows = -(-len(features) // columns)
    width = max(4.2, 0.2 * len(problems) * (len(names) + 1.5)) * columns
    size = (width + 0.8, 2.4 * rows + 1.1)
    shared: dict[str, Any] = {"squeeze": False, "sharex": True, "sharey": True}
    figure, axes = plt.subplots(rows, columns, figsize=size, **shared)
    shown = [p if len(p) < 24 else "\N{HORIZONTAL ELLIPSIS}" + p[-22:] for p in problems]
    long = max(map(len, shown)) * len(problems) > 60
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if long else {}
    every = [1.0]
    for axis, feat in zip(axes.flat, features, strict=False):
        here = {c["problem"]: c["peers"] for c in cells if c["feat"] == feat}
        ratios = {
            name: [plots.ratio(here.get(problem, {}), baseline, name) for problem in problems]
            for name in names
        }
        plots.bars(axis, plots.Panel("", shown, ratios, told=(OURS,), colours=COLORS))
        axis.set_xticks(range(len(shown)), shown, fontsize=8, **turned)
        axis.axhline(1, color=COLORS.get(baseline, "black"), label=f"{baseline} = 1", zorder=3)
        axis.set_title(f"d = {feat}", fontsize=10)
        every += [r for some in ratios.values() for r in some]
    for axis in axes.flat[len(features) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"speed-up over {baseline}")
    plots.scale(axes.flat[0], every)
    plots.legend_on_top(figure, axes.flat[0], title, columns=len(names) + 1)
    return figure
