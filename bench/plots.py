"""Pictures of JSON files, beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.libraries import FLOAT32, OURS
from bench.summary import group
from sparsetir.runtime.texts import many

COLORS = ("#1f5fa8", "#c8102e", "#8a8a8a", "#2e7d4f", "#e08a1e", "#6a4c93")
WIDEST_LINEAR = 8.0
# Libraries as baselines of speed-ups: the first one that most cells have.
BASELINES = ("mkl", "cusparse", "torch", "scipy", FLOAT32)


class Panel(NamedTuple):
    """Bars of ways at names; if there is one way, the bar of `marked` has another colour."""

    title: str
    names: Sequence[str]
    ways: Mapping[str, Sequence[float]]
    marked: str = ""


def grid(path: Path, rows: Sequence[Sequence[Panel]], below: str) -> Path:
    """Draw panels in rows, bars to the right, with a text below; NaN is omitted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = [max(len(p.names) * len(p.ways) for p in row) for row in rows]
    across = max(map(len, rows))
    size = 3.0 * across + 2, 0.2 * sum(counts) + 1.2 * len(rows) + 0.8
    figure, axes = plt.subplots(
        len(rows), across, squeeze=False, figsize=size, height_ratios=counts
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for row, panels in enumerate(rows):
        for axis, panel in zip(axes[row], panels, strict=False):
            axis.set_visible(True)
            bars(axis, panel)
    if len(rows[0][0].ways) > 1:
        axes.flat[0].legend(fontsize=7, frameon=False)
    figure.supxlabel(below, fontsize=8)
    figure.tight_layout()
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    print(f"drawn: {picture.name}")
    return picture


def bars(axis: Any, panel: Panel) -> None:
    """Draw a labelled bar for each way at each name; logarithmic if they differ much."""
    _, names, ways, marked = panel
    wide = 0.8 / len(ways)
    for n, (way, values) in enumerate(ways.items()):
        heights = [i + (n - (len(ways) - 1) / 2) * wide for i in range(len(names))]
        colour: Any = COLORS[n % len(COLORS)]
        if marked:
            colour = [COLORS[1] if name == marked else COLORS[2] for name in names]
        drawn = axis.barh(heights, values, 0.94 * wide, label=way, color=colour, zorder=3)
        texts = ["" if math.isnan(v) else f"{v:.2f}" for v in values]
        axis.bar_label(drawn, texts, fontsize=6.5, padding=2)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.margins(x=0.2)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(panel.title, fontsize=9)
    numbers = [v for values in ways.values() for v in values if not math.isnan(v)]
    if max(numbers) > WIDEST_LINEAR * min(numbers) > 0:
        axis.set_xscale("log")


def place(record: Mapping[str, Any]) -> str:
    """The machine of a record: the threads of a CPU, and its name, or that of the GPU."""
    return record.get("gpu") or f"{many(record['threads'], 'thread')}, {record['cpu']}"


def speed_ups(path: Path) -> list[Path]:
    """Draw a picture for each operator, dtype and number of threads in a file of `run`."""
    record = json.loads(path.read_text())
    cells = [c for c in record["results"]["cells"] if c.get("peers")]
    out = []
    for key in dict.fromkeys(map(group, cells)):
        mine = [c for c in cells if group(c) == key]
        baseline = max(BASELINES, key=lambda b: sum(b in c["peers"] for c in mine))
        mine = [c for c in mine if baseline in c["peers"]]
        peers = dict.fromkeys(n for c in mine for n in c["peers"] if n != baseline)
        rows = []
        for feat in sorted({c["feat"] for c in mine} if peers else ()):
            here = [c for c in mine if c["feat"] == feat]
            ways = {
                name: [
                    c["peers"][baseline]["min"] / c["peers"].get(name, {"min": math.nan})["min"]
                    for c in here
                ]
                for name in sorted(peers, key=lambda name: name != OURS)
            }
            rows.append([Panel(f"d = {feat}", [c["problem"] for c in here], ways)])
        if rows:
            op, dtype, threads = key
            where = place({**record, "threads": threads})
            text = f"{op}, {dtype}: speed-up over {baseline}; {where}"
            file = path.with_name(f"{path.stem}-{op}-{dtype}-{threads}.json")
            out.append(grid(file, rows, text))
    return out
