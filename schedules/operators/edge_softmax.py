"""Softmax over the elements of each row, and its gradient.

Y[b, e, h] = exp(X[b, e, h] - top) / total, with the maximum and the sum over the elements e of the
row, for each head: h or b.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.arguments import expect_one_of
from sparsetir.schedules.operators.names import SOFTMAX
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, greater, memoized, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class EdgeSoftmax(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    dtype : "float32" or "float64"
    idtype : the type of indptr
    backward : X * (G - the sum of X * G over the row) instead: the gradient, given the softmax X
    """

    dtype: str = "float32"
    idtype: str = "int32"
    backward: bool = False

    def __post_init__(self) -> None:
        expect_one_of(self, dtype=DTYPES)


@memoized
def program(problem: EdgeSoftmax) -> SparseFunc:
    """The operator as a stage-I function.

    x : (batch, nnz, heads) in row order; backward: the softmax, and g its gradient
    out : (batch, nnz, heads)
    indptr : (m + 1,)
    """
    dtype, idtype, backward = problem.dtype, problem.idtype, problem.backward
    size = getattr(T, idtype)
    zero, one = tirx.const(0.0, dtype), tirx.const(1.0, dtype)
    least = tirx.const(-math.inf, dtype)

    @T.prim_func
    def edge_softmax(
        x: T.handle, g: T.handle, out: T.handle, indptr: T.handle,
        batch: size, m: size, nnz: size, heads: size,
    ) -> None:  # fmt: skip
        B = T.dense_fixed(batch, idtype)
        I = T.dense_fixed(m, idtype)
        J = T.dense_variable(I, (nnz, nnz), indptr, idtype)
        H = T.dense_fixed(heads, idtype)
        X = T.match_sparse_buffer(x, (B, I, J, H), dtype)
        Y = T.match_sparse_buffer(out, (B, I, J, H), dtype)
        TOTAL = T.alloc_sparse_buffer((), dtype, "local")
        if backward:
            G = T.match_sparse_buffer(g, (B, I, J, H), dtype)
        else:
            TOP = T.alloc_sparse_buffer((), dtype, "local")
            INVERSE = T.alloc_sparse_buffer((), dtype, "local")
        with T.sp_iter([I, B, H], "SSS", "rows") as [i, b, h]:
            if not backward:
                with T.sp_iter([J], "R", "top") as [j]:
                    with T.init():
                        TOP[()] = least
                    TOP[()] = greater(TOP[()], X[b, i, j, h])
                with T.sp_iter([J], "S", "powers") as [j]:
                    Y[b, i, j, h] = T.exp(X[b, i, j, h] - TOP[()])
            with T.sp_iter([J], "R", "total") as [j]:
                with T.init():
                    TOTAL[()] = zero
                TOTAL[()] = TOTAL[()] + (
                    X[b, i, j, h] * G[b, i, j, h] if backward else Y[b, i, j, h]
                )
            if backward:
                with T.sp_iter([J], "S", "write") as [j]:
                    Y[b, i, j, h] = X[b, i, j, h] * (G[b, i, j, h] - TOTAL[()])
            else:
                INVERSE[()] = one / TOTAL[()]
                with T.sp_iter([J], "S", "divide") as [j]:
                    Y[b, i, j, h] = Y[b, i, j, h] * INVERSE[()]

    return with_parameters(edge_softmax, {"g": not backward})


def _fit(heads: int, feat: int) -> dict[str, Any]:
    sizes = {"batch": 1, "heads": heads}
    return {"problem": EdgeSoftmax(), "features": (heads,), "sizes": sizes, "there": ("x", "out")}


for _name in SOFTMAX:
    register(
        Operator(
            _name, EdgeSoftmax, "softmax over the elements of each row",
            dict.fromkeys(("x", "out"), "eh"), False, None, reductions=(),
            program=program, on="edges", options=("heads",), dtypes=DTYPES,
            function="edge_softmax" if _name == "edge_softmax" else "sparse_softmax", fit=_fit,
        )
    )  # fmt: skip
