"""Products and sums of sparse matrices with sparse results, beside scipy, MKL and torch's MKL."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial, reduce
from operator import add, itemgetter
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from bench.harness import run_cells
from bench.peers import mkl
from bench.problems import problems
from bench.report import show_means, show_times
from bench.timing import clock_of, interleaved
from sparsetir import SparseMatrix, plan
from sparsetir.schedules.templates.sparse_results import Assembled

SUMMANDS = (2, 4, 8)
OURS = "sparsetir"
Calls = dict[str, Callable[[], Any]]


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result is wrong."""
    torch.set_num_threads(args.threads)
    try:
        library = mkl.load()
        library.MKL_Set_Num_Threads(args.threads)
    except OSError:
        library = None
    todo = []
    for name, a in ((p.name, p.load()) for p in problems(["cora", *args.graph])):
        kinds: dict[str, Any] = {"product": product}
        if a.shape[0] == a.shape[1]:
            sums = {f"sum of {n}": partial(total, count=n) for n in SUMMANDS}
            kinds |= {"triangles": triangles, **sums}
        for op, kind in kinds.items():
            cell = partial(measure, op, name, partial(kind, name, a, library), args.seconds)
            todo.append((f"{name}: {op}", cell))
    run_cells(args, "sparse_results", todo, show)


def show(cells: list[dict[str, Any]]) -> None:
    """Print times, and means by operator."""
    show_times("ms, and times sparsetir's", cells, "seconds", ("graph", "op"), OURS)
    show_means(cells, "seconds", OURS, itemgetter("op"))


def measure(op: str, name: str, make: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Times of the calls of one kind, after their results were checked."""
    about, calls = make()
    clock = clock_of(torch.get_num_threads())
    took = interleaved(calls, seconds, least=3, warm_up=1, clock=clock)
    return {"op": op, "graph": name, **about, "seconds": took}


def product(name: str, a: Any, library: Any) -> tuple[dict[str, Any], Calls]:
    """A A, or A times its transpose if it is not square; and the values of a known pattern."""
    b = a if a.shape[0] == a.shape[1] else sp.csr_matrix(a.T)
    b.sort_indices()
    ours, other = SparseMatrix(a), SparseMatrix(b)
    result, planned = ours @ other, plan("spgemm", ours, other)
    check(name, sp.csr_matrix(a) @ sp.csr_matrix(b), result, planned(), planned())
    calls: Calls = {
        OURS: lambda: ours @ other,
        "values alone": lambda: ours.matmul(other, mask=result),
        "planned": planned,
        "scipy": lambda: a @ b,
        **by_torch(lambda x, y: x @ y, a, b),
    }
    if library is not None:
        left, right = (mkl.Handle(library, x, 1, inspect=False) for x in (a, b))
        calls |= {"mkl": left.sparse_product(right), "mkl values": left.numeric_phase(right)}
    terms = int(np.diff(b.indptr)[a.indices].sum())
    return {"terms": terms, "nnz": result.nnz}, calls


def triangles(name: str, a: Any, library: Any) -> tuple[dict[str, Any], Calls]:
    """L L at the elements of L, the lower part of a symmetrised pattern; beside all of L L."""
    below = sp.csr_matrix(sp.tril(a + a.T, -1)).astype("float32")
    below.data[:] = 1
    below.sort_indices()
    ours = SparseMatrix(below)
    planned = plan("spgemm", ours, ours, mask=ours)
    listed = plan("spgemm", ours, ours, mask=ours, config=Assembled(listed=True))
    result = ours.matmul(ours, mask=ours)
    check(name, (below @ below).multiply(below), result, planned(), listed())
    calls: Calls = {
        OURS: lambda: ours.matmul(ours, mask=ours),
        "planned": planned,
        "terms listed": listed,
        "without a mask": lambda: ours @ ours,
        "scipy": lambda: (below @ below).multiply(below),
    }
    return {"triangles": float(result.values.sum())}, calls


def total(name: str, a: Any, library: Any, count: int) -> tuple[dict[str, Any], Calls]:
    """A and count - 1 of its permutations."""
    rng, matrices = np.random.default_rng(0), [sp.csr_matrix(a)]
    for _ in range(count - 1):
        order = rng.permutation(a.shape[0])
        matrices.append(sp.csr_matrix(a[order][:, order]))
        matrices[-1].sort_indices()
    ours = [SparseMatrix(x) for x in matrices]
    result, planned = ours[0].add(*ours[1:]), plan("add", *ours)
    check(name, reduce(add, matrices), result, planned(), planned())
    calls: Calls = {
        OURS: lambda: ours[0].add(*ours[1:]),
        "planned": planned,
        "scipy": lambda: reduce(add, matrices),
        **by_torch(lambda *x: reduce(add, x), *matrices),
    }
    if library is not None and count == 2:
        left, right = (mkl.Handle(library, x, 1, inspect=False) for x in matrices)
        calls["mkl"] = left.sparse_sum(right)
    return {"nnz": result.nnz}, calls


def by_torch(how: Callable[..., Any], *matrices: Any) -> Calls:
    """The same with torch's CSR tensors, whose CPU kernels are MKL's."""
    tensors = [SparseMatrix(x).to_torch() for x in matrices]
    return {"torch": lambda: how(*tensors)}


def check(name: str, exact: Any, *results: SparseMatrix) -> None:
    """Check that results agree to 1e-5 of the largest value."""
    for result in results:
        difference = abs(sp.csr_matrix(result.to_scipy()) - exact).max() if result.nnz else 0
        if not difference <= 1e-5 * max(1, abs(exact).max() if exact.nnz else 0):
            raise SystemExit(f"a result of {name} is wrong by {difference}")
