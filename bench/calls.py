"""What a call costs beside the kernel, microsecond by microsecond; beside another version too."""

from __future__ import annotations

import argparse

from bench import checkouts
from bench.harness import finish
from bench.report import table

TURNS = 4  # of processes
TITLES = {
    "floors": "What no layer of Python goes below: us as min/median",
    "calls": "Calls: us as min/median",
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
    finish(args, "calls", results)


def _text(times: dict[str, float] | None) -> str:
    return f"{times['min'] * 1e6:.2f}/{times['median'] * 1e6:.2f}" if times else "-"
