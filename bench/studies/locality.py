"""SpMM on a CPU, tiled and not (Senanayake's thesis, section 8.6; appendices A.12 and A.13).

"I [...] run the resulting kernels on a 100k x 100k sparse matrix with an average of 1000 randomly
distributed nonzeros per row multiplied by a 100k x 32 dense matrix. Not surprisingly, the tiled
kernel performs 2.1x better."

That is one size; here sizes and mean lengths of rows are swept, that one with --full. Loops of the
two schedules stay as they are, but LLVM puts the innermost one of the untiled kernel, over
columns, into vectors by itself, and not that of the tiled kernel, over elements of a row. So the
thesis's tiled schedule with vectors over columns (A.3) stands beside them, and the default one.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

import sparsetir
from bench import plots
from bench.examples import example
from bench.report import table
from bench.studies import common
from bench.studies.skew import random_rows

FEATURES = 32
TILED, UNTILED = "tiled (A.12)", "untiled (A.13)"
VECTORS, DEFAULT = "tiled, in vectors (A.3)", "default schedule"
PAPER = {"n": 100_000, "mean": 1000, "speedup": 2.1}
# (n, mean lengths of rows)
QUICK: dict[int, tuple[int, ...]] = {60: (4,)}
SMALL: dict[int, tuple[int, ...]] = {1_000: (10, 100), 10_000: (10, 100, 1000)}
FULL: dict[int, tuple[int, ...]] = {**SMALL, 100_000: (10, 100, 1000)}


def run(args: argparse.Namespace) -> None:
    """The command."""
    if args.target == "cuda":
        raise SystemExit("study locality: is of CPUs, as the thesis has it; leave out --target")
    sizes = QUICK if args.quick else FULL if args.full else SMALL
    kernels = built()
    step = common.Steps(sum(map(len, sizes.values())))
    cells = []
    for n, means in sizes.items():
        for mean in means:
            step(f"{n} x {n}, {mean} elements in a row")
            matrix = random_matrix(n, mean)
            b = np.random.default_rng(0).random((n, FEATURES), dtype="float32")
            times = common.cpu_seconds(kernels, matrix, b, 0.02 if args.quick else 3.0)
            cells.append({"n": n, "mean": mean, "nnz": matrix.nnz, "ways": times})
    rows = [
        [f"{c['n']} x {c['n']}", c["mean"], *(f"{1e3 * t['min']:.2f}" for t in c["ways"].values()),
         *(f"{speedup(c, way):.2f}" for way in (TILED, VECTORS)),
         PAPER["speedup"] if (c["n"], c["mean"]) == (PAPER["n"], PAPER["mean"]) else ""]
        for c in cells
    ]  # fmt: skip
    title = f"SpMM with {FEATURES} columns, threads: {args.threads}; shortest times in ms"
    head = ["matrix", "elements in a row", *kernels, "A.13 / A.12", "A.13 / A.3",
            "A.13 / A.12 in the thesis"]  # fmt: skip
    table(title, head, rows)
    results = {"paper": {"section": "Senanayake, 8.6", **PAPER}, "features": FEATURES,
               "dtype": "float32", "cells": cells}  # fmt: skip
    draw(common.finish(args, "times", results))


def speedup(cell: dict[str, Any], way: str) -> float:
    """Of a way over the untiled one."""
    return cell["ways"][UNTILED]["min"] / cell["ways"][way]["min"]


def built() -> dict[str, Any]:
    """The kernels; loops of the thesis's schedules stay as they are."""
    thesis = example("thesis_schedules")
    out = {}
    for name, apply in ((TILED, thesis.a12_spmm_tiled), (UNTILED, thesis.a13_spmm)):
        sch = sparsetir.Schedule(thesis.spmm())
        apply(sch)
        sch.lower()
        out[name] = sparsetir.build(sch)
    out[VECTORS] = sparsetir.build(thesis.spmm(), schedule=thesis.a3_spmm)
    return {**out, DEFAULT: sparsetir.build(thesis.spmm())}


def random_matrix(n: int, mean: int) -> Any:
    """CSR, n x n, with about `mean` elements in a row, anywhere."""
    rng = np.random.default_rng(0)
    return random_rows(np.minimum(rng.poisson(mean, n), n), n, rng)


def draw(path: Path) -> Path:
    """Bars of speed-ups by size, beside the thesis's one."""
    plt, record, results = plots.load(path)
    cells, paper = results["cells"], results["paper"]
    sizes = [*((c["n"], c["mean"]) for c in cells), (paper["n"], paper["mean"])]
    labels = [f"{n:,}\n{mean:,}" for n, mean in sizes[:-1]]
    labels.append(f"{sizes[-1][0]:,}\n{sizes[-1][1]:,}\n(thesis)")
    figure, axis = plt.subplots(figsize=(max(5.2, 0.95 * len(sizes) + 1.2), 3.3))
    none = math.nan
    heights = {
        f"{TILED}, here": [*(speedup(c, TILED) for c in cells), none],
        f"{VECTORS}, here": [*(speedup(c, VECTORS) for c in cells), none],
        f"{TILED}, in the thesis": [none] * len(cells) + [paper["speedup"]],
    }
    plots.bars(axis, labels, heights, form="{:.2f}")
    axis.axhline(1, color="#1f5fa8", linewidth=1.1, zorder=2)
    axis.set_ylabel("speed-up over untiled (A.13)", fontsize=9)
    axis.set_xlabel("n of the n x n matrix, and below it elements in a row", fontsize=8.5)
    title = f"SpMM with {results['features']} columns, {plots.place(record)}"
    plots.legend_on_top(figure, axis, title)
    return plots.save(plt, figure, path)
