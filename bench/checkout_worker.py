"""A process that times calls or steps: `calls SECONDS`, or `new_edges SECONDS THREADS`.

It runs with any version of the package that is first on the path, so it imports nothing of `bench`;
parts that a version does not have are left out. It prints JSON. Calls are of products of a 64 x 64
matrix with 5 % of its places and 32 features, on one thread; steps of layers of PyG's and ours.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import tvm_ffi

import sparsetir

Step = Callable[[], float]  # seconds
Found = dict[str, dict[str, float]]


def in_turns(steps: Mapping[str, Step], seconds: float, least: int = 3) -> Found:
    """Minimum and median of steps that take turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(taken.values()))) < least:
        for name, step in steps.items():
            taken[name].append(step())
    return {
        name: {"min": min(t), "median": statistics.median(t), "rows": len(t)}
        for name, t in taken.items()
    }


def timed(step: Callable[[], Any], around: Any = None) -> Step:
    """Seconds of a step, in a context."""

    def run() -> float:
        if around is None:
            start = time.perf_counter()
            step()
            return time.perf_counter() - start
        with around():
            return timed(step)()

    return run


# -- calls ----------------------------------------------------------------------------------------

Calls = dict[str, Callable[[], Any]]
SIZE, FEAT, DENSITY = 64, 32, 0.05
BATCH = 100e-6  # seconds of calls that are timed together: short, as others may use the machine


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
    rowptr, col = torch.from_numpy(a.indptr), torch.from_numpy(a.indices)
    parts = rowptr, col
    csr = torch.sparse_csr_tensor(*parts, values, a.shape)
    operand = sparsetir.ops.Operand(rowptr, col, SIZE, SIZE, values)
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
    return found


def warm(call: Callable[[], Any]) -> Step:
    """Seconds of a call among as many in a row as take `BATCH`."""
    twenty = timed(lambda: [call() for _ in range(20)])()
    count = max(1, min(50, round(20 * BATCH / twenty)))

    def run() -> float:
        call()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    return run


def of_calls(seconds: float) -> dict[str, Found]:
    """All calls by group, in turns."""
    warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
    torch.set_num_threads(1)
    groups = calls()
    gc.disable()
    flat = {(g, n): warm(call) for g, group in groups.items() for n, call in group.items()}
    times = in_turns(flat, seconds)  # pyright: ignore[reportArgumentType]
    return {g: {n: times[g, n] for n in group} for g, group in groups.items()}  # pyright: ignore


# -- new edges ------------------------------------------------------------------------------------

NEW = ((2_000, 10_000), (2_000, 100_000))  # nodes and edges that are new in each step
NEW_FEATURES, GROWTH = 32, 1_000
MANY = 200  # steps after which no kernel is new
BRIEF = 1.0  # seconds below which it is only shown that all runs


def new_edges(nodes: int, nnz: int, kinds: Sequence[str] = ("SAGE",)) -> Iterator[tuple[str, Step]]:
    """Steps of a layer on edges that are new in each, by ways; of SAGE on known ones, too."""
    import torch_geometric.nn as pyg

    from sparsetir import nn
    from sparsetir.nn import accelerate

    torch.manual_seed(0)
    x, known = torch.randn(nodes, NEW_FEATURES), torch.randint(0, nodes, (2, nnz))

    def with_new(layer: Any, around: Any = None) -> Step:
        def run() -> float:
            edges = torch.randint(0, nodes, (2, nnz))
            return timed(lambda: layer(x, edges).sum().backward(), around)()

        return run

    for kind in kinds:
        name = "" if kind == "SAGE" else f"{kind}, "
        layer, own = (getattr(of, f"{kind}Conv")(NEW_FEATURES, NEW_FEATURES) for of in (pyg, nn))
        yield f"{name}PyG", with_new(layer)
        if kind == "SAGE":
            yield "accelerate", with_new(layer, accelerate)
            again = partial(lambda layer: layer(x, known).sum().backward(), layer)
            yield "accelerate, known edges", timed(again, accelerate)
        yield f"{name}sparsetir.nn", with_new(own)
        compiled = torch.compile(layer, backend="sparsetir", dynamic=True)
        yield f"{name}backend sparsetir", with_new(compiled)


def growth(count: int) -> Found:
    """MiB by which memory grows in so many steps with new edges."""
    steps = dict(new_edges(*NEW[0]))

    def resident() -> float:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20

    for _ in range(count // 10):
        steps["accelerate"]()
    before = resident()
    for _ in range(count):
        steps["accelerate"]()
    grown = resident() - before
    return {"MiB": {"min": grown, "median": grown, "rows": count}}


def warmed(steps: Mapping[str, Step], seconds: float, warm_up: int) -> Found:
    """Of steps each of which comes after another way, with its threads and caches."""
    for step in steps.values():
        for _ in range(warm_up):
            step()
    return in_turns({n: lambda s=s: (s(), s())[1] for n, s in steps.items()}, seconds)


def of_new_edges(seconds: float, threads: int) -> dict[str, Found]:
    """Steps on new edges, and how memory grows in them."""
    torch.set_num_threads(threads)
    many, steps = (5, 20) if seconds < BRIEF else (MANY, GROWTH)
    found = {}
    for nodes, nnz in NEW:
        kinds = ("SAGE",) if seconds < BRIEF else ("SAGE", "GAT")
        found[f"new: {nnz} edges"] = warmed(dict(new_edges(nodes, nnz, kinds)), seconds, many)
    return {**found, "growth": growth(steps)}


def main() -> None:
    """The command."""
    what, seconds, *words = sys.argv[1:]
    if what == "calls":
        print(json.dumps(of_calls(float(seconds))))
    else:
        print(json.dumps(of_new_edges(float(seconds), int(words[0]))))


if __name__ == "__main__":
    main()
