"""Kinds of reduction in SpMM, and how much of it goes where (Sgap, section 7, tables 1 to 5).

On a GPU, and where its instructions are counted: the four algorithms of `sgap.py` at many points.
On a CPU, which has no groups of threads: blocks of rows and chunks of equal work across rows, with
tiles of c columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import sparsetir
from bench import equal_work
from bench.peers.gpu_clock import Clock
from bench.programs import SPMM
from bench.report import table
from bench.studies import common, group_plots, sgap_tables
from bench.studies.counting import MEANINGS, Counted
from bench.studies.matrices import folder, generated
from bench.studies.sgap import COLUMNS, NEW, ONE, ORIGINAL, PART_OF_ROW, Point, points
from sparsetir.schedules.gpu.spmm_groups import Groups, apply

TILES = (16, 32, 64)  # of a CPU
# (rows, mean length) of generated matrices
SIZES = {
    "quick": (40, 4), "counts": (1_000, 8), "cpu": (20_000, 16), "cuda": (50_000, 16),
    "full": (500_000, 32),
}  # fmt: skip
# N
WIDTHS = {"counts": (8,), "cpu": (128, 64), "cuda": (COLUMNS, 128, 64, 16, 4)}
# What measures or counts for a case: a way's figures by its name.
Measure = Callable[["Case"], dict[str, Any]]


class Case:
    """A matrix with N columns.

    arguments : of the plain SpMM, NumPy arrays and numbers by name
    """

    def __init__(self, matrix: Any, columns: int) -> None:
        self.matrix = matrix
        (m, n), rng = matrix.shape, np.random.default_rng(0)
        b = rng.random((n, columns), dtype="float32")
        self.arguments = {
            "a": matrix.data, "b": b, "c": np.full((m, columns), np.nan, "float32"),
            "indptr": matrix.indptr, "indices": matrix.indices,
            "m": m, "n": n, "nnz": matrix.nnz, "feat": columns,
        }  # fmt: skip
        self._exact = matrix.astype("float64") @ b
        self._unit = abs(matrix).astype("float64") @ b

    def check(self, way: str, found: np.ndarray) -> None:
        """Raises SystemExit for a wrong result."""
        common.check(way, found, self._exact, self._unit)


def run(args: argparse.Namespace) -> None:
    """The command."""
    what = "counts" if args.counts else "times"
    torch = None if args.counts else common.device(args)
    which = "counts" if args.counts else "cpu" if torch is None else "cuda"
    if args.counts:
        print(f"Counted, not timed; {common.NO_GPU}")
    size = SIZES["quick" if args.quick else "full" if args.full else which]
    matrices = generated(*size) if args.data is None else folder(args.data)
    chosen = [] if which == "cpu" else _quick_points() if args.quick else points(args.full)
    families = {}
    if args.counts:
        measure = _counting(chosen)
    elif torch is not None:
        measure = _on_gpu(torch, chosen, args)
    else:
        measure, families = _on_cpu(args), {"old": "row blocks", "new": "equal work"}
    cells = list(_cells(matrices, WIDTHS[which], measure))
    found = _show(cells, chosen, what, args)
    results = {
        "paper": "Sgap, section 7, tables 1 to 5, of the matrices of DA-SpMM; ours are others",
        "dtype": "float32", "families": families,
        "points": {p.name: {"kind": p.kind, "size": p.size, "c": p.c, "r": p.r} for p in chosen},
        "tables": [{"title": t, "head": h, "rows": r} for t, h, r in found], "cells": cells,
        **({"meanings": MEANINGS} if args.counts else {}),
    }  # fmt: skip
    group_plots.draw(common.finish(args, what, results, torch))


def _quick_points() -> list[Point]:
    """One of each algorithm, and what the tables divide by."""
    some = points(columns=(4,))
    return [p for p in some if p.size in (1, 32) and p.r in (1, 4, 8, 32) and p != Point(ONE, 1, 4)]


def _cells(
    matrices: dict[str, Any], columns: tuple[int, ...], measure: Measure
) -> Iterator[dict[str, Any]]:
    step = common.Steps(len(matrices) * len(columns))
    for name, matrix in matrices.items():
        for n in columns:
            step(f"{name}, N = {n}")
            lengths = np.diff(matrix.indptr)
            yield {
                "matrix": name, "rows": matrix.shape[0], "columns": matrix.shape[1],
                "nnz": matrix.nnz, "density": matrix.nnz / (matrix.shape[0] * matrix.shape[1]),
                "longest": int(lengths.max(initial=0)), "N": n, "ways": measure(Case(matrix, n)),
            }  # fmt: skip


# -- ways -----------------------------------------------------------------------------------------


def _on_cpu(args: argparse.Namespace) -> Measure:
    seconds, parts = (0.01 if args.quick else 2.0), 8 * args.threads
    makers = {"row blocks": equal_work.row_blocks, "equal work": equal_work.equal_work}
    tiles = TILES[-1:] if args.quick else TILES
    kernels = {f"{n}, {c} col": make(parts, c) for n, make in makers.items() for c in tiles}

    return lambda case: common.cpu_seconds(kernels, case.matrix, case.arguments["b"], seconds)


def _kernels(
    chosen: list[Point], which: str, make: Callable[[Any, Groups], Any]
) -> Callable[[Case], dict[str, Any]]:
    """What gives a kernel of each point for a case, by the point's name.

    which : of `WIDTHS`
    """
    program, widths = sparsetir.from_source(SPMM), WIDTHS[which]
    named = {p.config(n): p.name for p in chosen for n in widths}
    step, made = common.Steps(len(named)), {}
    for config, name in named.items():
        step(f"making {name}")
        made[config] = make(program, config)
    return lambda case: {p.name: made[p.config(case.arguments["feat"])] for p in chosen}


def _counting(chosen: list[Point]) -> Measure:
    kernels = _kernels(chosen, "counts", lambda func, config: Counted(func, apply, config))

    def measure(case: Case) -> dict[str, Any]:
        found = {}
        for way, kernel in kernels(case).items():
            out, found[way] = kernel(case.arguments)
            case.check(way, out["c"])
        return found

    return measure


def _on_gpu(torch: Any, chosen: list[Point], args: argparse.Namespace) -> Measure:
    clock = Clock(torch)

    def make(func: Any, config: Groups) -> Any:
        return sparsetir.build(func, "cuda", schedule=apply, config=config)

    kernels = _kernels(chosen, "cuda", make)

    def measure(case: Case) -> dict[str, Any]:
        there = common.on_gpu(torch, case.arguments)
        calls = {way: common.ready(torch, kernel, there) for way, kernel in kernels(case).items()}
        for way, call in calls.items():
            there["c"].fill_(float("nan"))
            call()
            case.check(way, there["c"].cpu().numpy())
        return common.gpu_seconds(clock, calls, 2 if args.quick else common.ROUNDS)

    return measure


# -- what is shown --------------------------------------------------------------------------------


def _show(
    cells: list[dict[str, Any]], chosen: list[Point], what: str, args: argparse.Namespace
) -> list[sgap_tables.Table]:
    """Print the tables, and give them."""
    if what == "counts":
        found = [*totals(cells, chosen), by_r(cells, chosen), least_sectors(cells, chosen)]
    elif chosen:
        found = sgap_tables.tables(cells, chosen, COLUMNS)
    else:
        found = [_times(cells, args.threads), _cpu_choices(cells)]
    for one in found:
        table(*one)
    return found


def _times(cells: list[dict[str, Any]], threads: int) -> sgap_tables.Table:
    ways = list(cells[0]["ways"])
    rows = [
        [f"{c['matrix']}, N = {c['N']}", *(f"{1e3 * c['ways'][w]['min']:.3f}" for w in ways)]
        for c in cells
    ]
    return f"SpMM in float32, threads: {threads}; shortest times in ms", ["", *ways], rows


def _cpu_choices(cells: list[dict[str, Any]]) -> sgap_tables.Table:
    rows = sgap_tables.static_rows(cells, list(cells[0]["ways"]))
    title = "The best way of each matrix over the best single one, as table 5 has it of GPUs"
    return title, ["", "geometric mean", "best single one"], rows


def totals(cells: list[dict[str, Any]], chosen: list[Point]) -> list[sgap_tables.Table]:
    """What each point does for all matrices together, for each element and column of B."""
    work = sum(c["nnz"] * c["N"] for c in cells)
    counted = ("sectors", "instructions", "shuffles", "atomics", "conflicts")
    rows = []
    for point in chosen:
        ways = [c["ways"][point.name] for c in cells]
        lanes = sum(w["active_lanes"] * w["instructions"] for w in ways)
        rows.append([
            point.name, *(f"{sum(w[x] for w in ways) / work:.3f}" for x in counted),
            f"{lanes / sum(w['instructions'] for w in ways):.2f}",
            f"{max(w['imbalance'] for w in ways):.2f}",
        ])  # fmt: skip
    head = ["", *counted, "active lanes", "worst imbalance"]
    return [("Counts over elements times N, of all matrices together", head, rows)]


def by_r(cells: list[dict[str, Any]], chosen: list[Point]) -> sgap_tables.Table:
    """Conflicts of atomics by the size of groups."""
    lines = list(dict.fromkeys((p.kind, p.size, p.c) for p in chosen if p.kind in NEW))
    sizes = sorted({p.r for p in chosen if p.kind in NEW})
    rows = []
    for kind, size, c in lines:
        found = {p.r: p for p in chosen if (p.kind, p.size, p.c) == (kind, size, c)}
        label = Point(kind, size, c).name.replace(", 1}", ", r}")
        texts = [
            str(sum(x["ways"][found[r].name]["conflicts"] for x in cells)) if r in found else ""
            for r in sizes
        ]
        rows.append([label, *texts])
    return "Conflicts of atomics by r, of all matrices together", ["", *map(str, sizes)], rows


def least_sectors(cells: list[dict[str, Any]], chosen: list[Point]) -> sgap_tables.Table:
    """The choice that moves the fewest sectors, for each matrix and for all."""
    rows = []
    for label, kinds in (
        ("all four algorithms", (*ORIGINAL, *NEW)), ("{<1/g row, c col>, r}", (PART_OF_ROW,))
    ):  # fmt: skip
        names = [p.name for p in chosen if p.kind in kinds]
        static, ratio = sgap_tables.static_and_dynamic(cells, names, lambda w: w["sectors"])
        rows.append([label, f"{ratio:.3f}", static])
        for cell in cells:
            best = min(names, key=lambda n: cell["ways"][n]["sectors"])
            rows.append([f"  {cell['matrix']}", "", best])
    title = "Fewest sectors (counted; no times): the best choice of each matrix over the best one"
    return title, ["", "geometric mean", "choice"], rows
