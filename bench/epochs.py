"""Epochs of GCN, SAGE and GAT, and SAGE on edges that are new in each step, beside PyG's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.calls import measured, merge
from bench.report import ROOT, circumstances, commit, table, write
from bench.timing import progress

WORKER = Path(__file__).with_name("epoch_worker.py")
TURNS = 2  # of processes


def run(args: argparse.Namespace) -> None:
    """The command."""
    trees = {"now": ROOT}
    if args.before is not None:
        trees = {"before": args.before.resolve(), **trees}
    turns = 1 if args.quick else TURNS
    graphs = args.graph or ["cora"]
    found: dict[str, Any] = {}
    for turn in range(turns):
        for name, root in trees.items():
            for threads in args.numbers:
                progress(f"turn {turn + 1} of {turns}: {name}, {threads} threads")
                words = [str(threads), str(0.1 if args.quick else args.seconds / turns), *graphs]
                into = found.setdefault(f"{name}, {threads} threads", {})
                merge(into, measured(root, WORKER, words))
    progress("")
    for group in next(iter(found.values())):
        unit, scale = ("MiB", 1) if group == "growth" else ("ms", 1e3)
        rows = [
            [way, *("/".join(f"{cell[group][way][k] * scale:.2f}" for k in ("min", "median"))
                    for cell in found.values())]
            for way in next(iter(found.values()))[group]
        ]  # fmt: skip
        table(f"{group}: {unit} as min/median", ["", *found], rows)
    commits = {name: commit(root) for name, root in trees.items()}
    where = circumstances(max(args.numbers))
    write(args.out, "epochs", where, {"commits": commits, "seconds": found})
