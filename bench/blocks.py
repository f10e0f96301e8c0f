"""`python -m bench blocks`: a product with a weight in blocks of 32, beside torch and our CSR.

1024 x 1024 with 90 % zeros, 512 features (SparseTIR, section 4.3.2), on a CPU; `--target cuda` is
`bench.blocks_gpu`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import sparsetir
from bench import blocks_gpu
from bench.block_weights import KINDS, weight
from bench.harness import finish
from bench.report import table
from bench.timing import interleaved, progress
from sparsetir.formats import BSR
from sparsetir.planning.matrix_request import matrix_request as request
from sparsetir.schedules.search.choose import choose
from sparsetir.tuning.process import go_ahead
from sparsetir.tuning.serving import one_line

SIZE, SPARSITY, FEAT, BLOCK = 1024, 0.9, 512, 32
QUICK_SIZE, QUICK_FEAT = 128, 32
BASE = "sparsetir BSR float32"

Call = Callable[[], Any]


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    if args.target == "cuda":
        blocks_gpu.run(args)
        return
    size, feat = (QUICK_SIZE, QUICK_FEAT) if args.quick else (SIZE, FEAT)
    seconds = 0.05 if args.quick else args.seconds
    torch.set_num_threads(args.threads)
    go_ahead()
    progress("products")
    before = os.getloadavg()
    with torch.no_grad():
        ways, wrong, missing = right_ways(size, feat)
        times = interleaved(ways, seconds, most=100_000)
    progress("")
    results = {
        "size": size, "sparsity": SPARSITY, "block": BLOCK, "feat": feat,
        "load": {"before": before, "after": os.getloadavg()},
        "times": times, "wrong": wrong, "missing": missing,
    }  # fmt: skip
    show(results, args.threads)
    finish(args, "blocks", results, wrong)


def right_ways(size: int, feat: int) -> tuple[dict[str, Call], dict[str, str], dict[str, str]]:
    """Calls whose results are right, what is wrong with others, and what torch has not."""
    matrix = sparsetir.SparseMatrix(weight(KINDS["blocks"], size, SPARSITY))
    wide = torch.zeros(size, size)
    rows, columns = (torch.from_numpy(c).long() for c in matrix.pattern.coords)
    wide[rows, columns] = torch.from_numpy(matrix.values)
    b = torch.randn(size, feat, generator=torch.Generator().manual_seed(1))
    ways: dict[str, Call] = {}
    wrong: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in ("float32", "float16", "bfloat16"):
        dtype = getattr(torch, name)
        right, dense, operand = blocks_gpu.Right(wide, b, name), wide.to(dtype), b.to(dtype)
        for who, make in of_type(matrix, dense, operand, name).items():
            label = f"{who} {name}"
            try:
                call = make()
                error = right.error(call())
            except RuntimeError as problem:  # what torch says of types that it has not
                missing[label] = one_line(problem)
                continue
            if error is None:
                ways[label] = call
            else:
                wrong[label] = error
    return ways, wrong, missing


def of_type(matrix: Any, dense: Any, b: Any, dtype: str) -> dict[str, Callable[[], Call]]:
    """Makers of calls by name; all write into an array of their own, as far as torch lets them."""
    wanted = request("spmm", matrix, b.shape[1], dtype=dtype)
    elements = replace(wanted.statistics, block=1)  # as of a matrix that is made of no blocks

    def ours(**options: Any) -> Call:
        plan = sparsetir.plan("spmm", matrix, b.shape[1], dtype=dtype, **options)
        out = torch.empty(len(dense), b.shape[1], dtype=b.dtype)
        return lambda: plan(b, out=out)

    def product(a: Any) -> Call:
        return lambda: a @ b

    def full() -> Call:
        out = torch.empty(len(dense), b.shape[1], dtype=b.dtype)
        return lambda: torch.mm(dense, b, out=out)

    found: dict[str, Callable[[], Call]] = {
        "sparsetir BSR": lambda: ours(format=BSR(BLOCK, BLOCK)),
        "sparsetir CSR": lambda: ours(config=choose(wanted.problem, elements, wanted.target)),
        "torch BSR": lambda: product(dense.to_sparse_bsr((BLOCK, BLOCK))),
        "torch CSR": lambda: product(dense.to_sparse_csr()),
    }
    if dtype != "float16":  # which takes torch seconds on most CPUs
        found["torch dense"] = full
    return found


def show(results: dict[str, Any], threads: int) -> None:
    """Print a table."""
    times = results["times"]
    base = times[BASE]["min"] if BASE in times else float("nan")
    rows = [
        [n, f"{1e3 * t['min']:.3f}", f"{1e3 * t['median']:.3f}", f"{t['min'] / base:.2f}"]
        for n, t in sorted(times.items(), key=lambda item: item[1]["min"])
    ]
    size = results["size"]
    title = (
        f"{size} x {size}, {results['sparsity']:.0%} zeros in blocks of {BLOCK}, "
        f"{results['feat']} features, threads: {threads}; ms"
    )
    table(title, ["", "min", "median", f"/ {BASE}"], rows)
    for name, why in results["missing"].items():
        print(f"{name} is missing: {why}")
