"""Steps of SAGE and GAT on edges that are new in each, beside PyG's."""

from __future__ import annotations

import argparse

from bench import checkouts
from bench.report import circumstances, table, write

TURNS = 2  # of processes


def run(args: argparse.Namespace) -> None:
    """Write the file: by checkout and number of threads."""
    trees, turns = checkouts.of(args), 1 if args.quick else TURNS
    seconds, found = 0.1 if args.quick else args.seconds / turns, {}
    for threads in args.numbers:
        words = [str(seconds), str(threads)]
        of_trees = checkouts.in_turns(trees, turns, "new_edges", words)
        found |= {f"{name}, {threads} threads": cells for name, cells in of_trees.items()}
    for group, ways in next(iter(found.values())).items():
        unit, scale = ("MiB", 1) if group == "growth" else ("ms", 1e3)
        rows = []
        for way in ways:
            times = [cell[group][way] for cell in found.values()]
            texts = [f"{scale * t['min']:.2f}/{scale * t['median']:.2f}" for t in times]
            rows.append([way, *texts])
        table(f"{group}: {unit} as min/median", ["", *found], rows)
    results = {"commits": checkouts.commits(trees), "seconds": found}
    write(args.out, "new_edges", circumstances(max(args.numbers)), results)
