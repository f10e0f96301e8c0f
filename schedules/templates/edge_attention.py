"""Attention over the elements of each row in one kernel, on CPUs.

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

from tvm import s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.problems import accumulator, greater
from sparsetir.schedules.passes.exponential import inline_exponentials
from sparsetir.schedules.passes.lane_sums import add_lanes
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.message_tiles import Tile, in_vectors, on_threads, without_guards
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["AttentionTiles", "EdgeAttention", "program", "schedule"]


@dataclass(frozen=True)
class EdgeAttention:
    """What a kernel is compiled for.

    dtype : of Q, K, V and OUT; scores and sums are in float32 (float64 for float64)
    idtype : of indptr and indices
    """

    dtype: str = "float32"
    idtype: str = "int32"

    @property
    def accumulator(self) -> str:
        """The type that scores and sums are in."""
        return accumulator(self.dtype)


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles of the features of Q and K, and of those of V."""

    keys: Tile = Tile()
    values: Tile = Tile()
    parallel: bool = False


def program(problem: EdgeAttention, config: AttentionTiles) -> SparseFunc:
    """The stage-I function, over blocks of rows.

    q : (m, heads, feat) ; k : (n, heads, feat) ; v : (n, heads, width) ; out : (m, heads, width)
    scores : (heads, nnz) in the accumulator's type, for the kernel's own use
    scale : number of that type
    block_ptr : (blocks + 1,) first row of each block
    indptr : (m + 1,) ; indices : (nnz,) columns in any order

    feat is rest + config.keys.tile, width is value_rest + config.values.tile.
    """
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    size, number = getattr(T, idtype), getattr(T, acc)
    keys, values = config.keys, config.values
    zero, one, least = tirx.const(0.0, acc), tirx.const(1.0, acc), tirx.const(-math.inf, acc)

    def once(value: Any, p: Any, v: Any, lane: Any, rest: Any) -> Any:
        """Zero in a last tile where the one before has it too."""
        if keys.tile == 1:
            return value
        return T.Select(keys.place(p, v, lane, rest) >= p * keys.tile, value, zero)

    @T.prim_func
    def edge_attention(
        q: T.handle, k: T.handle, v: T.handle, out: T.handle, scores: T.handle, scale: number,
        block_ptr: T.handle, indptr: T.handle, indices: T.handle,
        blocks: size, m: size, n: size, nnz: size, heads: size, tiles: size, rest: size,
        value_tiles: size, value_rest: size,
    ) -> None:  # fmt: skip
        O = T.dense_fixed(blocks, idtype)
        I = T.dense_variable(O, (m, m), block_ptr, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        H = T.dense_fixed(heads, idtype)
        ONE = T.dense_fixed(1, idtype)
        KP = T.dense_fixed(tiles, idtype)
        KF = T.dense_fixed(rest + keys.tile, idtype)
        KV = T.dense_fixed(keys.vectors, idtype)
        KL = T.dense_fixed(keys.lanes, idtype)
        VP = T.dense_fixed(value_tiles, idtype)
        VF = T.dense_fixed(value_rest + values.tile, idtype)
        VV = T.dense_fixed(values.vectors, idtype)
        VL = T.dense_fixed(values.lanes, idtype)
        Q = T.match_sparse_buffer(q, (O, I, H, KF), dtype)
        K = T.match_sparse_buffer(k, (N, H, KF), dtype)
        V = T.match_sparse_buffer(v, (N, H, VF), dtype)
        OUT = T.match_sparse_buffer(out, (O, I, H, VF), dtype)
        SCORES = T.match_sparse_buffer(scores, (H, O, I, J), acc)
        PARTS = T.alloc_sparse_buffer((ONE, KL), acc, "local")
        SUM = T.alloc_sparse_buffer((ONE,), acc, "local")
        TOP = T.alloc_sparse_buffer((ONE,), acc, "local")
        TOTAL = T.alloc_sparse_buffer((ONE,), acc, "local")
        ACC = T.alloc_sparse_buffer((VV, VL), acc, "local")
        with T.sp_iter([O], "S", "outer") as [o]:
            with T.sp_iter([I, H], "SS", "rows") as [i, h]:
                with T.sp_iter([J], "S", "edges") as [j]:
                    with T.sp_iter([ONE, KP, KV, KL], "SRRS", "parts") as [g, p, w, l]:
                        with T.init():
                            PARTS[g, l] = zero
                        PARTS[g, l] = PARTS[g, l] + once(
                            T.cast(Q[o, i, h, keys.place(p, w, l, rest)], acc)
                            * T.cast(K[j, h, keys.place(p, w, l, rest)], acc),
                            p, w, l, rest,
                        )  # fmt: skip
                    with T.sp_iter([ONE, KL], "SR", "sums") as [g, l]:
                        with T.init():
                            SUM[g] = zero
                        SUM[g] = SUM[g] + PARTS[g, l]
                    with T.sp_iter([ONE], "S", "score") as [g]:
                        SCORES[h, o, i, j] = SUM[g] * scale
                with T.sp_iter([ONE, J], "SR", "top") as [g, j]:
                    with T.init():
                        TOP[g] = least
                    TOP[g] = greater(TOP[g], SCORES[h, o, i, j])
                with T.sp_iter([J], "S", "powers") as [j]:
                    SCORES[h, o, i, j] = T.exp(SCORES[h, o, i, j] - TOP[0])
                with T.sp_iter([ONE, J], "SR", "total") as [g, j]:
                    with T.init():
                        TOTAL[g] = zero
                    TOTAL[g] = TOTAL[g] + SCORES[h, o, i, j]
                with T.sp_iter([VP], "S", "tiles") as [p]:
                    with T.sp_iter([J, VV, VL], "RSS", "reduce") as [j, w, l]:
                        with T.init():
                            ACC[w, l] = zero
                        ACC[w, l] = ACC[w, l] + SCORES[h, o, i, j] * T.cast(
                            V[j, h, values.place(p, w, l, value_rest)], acc
                        )
                    with T.sp_iter([VV, VL], "SS", "write") as [w, l]:
                        OUT[o, i, h, values.place(p, w, l, value_rest)] = T.cast(
                            ACC[w, l] / T.Select(TOTAL[0] == zero, one, TOTAL[0]), dtype
                        )

    return cast(Any, edge_attention)


def schedule(
    func: tirx.PrimFunc, problem: EdgeAttention, config: AttentionTiles, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage-II form of :func:`program`; the function given is left as it is."""
    del problem
    func = without_guards(func)
    if target is not None and is_gpu(target):
        return on_threads(func, "outer0")
    sch = s_tir.Schedule(s_tir.renew_defs(inline_exponentials(func)))
    if config.parallel:
        run_in_parallel(sch, sch.get_loops(sch.get_sblock("outer0"))[-1], "parallel")
    parts, reduce = sch.get_sblock("parts0"), sch.get_sblock("reduce0")
    for block in (parts, reduce, sch.get_sblock("write0")):
        in_vectors(sch, block)
    init = sch.decompose_reduction(parts, sch.get_loops(parts)[1])
    sch.vectorize(sch.get_loops(init)[-1])
    in_vectors(sch, sch.decompose_reduction(reduce, sch.get_loops(reduce)[0]))
    func = sch.mod["main"]
    return apply_kinds(add_lanes(func, "sums0") if config.keys.lanes > 1 else func)
