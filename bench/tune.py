"""The tuner against a sweep of all configs: how many trials it needs, and what it gains."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sparsetir
from bench.peers import turns
from bench.peers.cases import features
from bench.peers.libraries import OURS
from bench.problems import chosen, problems
from bench.report import circumstances, table, write
from bench.run import thread_counts
from sparsetir.records.task import OK, Task
from sparsetir.schedules.search.configs import to_data
from sparsetir.tuning.operator_case import case_of
from sparsetir.tuning.progress import Bar

CLOSE = 1.05  # times the best of the sweep: near enough
SHARE = 0.25  # of the sweep's configs that the search may try
FEATURES = (32,)
LIBRARIES = ("scipy", "torch", "mkl")
ROUNDS, SECONDS = 5, 0.015


def run(args: argparse.Namespace) -> None:
    """The command."""
    (threads,) = thread_counts(args.threads or ["all"])
    cells = []
    for problem in problems(args.graph, args.pruned, args.layers, chosen(args.synthetic)):
        matrix = problem.load()
        for op in args.op:
            for feat in features(op, args.feat or FEATURES):
                found = measured(op, matrix, feat, threads, args.quick)
                cells.append({"problem": problem.name, "op": op, "feat": feat, **found})
                show(cells[-1:])
    show(cells)
    write(args.out, "tune", circumstances(threads), {"threads": threads, "cells": cells})


def measured(op: str, matrix: Any, feat: int, threads: int, quick: bool) -> dict[str, Any]:
    """A sweep, a search with a share of its trials, and both winners beside the libraries."""

    def tune(label: str, **options: Any) -> Any:
        bar = Bar(f"{op} {feat}: {label}")
        return sparsetir.tune(
            op, matrix, feat, threads=threads, records="", progress=bar, **options
        )

    # A quick one sweeps nothing, and shows that the command runs.
    sweep = tune("sweep", **({"trials": 4} if quick else {"sampler": "exhaustive"}))
    times = {t.config: t.outcome.seconds for t in sweep.trials if t.outcome.state == OK}
    budget = max(1, math.ceil(SHARE * len(sweep.trials)))
    search = tune("search", sampler="tpe", trials=budget)
    near = [math.inf if t.config not in times else times[t.config] for t in search.trials]
    enough = CLOSE * min(times.values())
    reached = next((n + 1 for n, seconds in enumerate(near) if seconds <= enough), None)
    configs = {"default": sweep.default, "sweep": sweep.config, "search": search.config}
    found = {"m": matrix.shape[0], "n": matrix.shape[1], "nnz": int(matrix.nnz)}
    found |= {"configs": len(sweep.trials), "sweep_seconds": sweep.trials[-1].when}
    found |= {"states": sweep.counts, "budget": budget, "search_seconds": search.trials[-1].when}
    found |= {"trials_to_within_5_percent": reached, "sweep_best_seconds": min(times.values())}
    best = min(near) / min(times.values())
    found["search_best_over_sweep_best"] = best if math.isfinite(best) else None
    found["plans"] = {name: to_data(config) for name, config in configs.items()}
    return {**found, "final": beside_libraries(sweep.task, configs)}


def beside_libraries(
    task: Task, configs: Mapping[str, Any], rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[str, Any]:
    """Times of configs and of scipy, torch and MKL, each in a process of its own, in turns.

    configs : by name; one with several names is measured once
    rounds : turns of each at least; seconds : of a turn

    Gives "configs" and "libraries", seconds by name; "vendor", the fastest library; and why others
    have none: "missing", "wrong", "failed", also with "sparsetir", all configs together.
    """
    first: dict[Any, str] = {}
    for name, config in configs.items():
        first.setdefault(config, name)
    case = case_of(task)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparsetir-")))
        plans = folder / "plans.json"
        data = {name: to_data(config) for config, name in first.items()}
        modules = sorted({type(config).__module__ for config in first})
        plans.write_text(json.dumps({"target": task.target, "modules": modules, "configs": data}))
        workers = [turns.Worker(OURS, task.threads, {"plans": str(plans)})]
        workers += [turns.Worker(name, task.threads, {}) for name in LIBRARIES]
        for worker in workers:
            stack.callback(worker.close)
            worker.start()
        reference = turns.shared(case, folder)
        found = turns.compare(case, workers, folder, rounds, seconds, reference, drop=False)
    peers = found.pop("peers")
    ours = peers.pop(OURS, {}).get("variants", {})
    libraries = {name: _times(t, t["variant"]) for name, t in peers.items()}
    known = {n: _times(ours[first[c]]) for n, c in configs.items() if first[c] in ours}
    vendor = min(libraries, key=lambda n: libraries[n]["seconds"], default=None)
    return {"configs": known, "libraries": libraries, **found, "vendor": vendor}


def _times(found: Mapping[str, Any], way: str = "") -> dict[str, Any]:
    return {"seconds": found["min"], "median": found["median"], "way": way}


def show(cells: list[dict[str, Any]]) -> None:
    """A line for each cell."""
    # The last three are of the comparison in turns; times of single trials hold much luck.
    header = ["problem", "op", "d", "configs", "trials to 5 %", "share", "sweep (s)", "search (s)"]
    rows = []
    for cell in cells:
        reached, final = cell["trials_to_within_5_percent"], cell["final"]
        ours = {name: t["seconds"] for name, t in final["configs"].items()}
        others = [t["seconds"] for t in final["libraries"].values()]
        row = [cell[k] for k in ("problem", "op", "feat", "configs")]
        row += [f"> {cell['budget']}", ""]
        if reached is not None:
            row[-2:] = [reached, f"{reached / cell['configs']:.0%}"]
        row += [f"{cell[k]:.0f}" for k in ("sweep_seconds", "search_seconds")]
        row += [f"{ours[k] / ours['search']:.2f}" for k in ("sweep", "default")]
        rows.append([*row, f"{min(others) / ours['search']:.2f}" if others else ""])
    title = "The search against a sweep of all configs"
    table(title, [*header, "x sweep", "x default", "x best library"], rows)
