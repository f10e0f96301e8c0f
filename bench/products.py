"""A sparse matrix times features as users write it, and pruned weights beside dense products."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

import sparsetir
from bench.harness import check, run_cells
from bench.problems import problems
from bench.report import show_times
from bench.timing import clock_of, interleaved
from sparsetir import SparseMatrix

FEATURES = 64
OURS, SCIPY, TORCH, DENSE = "sparsetir", "scipy", "torch (MKL)", "dense"
# Sizes of weights, their shares of zeros, and features.
SHAPES, ZEROS, BATCHES = ((2048, 512), (512, 512)), (0.5, 0.7, 0.8, 0.9, 0.95, 0.98), (32, 512)


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    torch.set_num_threads(args.threads)
    seconds = 0.05 if args.quick else args.seconds
    graphs = problems(args.graph)
    todo: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (p.name, partial(product, p.name, p.load, seconds)) for p in graphs
    ]
    if not args.no_pruned:
        sizes = [(s, z, f) for s in SHAPES for z in ZEROS for f in BATCHES]
        for shape, zeros, feat in sizes[:1] if args.quick else sizes:
            cell = partial(pruned, shape, zeros, feat, seconds)
            todo.append((f"{shape[0]} x {shape[1]}, {zeros:.0%} zeros, {feat}", cell))
    title, clock = f"products, {args.threads} threads: ms", clock_of(args.threads).__name__
    show = lambda cells: show_times(title, cells, "seconds", ("problem", "feat"), OURS)  # noqa: E731
    run_cells(args, "products", todo, show, clock=clock)


def product(name: str, load: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """`A @ X` of a `SparseMatrix`, of scipy, and of torch's CSR tensor, which calls MKL."""
    matrix = load()
    dense = torch.rand(matrix.shape[1], FEATURES)  # starts at a cache line
    x, A = dense.numpy(), SparseMatrix(matrix)
    check("A @ X", A @ x, matrix.astype("float64") @ x, abs(matrix).astype("float64") @ x)
    tensor = A.to_torch()
    calls = {OURS: lambda: A @ x, SCIPY: lambda: matrix @ x, TORCH: lambda: tensor @ dense}
    return {"what": "A @ X", **_timed(name, matrix.nnz, FEATURES, calls, seconds)}


def pruned(shape: tuple[int, int], zeros: float, feat: int, seconds: float) -> dict[str, Any]:
    """A plan of a weight with scattered zeros, and torch's product with all of them stored."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape).astype("float32") * (rng.random(shape) >= zeros)
    whole, x = torch.tensor(weight), torch.rand(shape[1], feat)
    matrix, out = sp.csr_array(weight), torch.empty(shape[0], feat)
    plan = sparsetir.plan("spmm", matrix, feat, threads=torch.get_num_threads())
    unit = abs(weight).astype("float64") @ x.numpy()
    check("a plan", plan(x).numpy(), weight.astype("float64") @ x.numpy(), unit)
    calls = {OURS: lambda: plan(x, out=out), DENSE: lambda: torch.mm(whole, x, out=out)}
    name = f"{shape[0]} x {shape[1]}, {zeros:.0%} zeros"
    return {"what": "pruned", **_timed(name, matrix.nnz, feat, calls, seconds)}


def _timed(
    name: str, nnz: int, feat: int, calls: dict[str, Callable[[], Any]], seconds: float
) -> dict[str, Any]:
    with torch.no_grad():
        times = interleaved(calls, seconds, clock=clock_of(torch.get_num_threads()))
    return {"problem": name, "nnz": nnz, "feat": feat, "seconds": times}
