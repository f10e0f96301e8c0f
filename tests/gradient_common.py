"""Programs whose gradients are tested, on patterns given by their coordinates."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm.script import sparse_tir as T

import sparsetir
from small import small
from sparsetir.sparse_ir.gradient import gradient, transposed_axes

SIZES = {"m": 4, "n": 5, "feat": 3, "r": 2}


@dataclass
class Case:
    """A program over a pattern.

    chain : names of the pattern's axes, in its order
    levels : parameters of each level after the first: indptr, indices, number of elements
    coords : (nnz, levels) coordinates, in the order of the program
    arrays : operands by parameter; those of `stored` are over the pattern
    out : the result's parameter and shape
    """

    func: Any
    arrays: dict[str, np.ndarray]
    out: tuple[str, tuple[int, ...]]
    coords: np.ndarray
    stored: tuple[str, ...] = ()
    chain: tuple[str, ...] = ("I", "J")
    levels: tuple[tuple[str, str, str], ...] = (("indptr", "indices", "nnz"),)
    sizes: dict[str, int] = field(default_factory=lambda: dict(SIZES))
    lengths: tuple[int, ...] = (4, 5)
    idtype: str = "int32"

    def arguments(self, func, arrays):
        """Arguments of a program by name; the pattern is in the order that the program needs."""
        order = self.order(func)
        sorting, pattern = self.structure([self.chain.index(a) for a in order])
        values = {**self.sizes, **pattern}
        for name, array in {**self.arrays, **arrays}.items():
            over = name in self.stored or name.removeprefix("grad_") in self.stored
            values[name] = np.ascontiguousarray(array[sorting]) if over else array
        return {p.name: values[p.name] for p in func.params}

    def order(self, func):
        moved = transposed_axes(func)
        return tuple(moved[0]) if moved else self.chain

    def structure(self, places):
        """The order of elements, and the arrays of each level, for levels in another order."""
        coords = self.coords[:, places].reshape(-1, len(places))
        sorting = np.lexsort(coords.T[::-1])
        coords, arrays = coords[sorting], {}
        parents, count = coords[:, 0], self.lengths[places[0]]
        for level, (indptr, indices, nnz) in enumerate(self.levels, start=1):
            pairs = np.stack([parents, coords[:, level]], axis=1).reshape(-1, 2)
            last = level == len(self.levels)
            distinct, where = np.unique(pairs, axis=0, return_inverse=True)
            if last:
                distinct, where = pairs, np.arange(len(pairs))
            counts = np.bincount(distinct[:, 0], minlength=count)
            arrays[indptr] = np.concatenate([[0], np.cumsum(counts)]).astype(self.idtype)
            arrays[indices] = distinct[:, 1].astype(self.idtype)
            arrays[nnz] = count = len(distinct)
            parents = where.reshape(-1)
        return sorting, arrays

    def forward(self, **changed):
        """The result of the program, in the interpreter."""
        name, shape = self.out
        arguments = self.arguments(self.func, {**changed, name: np.full(shape, np.nan, self.dtype)})
        sparsetir.interpret(self.func, arguments)
        return arguments[name]

    @property
    def dtype(self):
        return next(a.dtype for a in self.arrays.values() if a.dtype.kind == "f")

    def gradient(self, wrt, upstream, run=sparsetir.interpret, **options):
        """The gradient by the derived program, for elements in the order of the program."""
        func = gradient(self.func, wrt, **options)
        shape = self.arrays[wrt].shape
        out = np.full(shape, np.nan, self.dtype)
        arguments = self.arguments(func, {f"grad_{self.out[0]}": upstream, f"grad_{wrt}": out})
        run(func, arguments)
        result = arguments[f"grad_{wrt}"].reshape(shape)
        if wrt in self.stored:
            back, _ = self.structure([self.chain.index(a) for a in self.order(func)])
            result = result[np.argsort(back)]
        return result


def built(func, arguments):
    """Run a program as a kernel, by the default schedule."""
    sparsetir.build(func)(**arguments)


PATTERNS = {
    "mixed": [(0, 1), (0, 4), (2, 0), (2, 1), (2, 3), (3, 4)],
    "empty": [],
    "one dense row": [(1, j) for j in range(5)],
    "one column": [(i, 2) for i in range(4)],
    "full": [(i, j) for i in range(4) for j in range(5)],
}


def rows_of(pattern):
    return np.array(PATTERNS[pattern], "int64").reshape(-1, 2)


def drawn(seed, dtype="float64", **shapes):
    """Normal numbers of these shapes."""
    draw = np.random.default_rng(seed)
    return {k: draw.standard_normal(shape).astype(dtype) for k, shape in shapes.items()}


def spmm(dtype="float64", idtype="int32", pattern="mixed"):
    from sparsetir.schedules.operators.problems import Spmm
    from sparsetir.schedules.operators.spmm import program

    coords = rows_of(pattern)
    arrays = drawn(0, dtype, a=len(coords), b=(5, 3))
    func = program(Spmm(dtype=dtype, idtype=idtype))
    return Case(func, arrays, ("out", (4, 3)), coords, ("a",), idtype=idtype)


def sddmm(dtype="float64", idtype="int32", pattern="mixed"):
    from sparsetir.schedules.operators.problems import Sddmm
    from sparsetir.schedules.operators.sddmm import program

    coords, arrays = rows_of(pattern), drawn(0, dtype, x=(4, 3), y=(5, 3))
    func = program(Sddmm(dtype=dtype, idtype=idtype))
    return Case(func, arrays, ("out", (len(coords),)), coords, ("out",), idtype=idtype)


def spmv(pattern="mixed"):
    from sparsetir.schedules.operators.problems import Spmm
    from sparsetir.schedules.operators.spmv import program

    coords = rows_of(pattern)
    arrays = drawn(0, a=len(coords), b=5)
    return Case(program(Spmm(dtype="float64")), arrays, ("out", (4,)), coords, ("a",))


def over_edges(term, dtype="float64", pattern="mixed", seed=0):
    """OUT[i, j] = sum over k of a term of A[i, j], X[i, k], Y[j, k] and k."""

    @T.prim_func
    def edges(
        a: T.handle, x: T.handle, y: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        N = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        X = T.match_sparse_buffer(x, (I, K), dtype)
        Y = T.match_sparse_buffer(y, (N, K), dtype)
        OUT = T.match_sparse_buffer(out, (I, J), dtype)
        with T.sp_iter([T.fuse(I, J), K], "SSR", "edges") as [i, j, k]:
            with T.init():
                OUT[i, j] = T.cast(0, dtype)
            OUT[i, j] = OUT[i, j] + term(A[i, j], X[i, k], Y[j, k], k)

    draw, coords = np.random.default_rng(seed), rows_of(pattern)
    arrays = {
        "a": draw.uniform(0.5, 2, len(coords)),
        "x": draw.uniform(-2, 2, (4, 3)),
        "y": draw.uniform(-2, 2, (5, 3)),
    }
    arrays = {k: v.astype(dtype) for k, v in arrays.items()}
    return Case(edges, arrays, ("out", (len(coords),)), coords, ("a", "out"))


def gated(pattern="mixed"):
    """C[i, k] = sum over j of sigmoid(X[i, k] + Y[j, k]) * tanh(Y[j, k]) * exp(A[i, j])."""

    messages = small("messages", """
with T.sp_iter([I, J, K], "SRS", "messages") as [i, j, k]:
    with T.init():
        C[i, k] = T.float64(0)
    gate = T.sigmoid(X[i, k] + Y[j, k])
    C[i, k] = C[i, k] + gate * T.tanh(Y[j, k]) * T.exp(A[i, j])
""", dtype="float64", A="I J", X="I K", Y="N K", C="I K")  # fmt: skip

    coords = rows_of(pattern)
    arrays = drawn(1, a=len(coords), x=(4, 3), y=(5, 3))
    return Case(messages, arrays, ("c", (4, 3)), coords, ("a",))


TRIPLES = [(0, 1, 2), (0, 1, 4), (0, 3, 0), (1, 0, 2), (1, 1, 4), (1, 1, 0)]
LEVELS = (("row_ptr", "rows", "nnz_rows"), ("indptr", "indices", "nnz"))


def rgms(dtype="float64"):
    from sparsetir.schedules.operators.rgms import Rgms, program

    arrays = drawn(0, dtype, a=len(TRIPLES), x=(5, 3), w=(2, 3, 2))
    sizes = {**SIZES, "relations": 2, "feat_in": 3, "feat": 2}
    of = ("out", (4, 2)), np.array(TRIPLES), ("a",), ("R", "I", "J"), LEVELS, sizes, (2, 4, 5)
    return Case(program(Rgms(dtype=dtype)), arrays, *of)


def mttkrp():
    """C[i, f] = sum over j, l of A[i, j, l] * U[j, f] * V[l, f]."""

    mttkrp = small("mttkrp", """
with T.sp_iter([I, J, L, F], "SRRS", "mttkrp") as [i, j, l, f]:
    with T.init():
        C[i, f] = T.float64(0)
    C[i, f] = C[i, f] + A[i, j, l] * U[j, f] * V[l, f]
""", """
I = T.dense_fixed(r)
J = T.sparse_variable(I, (m, nnz_rows), (row_ptr, rows))
L = T.sparse_variable(J, (n, nnz), (indptr, indices))
M = T.dense_fixed(m)
F = T.dense_fixed(feat)
""", "float64", A="I J L", U="M F", V="N F", C="I F")  # fmt: skip

    arrays = drawn(0, a=len(TRIPLES), u=(4, 3), v=(5, 3))
    of = ("c", (2, 3)), np.array(TRIPLES), ("a",), ("I", "J", "L"), LEVELS
    return Case(mttkrp, arrays, *of, lengths=(2, 4, 5))
