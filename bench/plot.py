"""Bars of speed-ups over the vendor's library, as in figures 13 and 14 of the SparseTIR paper."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.peers.libraries import FLOAT32, OURS
from bench.summary import group

# Held against: the first one that most cells have.
BASELINES = ("mkl", "cusparse", "torch", "scipy", FLOAT32)
COLORS = {
    OURS: "#c8102e", FLOAT32: "#e9a0a8", "mkl": "#1f5fa8", "cusparse": "#1f5fa8",
    "dense": "#6a4c93", "torch": "#e08a1e", "scipy": "#8a8a8a", "torch_sparse": "#9c6b30",
    "yardstick": "#2e7d4f",
}  # fmt: skip
OTHERS = ("#17888f", "#b0a000", "#444444", "#d16ba5")
WIDEST_LINEAR = 8.0  # highest over lowest bar; the scale is logarithmic above
BARS_IN_A_ROW = 60


def run(args: argparse.Namespace) -> None:
    """The command."""
    draw(args.file)


def draw(path: Path) -> list[Path]:
    """A PNG file for each operator, dtype and number of threads, beside the JSON file of a run."""
    import matplotlib

    matplotlib.use("Agg")
    record = json.loads(path.read_text())
    cells = [c for c in record["results"]["cells"] if c.get("peers")]
    device = record.get("gpu") or record["cpu"]
    out = []
    for key in dict.fromkeys(map(group, cells)):
        op, dtype, threads = key
        mine = [c for c in cells if group(c) == key]
        where = f"{threads} thread{'s' if threads != 1 else ''}, " if threads != "cuda" else ""
        picture = path.with_name(f"{path.stem}-{op}-{dtype}-{threads}.png")
        if _draw(mine, f"{op}, {dtype}, {where}{device}", picture):
            out.append(picture)
            print(f"drawn: {picture.name}")
    return out


def _draw(cells: list[dict[str, Any]], title: str, path: Path) -> bool:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    baseline = max(BASELINES, key=lambda b: sum(b in c["peers"] for c in cells))
    cells = [c for c in cells if baseline in c["peers"]]
    if not cells:
        return False
    found = dict.fromkeys(n for c in cells for n in c["peers"])
    peers = [n for n in found if n not in (OURS, baseline)]
    names = [OURS, *peers] if OURS in found else peers
    if not names:
        return False
    problems = list(dict.fromkeys(c["problem"] for c in cells))
    features = sorted({c["feat"] for c in cells})
    # A row for each number of features; beside each other where there are few bars.
    columns = max(1, min(len(features), BARS_IN_A_ROW // (len(problems) * (len(names) + 1))))
    rows = -(-len(features) // columns)
    width = max(4.2, 0.2 * len(problems) * (len(names) + 1.5)) * columns
    figure, axes = plt.subplots(
        rows,
        columns,
        squeeze=False,
        figsize=(width + 0.8, 2.4 * rows + 1.1),
        sharey=True,
        sharex=True,
    )
    ratios = [c["peers"][baseline]["min"] / c["peers"][n]["min"]
              for c in cells for n in names if n in c["peers"]]  # fmt: skip
    logarithmic = max([*ratios, 1]) / min([*ratios, 1]) > WIDEST_LINEAR
    for axis, feat in zip(axes.flat, features, strict=False):
        here = {c["problem"]: c["peers"] for c in cells if c["feat"] == feat}
        _bars(axis, here, problems, names, baseline)
        if len(features) > 1:
            axis.set_title(f"d = {feat}", fontsize=10)
        if logarithmic:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_locator(LogLocator(base=2, numticks=12))
            axis.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
            axis.set_ylim(min([*ratios, 1]) / 1.25, max([*ratios, 1]) * 1.5)
        else:
            axis.set_ylim(0, max([*ratios, 1]) * 1.15)
    for axis in axes.flat[len(features) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"speed-up over {baseline}")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.suptitle(title, fontsize=11, y=1 - 0.12 / figure.get_figheight())
    figure.legend(
        handles, labels, ncols=len(labels), frameon=False, loc="upper center", fontsize=9,
        bbox_to_anchor=(0.5, 1 - 0.32 / figure.get_figheight()),
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.45 / figure.get_figheight()))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _bars(
    axis: Any, here: dict[str, Any], problems: list[str], names: list[str], baseline: str
) -> None:
    """Bars of one number of features; the height of sparsetir's is written above it."""
    import numpy as np

    at, wide = np.arange(len(problems)), 0.84 / len(names)
    others = iter(OTHERS * 3)
    for i, name in enumerate(names):
        heights = [
            here[p][baseline]["min"] / here[p][name]["min"]
            if p in here and name in here[p] else np.nan
            for p in problems
        ]  # fmt: skip
        color = COLORS.get(name) or next(others)
        bars = axis.bar(
            at + (i - (len(names) - 1) / 2) * wide, heights, wide * 0.94, label=name, color=color,
            zorder=2,
        )  # fmt: skip
        if name == OURS:
            texts = ["" if np.isnan(h) else f"{h:.2f}" if h < 10 else f"{h:.0f}" for h in heights]
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
            axis.bar_label(bars, texts, fontsize=7, padding=2, color=color, bbox=box, zorder=4)
    line = {"color": COLORS.get(baseline, "black"), "linewidth": 1.2, "zorder": 3}
    axis.axhline(1, label=f"{baseline} = 1", **line)
    shown = [p if len(p) < 24 else "\N{HORIZONTAL ELLIPSIS}" + p[-22:] for p in problems]
    long = max(map(len, shown)) * len(problems) > 60
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axis.set_xticks(at, shown, fontsize=8, **turned)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
