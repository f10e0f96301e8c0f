"""Products and sums of sparse matrices, which are sparse, beside scipy, MKL and torch's MKL."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from bench.harness import each, finish, geomean
from bench.peers import mkl
from bench.problems import problems
from bench.report import ms, table
from bench.timing import clock_of, interleaved
from sparsetir import Schedule, SparseMatrix, build, plan
from sparsetir.planning.sparse_results import csr, of_elements
from sparsetir.runtime.assembled import Numeric
from sparsetir.schedules.operators.sparse_results import SparseResult
from sparsetir.schedules.templates.sparse_results import Assembled

SUMMANDS = (2, 4, 8)
FEW = ((1_000_000, 1_000_000, 2), (100_000, 100_000, 3), (200_000, 200_000, 4))
INNER = {"sparsetir": Assembled(dotted=True), "all terms": Assembled()}
TARGETS = {
    "product": "1.3 times MKL, 3 times scipy; values alone, of plans too, 1.5 times MKL's",
    "sum": "3 times scipy, 1.2 times MKL",
    "triangles": "5 times the product without a mask",
}
Calls = dict[str, Callable[[], Any]]


def run(args: argparse.Namespace) -> None:
    """The command; status 1 where a result is wrong."""
    torch.set_num_threads(args.threads)
    library = _mkl()
    if library is not None:
        library.MKL_Set_Num_Threads(args.threads)
    todo = [
        (f"{name}: {kind.__name__}", partial(kind, name, matrix, library, args.seconds, *more))
        for name, matrix in ((p.name, p.load()) for p in problems(["cora", *args.graph]))
        for kind, more in (
            (product, ()),
            (triangles, ()),
            (pairs, ()),
            *((total, (n,)) for n in SUMMANDS),
        )
        if kind is product or matrix.shape[0] == matrix.shape[1]
    ]
    for name, matrix in few().items():
        todo.append((name, partial(product, name, matrix, library, args.seconds, "few a row")))
    cells = each(iter(todo))
    show(cells)
    finish(args, "sparse_results", {"cells": cells, "targets": TARGETS}, load=os.getloadavg()[0])


def _mkl() -> Any:
    try:
        return mkl.load()
    except OSError:
        return None


def few() -> dict[str, Any]:
    """Random matrices with few elements in each row, by name."""
    rng, found = np.random.default_rng(0), {}
    for m, n, count in FEW:
        columns = np.sort(rng.integers(0, n, (m, count))).ravel()
        ones, ends = np.ones(m * count, "float32"), np.arange(0, m * count + 1, count)
        a = sp.csr_matrix((ones, columns, ends), shape=(m, n))
        a.sum_duplicates()
        found[f"{m:,} x {n:,}, {count} a row"] = a
    return found


def pairs(name: str, a: Any, library: Any, seconds: float) -> dict[str, Any]:
    """Inner products of each row with four of the longest 64 rows."""
    rng, m = np.random.default_rng(0), a.shape[0]
    hubs = np.sort(np.argsort(np.diff(a.indptr))[-64:])
    columns = np.sort(hubs[rng.integers(0, len(hubs), (m, 4))]).ravel()
    chosen = sp.csr_matrix((np.ones(4 * m, "float32"), columns, np.arange(0, 4 * m + 1, 4)), (m, m))
    chosen.sum_duplicates()
    rows, columns = chosen.nonzero()
    ours, mask = SparseMatrix(a), SparseMatrix(chosen)
    first, second = (a[x] for x in (rows, columns))
    exact = sp.csr_matrix(
        (np.ravel(first.multiply(second).sum(axis=1)), columns, chosen.indptr), (m, m)
    )
    ways = {way: plan("inner", ours, ours, mask=mask, config=c) for way, c in INNER.items()}
    problem = SparseResult("plus_times", "float32", "float32", "float32")
    merged = Schedule(problem.elements_program())
    merged.gallop(merged.get_sp_iters(merged.get_sparse_iteration("elements"))[-1], 0)
    given = of_elements(csr(ours), csr(ours), csr(mask), "int32")
    steps = Numeric(build(merged, check=False), given, "out")
    for found in (*(run() for run in ways.values()), mask.with_values(steps())):
        _check(name, found, exact)
    calls: Calls = {
        **ways, "step by step": steps,
        "scipy": lambda: a[rows].multiply(a[columns]).sum(axis=1),
    }  # fmt: skip
    return {"op": "pairs", "graph": name, "nnz": mask.nnz, "seconds": _timed(calls, seconds)}


def product(name: str, a: Any, library: Any, seconds: float, op: str = "product") -> dict[str, Any]:
    """A A, or A times its transpose where it is no square; and the values of a known pattern."""
    b = a if a.shape[0] == a.shape[1] else sp.csr_matrix(a.T)
    b.sort_indices()
    ours, other = SparseMatrix(a), SparseMatrix(b)
    found, exact = ours @ other, sp.csr_matrix(a) @ sp.csr_matrix(b)
    planned = plan("spgemm", ours, other)
    for x in (found, planned(), planned()):
        _check(name, x, exact)
    terms = int(np.diff(b.indptr)[a.indices].sum())
    calls: Calls = {
        "sparsetir": lambda: ours @ other,
        "values alone": lambda: ours.matmul(other, mask=found),
        "planned": planned,
        "scipy": lambda: a @ b,
        **_torch("torch", lambda x, y: x @ y, a, b),
    }
    if library is not None:
        left, right = (mkl.Handle(library, x, 1, inspect=False) for x in (a, b))
        calls |= {"mkl": left.sparse_product(right), "mkl values": left.numeric_phase(right)}
    about = {"op": op, "graph": name, "terms": terms, "nnz": found.nnz}
    return {**about, "seconds": _timed(calls, seconds)}


def triangles(name: str, a: Any, library: Any, seconds: float) -> dict[str, Any]:
    """L L where L has elements, of the lower part of a pattern made symmetric; beside all of it."""
    below = sp.csr_matrix(sp.tril(a + a.T, -1)).astype("float32")
    below.data[:] = 1
    below.sort_indices()
    ours = SparseMatrix(below)
    found = ours.matmul(ours, mask=ours)
    exact = (below @ below).multiply(below)
    planned = plan("spgemm", ours, ours, mask=ours)
    listed = plan("spgemm", ours, ours, mask=ours, config=Assembled(listed=True))
    for x in (found, planned(), listed()):
        if x.values.sum(dtype="float64") != exact.sum(dtype="float64"):
            raise SystemExit(f"triangles of {name} are wrong")
    calls: Calls = {
        "sparsetir": lambda: ours.matmul(ours, mask=ours),
        "planned": planned,
        "terms listed": listed,
        "without a mask": lambda: ours @ ours,
        "scipy": lambda: (below @ below).multiply(below),
    }
    about = {"op": "triangles", "graph": name, "triangles": float(found.values.sum())}
    return {**about, "seconds": _timed(calls, seconds)}


def total(name: str, a: Any, library: Any, seconds: float, count: int) -> dict[str, Any]:
    """A and count - 1 of its permutations."""
    rng, matrices = np.random.default_rng(0), [sp.csr_matrix(a)]
    for _ in range(count - 1):
        order = rng.permutation(a.shape[0])
        matrices.append(sp.csr_matrix(a[order][:, order]))
        matrices[-1].sort_indices()
    ours = [SparseMatrix(x) for x in matrices]
    found = ours[0].add(*ours[1:])
    planned, exact = plan("add", *ours), reduce(add, matrices)
    for x in (found, planned(), planned()):
        _check(name, x, exact)
    calls: Calls = {
        "sparsetir": lambda: ours[0].add(*ours[1:]),
        "planned": planned,
        "scipy": lambda: reduce(add, matrices),
        **_torch("torch", lambda *x: reduce(add, x), *matrices),
    }
    if library is not None and count == 2:
        left, right = (mkl.Handle(library, x, 1, inspect=False) for x in matrices)
        calls["mkl"] = left.sparse_sum(right)
    about = {"op": f"sum of {count}", "graph": name, "nnz": found.nnz}
    return {**about, "seconds": _timed(calls, seconds)}


def _timed(calls: Calls, seconds: float) -> dict[str, Any]:
    clock = clock_of(torch.get_num_threads())
    return interleaved(calls, seconds, least=3, warm_up=1, clock=clock)


def _torch(name: str, how: Callable[..., Any], *matrices: Any) -> Calls:
    """The same by torch's CSR tensors, whose CPU kernels are MKL's."""
    tensors = [SparseMatrix(x).to_torch() for x in matrices]
    return {name: lambda: how(*tensors)}


def _check(name: str, found: SparseMatrix, exact: Any) -> None:
    """The same to 1e-5 of the largest value."""
    difference = abs(sp.csr_matrix(found.to_scipy()) - exact).max() if found.nnz else 0
    if difference > 1e-5 * max(1, abs(exact).max() if exact.nnz else 0):
        raise SystemExit(f"a result of {name} is wrong by {difference}")


def show(cells: list[dict[str, Any]]) -> None:
    """A table; and how many times as fast as each other way, as geometric means."""
    ways = list(dict.fromkeys(way for cell in cells for way in cell["seconds"]))
    rows = [
        [cell["graph"], cell["op"], *(ms(t[w]) if w in t else "" for w in ways)]
        for cell in cells
        for t in [cell["seconds"]]
    ]
    table("ms, shortest and median", ["matrix", "operator", *ways], rows)
    for op in dict.fromkeys(cell["op"] for cell in cells):
        times = [cell["seconds"] for cell in cells if cell["op"] == op]
        ratios = {
            way: geomean(t[way]["min"] / t["sparsetir"]["min"] for t in times if way in t)
            for way in ways[1:]
            if any(way in t for t in times)
        }
        print(f"{op}: " + ", ".join(f"{r:.2f} times as fast as {way}" for way, r in ratios.items()))
