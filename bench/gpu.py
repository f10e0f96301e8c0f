"""Operators on an NVIDIA GPU, beside cuSPARSE, torch and a dense product."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from typing import Any

import sparsetir
from bench.harness import cuda, of_gpu, refuse_bad
from bench.limits import limit
from bench.peers.cases import features
from bench.peers.gpu import COPIES, Gpu
from bench.problems import chosen, problems
from bench.report import circumstances, write
from bench.summary import show, summarise
from bench.timing import progress
from sparsetir.tuning.case import Case, make

FEATURES = (32, 128, 512)
ROUNDS, CALLS = 5, 20
QUICK_ROUNDS, QUICK_CALLS = 2, 3
PEAK_SIZE = 8192
THREADS = "cuda"  # in place of a number of threads


def run(args: argparse.Namespace) -> None:
    """`run --target cuda`; without a device it says so and measures nothing."""
    torch = cuda()
    if torch is None:
        return
    warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(torch, args)
    given = problems(args.graph, args.pruned, args.layers, chosen(args.synthetic))
    cells = list(bench.cells(given))
    progress("")
    results = {
        "settings": {"rounds": bench.gpu.rounds, "calls": bench.gpu.calls, "copies": COPIES},
        "cells": cells, "summary": summarise(cells), "compilations": sparsetir.compilations(),
    }  # fmt: skip
    show(results)
    where = {**circumstances(1), **of_gpu(torch)}
    path = write(args.out, "-".join(["run", *args.op]), where, results)
    if args.plot:
        from bench.plot import draw

        draw(path)
    refuse_bad(cells, [c for c in cells if c["wrong"] or c["failed"]])


class Bench:
    """The device, and what is measured on it."""

    def __init__(self, torch: Any, args: argparse.Namespace) -> None:
        self.torch, self.args = torch, args
        rounds, calls = (QUICK_ROUNDS, QUICK_CALLS) if args.quick else (ROUNDS, CALLS)
        self.gpu = Gpu(torch, rounds, calls)
        self.bandwidth = self._bandwidth()

    def compare(self, case: Case) -> dict[str, Any]:
        """As `bench.peers.turns.compare`, on the GPU."""

        def default() -> Any:
            return sparsetir.plan(case.op, case.matrix, case.feat, dtype=case.dtype, target="cuda")

        return self.gpu.compare(case, {"default": default}, self.args.peers)

    def cells(self, given: Iterator[Any]) -> Iterator[dict[str, Any]]:
        """Measure everything, one problem at a time."""
        args = self.args
        sizes = args.feat or ([32] if args.quick else FEATURES)
        peaks = {d: self._peak(d) for d in args.dtype}
        for problem in given:
            matrix = problem.load()
            for op in args.op:
                for feat in features(op, sizes):
                    for dtype in args.dtype:
                        progress(f"{problem.name}: {op}, d = {feat}, {dtype}")
                        case = make(op, matrix, feat, dtype)
                        m, n = matrix.shape
                        yield {
                            "op": op, "problem": problem.name, "class": problem.kind, "m": m,
                            "n": n, "nnz": int(matrix.nnz), "feat": case.feat, "dtype": dtype,
                            "threads": THREADS, "limit": limit(case, self.bandwidth, peaks[dtype]),
                            **self.compare(case),
                        }  # fmt: skip

    def _bandwidth(self) -> float:
        torch = self.torch
        a, b = (torch.ones(2**28, dtype=torch.float32, device="cuda") for _ in range(2))
        best = min(self.gpu.clock.seconds(lambda: b.copy_(a)) for _ in range(8))
        return 2 * a.numel() * 4 / best

    def _peak(self, dtype: str) -> float:
        torch = self.torch
        kind = getattr(torch, dtype)
        a, b = (torch.ones(PEAK_SIZE, PEAK_SIZE, dtype=kind, device="cuda") for _ in range(2))
        best = min(self.gpu.clock.seconds(lambda: torch.mm(a, b)) for _ in range(8))
        return 2 * PEAK_SIZE**3 / best
