"""Skewed rows (Senanayake's thesis, section 8.4): SpMV by rows, and by equal shares of positions.

On a GPU, and where its instructions are counted: a warp for each row (appendix A.10), a position
split (A.2), a thread for each element (Sgap's {1 nnz, 1 col, 32}), and hyb, whose pieces of rows
have at most twice the mean length. On a CPU: SpMM with 32 features by blocks of rows of equal work,
and by chunks of equal work across rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np

import sparsetir
from bench import equal_work, plots
from bench.examples import example
from bench.peers.gpu_clock import Clock
from bench.report import table
from bench.studies import common
from bench.studies.counting import MEANINGS, Counted
from bench.studies.skew import SIZES, Size, skewed
from sparsetir.schedules.gpu.spmm_hyb import HybRows, arrange
from sparsetir.schedules.gpu.spmm_hyb import apply as apply_hyb
from sparsetir.schedules.gpu.spmm_hyb import program as hyb_program
from sparsetir.schedules.operators.problems import CsrPattern, Spmm

ROWS, POSITIONS, HYB = "warp per row (A.10)", "position split (A.2)", "hyb"
ELEMENTS = "1 nnz per thread, segment(32)"
MOST_BUCKETS = 9  # of hyb; more take long to compile
CPU_FEATURES = 32


def run(args: argparse.Namespace) -> None:
    """The command."""
    what = "counts" if args.counts else "times"
    torch = None if args.counts else common.device(args)
    if args.quick or args.full:
        size = SIZES["quick" if args.quick else "full"]
    else:
        size = SIZES["counts" if args.counts else "cpu" if torch is None else "cuda"]
    if args.counts:
        print(f"Counted, not timed; {common.NO_GPU}")
    cells = list(_cells(args, torch, size))
    show(cells, what, args.threads)
    note = {
        "paper": "Senanayake, section 8.4, figure 8-7, which gives no numbers in its text: 400 "
        "million elements on an NVIDIA V100; the sizes and the values of c here are our choice",
        "operator": f"SpMM, {CPU_FEATURES} features" if torch is None and not args.counts
        else "SpMV", "dtype": "float32",
    }  # fmt: skip
    meanings = {"meanings": MEANINGS} if args.counts else {}
    path = common.finish(args, what, {**note, **meanings, "cells": cells}, torch)
    draw(path)


def _cells(args: argparse.Namespace, torch: Any, size: Size) -> Iterator[dict[str, Any]]:
    measure = (
        _counting(size) if args.counts
        else _on_cpu(args) if torch is None
        else _on_gpu(torch, size, args)
    )  # fmt: skip
    factors = size.factors()
    step = common.Steps(len(factors))
    for c in factors:
        step(f"c = {c:.7g}")
        matrix = skewed(c, size)
        yield {
            "c_minus_1": c - 1, "rows": size.rows, "columns": size.columns, "nnz": size.nnz,
            "longest_over_mean": float(np.diff(matrix.indptr).max() * size.rows / size.nnz),
            "ways": measure(matrix),
        }  # fmt: skip


# -- on a CPU -------------------------------------------------------------------------------------


def _on_cpu(args: argparse.Namespace) -> Any:
    """What measures a matrix: seconds by way."""
    seconds = 0.02 if args.quick else 4.0
    kernels = {
        "row blocks": equal_work.row_blocks(8 * args.threads),
        "equal work": equal_work.equal_work(8 * args.threads),
    }

    def measure(matrix: Any) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        b = rng.random((matrix.shape[1], CPU_FEATURES), dtype="float32") - np.float32(0.5)
        return common.cpu_seconds(kernels, matrix, b, seconds)

    return measure


# -- for a GPU ------------------------------------------------------------------------------------


def schedules() -> dict[str, tuple[Any, Any]]:
    """Programs and schedules by way: of the thesis, and Sgap's {1 nnz, 1 col, 32}."""
    found = {name: (program, apply) for name, program, apply in
             example("thesis_gpu_schedules").GPU_SCHEDULES}  # fmt: skip
    by_rows, by_positions = found["A.10"], found["A.2"]
    return {ROWS: by_rows, POSITIONS: by_positions, ELEMENTS: (by_positions[0], by_elements)}


def by_elements(sch: Any) -> None:
    """Of the thesis's SpMV: a thread for each element, and an atomic for each run of a warp."""
    it = sch.get_sparse_iteration("spmv")
    element = sch.positions(sch.sparse_fuse(it, sch.get_sp_iters(it)))
    blocks, threads = sch.split(element, [None, 512], tail="repeat")
    sch.parallelize(blocks, "block", race="atomics")
    sch.parallelize(threads, "thread", race="segment(32)")


def hyb_config(size: Size) -> HybRows:
    """Buckets up to the mean length of a row."""
    mean = size.nnz / size.rows
    return HybRows.for_features(1, k=min(MOST_BUCKETS, max(0, ceil(log2(mean)))))


def spmv_arguments(matrix: Any) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Of the thesis's SpMV; the exact result, and the sums of its terms without their signs."""
    x = np.random.default_rng(0).random(matrix.shape[1], dtype="float32") - np.float32(0.5)
    arguments = {
        "a": matrix.data, "x": x, "y": np.full(matrix.shape[0], np.nan, "float32"),
        "indptr": matrix.indptr, "indices": matrix.indices,
        "m": matrix.shape[0], "n": matrix.shape[1], "nnz": matrix.nnz,
    }  # fmt: skip
    exact = matrix.astype("float64")
    return arguments, exact @ x, exact @ np.abs(x)


def _counting(size: Size) -> Any:
    """What counts for a matrix: counts by way."""
    kernels = {way: Counted(program(), apply) for way, (program, apply) in schedules().items()}
    problem, config = Spmm(), hyb_config(size)
    hyb = Counted(hyb_program(problem, config), apply_hyb, config)

    def measure(matrix: Any) -> dict[str, Any]:
        arguments, exact, unit = spmv_arguments(matrix)
        found = {}
        for way, kernel in kernels.items():
            out, found[way] = kernel(arguments)
            common.check(way, out["y"], exact, unit)
        pattern = CsrPattern(matrix.indptr, matrix.indices, matrix.shape)
        arranged = arrange(pattern, problem, config)
        out, found[HYB] = hyb({
            **arranged.arguments, **arranged.stored.values(A=matrix.data), "feat": 1,
            "b": arguments["x"][:, None], "out": np.full((matrix.shape[0], 1), np.nan, "float32"),
        })  # fmt: skip
        common.check(HYB, out["out"][:, 0], exact, unit)
        return found

    return measure


def _on_gpu(torch: Any, size: Size, args: argparse.Namespace) -> Any:
    """What measures a matrix on a GPU: seconds by way."""
    clock, config = Clock(torch), hyb_config(size)
    kernels = {
        way: sparsetir.build(program(), "cuda", schedule=apply)
        for way, (program, apply) in schedules().items()
    }

    def measure(matrix: Any) -> dict[str, Any]:
        arguments, exact, unit = spmv_arguments(matrix)
        there = common.on_gpu(torch, arguments)
        y = there["y"]
        plan = sparsetir.plan("spmm", matrix, 1, target="cuda", config=config)
        calls = {way: common.ready(torch, kernel, there) for way, kernel in kernels.items()}
        calls[HYB] = lambda: plan(there["x"][:, None], out=y[:, None])
        for way, call in calls.items():
            y.fill_(float("nan"))
            call()
            common.check(way, y.cpu().numpy(), exact, unit)
        return common.gpu_seconds(clock, calls, 2 if args.quick else common.ROUNDS)

    return measure


# -- what is shown --------------------------------------------------------------------------------


def show(cells: list[dict[str, Any]], what: str, threads: int) -> None:
    """The tables of the command."""
    ways = list(cells[0]["ways"])
    size = f"{cells[0]['rows']} rows, {cells[0]['nnz']} elements"
    if what == "times":
        rows = [
            [f"{1 + c['c_minus_1']:.7g}", f"{c['longest_over_mean']:.1f}",
             *(f"{1e3 * c['ways'][w]['min']:.3f}" for w in ways),
             f"{c['ways'][ways[0]]['min'] / c['ways'][ways[1]]['min']:.2f}"]
            for c in cells
        ]  # fmt: skip
        head = ["c", "longest / mean", *ways, f"{ways[0]} / {ways[1]}"]
        table(f"Skewed rows, {size}, threads: {threads}; shortest times in ms", head, rows)
        return
    for name in ("imbalance", "warp_imbalance", "sectors", "active_lanes", "shuffles", "atomics",
                 "conflicts"):  # fmt: skip
        rows = [
            [f"{1 + c['c_minus_1']:.7g}", f"{c['longest_over_mean']:.1f}",
             *(_text(c["ways"][w][name]) for w in ways)]
            for c in cells
        ]  # fmt: skip
        table(f"{name}: {MEANINGS[name]}; {size}", ["c", "longest / mean", *ways], rows)


def _text(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def draw(path: Path) -> Path:
    """Figure 8-7 of Senanayake's thesis; with counts, a panel for each of some."""
    plt, record, results = plots.load(path)
    cells = results["cells"]
    ways = list(cells[0]["ways"])
    longest = [c["longest_over_mean"] for c in cells]
    shown = [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in longest]
    at = [f"{1 + c['c_minus_1']:.7g}\n{x}" for c, x in zip(cells, shown, strict=True)]
    if results["what"] == "times":
        panels = {"time in ms": lambda w: 1e3 * w["min"]}
    else:
        nnz = cells[0]["nnz"]
        panels = {
            "longest block / mean block": lambda w: w["imbalance"],
            "longest warp / mean warp": lambda w: w["warp_imbalance"],
            "sectors of 32 bytes / element": lambda w: w["sectors"] / nnz,
        }
    figure, axes = plt.subplots(1, len(panels), squeeze=False,
                                figsize=(max(5.8, 4.1 * len(panels) + 0.8), 3.3))  # fmt: skip
    for axis, (label, value) in zip(axes.flat, panels.items(), strict=True):
        found = {w: [value(c["ways"][w]) for c in cells] for w in ways}
        plots.lines(axis, at, found)
        axis.set_ylabel(label, fontsize=9)
        axis.set_xlabel("c, and below it the longest row / the mean row", fontsize=8.5)
        axis.tick_params(axis="x", labelsize=7)
        everything = [v for values in found.values() for v in values]
        plots.scale(axis, everything)
    size = f"{cells[0]['rows']:,} rows, {cells[0]['nnz']:,} elements"
    where = plots.place(record) if results["what"] == "times" else "counted, not timed"
    between = "\n" if len(panels) == 1 else "; "
    title = f"{results['operator']}, k c^i elements in row i, {size}{between}{where}"
    plots.legend_on_top(figure, axes.flat[0], title)
    return plots.save(plt, figure, path)
