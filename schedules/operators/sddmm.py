"""Dense times dense where a matrix stores elements: OUT[i, j] = sum over k of X[i, k] * Y[j, k]."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.schedules.operators.operands import Operator, each_head, gathered, register
from sparsetir.schedules.operators.problems import CsrPattern, Sddmm, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer


@memoized
def program(problem: Sddmm) -> SparseFunc:
    """The operator as a stage-I function, which templates schedule.

    Its arrays, with a dimension of heads before those of X, Y and OUT if the problem is batched:

    x : (m, feat) ; y : (n, feat) ; out : (nnz,)
    indptr : (m + 1,) ; indices : (nnz,) columns, in any order within a row
    """
    dtype, acc, h = problem.dtype, problem.accumulator, "H" * problem.batched
    write = Writer("sddmm", problem.idtype)
    write.dense(I="m")
    write.variable("J", "I", "n", "nnz", "indptr", "indices")
    write.dense(N="n", K="feat", **({h: "heads"} if h else {}))
    write.buffer("x", f"{h} I K", dtype)
    write.buffer("y", f"{h} N K", dtype)
    write.buffer("out", f"{h} I J", dtype)
    elements = {"OUT": f"{h} I J", "X": f"{h} I K", "Y": f"{h} J K"}
    axes = [*h, "T.fuse(I, J)", "K"]
    write.products("sddmm", axes, "S" * len(h) + "SSR", elements, acc, f"{h} I J K".lower())
    return write.program("x y out indptr indices heads m n nnz feat")


@each_head
def reference(
    problem: Sddmm, pattern: CsrPattern, values: Any, operands: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The exact result: for each stored element the inner product of its rows of X and Y."""
    del problem, values
    indptr, indices, (m, _) = pattern
    rows = np.repeat(np.arange(m, dtype=indices.dtype), np.diff(indptr))
    x, y = (np.asarray(v, "float64") for v in operands)
    exact, scale = np.empty(len(indices)), np.empty(len(indices))
    gathered(rows, indices, x, y, exact)
    gathered(rows, indices, np.abs(x), np.abs(y), scale)
    return exact, scale


register(
    Operator(
        "sddmm", Sddmm, "dense times dense where a matrix stores elements",
        {"x": "m feat", "y": "n feat", "out": "nnz"}, False, reference,
        reductions=("sum",), program=program,
    )
)  # fmt: skip
