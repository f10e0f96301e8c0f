"""Gradients of attention over the stored blocks of a mask; see `block_attention`.

With the gradient G of OUT, the weights P[i, j] = exp(scale * Q[i] . K[j] - LSE[i]) are recomputed,
block by block, and DELTA[i] = G[i] . OUT[i]:

    DS[i, j] = P[i, j] * (G[i] . V[j] - DELTA[i])
    DQ[i] = scale * sum over j of DS[i, j] * K[j]
    DK[j] = scale * sum over i of DS[i, j] * Q[i]
    DV[j] = sum over i of P[i, j] * G[i]

Sums over j run over the rows of blocks, sums over i over those of the transposed mask, so that each
is accumulated by one visit. (FlashAttention-2, Dao 2023, algorithm 2.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.block_attention import WORD, BlockAttention, is_element
from sparsetir.schedules.operators.problems import memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.facts import assume


@dataclass(frozen=True)
class BlockAttentionBackward(BlockAttention):
    """The part of its arguments that a kernel is compiled for, besides :class:`BlockAttention`'s.

    keys : whether the gradients of K and V are computed, instead of that of Q
    """

    keys: bool = False


@memoized
def program(problem: BlockAttentionBackward) -> SparseFunc:
    """The operator as a stage-I function.

    q, k, v, lse : as for attention
    grad : like its result ; delta : like lse
    dq : like q, or with `keys` dk and dv, like k and v
    scale : number of the accumulator's type
    indptr, indices, kind, bits : as for attention; with `keys` those of the transposed mask, whose
        blocks `rows` and `cols` then count
    """
    return _keys(problem) if problem.keys else _queries(problem)


def _queries(problem: BlockAttentionBackward) -> SparseFunc:
    dtype, acc, block = problem.dtype, problem.accumulator, problem.block
    feat, width, number = problem.feat, problem.width, getattr(T, problem.accumulator)
    zero = tirx.const(0.0, acc)

    @T.prim_func
    def block_attention_dq(
        q: T.handle, k: T.handle, v: T.handle, grad: T.handle, lse: T.handle, delta: T.handle,
        dq: T.handle, scale: number, indptr: T.handle, indices: T.handle, kind: T.handle,
        bits: T.handle, heads: T.int32, rows: T.int32, cols: T.int32,
        blocks: T.int32, kinds: T.int32,
    ) -> None:  # fmt: skip
        H = T.dense_fixed(heads)
        IO = T.dense_fixed(rows)
        JO = T.sparse_variable(IO, (cols, blocks), (indptr, indices))
        II = T.dense_fixed(block)
        JI = T.dense_fixed(block)
        F = T.dense_fixed(feat)
        W = T.dense_fixed(width)
        KO = T.dense_fixed(cols)
        KINDS = T.dense_fixed(kinds)
        WORDS = T.dense_fixed(block // WORD)
        Q = T.match_sparse_buffer(q, (H, IO, II, F), dtype)
        K = T.match_sparse_buffer(k, (H, KO, JI, F), dtype)
        V = T.match_sparse_buffer(v, (H, KO, JI, W), dtype)
        G = T.match_sparse_buffer(grad, (H, IO, II, W), dtype)
        LSE = T.match_sparse_buffer(lse, (H, IO, II), acc)
        DELTA = T.match_sparse_buffer(delta, (H, IO, II), acc)
        DQ = T.match_sparse_buffer(dq, (H, IO, II, F), dtype)
        KIND = T.match_sparse_buffer(kind, (IO, JO), "int32")
        BITS = T.match_sparse_buffer(bits, (KINDS, JI, WORDS), "int16")
        QUERY = T.alloc_sparse_buffer((F, II), acc, "local")
        GRAD = T.alloc_sparse_buffer((W, II), acc, "local")
        SCORE = T.alloc_sparse_buffer((JI, II), acc, "local")
        DSCORE = T.alloc_sparse_buffer((JI, II), acc, "local")
        TOTAL = T.alloc_sparse_buffer((F, II), acc, "local")
        with T.sp_iter([H, IO], "SS", "rows") as [h, io]:
            with T.sp_iter([F, II], "SS", "query") as [f, ii]:
                QUERY[f, ii] = T.cast(Q[h, io, ii, f], acc) * scale
            with T.sp_iter([W, II], "SS", "grad") as [w, ii]:
                GRAD[w, ii] = T.cast(G[h, io, ii, w], acc)
            with T.sp_iter([F, II], "SS", "clear") as [f, ii]:
                TOTAL[f, ii] = zero
            with T.sp_iter([JO], "R", "keys") as [jo]:
                with T.sp_iter([JI, II, F], "SSR", "score") as [ji, ii, f]:
                    with T.init():
                        SCORE[ji, ii] = zero
                    SCORE[ji, ii] = SCORE[ji, ii] + T.cast(K[h, jo, ji, f], acc) * QUERY[f, ii]
                with T.sp_iter([JI, II, W], "SSR", "dweight") as [ji, ii, w]:
                    with T.init():
                        DSCORE[ji, ii] = zero
                    DSCORE[ji, ii] = DSCORE[ji, ii] + T.cast(V[h, jo, ji, w], acc) * GRAD[w, ii]
                with T.sp_iter([JI, II], "SS", "dscore") as [ji, ii]:
                    DSCORE[ji, ii] = T.exp(SCORE[ji, ii] - LSE[h, io, ii]) * (
                        DSCORE[ji, ii] - DELTA[h, io, ii]
                    )
                with T.sp_iter([JI, II], "SS", "hide") as [ji, ii]:
                    if KIND[io, jo] != 0:
                        DSCORE[ji, ii] = T.Select(
                            is_element(BITS[KIND[io, jo], ji, ii // WORD], ii), DSCORE[ji, ii], zero
                        )
                with T.sp_iter([F, II, JI], "SSR", "weigh") as [f, ii, ji]:
                    TOTAL[f, ii] = TOTAL[f, ii] + T.cast(K[h, jo, ji, f], acc) * DSCORE[ji, ii]
            with T.sp_iter([F, II], "SS", "write") as [f, ii]:
                DQ[h, io, ii, f] = T.cast(TOTAL[f, ii] * scale, dtype)

    func, _ = assume(cast(Any, block_attention_dq), "coordinates", buffer="KIND", axis="KINDS")
    return func


def _keys(problem: BlockAttentionBackward) -> SparseFunc:
    """The gradients of K and V; JO, the transposed mask's rows of blocks, are of keys."""
    dtype, acc, block = problem.dtype, problem.accumulator, problem.block
    feat, width, number = problem.feat, problem.width, getattr(T, problem.accumulator)
    zero = tirx.const(0.0, acc)

    @T.prim_func
    def block_attention_dkv(
        q: T.handle, k: T.handle, v: T.handle, grad: T.handle, lse: T.handle, delta: T.handle,
        dk: T.handle, dv: T.handle, scale: number, indptr: T.handle, indices: T.handle,
        kind: T.handle, bits: T.handle, heads: T.int32, rows: T.int32,
        cols: T.int32, blocks: T.int32, kinds: T.int32,
    ) -> None:  # fmt: skip
        H = T.dense_fixed(heads)
        JO = T.dense_fixed(rows)
        IO = T.sparse_variable(JO, (cols, blocks), (indptr, indices))
        II = T.dense_fixed(block)
        JI = T.dense_fixed(block)
        F = T.dense_fixed(feat)
        W = T.dense_fixed(width)
        QO = T.dense_fixed(cols)
        KINDS = T.dense_fixed(kinds)
        WORDS = T.dense_fixed(block // WORD)
        Q = T.match_sparse_buffer(q, (H, QO, II, F), dtype)
        K = T.match_sparse_buffer(k, (H, JO, JI, F), dtype)
        V = T.match_sparse_buffer(v, (H, JO, JI, W), dtype)
        G = T.match_sparse_buffer(grad, (H, QO, II, W), dtype)
        LSE = T.match_sparse_buffer(lse, (H, QO, II), acc)
        DELTA = T.match_sparse_buffer(delta, (H, QO, II), acc)
        DK = T.match_sparse_buffer(dk, (H, JO, JI, F), dtype)
        DV = T.match_sparse_buffer(dv, (H, JO, JI, W), dtype)
        KIND = T.match_sparse_buffer(kind, (JO, IO), "int32")
        BITS = T.match_sparse_buffer(bits, (KINDS, II, WORDS), "int16")
        KEY = T.alloc_sparse_buffer((F, JI), acc, "local")
        VALUE = T.alloc_sparse_buffer((W, JI), acc, "local")
        WEIGHT = T.alloc_sparse_buffer((II, JI), acc, "local")
        DSCORE = T.alloc_sparse_buffer((II, JI), acc, "local")
        KEYS = T.alloc_sparse_buffer((F, JI), acc, "local")
        VALUES = T.alloc_sparse_buffer((W, JI), acc, "local")
        with T.sp_iter([H, JO], "SS", "columns") as [h, jo]:
            with T.sp_iter([F, JI], "SS", "key") as [f, ji]:
                KEY[f, ji] = T.cast(K[h, jo, ji, f], acc) * scale
            with T.sp_iter([W, JI], "SS", "value") as [w, ji]:
                VALUE[w, ji] = T.cast(V[h, jo, ji, w], acc)
            with T.sp_iter([F, JI], "SS", "clear_keys") as [f, ji]:
                KEYS[f, ji] = zero
            with T.sp_iter([W, JI], "SS", "clear_values") as [w, ji]:
                VALUES[w, ji] = zero
            with T.sp_iter([IO], "R", "queries") as [io]:
                with T.sp_iter([II, JI, F], "SSR", "score") as [ii, ji, f]:
                    with T.init():
                        WEIGHT[ii, ji] = zero
                    WEIGHT[ii, ji] = WEIGHT[ii, ji] + T.cast(Q[h, io, ii, f], acc) * KEY[f, ji]
                with T.sp_iter([II, JI], "SS", "weight") as [ii, ji]:
                    WEIGHT[ii, ji] = T.exp(WEIGHT[ii, ji] - LSE[h, io, ii])
                with T.sp_iter([II, JI], "SS", "hide") as [ii, ji]:
                    if KIND[jo, io] != 0:
                        WEIGHT[ii, ji] = T.Select(
                            is_element(BITS[KIND[jo, io], ii, ji // WORD], ji), WEIGHT[ii, ji], zero
                        )
                with T.sp_iter([W, JI, II], "SSR", "add_values") as [w, ji, ii]:
                    VALUES[w, ji] = VALUES[w, ji] + T.cast(G[h, io, ii, w], acc) * WEIGHT[ii, ji]
                with T.sp_iter([II, JI, W], "SSR", "dweight") as [ii, ji, w]:
                    with T.init():
                        DSCORE[ii, ji] = zero
                    DSCORE[ii, ji] = DSCORE[ii, ji] + T.cast(G[h, io, ii, w], acc) * VALUE[w, ji]
                with T.sp_iter([II, JI], "SS", "dscore") as [ii, ji]:
                    DSCORE[ii, ji] = WEIGHT[ii, ji] * (DSCORE[ii, ji] - DELTA[h, io, ii])
                with T.sp_iter([F, JI, II], "SSR", "add_keys") as [f, ji, ii]:
                    KEYS[f, ji] = KEYS[f, ji] + T.cast(Q[h, io, ii, f], acc) * DSCORE[ii, ji]
            with T.sp_iter([F, JI], "SS", "write_keys") as [f, ji]:
                DK[h, jo, ji, f] = T.cast(KEYS[f, ji] * scale, dtype)
            with T.sp_iter([W, JI], "SS", "write_values") as [w, ji]:
                DV[h, jo, ji, w] = T.cast(VALUES[w, ji], dtype)

    func, _ = assume(cast(Any, block_attention_dkv), "coordinates", buffer="KIND", axis="KINDS")
    return func
