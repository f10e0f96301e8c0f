"""Epochs of GCN, SAGE and GAT, and SAGE on edges that are new in each step, beside PyG's."""

from __future__ import annotations

import argparse
from typing import Any

from bench import checkouts
from bench.report import circumstances, table, write

TURNS = 2  # of processes


def run(args: argparse.Namespace) -> None:
    """The command."""
    trees, turns = checkouts.of(args), 1 if args.quick else TURNS
    seconds, found = 0.1 if args.quick else args.seconds / turns, {}
    for threads in args.numbers:
        words = [str(seconds), str(threads), *(args.graph or ["cora"])]
        of_trees = checkouts.in_turns(trees, turns, "epochs", words)
        found |= {f"{name}, {threads} threads": cells for name, cells in of_trees.items()}
    show(found)
    results = {"commits": checkouts.commits(trees), "seconds": found}
    write(args.out, "epochs", circumstances(max(args.numbers)), results)


def show(found: dict[str, Any]) -> None:
    """A table for each graph, of the ways by checkouts and threads."""
    first = next(iter(found.values()))
    for group, ways in first.items():
        unit, scale = ("MiB", 1) if group == "growth" else ("ms", 1e3)
        rows = []
        for way in ways:
            times = [cell[group][way] for cell in found.values()]
            rows.append(
                [way, *(f"{scale * t['min']:.2f}/{scale * t['median']:.2f}" for t in times)]
            )
        table(f"{group}: {unit} as min/median", ["", *found], rows)
