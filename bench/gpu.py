"""Operators on an NVIDIA GPU, beside cuSPARSE, torch and a dense product.

Each call is timed by CUDA events after the level-2 cache was overwritten, see `gpu_clock`; calls
take turns with copies of their operands.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparsetir
from sparsetir.bench.cusparse import CuSparse
from sparsetir.bench.gpu_clock import Clock, take_turns
from sparsetir.bench.limits import limit
from sparsetir.bench.operators import Case, Reference, features, make, rows_of
from sparsetir.bench.ours import describe
from sparsetir.bench.peers import OURS
from sparsetir.bench.problems import chosen, problems
from sparsetir.bench.report import circumstances, write
from sparsetir.bench.rounds import add_wrong
from sparsetir.bench.summary import show, summarise
from sparsetir.bench.timing import progress

FEATURES = (32, 128, 512)
COPIES = 3
ROUNDS, CALLS = 5, 20
QUICK_ROUNDS, QUICK_CALLS = 2, 3
MOST_DENSE = 2 * 10**9  # bytes of a dense matrix that is multiplied for comparison
PEAK_SIZE = 8192
THREADS = "cuda"  # in place of a number of threads

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Tensors:
    """A case on the GPU; `copies` of its dense operands and of an output, NaN."""

    indptr: Any
    indices: Any
    rows: Any
    values: Any
    copies: list[tuple[list[Any], Any]]


def run(args: argparse.Namespace) -> None:
    """`run --target cuda`; without a device it says so and measures nothing."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: skipped")
        return
    if not torch.cuda.is_available():
        print("no CUDA device: skipped")
        return
    warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(torch, args)
    given = problems(args.graph, args.pruned, args.layers, chosen(args.synthetic))
    cells = list(bench.cells(given))
    progress("")
    results = {
        "settings": {"rounds": bench.rounds, "calls": bench.calls, "copies": COPIES},
        "cells": cells, "summary": summarise(cells), "compilations": sparsetir.compilations(),
    }  # fmt: skip
    show(results)
    where = {**circumstances(1), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    path = write(args.out, "-".join(["run", *args.op]), where, results)
    if args.plot:
        from sparsetir.bench.plot import draw

        draw(path)
    bad = [c for c in cells if c["wrong"] or c["failed"]]
    if bad:
        raise SystemExit(f"{len(bad)} of {len(cells)} cells hold wrong results or failures")


class Bench:
    """The device, and what it is measured with."""

    def __init__(self, torch: Any, args: argparse.Namespace) -> None:
        self.torch, self.args = torch, args
        self.rounds = QUICK_ROUNDS if args.quick else ROUNDS
        self.calls = QUICK_CALLS if args.quick else CALLS
        self.clock = Clock(torch)
        self.library: CuSparse | None = None
        self.bandwidth = self._bandwidth()

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

    def compare(self, case: Case) -> dict[str, Any]:
        """As `bench.rounds.compare`, on the GPU."""
        reference, tensors = Reference(case), self._tensors(case)
        out: dict[str, dict[str, Any]] = {"peers": {}, "missing": {}, "wrong": {}, "failed": {}}
        ways: dict[tuple[str, str], Call] = {}
        makers = {
            OURS: self._ours, "cusparse": self._cusparse, "torch": self._torch,
            "dense": self._dense,
        }  # fmt: skip
        wanted = [OURS, *(self.args.peers or makers)]
        for name, prepare in makers.items():
            if name not in wanted:
                continue
            about: dict[str, Any] = {}
            refused: dict[str, str] = {}
            try:
                found = prepare(case, tensors, about) if name == OURS else prepare(case, tensors)
            except Exception as error:  # told at the end, with all others
                found, refused = {}, {"": _first_line(error)}
            for variant, call in found.items():
                for _, result in tensors.copies:
                    result.fill_(float("nan"))
                try:
                    problem = reference.error(self._numpy(call(0)))
                except Exception as error:
                    refused[variant] = _first_line(error)
                    continue
                if problem:
                    add_wrong(out["wrong"], name, f"{variant}: {problem}")
                else:
                    ways[name, variant] = call
            if len(refused) >= len(found):
                why = "; ".join(refused.values()) or f"has no {case.op} of {case.dtype} here"
                out["failed" if name == OURS else "missing"][name] = why
            out["peers"][name] = {"about": about, "refused": refused}
        times = take_turns(self.clock, ways, self.rounds, self.calls, COPIES)
        for (name, variant), taken in times.items():
            found = out["peers"][name].setdefault("variants", {})
            found[variant] = taken
        for found in out["peers"].values():
            if "variants" in found:
                best = min(found["variants"], key=lambda v: found["variants"][v]["min"])
                found |= {**found["variants"][best], "variant": best}
        out["peers"] = {n: p for n, p in out["peers"].items() if "min" in p}
        if self.library:
            self.library.release()
        return out

    def _tensors(self, case: Case) -> Tensors:
        torch, a = self.torch, case.matrix
        dtype = getattr(torch, case.dtype)
        shape = {
            "spmm": (a.shape[0], case.feat), "sddmm": (a.nnz,), "spmv": (a.shape[0],)
        }[case.op]  # fmt: skip

        def on_gpu(array: np.ndarray) -> Any:
            return torch.from_numpy(array).cuda()

        copies = [
            ([on_gpu(x).to(dtype) for x in case.operands],
             torch.full(shape, float("nan"), dtype=dtype, device="cuda"))
            for _ in range(COPIES)
        ]  # fmt: skip
        return Tensors(on_gpu(a.indptr), on_gpu(a.indices), on_gpu(rows_of(a)),
                       on_gpu(a.data).to(dtype), copies)  # fmt: skip

    def _numpy(self, result: Any) -> np.ndarray:
        sparse = result.layout == self.torch.sparse_csr
        return (result.values() if sparse else result).float().cpu().numpy()

    def _ours(self, case: Case, tensors: Tensors, about: dict[str, Any]) -> dict[str, Call]:
        plan = sparsetir.plan(case.op, case.matrix, case.feat, dtype=case.dtype, target="cuda")
        about["plans"] = {"default": describe(plan)}
        return {"default": lambda i: plan(*tensors.copies[i][0], out=tensors.copies[i][1])}

    def _cusparse(self, case: Case, tensors: Tensors) -> dict[str, Call]:
        self.library = self.library or CuSparse(self.torch)
        return self.library.prepare(case, tensors)

    def _torch(self, case: Case, tensors: Tensors) -> dict[str, Call]:
        """CSR tensors, which torch gives to cuSPARSE anew in each call."""
        torch, copies = self.torch, tensors.copies
        matrix = torch.sparse_csr_tensor(
            tensors.indptr, tensors.indices, tensors.values, case.matrix.shape
        )
        if case.op == "sddmm":
            return {"sampled_addmm": lambda i: torch.sparse.sampled_addmm(
                matrix, copies[i][0][0], copies[i][0][1].t(), beta=0.0)}  # fmt: skip
        return {"new": lambda i: matrix @ copies[i][0][0]}

    def _dense(self, case: Case, tensors: Tensors) -> dict[str, Call]:
        """cuBLAS with all zeros, where that fits: what a pruned weight has to beat."""
        torch, a = self.torch, case.matrix
        size = a.shape[0] * a.shape[1] * tensors.values.element_size()
        if case.op == "sddmm" or size > MOST_DENSE:
            return {}
        matrix = torch.zeros(a.shape, dtype=tensors.values.dtype, device="cuda")
        matrix[tensors.rows.long(), tensors.indices.long()] = tensors.values
        product = torch.mm if case.op == "spmm" else torch.mv
        return {"mm": lambda i: product(matrix, tensors.copies[i][0][0], out=tensors.copies[i][1])}

    def _bandwidth(self) -> float:
        torch = self.torch
        a, b = (torch.ones(2**28, dtype=torch.float32, device="cuda") for _ in range(2))
        best = min(self.clock.seconds(lambda: b.copy_(a)) for _ in range(8))
        return 2 * a.numel() * 4 / best

    def _peak(self, dtype: str) -> float:
        torch = self.torch
        kind = getattr(torch, dtype)
        a, b = (torch.ones(PEAK_SIZE, PEAK_SIZE, dtype=kind, device="cuda") for _ in range(2))
        best = min(self.clock.seconds(lambda: torch.mm(a, b)) for _ in range(8))
        return 2 * PEAK_SIZE**3 / best


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
