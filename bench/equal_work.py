"""SpMM by chunks of equal work across rows, beside blocks of rows: even rows, and one giant row."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm_ffi

import sparsetir
from bench.graphs import graphs
from bench.harness import check, each, finish
from bench.programs import SPMM
from bench.report import table
from bench.timing import interleaved
from sparsetir.schedules.passes.parallel_loops import in_vectors

TILE, LANES = 32, 16
TARGETS = {
    "even": "equal work takes at most 1.1 times as long as row blocks",
    "skewed": "row blocks take at least 1.5 times as long as equal work, on two threads",
}


def run(args: argparse.Namespace) -> None:
    seconds = 0.05 if args.quick else 10.0
    matrices = {"even": even(args.quick), "skewed": skewed(args.quick), **graphs(args.graph)}
    cells = each(
        (f"{name}, {feat} features",
         partial(measure, name, sp.csr_array(matrix), feat, args.threads, seconds))
        for name, matrix in matrices.items()
        for feat in ((32,) if name == "skewed" else (32, 128))
    )  # fmt: skip
    show(cells, args.threads)
    finish(args, "equal_work", {"cells": cells, "targets": TARGETS})


def even(quick: bool) -> Any:
    """Rows of 32 elements each, in random columns."""
    m, row = (200 if quick else 20_000), 32
    rng = np.random.default_rng(0)
    columns = np.cumsum(rng.integers(1, 625, (m, row)), axis=1).ravel()
    values = rng.random(m * row, dtype="float32")
    return sp.csr_array((values, columns, np.arange(m + 1) * row), shape=(m, 625 * row))


def skewed(quick: bool) -> Any:
    """One row with nine tenths of the elements, among many short ones."""
    m, nnz = (100, 2_000) if quick else (5_000, 100_000)
    rng = np.random.default_rng(0)
    giant = rng.choice(nnz, nnz * 9 // 10, replace=False)
    rest = nnz - len(giant)
    rows = np.concatenate([np.full(len(giant), m // 2), rng.integers(0, m, rest)])
    columns = np.concatenate([giant, rng.integers(0, nnz, rest)])
    places = np.unique(rows.astype("int64") * nnz + columns)
    values = rng.random(len(places), dtype="float32")
    return sp.coo_array((values, (places // nnz, places % nnz)), shape=(m, nnz)).tocsr()


def row_blocks(parts: int, tile: int = TILE) -> Any:
    """Each worker has rows of its own, with as much work as the others where rows allow it.

    tile : columns at a time, a multiple of `LANES`
    """
    sch = sparsetir.Schedule(sparsetir.from_source(SPMM))
    it = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(it)
    o, i = sch.divide(i, parts, by="work")
    p, v, lane = sch.split(k, [None, tile // LANES, LANES], tail="shift")
    sch.sparse_reorder(it, [o, i, p, j, v, lane])
    made = sch.precompute("C", p, [v, lane])
    sch.parallelize(o)
    return sparsetir.build(in_registers(sch, made))


def equal_work(parts: int, tile: int = TILE) -> Any:
    """Each worker has a chunk of the elements, whatever their rows; `tile` columns at a time."""
    sch = sparsetir.Schedule(sparsetir.from_source(SPMM))
    it = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(it)
    o, i, j = sch.divide(sch.sparse_fuse(it, [i, j]), parts, by="work")
    p, v, lane = sch.split(k, [None, tile // LANES, LANES], tail="shift")
    sch.sparse_reorder(it, [o, i, p, j, v, lane])
    made = sch.precompute("C", p, [v, lane])
    keep, _, _ = sch.parallelize(o, race="temporary") or []
    return sparsetir.build(in_registers(sch, [*made, keep]))


def in_registers(sch: Any, iterations: list[Any]) -> Any:
    """The schedule, gone on to stage II, with the tiles of these iterations in vectors."""
    lowered = sch.lower()
    for made in iterations:
        in_vectors(lowered, made)
    return sch


def measure(name: str, matrix: Any, feat: int, threads: int, seconds: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    b = rng.random((matrix.shape[1], feat), dtype="float32") - np.float32(0.5)
    data = matrix.data.astype("float32")
    indptr, indices = matrix.indptr.astype("int32"), matrix.indices.astype("int32")
    exact = matrix.astype("float64") @ b
    unit = abs(matrix).astype("float64") @ abs(b)  # of the terms of each sum
    calls, errors = {}, {}
    for way, kernel in (
        ("row blocks", row_blocks(8 * threads)),
        ("equal", equal_work(8 * threads)),
    ):
        c = np.full((matrix.shape[0], feat), np.nan, "float32")
        arrays = [tvm_ffi.from_dlpack(x) for x in (data, b, c, indptr, indices)]
        kernel(*arrays)
        errors[way] = check(f"equal_work: {way} of {name}", c, exact, unit)
        calls[way] = lambda kernel=kernel, arrays=arrays: kernel(*arrays)
    times = interleaved(calls, seconds)
    ratio = times["equal"]["min"] / times["row blocks"]["min"]
    size = {"rows": matrix.shape[0], "columns": matrix.shape[1], "nnz": matrix.nnz}
    return {"matrix": name, **size, "feat": feat, "times": times, "errors": errors, "ratio": ratio}


def show(cells: list[dict[str, Any]], threads: int) -> None:
    rows = []
    for cell in cells:
        times = [f"{1e3 * cell['times'][way]['min']:.3f}" for way in ("row blocks", "equal")]
        rows.append([cell["matrix"], cell["feat"], *times, f"{cell['ratio']:.3f}"])
    title = f"SpMM in float32, threads: {threads}; shortest times in ms"
    table(title, ["matrix", "features", "row blocks", "equal work", "equal / rows"], rows)
    for name, text in TARGETS.items():
        print(f"{name}: {text}")
