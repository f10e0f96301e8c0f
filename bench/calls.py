"""What a call costs beside the kernel, microsecond by microsecond; beside another version too."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from bench import checkouts, plots
from bench.harness import finish
from bench.report import table

TURNS = 4  # of processes
TITLES = {
    "floors": "What no layer of Python goes below: us as min/median",
    "calls": "Calls: us as min/median",
    "parts": "Of a call of ops.spmm: us as min/median",
    "cold": "Single calls after 64 MiB were written: us as min/median",
}


def run(args: argparse.Namespace) -> None:
    """The command."""
    trees, turns = checkouts.of(args), 1 if args.quick else TURNS
    seconds = 1 if args.quick else args.seconds / turns
    found = checkouts.in_turns(trees, turns, "calls", [str(seconds)])
    for group, title in TITLES.items():
        if group in found["now"]:
            rows = [
                [name, *(_text(of.get(group, {}).get(name)) for of in found.values())]
                for name in found["now"][group]
            ]
            table(title, ["", *found], rows)
    results = {"commits": checkouts.commits(trees), "seconds": found}
    finish(args, "calls", results, draw=draw)


def _text(times: dict[str, float] | None) -> str:
    return f"{times['min'] * 1e6:.2f}/{times['median'] * 1e6:.2f}" if times else "-"


def draw(path: Path) -> Path:
    """A picture of a JSON file of this command, beside it: minima as bars."""
    record, results = plots.read(path)
    found, rows = results["seconds"], []
    for group in (g for g in TITLES if g in found["now"]):
        names = [*found["now"][group]]
        ways = {
            tree: [1e6 * of.get(group, {}).get(n, {}).get("min", math.nan) for n in names]
            for tree, of in found.items()
        }
        rows.append([plots.Panel(TITLES[group].split(":")[0], names, ways, form="{:.1f}")])
    return plots.grid(path, rows, f"microseconds (least), {plots.place(record)}", lying=True)
