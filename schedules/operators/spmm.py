"""Sparse times dense: C[i, k] = reduce over the stored j of A[i, j] * B[j, k]."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.reductions import COMBINES, REDUCERS
from sparsetir.schedules.operators.operands import CHUNK, Operator, each_head, register
from sparsetir.schedules.operators.problems import (
    CsrPattern,
    Product,
    Spmm,
    SpmmInSteps,
    memoized,
    reduce_at_rows,
)
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer


@memoized
def program(problem: Product) -> SparseFunc:
    """The operator as a stage-I function, which every template schedules.

    Its arrays, with a dimension of heads before those of A, B and C if the problem is batched:

    a : (nnz,) ; b : (n, feat) ; out : (m, feat)
    indptr : (m + 1,) ; indices : (nnz,) columns, in any order within a row
    row : (m,) computed, in the accumulator's type; for a mean the factors of terms, for a maximum
        or minimum the initial values of rows: an infinity, and 0 without elements; absent for a sum
    """
    return written(problem, "spmm", "K")


def written(problem: Product, name: str, k: str = "") -> SparseFunc:
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
    term, how = " * ".join(loads), problem.reduce
    names = reduce_at_rows(write, name, f"{h} I", k, how, result, term, acc, out)
    return write.program("a b out indptr indices heads m n nnz feat row", **names)


@each_head
def reference(
    problem: Product, pattern: CsrPattern, values: Any, operands: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The exact result C, and the sums of the absolute values of its terms."""
    (b,) = operands
    values, b = np.asarray(values, "float64"), np.asarray(b, "float64")
    reducer = REDUCERS[problem.reduce]
    if not reducer.is_linear:
        exact = _each_row(problem.reduce, pattern, values, b)
        return exact, _each_row("max", pattern, np.abs(values), np.abs(b))
    indptr, indices, shape = pattern
    sums = []
    for data, dense in ((values, b), (np.abs(values), np.abs(b))):
        out = sp.csr_array((data, indices, indptr), shape=shape) @ dense
        if reducer.is_scaled:
            counts = np.maximum(np.diff(indptr), 1)
            out = out / counts.reshape(-1, *[1] * (out.ndim - 1))
        sums.append(out)
    return sums[0], sums[1]


def _each_row(reduce: str, pattern: CsrPattern, values: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The reduced products of each row and feature, 0 in rows without elements; keeps NaN."""
    indptr, indices, (m, _) = pattern
    width = int(np.prod(b.shape[1:], dtype=int))
    dense, out = b.reshape(len(b), width), np.zeros((m, width))
    rows = np.flatnonzero(np.diff(indptr))
    step = max(1, CHUNK // max(1, len(indices)))
    for start in range(0, width if len(rows) else 0, step):
        part = slice(start, start + step)
        products = values[:, None] * dense[indices, part]
        out[rows, part] = _reduced(reduce, products, indptr, rows)
    return out.reshape(m, *b.shape[1:])


def _reduced(reduce: str, terms: np.ndarray, indptr: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Terms (nnz, width) reduced in each of some rows, none of which is empty."""
    reducer, shift = REDUCERS[reduce], np.zeros(())
    combined = getattr(np, COMBINES[reducer.combine].ufunc).reduceat
    if reducer.steps is None:
        return combined(terms, indptr[rows], axis=0)
    if reducer.steps.shift:
        shift = _reduced(reducer.steps.shift, terms, indptr, rows)
        shift = np.where(np.isfinite(shift), shift, 0)
        terms = terms - np.repeat(shift, np.diff(indptr)[rows], axis=0)
    total = combined(reducer.steps.each(np, terms), indptr[rows], axis=0)
    return reducer.steps.finish(np, total) + shift


SPMM = register(
    Operator(
        "spmm", Spmm, "sparse times dense", {"b": "n feat", "out": "m feat"}, True, reference,
        program=program, in_steps=SpmmInSteps,
    )
)  # fmt: skip
