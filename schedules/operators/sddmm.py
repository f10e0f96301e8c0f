"""Dense times dense where a matrix stores elements: OUT[i, j] = sum over k of X[i, k] * Y[j, k]."""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.operands import Operator, each_head, gathered, register
from sparsetir.schedules.operators.problems import CsrPattern, Sddmm, memoized, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc


@memoized
def program(problem: Sddmm) -> SparseFunc:
    """The operator as a stage-I function, which templates schedule.

    Its arrays, with a dimension of heads before those of X, Y and OUT where the problem is batched:

    x : (m, feat) ; y : (n, feat) ; out : (nnz,)
    indptr : (m + 1,) ; indices : (nnz,) columns, in any order within a row
    """
    dtype, idtype, acc, batched = (
        problem.dtype,
        problem.idtype,
        problem.accumulator,
        problem.batched,
    )
    size, zero = getattr(T, idtype), tirx.const(0.0, dtype)

    def added(total: Any, x: Any, y: Any) -> Any:
        return T.cast(T.cast(total, acc) + T.cast(x, acc) * T.cast(y, acc), dtype)

    @T.prim_func
    def sddmm(
        x: T.handle, y: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        heads: size, m: size, n: size, nnz: size, feat: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        if batched:
            H = T.dense_fixed(heads, idtype)
        head = T.meta_var([H] if batched else [])
        X = T.match_sparse_buffer(x, (*head, I, K), dtype)
        Y = T.match_sparse_buffer(y, (*head, N, K), dtype)
        OUT = T.match_sparse_buffer(out, (*head, I, J), dtype)
        kinds = T.meta_var("SSSR"[not batched :])
        with T.sp_iter([*head, T.fuse(I, J), K], kinds, "sddmm") as [*h, i, j, k]:
            with T.init():
                OUT[(*h, i, j)] = zero
            OUT[(*h, i, j)] = added(OUT[(*h, i, j)], X[(*h, i, k)], Y[(*h, j, k)])

    return with_parameters(sddmm, {"heads": not batched})


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
        {"x": "mk", "y": "nk", "out": "e"}, False, reference, reductions=("sum",), program=program,
    )
)  # fmt: skip
