"""Attention over the elements of each row in one kernel.

OUT[i, h] = sum over the elements (i, j) of softmax(scale * Q[i, h] . K[j, h]) * V[j, h]: the scores
of a row, their softmax and the weighted sum are computed together while all of it is in cache. A
row without elements gives zeros. (Sparse attention, SparseTIR section 4.3.1.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, greater, memoized
from sparsetir.sparse_ir.nodes import SparseFunc


@dataclass(frozen=True)
class EdgeAttention(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    dtype : the type of Q, K, V and OUT; scores and sums are float32 (float64 for float64)
    idtype : the type of indptr and indices
    heads_first : whether heads come before rows and columns in Q, K, V and OUT
    """

    dtype: str = "float32"
    idtype: str = "int32"
    heads_first: bool = False

    def at(self, node: Any, head: Any) -> list[Any]:
        """The first dimensions of an operand, or an element's indices in these."""
        return [head, node] if self.heads_first else [node, head]


@memoized
def program(problem: EdgeAttention) -> SparseFunc:
    """The operator as a stage-I function.

    q : (m, heads, feat) ; k : (n, heads, feat) ; v : (n, heads, width) ; out : (m, heads, width);
        with `heads_first` (heads, m, feat), and so on
    scores : (heads, nnz) in the accumulator's type, a workspace
    scale : number of that type
    indptr : (m + 1,) ; indices : (nnz,) columns in any order
    """
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    size, number = getattr(T, idtype), getattr(T, acc)
    zero, one, least = tirx.const(0.0, acc), tirx.const(1.0, acc), tirx.const(-math.inf, acc)
    nothing = tirx.const(0.0, dtype)

    def element(operand: Any, node: Any, head: Any, feature: Any) -> Any:
        return T.cast(operand[(*problem.at(node, head), feature)], acc)

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
        Q = T.match_sparse_buffer(q, [*problem.at(I, H), F], dtype)
        K = T.match_sparse_buffer(k, [*problem.at(N, H), F], dtype)
        V = T.match_sparse_buffer(v, [*problem.at(N, H), W], dtype)
        OUT = T.match_sparse_buffer(out, [*problem.at(I, H), W], dtype)
        SCORES = T.match_sparse_buffer(scores, (H, I, J), acc)
        TOP = T.alloc_sparse_buffer((), acc, "local")
        TOTAL = T.alloc_sparse_buffer((), acc, "local")
        INVERSE = T.alloc_sparse_buffer((), acc, "local")
        with T.sp_iter([I, H], "SS", "rows") as [i, h]:
            with T.sp_iter([J, F], "SR", "score") as [j, f]:
                with T.init():
                    SCORES[h, i, j] = zero
                query = T.meta_var(element(Q, i, h, f))
                key = T.meta_var(element(K, j, h, f))
                SCORES[h, i, j] = SCORES[h, i, j] + query * key * scale
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
                first = T.meta_var(problem.at(i, h)[0])
                second = T.meta_var(problem.at(i, h)[1])
                value = T.meta_var(element(V, j, h, w))
                with T.init():
                    OUT[first, second, w] = nothing
                OUT[first, second, w] = T.cast(
                    T.cast(OUT[first, second, w], acc) + SCORES[h, i, j] * value * INVERSE[()],
                    dtype,
                )

    return cast(Any, edge_attention)


def fit(
    heads: int, feat: int, *, feat_in: int | None = None, scale: float | None = None
) -> dict[str, Any]:
    """The kernel of a call; feat_in : features of queries and keys, by default those of values."""
    of_keys = feat_in or feat
    scale = 1 / math.sqrt(of_keys) if scale is None else float(scale)
    return {
        "problem": EdgeAttention(), "features": (of_keys, feat), "callers": {"i": of_keys},
        "sizes": {"heads": heads, "feat": of_keys, "width": feat, "scale": scale},
        "there": ("q", "k", "v", "out"),
    }  # fmt: skip


ATTENTION = register(
    Operator(
        "attention", EdgeAttention, "attention over the elements of each row",
        {"q": "mhi", "k": "nhi", "v": "nhk", "out": "mhk"}, False, None, reductions=(),
        program=program, on="edges", options=("heads", "feat_in", "scale"), fit=fit,
        scratch=("scores",),
    )
)  # fmt: skip
