"""Effect of each primitive of a schedule: from the plain SpMM to the speed of a plan."""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import sparsetir
from bench import plots
from bench.harness import check, run_cells
from bench.problems import problems
from bench.report import show_times
from bench.timing import interleaved
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.templates.row_tile import RowTile, apply

FEATURES = (128, 512)
FIRST = "as written"
# Schedules of docs/schedules.md, as fields of the corresponding template.
STEPS: dict[str, dict[str, Any]] = {
    "sums in registers": {"tile": 128, "tiles_first": False},
    "and prefetch": {"tile": 128, "tiles_first": False, "prefetch": 8},
    "narrow tiles first": {"tile": 32},
    "and panels": {"tile": 32, "pack": True},
}


def run(args: argparse.Namespace) -> None:
    """The command."""
    func = program(Spmm())
    kernels = {FIRST: sparsetir.build(func, schedule=lambda sch: sch.lower(), check=False)}
    for name, fields in STEPS.items():
        config = RowTile(**{"prefetch": 0, "parallel": False, **fields})
        kernels[name] = sparsetir.build(func, schedule=apply, config=config, check=False)
    kernels["default schedule"] = sparsetir.build(func, check=False)

    todo = (
        (f"{problem.name}, {feat} features", partial(measured, problem, feat, kernels, args))
        for problem, feat in product(problems(args.graph), args.feat or FEATURES)
    )
    run_cells(args, "steps", todo, show, draw)


def measured(problem: Any, feat: int, kernels: dict[str, Any], args: Any) -> dict[str, Any]:
    """The least time of each kernel and of the plan, in turns, after their results were checked."""
    matrix = problem.load()
    b = np.random.default_rng(0).random((matrix.shape[1], feat), dtype="float32")
    out = np.empty((matrix.shape[0], feat), "float32")
    index = (x.astype("int32") for x in (matrix.indptr, matrix.indices))
    args_of = (matrix.data.astype("float32"), b, out, *index)
    plan = sparsetir.plan("spmm", matrix, feat, dtype="float32", threads=args.threads)
    calls: dict[str, Any] = {name: lambda k=kernel: k(*args_of) for name, kernel in kernels.items()}
    calls["plan"] = lambda: plan(b, out=out)
    exact, unit = matrix.astype("float64") @ b, abs(matrix).astype("float64") @ b
    for name, call in calls.items():
        out.fill(np.nan)
        call()
        check(f"steps: {name}", out, exact, unit)
    times = interleaved(calls, 0.2 if args.quick else 6.0)
    seconds = {name: times["min"] for name, times in times.items()}
    return {"problem": problem.name, "feat": feat, "seconds": seconds}


def show(cells: list[dict[str, Any]]) -> None:
    """Print times, and their ratios to the unscheduled loops."""
    title = "SpMM by steps: ms, and times the loops as written"
    show_times(title, cells, "seconds", ("problem", "feat"), FIRST)


def draw(path: Path) -> Path:
    """A picture of a JSON file of this command, beside it: bars of speed-ups."""
    record = json.loads(path.read_text())
    rows: dict[str, list[plots.Panel]] = {}
    for cell in record["results"]["cells"]:
        speed = [cell["seconds"][FIRST] / taken for taken in cell["seconds"].values()]
        title = f"{cell['problem']}, d = {cell['feat']}"
        panel = plots.Panel(title, [*cell["seconds"]], {"": speed}, marked="plan")
        rows.setdefault(cell["problem"], []).append(panel)
    label = f"times as fast as the loops as written, {plots.place(record)}"
    return plots.grid(path, list(rows.values()), label)
