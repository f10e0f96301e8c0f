"""SpMM on a CPU, tiled and not (Senanayake's thesis, section 8.6; appendices A.12 and A.13).

"I [...] run the resulting kernels on a 100k x 100k sparse matrix with an average of 1000 randomly
distributed nonzeros per row multiplied by a 100k x 32 dense matrix. Not surprisingly, the tiled
kernel performs 2.1x better."

That is one size; here sizes and mean lengths of rows are swept, that one with --full.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

import sparsetir
from sparsetir.bench.examples import example
from sparsetir.bench.report import table
from sparsetir.bench.studies import common, plots
from sparsetir.bench.studies.skew import random_rows
from sparsetir.bench.timing import interleaved

FEATURES = 32
TILED, UNTILED, DEFAULT = "tiled (A.12)", "untiled (A.13)", "default schedule"
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
            times = measure(kernels, matrix, 0.02 if args.quick else 3.0)
            gain = times[UNTILED]["min"] / times[TILED]["min"]
            cells.append({"n": n, "mean": mean, "nnz": matrix.nnz, "ways": times, "speedup": gain})
    rows = [
        [f"{c['n']} x {c['n']}", c["mean"], *(f"{1e3 * t['min']:.2f}" for t in c["ways"].values()),
         f"{c['speedup']:.2f}",
         PAPER["speedup"] if (c["n"], c["mean"]) == (PAPER["n"], PAPER["mean"]) else ""]
        for c in cells
    ]  # fmt: skip
    title = f"SpMM with {FEATURES} columns, threads: {args.threads}; shortest times in ms"
    head = ["matrix", "elements in a row", *kernels, "untiled / tiled", "the thesis's"]
    table(title, head, rows)
    results = {"paper": {"section": "Senanayake, 8.6", **PAPER}, "features": FEATURES,
               "dtype": "float32", "cells": cells}  # fmt: skip
    draw(common.finish(args, "times", results))


def built() -> dict[str, Any]:
    """The kernels; loops of the thesis's schedules stay as they are."""
    thesis = example("study", "thesis_schedules")
    out = {}
    for name, apply in ((TILED, thesis.a12_spmm_tiled), (UNTILED, thesis.a13_spmm)):
        sch = sparsetir.Schedule(thesis.spmm())
        apply(sch)
        sch.lower()
        out[name] = sparsetir.build(sch)
    return {**out, DEFAULT: sparsetir.build(thesis.spmm())}


def random_matrix(n: int, mean: int) -> Any:
    """CSR, n x n, with about `mean` elements in a row, anywhere."""
    rng = np.random.default_rng(0)
    return random_rows(np.minimum(rng.poisson(mean, n), n), n, rng)


def measure(kernels: dict[str, Any], matrix: Any, seconds: float) -> dict[str, Any]:
    """Times by way, checked before."""
    rng = np.random.default_rng(0)
    b = rng.random((matrix.shape[1], FEATURES), dtype="float32")
    exact = matrix.astype("float64") @ b
    calls = {}
    for way, kernel in kernels.items():
        c = np.full(exact.shape, np.nan, "float32")
        arrays = [tvm_ffi.from_dlpack(x) for x in (matrix.data, b, c, matrix.indptr,
                                                   matrix.indices)]  # fmt: skip
        kernel(*arrays)
        common.check(way, c, exact, exact)
        calls[way] = lambda kernel=kernel, arrays=arrays: kernel(*arrays)
    return interleaved(calls, seconds)


def draw(path: Path) -> Path:
    """Bars of the speed-up by size, beside the thesis's one."""
    plt, record, results = plots.load(path)
    cells, paper = results["cells"], results["paper"]
    labels = [f"{c['n']:,}\n{c['mean']:,}" for c in cells] + [
        f"thesis:\n{PAPER['n']:,}\n{PAPER['mean']:,}"
    ]
    heights = [c["speedup"] for c in cells] + [paper["speedup"]]
    figure, axis = plt.subplots(figsize=(max(4.2, 0.75 * len(heights) + 1.2), 3.1))
    colors = ["#c8102e"] * len(cells) + ["#8a8a8a"]
    bars = axis.bar(range(len(heights)), heights, 0.7, color=colors, zorder=3)
    axis.bar_label(bars, [f"{h:.2f}" for h in heights], fontsize=8, padding=2)
    axis.axhline(1, color="#1f5fa8", linewidth=1.1, zorder=4)
    axis.set_xticks(range(len(heights)), labels)
    plots.plain(axis)
    axis.set_ylim(0, 1.15 * max(heights))
    axis.set_ylabel("time untiled / time tiled", fontsize=9)
    axis.set_xlabel("n of the n x n matrix, and below it elements in a row", fontsize=8.5)
    where = f"{record['cpu']}, threads: {record['threads']}"
    axis.set_title(f"SpMM with {results['features']} columns, {where}", fontsize=9)
    figure.tight_layout()
    return plots.save(plt, figure, path)
