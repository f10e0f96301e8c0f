"""A process that times calls or steps: `calls SECONDS`, or `new_edges SECONDS THREADS`.

It runs with whichever version of the package is first on the path, so it only imports clocks from
`bench`; parts that a version lacks are left out. It prints JSON. Calls are products of a 64 x 64
matrix with 5 % of its elements and 32 features, on one thread; steps are of layers of PyG's and
ours.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import tvm_ffi

import sparsetir
from bench.timing import in_turns, timed

Step = Callable[[], float]  # seconds
Found = dict[str, dict[str, dict[str, float]]]  # by group and name

# -- calls ----------------------------------------------------------------------------------------

Calls = dict[str, Callable[[], Any]]
SIZE, FEAT, DENSITY = 64, 32, 0.05
BATCH = 100e-6  # seconds of calls timed together: short, as other work may interrupt


class _NoOp(torch.autograd.Function):
    """A gradient that computes nothing: the lower bound of a product's."""

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
    operand = sparsetir.ops.Operand(*parts, SIZE, SIZE, values)
    rows = np.repeat(np.arange(SIZE), np.diff(a.indptr))
    edges = torch.from_numpy(np.stack([a.indices, rows]).astype("int64"))
    matrix = sparsetir.SparseMatrix(a)
    run = sparsetir.plan("spmm", a, feat=FEAT, threads=1)
    prepared = {}
    of_tvm = (tvm_ffi.from_dlpack(b), tvm_ffi.from_dlpack(out))
    for name, pair in {"TVM": of_tvm, "NumPy": (b, out), "torch": (x, y)}.items():
        args = run._args.copy()
        args[run._place["b"]], args[run._place["out"]] = pair
        prepared[f"kernel, {name}"] = lambda args=args: run.kernel._run(*args)
    spmm = sparsetir.ops.spmm
    leaf, weights = x.clone().requires_grad_(), values.clone().requires_grad_()
    grad, no_op = torch.ones_like(x), partial(_NoOp.apply, *parts, weights, leaf)
    library = torch.library.Library("sparsetir_bench", "DEF")
    library.define("nothing(Tensor r, Tensor c, Tensor? v, Tensor b, str reduce) -> Tensor")
    library.impl("nothing", lambda r, c, v, b, reduce: b, "CompositeExplicitAutograd")
    nothing = torch.ops.sparsetir_bench.nothing.default
    groups: dict[str, Calls] = {
        "floors": {
            "nothing": lambda: None,
            **prepared,
            "new array, NumPy": lambda: np.empty((SIZE, FEAT), np.float32),
            "new tensor, torch": lambda: x.new_empty(SIZE, FEAT),
            # The operator lives as long as its library.
            "torch.library operator that does nothing": lambda _=library: nothing(
                *parts, values, x, "sum"
            ),
            "torch CSR @ dense": lambda: csr @ x,
            "autograd.Function that does nothing, forward": no_op,
            "autograd.Function that does nothing, pair": lambda: no_op().backward(grad),
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
    for call in groups["calls"].values():
        call()
    return groups


def warm(call: Callable[[], Any]) -> Step:
    """Seconds per call among as many consecutive ones as take `BATCH`."""
    twenty = timed(lambda: [call() for _ in range(20)])()
    count = max(1, min(50, round(20 * BATCH / twenty)))
    batch = timed(lambda: [call() for _ in range(count)])

    def run() -> float:
        call()
        return batch() / count

    return run


def time_calls(seconds: float) -> Found:
    """Times of all calls by group, in turns."""
    warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
    torch.set_num_threads(1)
    groups = calls()
    gc.disable()
    flat = {(g, n): warm(call) for g, group in groups.items() for n, call in group.items()}
    times = in_turns(flat, seconds, least=3)
    return {g: {n: times[g, n] for n in group} for g, group in groups.items()}


# -- new edges ------------------------------------------------------------------------------------

NODES, SIZES = 2_000, (10_000, 100_000)  # edges that are new in each step
FEATURES = 32
WARM_UP = 200  # steps after which no kernel is new
BRIEF = 1.0  # seconds below which the run only checks that everything works


def steps(nnz: int, kinds: tuple[str, ...]) -> Iterator[tuple[str, Step]]:
    """Steps of a layer on edges that are new in each, by way; for SAGE also on known ones."""
    import torch_geometric.nn as pyg

    from sparsetir import nn
    from sparsetir.nn import accelerate

    torch.manual_seed(0)
    x, fixed = torch.randn(NODES, FEATURES), torch.randint(0, NODES, (2, nnz))

    def step(layer: Any, around: Any = nullcontext, edges: Any = None) -> Step:
        def run() -> float:
            new_edges = torch.randint(0, NODES, (2, nnz)) if edges is None else edges
            once = timed(lambda: layer(x, new_edges).sum().backward())
            with around():
                return once()

        return run

    for kind in kinds:
        name = "" if kind == "SAGE" else f"{kind}, "
        layer, layer_of_ours = (getattr(of, f"{kind}Conv")(FEATURES, FEATURES) for of in (pyg, nn))
        yield f"{name}PyG", step(layer)
        if kind == "SAGE":
            yield "accelerate", step(layer, accelerate)
            yield "accelerate, known edges", step(layer, accelerate, fixed)
        yield f"{name}sparsetir.nn", step(layer_of_ours)
        compiled = torch.compile(layer, backend="sparsetir", dynamic=True)
        yield f"{name}backend sparsetir", step(compiled)


def time_new_edges(seconds: float, threads: str) -> Found:
    """Steps by number of edges, each after one of the same way, with its threads and caches."""
    torch.set_num_threads(int(threads))
    warm_up, kinds = (5, ("SAGE",)) if seconds < BRIEF else (WARM_UP, ("SAGE", "GAT"))
    times = {}
    for nnz in SIZES:
        ways = dict(steps(nnz, kinds))
        for way in ways.values():
            for _ in range(warm_up):
                way()
        second = {name: lambda way=way: (way(), way())[1] for name, way in ways.items()}
        times[f"new: {nnz} edges"] = in_turns(second, seconds, least=3)
    return times


if __name__ == "__main__":
    command, seconds, *words = sys.argv[1:]
    measured = {"calls": time_calls, "new_edges": time_new_edges}[command]
    print(json.dumps(measured(float(seconds), *words)))
