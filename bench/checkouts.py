"""Calls beside their kernel, and layers on new edges: of this checkout, and another in turns."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import finish
from bench.report import ROOT, commit, table
from bench.timing import progress

UNITS = {"calls": ("us", 1e6), "new_edges": ("ms", 1e3)}


def run(args: argparse.Namespace) -> None:
    """Write the file: by checkout, and for new edges by number of threads."""
    before = {} if args.before is None else {"before": args.before.resolve()}
    trees, times = {**before, "now": ROOT}, {}
    turns = 1 if args.quick else 2 if args.command == "new_edges" else 4
    seconds = str((0.9 if args.quick else args.seconds) / turns)
    if args.command == "calls":
        times = in_turns(trees, turns, ["calls", seconds])
    else:
        args.threads = max(args.numbers)
        for threads in args.numbers:
            of_trees = in_turns(trees, turns, ["new_edges", seconds, str(threads)])
            times |= {f"{name}, {threads} threads": cells for name, cells in of_trees.items()}
    unit, scale = UNITS[args.command]
    for group, ways in list(times.values())[-1].items():
        rows = []
        for way in ways:
            took = [of.get(group, {}).get(way) for of in times.values()]
            texts = [
                f"{scale * t['min']:.2f}/{scale * t['median']:.2f}" if t else "-" for t in took
            ]
            rows.append([way, *texts])
        table(f"{group}: {unit} as min/median", ["", *times], rows)
    commits = {name: commit(root) for name, root in trees.items()}
    finish(args, args.command, {"commits": commits, "seconds": times})


def in_turns(trees: Mapping[str, Path], turns: int, words: Sequence[str]) -> dict[str, Any]:
    """The merged times of `turns` processes of each checkout, by its name."""
    times: dict[str, Any] = {name: {} for name in trees}
    for turn in range(turns):
        for name, root in trees.items():
            progress(f"turn {turn + 1} of {turns}: {words[0]}, {name}")
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{root}/python", str(ROOT)])}
            command = [sys.executable, "-m", "bench.checkout_worker", *words]
            done = subprocess.run(
                command, env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
            )
            merge(times[name], json.loads(done.stdout.splitlines()[-1]))
    progress("")
    return times


def merge(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Merge a turn: the least of the minima, and the least median, that of the quietest turn."""
    for group, times in more.items():
        for name, new in times.items():
            old = total.setdefault(group, {}).get(name, new)
            least = {k: min(old[k], new[k]) for k in ("min", "median")}
            rounds = new["rounds"] + (0 if old is new else old["rounds"])
            total[group][name] = {**least, "rounds": rounds}
