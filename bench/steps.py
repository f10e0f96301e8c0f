"""What each primitive of a schedule is worth: the plain SpMM on its way to the speed of a plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import sparsetir
from bench import plots
from bench.harness import finish
from bench.problems import chosen, problems
from bench.report import table
from bench.timing import interleaved, progress
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.templates.spmm import RowBlocks, apply

FEATURES = (128, 512)
# Schedules of docs/schedules.md, as configs of the template that they are.
SUMS = RowBlocks(tile=128, tiles_first=False, prefetch=0, parallel=False)
STEPS: dict[str, RowBlocks | None] = {
    "as written": None,
    "sums in registers": SUMS,
    "and prefetch": RowBlocks(tile=128, tiles_first=False, prefetch=8, parallel=False),
    "narrow tiles first": RowBlocks(tile=32, prefetch=0, parallel=False),
    "and panels": RowBlocks(tile=32, pack=True, prefetch=0, parallel=False),
}


def run(args: argparse.Namespace) -> None:
    """The command."""
    func = program(Spmm())
    kernels = {name: built(func, config) for name, config in STEPS.items()}
    kernels["default schedule"] = sparsetir.build(func, check=False)
    cells = []
    for problem in problems(args.graph, [], 1, chosen([])):
        matrix = problem.load()
        for feat in args.feat or FEATURES:
            progress(f"{problem.name}, {feat} features")
            cells.append({"problem": problem.name, "feat": feat})
            cells[-1]["seconds"] = measured(matrix, feat, kernels, args)
    progress("")
    show(cells)
    finish(args, "steps", {"cells": cells}, draw=draw)


def built(func: Any, config: RowBlocks | None) -> Any:
    """The kernel of one step; without a config loops stay as the program has them."""
    if config is None:
        return sparsetir.build(func, schedule=lambda sch: sch.lower(), check=False)
    return sparsetir.build(func, schedule=apply, config=config, check=False)


def measured(
    matrix: Any, feat: int, kernels: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """The least time of each kernel and of the plan, in turns."""
    rng = np.random.default_rng(0)
    b = rng.random((matrix.shape[1], feat), dtype="float32")
    indptr, indices = matrix.indptr.astype("int32"), matrix.indices.astype("int32")
    values = matrix.data.astype("float32")
    out = np.empty((matrix.shape[0], feat), "float32")
    plan = sparsetir.plan("spmm", matrix, feat, dtype="float32", threads=args.threads)
    calls: dict[str, Any] = {
        name: lambda k=kernel: k(values, b, out, indptr, indices)
        for name, kernel in kernels.items()
    }
    calls["plan"] = lambda: plan(b, out=out)
    found = interleaved(calls, 0.2 if args.quick else 6.0)
    return {name: times["min"] for name, times in found.items()}


def show(cells: list[dict[str, Any]]) -> None:
    """Times, and how many times as fast as the loops as they are written."""
    names = [*STEPS, "default schedule", "plan"]
    rows = []
    for cell in cells:
        seconds = cell["seconds"]
        first = seconds["as written"]
        texts = [f"{seconds[n] * 1e3:.2f} ({first / seconds[n]:.2f})" for n in names]
        rows.append([cell["problem"], cell["feat"], *texts])
    title = "SpMM by steps: ms, and times as fast as the loops as written"
    table(title, ["problem", "d", *names], rows)


def draw(path: Path) -> Path:
    """A picture of a JSON file of this command, beside it: bars of how many times as fast."""
    plt, record, results = plots.load(path)
    cells = results["cells"]
    size = (2.2 * len(cells) + 1.6, 2.6)
    figure, axes = plt.subplots(1, len(cells), squeeze=False, figsize=size, sharey=True)
    for axis, cell in zip(axes.flat, cells, strict=True):
        seconds = cell["seconds"]
        speed = [seconds["as written"] / taken for taken in seconds.values()]
        plots.bars(axis, [*seconds], {"": speed}, marked="plan", lying=True)
        axis.set_title(f"{cell['problem']}, d = {cell['feat']}", fontsize=9)
    figure.supxlabel(f"times as fast as the loops as written, {plots.place(record)}", fontsize=8)
    return plots.save(plt, figure, path)
