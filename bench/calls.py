"""What a call costs beside the kernel, microsecond by microsecond; beside another version too."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plots
from bench.report import ROOT, circumstances, commit, table, write
from bench.timing import progress

WORKER = Path(__file__).with_name("call_worker.py")
TURNS = 4  # of processes
TITLES = {
    "floors": "What no layer of Python goes below: us as min/median",
    "calls": "Calls: us as min/median",
    "parts": "Of a call of ops.spmm: us as min/median",
    "cold": "Single calls after 64 MiB were written: us as min/median",
}


def run(args: argparse.Namespace) -> None:
    """The command."""
    trees = {"now": ROOT}
    if args.before is not None:
        trees = {"before": args.before.resolve(), **trees}
    turns = 1 if args.quick else TURNS
    found: dict[str, Any] = {name: {} for name in trees}
    for turn in range(turns):
        for name, root in trees.items():
            progress(f"turn {turn + 1} of {turns}: {name}")
            seconds = 1 if args.quick else args.seconds / turns
            merge(found[name], measured(root, WORKER, [str(seconds)]))
    progress("")
    commits = {name: commit(root) for name, root in trees.items()}
    _show(found)
    where = circumstances(1)
    path = write(args.out, "calls", where, {"commits": commits, "seconds": found})
    if args.plot:
        draw(path)


def measured(root: Path, worker: Path, words: Sequence[str]) -> dict[str, Any]:
    """What a process finds that imports the package from a checkout."""
    at = {**os.environ, "PYTHONPATH": str(root / "python")}
    command = [sys.executable, str(worker), *words]
    done = subprocess.run(command, env=at, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def merge(found: dict[str, Any], more: dict[str, Any]) -> None:
    """Add a turn: the least of the minima, and the least median, that of the quietest turn."""
    for group, times in more.items():
        for name, new in times.items():
            old = found.setdefault(group, {}).setdefault(name, new)
            found[group][name] = {
                "min": min(old["min"], new["min"]), "median": min(old["median"], new["median"]),
                "rows": new["rows"] + (old["rows"] if old is not new else 0),
            }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    last = found["now"]
    for group, title in TITLES.items():
        if group not in last:
            continue
        rows = []
        for name in last[group]:
            cells = [found[tree].get(group, {}).get(name) for tree in found]
            texts = [f"{c['min'] * 1e6:.2f}/{c['median'] * 1e6:.2f}" if c else "-" for c in cells]
            rows.append([name, *texts])
        table(title, ["", *found], rows)


def draw(path: Path) -> Path:
    """A picture of a JSON file of this command, beside it: minima as bars."""
    plt, record, results = plots.load(path)
    found = results["seconds"]
    groups = [g for g in TITLES if g in found["now"]]
    counts = [len(found["now"][g]) for g in groups]
    figure, axes = plt.subplots(
        len(groups), 1, squeeze=False, figsize=(8, 0.34 * sum(counts) + 3),
        gridspec_kw={"height_ratios": counts},
    )  # fmt: skip
    colours = {"before": "#8a8a8a", "now": "#c8102e"}
    for axis, group in zip(axes.flat, groups, strict=True):
        names = [*found["now"][group]]
        times = {
            tree: [1e6 * of.get(group, {}).get(n, {}).get("min", math.nan) for n in names]
            for tree, of in found.items()
        }
        plots.bars(axis, names, times, colours=colours, lying=True)
        axis.set_title(TITLES[group].split(":")[0], fontsize=9)
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel(f"microseconds (least), {plots.place(record)}", fontsize=8)
    return plots.save(plt, figure, path)
