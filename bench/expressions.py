"""Lines of index notation, beside scipy, NumPy and those of four more libraries that are there.

All in float64, tensora's only type; each library has the operands in its own format.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib import import_module
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsetir
from bench.harness import run_cells
from bench.problems import Problem, problems
from bench.report import show_means, show_times
from bench.timing import clock_of, interleaved
from sparsetir.data.graphs import GraphError

OURS, BEST = "sparsetir", "the fastest of them"
PEERS = {
    "sparse": "sparse",
    "GraphBLAS": "graphblas",
    "torch, dense": "torch",
    "tensora": "tensora",
}
FEATURES = 32
SHAPE, STORED = (2000, 1500, 1000), 200_000  # of the tensor P
TOLERANCE = 1e-9  # of the largest value
LARGEST = 256 << 20  # bytes of a graph as a dense matrix; larger ones are left out
Way = Callable[[Any], Any]


@dataclass(frozen=True)
class Line:
    """An expression, and how libraries without index notation compute it.

    text : of operands that are named as in `operands`
    formats : tensora's, of the result: "d" (dense) or "s" (stored) for each index; and of G, if
        not "ds"
    matrices : way of the libraries whose matrices have NumPy's operators
    others : ways by library, in place of `matrices` where both name it; None: none
    options : of `einsum`
    """

    text: str
    formats: str
    matrices: Way | None = None
    others: Mapping[str, Way | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


LINES = (
    Line("y[i] = G[i,j] * x[j]", "d", lambda m: m.G @ m.x,
         {"GraphBLAS": lambda m: m.G.mxv(m.x).new()}),
    Line("C[j,k] = G[i,j] * Y[i,k]", "dd d1s0", lambda m: m.GT @ m.Y),
    Line("C[i,k] = G[i,j] * X[j,k] + Y[i,k]", "dd", lambda m: m.G @ m.X + m.Y),
    Line("C[i,k] = G[i,j] * G[j,k]", "ds", lambda m: m.G @ m.G,
         {"GraphBLAS": lambda m: m.G.mxm(m.G).new()}, {"format": "csr"}),
    Line("C[i,l] = G[i,j] * G[j,k] * X[k,l]", "dd", lambda m: m.G @ (m.G @ m.X)),
    Line("C[i,j] = G[i,j] * Y[i,k] * X[j,k]", "ds", lambda m: m.G * (m.Y @ m.X.T), {
        "scipy": None, "sparse": None,
        "NumPy": lambda m: m.vals * np.einsum("ek,ek->e", m.Y[m.rows], m.X[m.cols]),
    }, {"like": "G"}),
    Line("z = x[i] * G[i,j] * d[j]", "", lambda m: m.x @ (m.G @ m.d)),
    Line("C[i,j] = d[i] * G[i,j] * d[j]", "ds", lambda m: m.G * m.d[:, None] * m.d, {
        "scipy": None, "NumPy": lambda m: m.vals * m.d[m.rows] * m.d[m.cols],
        "GraphBLAS": lambda m: m.D.mxm(m.G).new().mxm(m.D).new(),
    }, {"like": "G"}),
    Line("r[i] = b[i] - G[i,j] * x[j]", "d", lambda m: m.b - m.G @ m.x),
    Line("M[i,r] = P[i,j,k] * V[j,r] * W[k,r]", "dd", None,
         {"scipy": lambda m: m.sums[0] @ (m.stored * m.V[m.j] * m.W[m.k])}),
    Line("M[j,r] = P[i,j,k] * U[i,r] * W[k,r]", "dd", None,
         {"scipy": lambda m: m.sums[1] @ (m.stored * m.U[m.i] * m.W[m.k])}),
    Line("z = P[i,j,k] * U[i,r] * V[j,r] * W[k,r]", "", None,
         {"NumPy": lambda m: np.einsum("ex,er,er,er->", m.stored, m.U[m.i], m.V[m.j], m.W[m.k])}),
    Line("t = G[i,j] * G[j,k] * G[i,k]", "", lambda m: (m.G @ m.G * m.G).sum(),
         {"GraphBLAS": lambda m: (
             m.G.mxm(m.G).new(mask=m.G.S).ewise_mult(m.G).reduce_scalar().new()
         )}),
    Line("p[i] = 0.85 * G[i,j] * x[j] / d[j] + 0.15 / n", "d",
         lambda m: 0.85 * (m.G @ (m.x / m.d)) + 0.15 / m.n),
    Line("L[i,c] = 0.9 * G[i,j] * X[j,c] + 0.1 * Y[i,c]", "dd",
         lambda m: 0.9 * (m.G @ m.X) + 0.1 * m.Y),
    Line("k[i] = sum(j, (G[i,j] != 0) * x[j])", "d", lambda m: (m.G != 0) @ m.x,
         {"torch, dense": None, "GraphBLAS": lambda m: m.G.mxv(m.x, m.plus_second).new()}),
    Line("C[i,j] = (G[i,j] != 0) * exp(sum(k, X[i,k] * Y[j,k]))", "ds",
         lambda m: (m.G != 0) * (m.X @ m.Y.T).exp(), {
        "scipy": None, "sparse": None,
        "NumPy": lambda m: np.exp(np.einsum("ek,ek->e", m.X[m.rows], m.Y[m.cols])),
    }, {"like": "G"}),
    Line("C[i,k] = G[i,j] * X[j,k] / sum(j, G[i,j])", "dd",
         lambda m: (m.G @ m.X) / (m.G @ m.ones)),
)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result is wrong."""
    modules, missing = libraries()
    for name, why in missing.items():
        print(f"{name} is missing: {why}")
    seconds, lines = (0.05, LINES[:3]) if args.quick else (args.seconds, LINES)
    todo = [
        (f"{p.name}: {line.text}", partial(measure, p, line, args.threads, seconds))
        for p in problems(args.graph)
        for line in lines
    ]
    run_cells(args, "expressions", todo, show, missing=missing)


def show(cells: list[dict[str, Any]]) -> None:
    """Print times, and means by graph."""
    show_times("ms, and times sparsetir's", cells, "seconds", ("graph", "expression"), OURS)
    show_means(cells, "seconds", OURS, itemgetter("graph"))
    for cell in cells:
        ours, *others = cell["seconds"].values()
        cell["beside the fastest"] = {OURS: ours, BEST: min(others, key=itemgetter("min"))}
    show_means(cells, "beside the fastest", OURS, itemgetter("graph"))


def measure(problem: Problem, line: Line, threads: int, seconds: float) -> dict[str, Any]:
    """Times of a line, after all results were right."""
    by_library, lacks = operands(problem), {}
    calls: dict[str, Callable[[], Any]] = {}
    ways = {**dict.fromkeys(("scipy", "sparse", "torch, dense"), line.matrices), **line.others}
    named = set(re.findall(r"\w+", line.text.partition(" = ")[2]))
    given = {n: v for n, v in by_library[OURS].items() if n in named}
    calls[OURS] = lambda: sparsetir.einsum(line.text, **given, **line.options)
    for name, way in ways.items():
        if way is not None and name in by_library:
            calls[name] = partial(way, by_library[name])
    if "tensora" in by_library:
        try:
            calls["tensora"] = by_tensora(line, by_library["tensora"])
        except Exception as error:  # its notation lacks functions, its merges some sums
            lacks["tensora"] = f"{type(error).__name__}: {error}"[:200]
    results = {name: plain(call(), by_library["scipy"].G) for name, call in calls.items()}
    exact = results["NumPy" if "NumPy" in results else "scipy"]
    for name, result in results.items():
        if differ(result, exact):
            raise SystemExit(f"{line.text} by {name} is wrong")
    took = interleaved(calls, seconds, least=3, warm_up=1, clock=clock_of(threads))
    return {"graph": problem.name, "expression": line.text, "seconds": took, "lacks": lacks}


def differ(result: Any, exact: Any) -> bool:
    """Whether a result differs from the exact one by more than rounding.

    Quotients of empty rows, which index notation does not visit, are NaN in the others.
    """
    allowed = TOLERANCE * np.nanmax(abs(exact.data if sp.issparse(exact) else exact))
    if sp.issparse(exact):
        result, exact = (sp.csr_array(result) - exact).data, 0
    return not np.allclose(np.where(np.isnan(exact), 0, result - exact), 0, rtol=0, atol=allowed)


@cache
def libraries() -> tuple[dict[str, Any], dict[str, str]]:
    """The peers' modules, and why others are missing."""
    modules, missing = {}, {}
    for name, module in PEERS.items():
        try:
            modules[name] = import_module(module)
        except ImportError as error:
            missing[name] = str(error)
    return modules, missing


@lru_cache(maxsize=1)
def operands(problem: Problem) -> dict[str, Any]:
    """Operands in each library's own formats: a graph G, a tensor P, dense ones."""
    rng, modules = np.random.default_rng(0), libraries()[0]
    G = sp.csr_array(problem.load()).astype("float64")
    n = G.shape[0]
    if n != G.shape[1]:
        raise GraphError(f"{problem.name}: expected a square matrix, got {G.shape}")
    G.data[:] = rng.random(G.nnz) + 0.1
    flat = np.sort(rng.choice(np.prod(SHAPE), STORED, replace=False))
    coords, stored = np.stack(np.unravel_index(flat, SHAPE)), rng.random(STORED)
    vectors = {"x": rng.random(n), "d": rng.random(n) + 0.5, "b": rng.random(n)}
    dense = {**vectors, **{name: rng.random((n, FEATURES)) for name in "XY"}}
    dense |= {name: rng.random((size, FEATURES)) for name, size in zip("UVW", SHAPE, strict=True)}
    arrays = {**dense, "n": float(n), "ones": np.ones((n, 1))}
    matrices = {"G": G, "GT": sp.csr_array(G.T)}
    out: dict[str, Any] = {OURS: {**dense, "n": float(n), "G": sparsetir.SparseMatrix(G)}}
    out[OURS]["P"] = sparsetir.SparseTensor(coords, stored, shape=SHAPE)
    out["scipy"] = out["NumPy"] = SimpleNamespace(
        **arrays, **matrices, rows=np.repeat(np.arange(n), np.diff(G.indptr)), cols=G.indices,
        vals=G.data, **dict(zip("ijk", coords, strict=True)), stored=stored[:, None],
        sums=[
            sp.csr_array((np.ones(STORED), (index, np.arange(STORED))), (size, STORED))
            for index, size in zip(coords, SHAPE, strict=True)
        ],
    )  # fmt: skip
    if sparse := modules.get("sparse"):
        own = {name: sparse.GCXS.from_scipy_sparse(m) for name, m in matrices.items()}
        out["sparse"] = SimpleNamespace(**arrays, **own)
    if (torch := modules.get("torch, dense")) and 8 * n * n <= LARGEST:
        own = {k: torch.as_tensor(v) for k, v in arrays.items()}
        own |= {k: torch.as_tensor(m.toarray()) for k, m in matrices.items()}
        out["torch, dense"] = SimpleNamespace(**own)
    if gb := modules.get("GraphBLAS"):
        own = {name: gb.Vector.from_dense(v) for name, v in vectors.items()}
        own |= {"G": gb.io.from_scipy_sparse(G), "D": own["d"].diag()}
        out["GraphBLAS"] = SimpleNamespace(**own, plus_second=gb.semiring.plus_second)
    if tensora := modules.get("tensora"):
        new = tensora.Tensor
        own = {name: new.from_numpy(np.asarray(v)) for name, v in arrays.items()}
        own["G"] = new.from_scipy_sparse(sp.csr_matrix(G), format="ds")
        own["P"] = new.from_soa(list(coords), list(stored), dimensions=SHAPE, format="sss")
        out["tensora"] = own
    return out


def by_tensora(line: Line, tensors: dict[str, Any]) -> Callable[[], Any]:
    """The call of a line by tensora; an error of its own if it does not take the line."""
    left, _, right = line.text.partition(" = ")
    result, _, of_graph = line.formats.partition(" ")
    given = {name: t for name, t in tensors.items() if re.search(rf"\b{name}\b", right)}
    if of_graph:
        given["G"] = given["G"].to_format(of_graph)
    name, left = left.partition("[")[0], left if "[" in left else f"{left}[]"
    formats = {**{n: t.format.deparse() for n, t in given.items()}, name: result}
    text = f"{left} = {right}".replace("[", "(").replace("]", ")")
    return partial(libraries()[0]["tensora"].tensor_method(text, formats), **given)


def plain(result: Any, pattern: Any) -> Any:
    """A result as a NumPy array or a CSR matrix; pattern : of a list of values"""
    library = type(result).__module__.partition(".")[0]
    if library == "tensora" and result.format.deparse() == "ds":
        ptr, indices = map(np.array, result.taco_indices[1])
        return sp.csr_array((np.array(result.taco_vals), indices, ptr), result.dimensions)
    if library == "tensora":
        return np.array(result.taco_vals).reshape(result.dimensions)
    if library == "graphblas" and result.ndim == 2:
        result = libraries()[0]["GraphBLAS"].io.to_scipy_sparse(result, "csr")
    elif library == "graphblas":
        result = result.to_dense(0.0) if result.ndim else result.value
    elif library == "sparse":
        result = result.to_scipy_sparse() if result.ndim == 2 else result.todense()
    elif isinstance(result, sparsetir.SparseMatrix):
        result = result.to_scipy()
    if sp.issparse(result):
        return sp.csr_array(result)
    if np.shape(result) == pattern.data.shape:
        return sp.csr_array((result, pattern.indices, pattern.indptr), pattern.shape)
    return np.asarray(result)
