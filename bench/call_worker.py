"""A process that times calls: `python call_worker.py SECONDS`, JSON on stdout.

It runs with any version of the package that is first on the path, so it imports nothing of `bench`;
parts that a version does not have are left out. Products are of a 64 x 64 matrix with 5 % of its
places and 32 features, on one thread.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import tvm_ffi

import sparsetir

Calls = dict[str, Callable[[], Any]]
SIZE, FEAT, DENSITY = 64, 32, 0.05
BATCH = 100e-6  # seconds of calls that are timed together: short, as others may use the machine
EVICTED = 64 << 20  # bytes that are written before a call with cold caches
COLD = ("kernel, NumPy", "plan, NumPy", "plan, NumPy, out=", "plan, torch, values=",
        "ops.spmm, Operand", "ops.spmm, CSR tensor")  # fmt: skip


class _NoOp(torch.autograd.Function):
    """What a product's gradient costs where nothing is computed."""

    @staticmethod
    def forward(ctx: Any, rowptr: Any, col: Any, values: Any, b: Any) -> Any:
        ctx.save_for_backward(rowptr, col, values, b)
        return torch.empty_like(b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, _, values, b = ctx.saved_tensors
        return None, None, torch.empty_like(values), torch.empty_like(b)


def calls() -> dict[str, Calls]:
    """All calls by group."""
    a = sp.random_array((SIZE, SIZE), density=DENSITY, format="csr", dtype="float32", rng=0)
    b, out = np.ones((SIZE, FEAT), "float32"), np.empty((SIZE, FEAT), "float32")
    x, y = torch.ones(SIZE, FEAT), torch.empty(SIZE, FEAT)
    values = torch.from_numpy(a.data.copy())
    parts = torch.from_numpy(a.indptr), torch.from_numpy(a.indices)
    csr = torch.sparse_csr_tensor(*parts, values, a.shape)
    operand = sparsetir.ops.Operand(*parts, *a.shape, values)
    rows = np.repeat(np.arange(SIZE), np.diff(a.indptr))
    edges = torch.from_numpy(np.stack([a.indices, rows]).astype("int64"))
    matrix = sparsetir.SparseMatrix(a)
    run = sparsetir.plan("spmm", a, feat=FEAT, threads=1)
    prepared = {}
    for name, pair in {
        "TVM": (tvm_ffi.from_dlpack(b), tvm_ffi.from_dlpack(out)), "NumPy": (b, out),
        "torch": (x, y),
    }.items():  # fmt: skip
        args = run._args.copy()
        args[run._place["b"]], args[run._place["out"]] = pair
        prepared[f"kernel, {name}"] = lambda args=args: run.kernel._run(*args)
    spmm = sparsetir.ops.spmm
    leaf, weights = x.clone().requires_grad_(), values.clone().requires_grad_()
    grad = torch.ones_like(x)
    library = torch.library.Library("sparsetir_bench", "DEF")
    library.define("nothing(Tensor r, Tensor c, Tensor? v, Tensor b, str reduce) -> Tensor")
    library.impl("nothing", lambda r, c, v, b, reduce: b, "CompositeExplicitAutograd")
    nothing = torch.ops.sparsetir_bench.nothing.default
    found: dict[str, Calls] = {
        "floors": {
            "nothing": lambda: None,
            **prepared,
            "new array, NumPy": lambda: np.empty((SIZE, FEAT), np.float32),
            "new tensor, torch": lambda: x.new_empty(SIZE, FEAT),
            "torch.library operator that does nothing": lambda: nothing(*parts, values, x, "sum"),
            "torch CSR @ dense": lambda: csr @ x,
            "autograd.Function that does nothing, forward": lambda: _NoOp.apply(
                *parts, weights, leaf
            ),
            "autograd.Function that does nothing, pair": lambda: _NoOp.apply(
                *parts, weights, leaf
            ).backward(grad),
        },
        "calls": {
            "plan, NumPy": lambda: run(b),
            "plan, NumPy, out=": lambda: run(b, out=out),
            "plan, torch": lambda: run(x),
            "plan, torch, out=": lambda: run(x, out=y),
            "plan, torch, values=": lambda: run(x, values=values),
            "plan, torch, values=, out=": lambda: run(x, values=values, out=y),
            "ops.spmm, Operand": lambda: spmm(operand, x),
            "ops.spmm, edges": lambda: spmm(edges, x, values=values),
            "ops.spmm, CSR tensor": lambda: spmm(csr, x),
            "ops.spmm, SparseMatrix": lambda: spmm(matrix, x),
            "forward, with gradients": lambda: spmm(operand, leaf, values=weights),
            "forward and backward": lambda: spmm(operand, leaf, values=weights).backward(grad),
            "forward and backward, dense alone": lambda: spmm(operand, leaf).backward(grad),
        },
    }
    for call in found["calls"].values():
        call()
    parts_of_call = _parts(operand, csr, x, values)
    return {**found, "parts": parts_of_call} if parts_of_call else found


def _parts(operand: Any, csr: Any, x: Any, values: Any) -> Calls:
    """What a call of `ops.spmm` consists of, where this version has such parts."""
    try:
        from sparsetir.ops.cache import memory_key
        from sparsetir.ops.operands import known
        from sparsetir.ops.registry import is_undisturbed
        from sparsetir.ops.structure import known_pattern
    except ImportError:
        return {}
    found = known(operand, SIZE)
    assert found is not None
    (rowptr, col, structure), own = found
    run = next(run for run, _ in structure._calls.values() if run.op == "spmm")
    return {
        "is anything watching": is_undisturbed,
        "memory of the pattern": lambda: (memory_key(operand.col), memory_key(operand.rowptr)),
        "its structure, compared with copies": lambda: known_pattern(
            operand.rowptr, operand.col, SIZE
        ),
        "its structure, prepared": lambda: known_pattern(rowptr, col, SIZE),
        "the same, of a CSR tensor": lambda: known(csr, SIZE),
        "a call like it": lambda: structure.has_run("spmm", (x,), own, "sum"),
        "the plan, unchecked, with a new tensor": lambda: run.repeat((x,), own),
        "all after the structure": lambda: structure.again("spmm", (x,), own),
        "negative bit": x.is_neg,
        "requires a gradient": lambda: x.requires_grad,
    }


def warm(groups: dict[str, Calls], seconds: float) -> dict[str, dict[str, list[float]]]:
    """Seconds of calls in a row, of many short rows in turns."""
    flat = {(g, n): call for g, group in groups.items() for n, call in group.items()}
    counts = {}
    for key, call in flat.items():
        start = time.perf_counter()
        for _ in range(20):
            call()
        counts[key] = max(1, min(50, round(20 * BATCH / (time.perf_counter() - start))))
    taken: dict[Any, list[float]] = {key: [] for key in flat}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for key, call in flat.items():
            call()
            start = time.perf_counter()
            for _ in range(counts[key]):
                call()
            taken[key].append((time.perf_counter() - start) / counts[key])
    return {g: {n: taken[g, n] for n in group} for g, group in groups.items()}


def cold(groups: dict[str, Calls], seconds: float) -> dict[str, list[float]]:
    """Seconds of single calls after all caches have been written over."""
    flat = {n: call for group in groups.values() for n, call in group.items() if n in COLD}
    taken: dict[str, list[float]] = {name: [] for name in flat}
    evicted = np.zeros(EVICTED, np.uint8)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in flat.items():
            evicted += 1
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return taken


def main() -> None:
    seconds = float(sys.argv[1])
    warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
    torch.set_num_threads(1)
    groups = calls()
    gc.disable()
    found: dict[str, Any] = warm(groups, 0.8 * seconds)
    found["cold"] = cold(groups, 0.2 * seconds)
    short = {
        group: {
            name: {"min": min(t), "median": statistics.median(t), "rows": len(t)}
            for name, t in times.items()
        }
        for group, times in found.items()
    }
    print(json.dumps(short))


if __name__ == "__main__":
    main()
