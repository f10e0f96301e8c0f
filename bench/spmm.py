"""CSR times dense on the CPU with the default schedule, beside scipy and torch.sparse."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import sparsetir
from bench.graphs import graphs
from bench.programs import SPMM
from bench.report import circumstances, table, write
from bench.timing import copy_bandwidth, interleaved, progress

FEATURES = (32, 64, 128, 256, 512)
OURS, OURS_OUT = "sparsetir", "sparsetir out="


def run(args: argparse.Namespace) -> None:
    features = args.feat or ([32] if args.quick else FEATURES)
    seconds = 0.05 if args.quick else 2.0
    torch = _torch(args.threads)
    kernel = sparsetir.build(sparsetir.from_source(SPMM))
    results = []
    matrices = graphs(args.graph)
    for name, matrix in matrices.items():
        for feat in features:
            progress(f"{name}, d = {feat} ({len(results) + 1} of {len(matrices) * len(features)})")
            results.append(measure(name, matrix, feat, kernel, torch, args.threads, seconds))
    progress("")
    show(results, args.threads)
    write(args.out, "spmm", circumstances(args.threads), results)


def _torch(threads: int) -> Any:
    try:
        import torch
    except ImportError:
        print("torch is not installed: it is left out")
        return None
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
    return torch


def measure(
    name: str, matrix: Any, feat: int, kernel: Any, torch: Any, threads: int, seconds: float
) -> dict[str, Any]:
    """One cell; every result is right before anything is timed."""
    m, n = matrix.shape
    b = np.random.default_rng(0).uniform(-1, 1, (n, feat)).astype("float32")
    calls = _calls(matrix, b, kernel, torch)
    exact = matrix.astype("float64") @ b.astype("float64")
    bound = 1e-5 * (abs(matrix) @ np.abs(b)) + 1e-6
    for who, call in calls.items():
        if not (np.abs(np.asarray(call()) - exact) <= bound).all():
            raise SystemExit(f"{who} is wrong on {name}, d = {feat}")
    moved = matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes
    moved += b.nbytes + m * feat * 4
    times = interleaved(calls, seconds)
    bandwidth = copy_bandwidth(moved, threads, seconds / 10)
    return {
        "graph": name, "m": m, "n": n, "nnz": int(matrix.nnz), "feat": feat, "seconds": times,
        "bytes": moved, "copy_bytes_per_second": bandwidth, "limit_seconds": moved / bandwidth,
    }  # fmt: skip


def _calls(matrix: Any, b: np.ndarray, kernel: Any, torch: Any) -> dict[str, Callable[[], Any]]:
    data, indices, indptr = matrix.data, matrix.indices, matrix.indptr
    shape = (matrix.shape[0], b.shape[1])
    given = np.empty(shape, "float32")

    def into_new_output() -> np.ndarray:
        c = np.empty(shape, "float32")
        kernel(data, b, c, indptr, indices)
        return c

    def into_given_output() -> np.ndarray:
        kernel(data, b, given, indptr, indices)
        return given

    calls = {OURS: into_new_output, OURS_OUT: into_given_output, "scipy": lambda: matrix @ b}
    if torch is not None:
        a_torch = torch.sparse_csr_tensor(
            torch.from_numpy(indptr), torch.from_numpy(indices), torch.from_numpy(data),
            matrix.shape,
        )  # fmt: skip
        b_torch = torch.from_numpy(b)
        calls["torch"] = lambda: a_torch @ b_torch
    return calls


def show(results: list[dict[str, Any]], threads: int) -> None:
    """Times as minimum/median in ms; the ratios are of both."""
    names = list(results[0]["seconds"])
    peers = [n for n in names if n not in (OURS, OURS_OUT)]
    head = ["graph", "d", *names, *[f"x {p}" for p in peers], "limit", "reached"]
    rows = []
    for cell in results:
        times = cell["seconds"]
        row = [cell["graph"], cell["feat"]]
        row += [f"{times[n]['min'] * 1e3:.3f}/{times[n]['median'] * 1e3:.3f}" for n in names]
        for peer in peers:
            least, middle = (times[peer][k] / times[OURS][k] for k in ("min", "median"))
            row.append(f"{least:.2f}/{middle:.2f}")
        row.append(f"{cell['limit_seconds'] * 1e3:.3f}")
        row.append(f"{cell['limit_seconds'] / times[OURS_OUT]['min']:.0%}")
        rows.append(row)
    table(f"SpMM, CSR, float32, {threads} thread(s): ms as min/median", head, rows)
    print(f"x: time of the peer over {OURS}'s, both making a new output; scipy uses one thread.")
    print("limit: each array once at the speed of a copy of that size; reached: by out=, minimum.")
