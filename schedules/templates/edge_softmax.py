"""Softmax over the elements of each row, and its gradient, on CPUs.

Y[b, e, h] = exp(X[b, e, h] - top) / total, with the maximum and the sum over the elements e of the
row, for each head, h or b.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from tvm import s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.problems import greater, one_of
from sparsetir.schedules.passes.exponential import inline_exponentials
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.message_tiles import (
    Tile,
    hide_own_reads,
    in_vectors,
    on_threads,
    without_guards,
)
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["EdgeSoftmax", "program", "schedule"]


@dataclass(frozen=True)
class EdgeSoftmax:
    """What a kernel is compiled for.

    dtype : "float32" or "float64"
    idtype : of indptr
    backward : DX = Y * (G - the sum of Y * G over the row) instead
    """

    dtype: str = "float32"
    idtype: str = "int32"
    backward: bool = False

    def __post_init__(self) -> None:
        one_of("EdgeSoftmax", "dtype", self.dtype, ("float32", "float64"))


def program(problem: EdgeSoftmax, config: Tile) -> SparseFunc:
    """The stage-I function, over blocks of rows.

    x : (batch, nnz, heads) in row order; backward: y and g
    y : (batch, nnz, heads); backward: dx
    block_ptr : (blocks + 1,) first row of each block
    indptr : (m + 1,)

    heads is rest + config.tile.
    """
    dtype, idtype, backward = problem.dtype, problem.idtype, problem.backward
    size = getattr(T, idtype)
    tile, lanes, vectors, place = config.tile, config.lanes, config.vectors, config.place
    zero, one = tirx.const(0.0, dtype), tirx.const(1.0, dtype)
    least = tirx.const(-math.inf, dtype)

    @T.prim_func
    def edge_softmax(
        x: T.handle, y: T.handle, block_ptr: T.handle, indptr: T.handle,
        batch: size, blocks: size, m: size, nnz: size, tiles: size, rest: size,
    ) -> None:  # fmt: skip
        B = T.dense_fixed(batch, idtype)
        O = T.dense_fixed(blocks, idtype)
        I = T.dense_variable(O, (m, m), block_ptr, idtype)
        J = T.dense_variable(I, (nnz, nnz), indptr, idtype)
        P = T.dense_fixed(tiles, idtype)
        H = T.dense_fixed(rest + tile, idtype)
        V = T.dense_fixed(vectors, idtype)
        L = T.dense_fixed(lanes, idtype)
        X = T.match_sparse_buffer(x, (B, O, I, J, H), dtype)
        Y = T.match_sparse_buffer(y, (B, O, I, J, H), dtype)
        TOP = T.alloc_sparse_buffer((V, L), dtype, "local")
        TOTAL = T.alloc_sparse_buffer((V, L), dtype, "local")
        INVERSE = T.alloc_sparse_buffer((V, L), dtype, "local")
        with T.sp_iter([O], "S", "outer") as [o]:
            with T.sp_iter([I, B, P], "SSS", "rows") as [i, b, p]:
                with T.sp_iter([J, V, L], "RSS", "top") as [j, v, l]:
                    with T.init():
                        TOP[v, l] = least
                    TOP[v, l] = greater(TOP[v, l], X[b, o, i, j, place(p, v, l, rest)])
                with T.sp_iter([J, V, L], "SSS", "powers") as [j, v, l]:
                    Y[b, o, i, j, place(p, v, l, rest)] = T.exp(
                        X[b, o, i, j, place(p, v, l, rest)] - TOP[v, l]
                    )
                with T.sp_iter([J, V, L], "RSS", "total") as [j, v, l]:
                    with T.init():
                        TOTAL[v, l] = zero
                    TOTAL[v, l] = TOTAL[v, l] + Y[b, o, i, j, place(p, v, l, rest)]
                with T.sp_iter([V, L], "SS", "inverse") as [v, l]:
                    INVERSE[v, l] = one / TOTAL[v, l]
                with T.sp_iter([J, V, L], "SSS", "divide") as [j, v, l]:
                    Y[b, o, i, j, place(p, v, l, rest)] = (
                        Y[b, o, i, j, place(p, v, l, rest)] * INVERSE[v, l]
                    )

    @T.prim_func
    def edge_softmax_backward(
        y: T.handle, g: T.handle, dx: T.handle, block_ptr: T.handle, indptr: T.handle,
        batch: size, blocks: size, m: size, nnz: size, tiles: size, rest: size,
    ) -> None:  # fmt: skip
        B = T.dense_fixed(batch, idtype)
        O = T.dense_fixed(blocks, idtype)
        I = T.dense_variable(O, (m, m), block_ptr, idtype)
        J = T.dense_variable(I, (nnz, nnz), indptr, idtype)
        P = T.dense_fixed(tiles, idtype)
        H = T.dense_fixed(rest + tile, idtype)
        V = T.dense_fixed(vectors, idtype)
        L = T.dense_fixed(lanes, idtype)
        Y = T.match_sparse_buffer(y, (B, O, I, J, H), dtype)
        G = T.match_sparse_buffer(g, (B, O, I, J, H), dtype)
        DX = T.match_sparse_buffer(dx, (B, O, I, J, H), dtype)
        TOTAL = T.alloc_sparse_buffer((V, L), dtype, "local")
        with T.sp_iter([O], "S", "outer") as [o]:
            with T.sp_iter([I, B, P], "SSS", "rows") as [i, b, p]:
                with T.sp_iter([J, V, L], "RSS", "total") as [j, v, l]:
                    with T.init():
                        TOTAL[v, l] = zero
                    TOTAL[v, l] = (
                        TOTAL[v, l]
                        + Y[b, o, i, j, place(p, v, l, rest)] * G[b, o, i, j, place(p, v, l, rest)]
                    )
                with T.sp_iter([J, V, L], "SSS", "write") as [j, v, l]:
                    DX[b, o, i, j, place(p, v, l, rest)] = Y[b, o, i, j, place(p, v, l, rest)] * (
                        G[b, o, i, j, place(p, v, l, rest)] - TOTAL[v, l]
                    )

    return cast(Any, edge_softmax_backward if backward else edge_softmax)


def schedule(
    func: tirx.PrimFunc, problem: EdgeSoftmax, config: Tile, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage-II form of :func:`program`; the function given is left as it is."""
    func = without_guards(func)
    if target is not None and is_gpu(target):
        return on_threads(func, "outer0")
    sch = s_tir.Schedule(s_tir.renew_defs(inline_exponentials(func)))
    if not problem.backward:
        sch = hide_own_reads(sch, "divide0")
    if config.parallel:
        run_in_parallel(sch, sch.get_loops(sch.get_sblock("outer0"))[-1], "parallel")
    if problem.backward:
        sums, others = ["total0"], ["write0"]
    else:
        sums, others = ["top0", "total0"], ["powers0", "inverse0", "divide0"]
    for name in (*sums, *others):
        in_vectors(sch, sch.get_sblock(name))
    for name in sums:
        block = sch.get_sblock(name)
        in_vectors(sch, sch.decompose_reduction(block, sch.get_loops(block)[0]))
    return apply_kinds(sch.mod["main"])
