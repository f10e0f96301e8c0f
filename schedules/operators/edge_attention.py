"""Attention over the elements of each row in one kernel.

OUT[i, h] = sum over the elements (i, j) of softmax(scale * Q[i, h] . K[j, h]) * V[j, h]: the scores
of a row, their softmax and the weighted sum follow each other while all of it is in cache. A row
without elements gives zeros. (Sparse attention, SparseTIR section 4.3.1.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.problems import Problem, greater
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["EdgeAttention", "program"]


@dataclass(frozen=True)
class EdgeAttention(Problem):
    """What a kernel is compiled for.

    dtype : of Q, K, V and OUT; scores and sums are in float32 (float64 for float64)
    idtype : of indptr and indices
    """

    dtype: str = "float32"
    idtype: str = "int32"


def program(problem: EdgeAttention, config: Any = None) -> SparseFunc:
    """The operator as a stage-I function.

    q : (m, heads, feat) ; k : (n, heads, feat) ; v : (n, heads, width) ; out : (m, heads, width)
    scores : (heads, nnz) in the accumulator's type, for the kernel's own use
    scale : number of that type
    indptr : (m + 1,) ; indices : (nnz,) columns in any order
    """
    del config
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    size, number = getattr(T, idtype), getattr(T, acc)
    zero, one, least = tirx.const(0.0, acc), tirx.const(1.0, acc), tirx.const(-math.inf, acc)
    nothing = tirx.const(0.0, dtype)

    @T.prim_func
    def edge_attention(
        q: T.handle, k: T.handle, v: T.handle, out: T.handle, scores: T.handle, scale: number,
        indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size, heads: size, feat: size, width: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        H = T.dense_fixed(heads, idtype)
        F = T.dense_fixed(feat, idtype)
        W = T.dense_fixed(width, idtype)
        Q = T.match_sparse_buffer(q, (I, H, F), dtype)
        K = T.match_sparse_buffer(k, (N, H, F), dtype)
        V = T.match_sparse_buffer(v, (N, H, W), dtype)
        OUT = T.match_sparse_buffer(out, (I, H, W), dtype)
        SCORES = T.match_sparse_buffer(scores, (H, I, J), acc)
        TOP = T.alloc_sparse_buffer((), acc, "local")
        TOTAL = T.alloc_sparse_buffer((), acc, "local")
        INVERSE = T.alloc_sparse_buffer((), acc, "local")
        with T.sp_iter([I, H], "SS", "rows") as [i, h]:
            with T.sp_iter([J, F], "SR", "score") as [j, f]:
                with T.init():
                    SCORES[h, i, j] = zero
                SCORES[h, i, j] = (
                    SCORES[h, i, j] + T.cast(Q[i, h, f], acc) * T.cast(K[j, h, f], acc) * scale
                )
            with T.sp_iter([J], "R", "top") as [j]:
                with T.init():
                    TOP[()] = least
                TOP[()] = greater(TOP[()], SCORES[h, i, j])
            with T.sp_iter([J], "S", "powers") as [j]:
                SCORES[h, i, j] = T.exp(SCORES[h, i, j] - TOP[()])
            with T.sp_iter([J], "R", "total") as [j]:
                with T.init():
                    TOTAL[()] = zero
                TOTAL[()] = TOTAL[()] + SCORES[h, i, j]
            INVERSE[()] = one / T.Select(TOTAL[()] == zero, one, TOTAL[()])
            with T.sp_iter([W, J], "SR", "weigh") as [w, j]:
                with T.init():
                    OUT[i, h, w] = nothing
                OUT[i, h, w] = T.cast(
                    T.cast(OUT[i, h, w], acc)
                    + SCORES[h, i, j] * T.cast(V[j, h, w], acc) * INVERSE[()],
                    dtype,
                )

    return cast(Any, edge_attention)
