"""Checkouts of this project that take turns: what processes find that import each one's package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import ROOT, commit
from bench.timing import progress

WORKER = Path(__file__).with_name("checkout_worker.py")


def of(args: argparse.Namespace) -> dict[str, Path]:
    """This checkout as `now`, and `before` it the one that the command line names."""
    before = {} if args.before is None else {"before": args.before.resolve()}
    return {**before, "now": ROOT}


def commits(trees: Mapping[str, Path]) -> dict[str, str]:
    """Of each checkout."""
    return {name: commit(root) for name, root in trees.items()}


def in_turns(
    trees: Mapping[str, Path], turns: int, what: str, words: Sequence[str]
) -> dict[str, Any]:
    """What `turns` processes of each checkout find together, by its name."""
    found: dict[str, Any] = {name: {} for name in trees}
    for turn in range(turns):
        for name, root in trees.items():
            progress(f"turn {turn + 1} of {turns}: {what}, {name}")
            at = {**os.environ, "PYTHONPATH": str(root / "python")}
            command = [sys.executable, str(WORKER), what, *words]
            done = subprocess.run(command, env=at, check=True, stdout=subprocess.PIPE, text=True)
            merge(found[name], json.loads(done.stdout.splitlines()[-1]))
    progress("")
    return found


def merge(found: dict[str, Any], more: dict[str, Any]) -> None:
    """Add a turn: the least of the minima, and the least median, that of the quietest turn."""
    for group, times in more.items():
        for name, new in times.items():
            old = found.setdefault(group, {}).get(name)
            if old is not None:
                new = {k: min(old[k], new[k]) for k in ("min", "median")} | {
                    "rows": old["rows"] + new["rows"]
                }
            found[group][name] = new
