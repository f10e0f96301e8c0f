"""The pools of threads that kernels may run on, beside MKL in torch: alone and between operators.

All ways are in one process and take turns of some milliseconds, of which the second half counts: a
pool whose threads wait by spinning is in the way of the next one for as long as they spin.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np
import scipy.sparse as sp

from bench.harness import finish
from bench.report import table
from bench.timing import progress, shortest

FEAT = 32
SIZES = (1_000, 4_000, 10_000, 40_000, 100_000, 400_000, 1_000_000)
BURST = 0.03  # seconds that one way goes on
SHOWN = ("min", "median", "mean")
DENSE = 96  # of the products of torch's between ours


def run(args: argparse.Namespace) -> None:
    """The command."""
    import torch

    from sparsetir.runtime import pool

    torch.set_num_threads(args.threads)
    # Plans cut rows for the threads of a pool and have parallel loops from few elements on.
    pool.WORK_OF_THREADS["openmp"] = pool.WORK_OF_THREADS["tvm"] = 0
    found: dict[str, Any] = {}
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(args.busy)]
    try:
        for mode in ("alone", "between"):
            found[mode] = {}
            for nnz in SIZES[:2] if args.quick else SIZES:
                progress(f"{mode}: {nnz} nonzeros")
                found[mode][nnz] = _measured(nnz, mode == "between", args)
    finally:
        for other in others:
            other.kill()
    progress("")
    for mode, rows in found.items():
        names = list(next(iter(rows.values())))
        cells = [
            [n, *("/".join(f"{t[k] * 1e6:.1f}" for k in SHOWN) for t in row.values())]
            for n, row in rows.items()
        ]
        table(f"spmm, {FEAT} features, {mode}: us as min/median/mean", ["nonzeros", *names], cells)
    results = {"busy": args.busy, "torch": torch.get_num_threads(), "seconds": found}
    finish(args, "pools", results)


def _measured(nnz: int, between: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a product by the way it is made."""
    import torch

    import sparsetir
    from sparsetir.runtime import pool

    n = max(200, min(nnz // 10, 20_000))
    rng = np.random.default_rng(0)
    a = sp.random_array((n, n), density=nnz / n**2, format="csr", dtype="float32", rng=rng)
    b = torch.from_numpy(rng.random((n, FEAT), dtype="float32"))
    out = torch.empty(n, FEAT)
    dense = torch.randn(DENSE, DENSE)
    indptr, indices = (torch.from_numpy(x.astype("int32")) for x in (a.indptr, a.indices))
    parts = (indptr, indices, torch.from_numpy(a.data))
    matrix = torch.sparse_csr_tensor(*parts, a.shape, check_invariants=False)
    one = sparsetir.plan("spmm", a, feat=FEAT, threads=1)
    each = sparsetir.plan("spmm", a, feat=FEAT, threads=args.threads)
    launcher, why = pool._launcher()
    if launcher is None:
        raise SystemExit(f"pools: {why}")
    library = pool._openmp(others=True)

    def using(kind: int, plan: Any, late: int = pool.LATE) -> tuple[Callable[[], Any], ...]:
        return lambda: launcher.use(kind, library, late=late), lambda: plan(b, out=out)

    ways = {
        "1 thread": using(pool.SERIAL, one),
        "TVM's pool": using(pool.TVM, each),
        "OpenMP's pool": using(pool.OPENMP, each),
        "never resting": using(pool.OPENMP, each, pool.NEVER),
        "MKL, in torch": (lambda: None, lambda: torch.mm(matrix, b, out=out)),
    }
    wanted = a @ b.numpy()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    rests = dict.fromkeys(ways, 0)
    end = time.perf_counter() + (0.5 if args.quick else args.seconds)
    while time.perf_counter() < end:
        for name, (begin, call) in ways.items():
            begin()
            times, start, before = [], time.perf_counter(), launcher.rests()
            while len(times) < 4 or time.perf_counter() < start + BURST:
                if between:
                    torch.relu(torch.mm(dense, dense))
                at = time.perf_counter()
                call()
                times.append(time.perf_counter() - at)
            taken[name] += times[len(times) // 2 :]
            rests[name] += launcher.rests() != before
            np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-4, atol=1e-4)
    launcher.use(pool.OPENMP, library)
    return {
        name: shortest(times, mean=mean(times), calls=len(times), turns_with_rests=rests[name])
        for name, times in taken.items()
    }
