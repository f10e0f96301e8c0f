"""Sparse times dense: C[i, k] = reduce over the stored j of A[i, j] * B[j, k]."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.reductions import COMBINES, EXTREMA, REDUCERS
from sparsetir.schedules.operators.operands import CHUNK, Operator, each_head, register
from sparsetir.schedules.operators.problems import CsrPattern, Spmm, memoized, reduced_at_rows
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer


@memoized
def program(problem: Spmm) -> SparseFunc:
    """The operator as a stage-I function, which every template schedules.

    Its arrays, with a dimension of heads before those of A, B and C if the problem is batched:

    a : (nnz,) ; b : (n, feat) ; out : (m, feat)
    indptr : (m + 1,) ; indices : (nnz,) columns, in any order within a row
    row : (m,) computed, in the accumulator's type; for a mean the factors of terms, for a maximum
        or minimum the initial values of rows: an infinity, and 0 without elements; absent for a sum
    """
    return written(problem, "spmm", "K")


def written(problem: Spmm, name: str, k: str = "") -> SparseFunc:
    """A product with a matrix, with an axis of features `k`, or with a vector."""
    acc, out, h = problem.accumulator, problem.out or problem.dtype, "H" * problem.batched
    write = Writer(name, problem.idtype)
    write.dense(I="m")
    write.variable("J", "I", "n", "nnz", "indptr", "indices")
    write.dense(N="n", **({k: "feat"} if k else {}), **({h: "heads"} if h else {}))
    write.buffer("a", f"{h} I J", problem.dtype)
    write.buffer("b", f"{h} N {k}", problem.dtype)
    write.buffer("out", f"{h} I {k}", out, "C")
    loads = write.load("A", f"{h} I J".lower(), acc), write.load("B", f"{h} J {k}".lower(), acc)
    result = write.load("C", f"{h} I {k}".lower())
    lines = reduced_at_rows(write, problem.reduce, result, " * ".join(loads), acc, out)
    write.visit(name, f"{h} I J {k}", "S" * len(h) + "SR" + "S" * len(k), lines)
    return write.program("a b out indptr indices heads m n nnz feat row")


@each_head
def reference(
    problem: Spmm, pattern: CsrPattern, values: Any, operands: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The exact result C, and the sums of the absolute values of its terms."""
    (b,) = operands
    values, b = np.asarray(values, "float64"), np.asarray(b, "float64")
    if problem.reduce in EXTREMA:
        # The minimum is the negative of the maximum of the negatives.
        sign = 1 if COMBINES[problem.reduce].symbol == ">" else -1
        exact = sign * _largest(pattern, sign * values, b)
        return exact, _largest(pattern, np.abs(values), np.abs(b))
    indptr, indices, shape = pattern
    sums = []
    for data, dense in ((values, b), (np.abs(values), np.abs(b))):
        out = sp.csr_array((data, indices, indptr), shape=shape) @ dense
        if REDUCERS[problem.reduce].is_scaled:
            counts = np.maximum(np.diff(indptr), 1)
            out = out / counts.reshape(-1, *[1] * (out.ndim - 1))
        sums.append(out)
    return sums[0], sums[1]


def _largest(pattern: CsrPattern, values: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest product of each row and feature, 0 in rows without elements; keeps NaN."""
    indptr, indices, (m, _) = pattern
    width = int(np.prod(b.shape[1:], dtype=int))
    dense, out = b.reshape(len(b), width), np.zeros((m, width))
    rows = np.flatnonzero(np.diff(indptr))
    step = max(1, CHUNK // max(1, len(indices)))
    for start in range(0, width if len(rows) else 0, step):
        part = slice(start, start + step)
        products = values[:, None] * dense[indices, part]
        out[rows, part] = np.maximum.reduceat(products, indptr[rows], axis=0)
    return out.reshape(m, *b.shape[1:])


SPMM = register(
    Operator(
        "spmm", Spmm, "sparse times dense", {"b": "nk", "out": "mk"}, True, reference,
        program=program,
    )
)  # fmt: skip
