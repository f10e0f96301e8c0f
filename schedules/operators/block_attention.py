"""Attention over the stored blocks of a mask, in one kernel: scores are never stored as a whole.

OUT[h, i] = sum over the elements j of row i of softmax(scale * Q[h, i] . K[h, j]) * V[h, j]

The blocks of keys of a row of blocks are visited sequentially. For each row i of queries these
running values cover the keys so far:

    TOP[i]       the greatest score
    SUM[i]       sum of exp(score - TOP[i])
    TOTAL[:, i]  sum of exp(score - TOP[i]) * V[j]

A visit computes the greatest score including its own keys, NEXT[i]. Earlier sums were relative to
the old TOP[i], so they are multiplied by FADE[i] = exp(TOP[i] - NEXT[i]). In the end OUT is TOTAL /
SUM, and LSE = TOP + log(SUM), from which gradients recompute the weights. A row without
elements has TOP = LSE = -infinity and gives zeros.

(FlashAttention-2, Dao 2023, algorithm 1, over the blocks of SparseTIR's section 4.3.1.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.arguments import expect, expect_at_least, expect_one_of
from sparsetir.schedules.operators.names import DTYPES
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.facts import assume

# Bits per word of a block's element mask.
WORD = 16


@dataclass(frozen=True)
class BlockAttention(Problem):
    """The part of attention's arguments that a kernel is compiled for.

    block : rows and columns of a block, a multiple of 16
    feat : features of Q and K
    width : features of V and OUT
    dtype : the type of Q, K, V and OUT; scores and sums are float32 (float64 for float64)
    """

    block: int = 64
    feat: int = 64
    width: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        expect(self, "block", self.block > 0 and self.block % WORD == 0, f"a multiple of {WORD}")
        expect_at_least(self, feat=1, width=1)
        expect_one_of(self, dtype=DTYPES)


def is_element(bits: Any, place: Any) -> Any:
    """The expression that bit `place % 16` of a word of a block's element mask is set."""
    return ((T.cast(bits, "int32") >> (place % WORD)) & 1) != 0


@memoized
def program(problem: BlockAttention) -> SparseFunc:
    """The operator as a stage-I function.

    q : (heads, rows, block, feat) ; k : (heads, cols, block, feat)
    v : (heads, cols, block, width) ; out : (heads, rows, block, width)
    lse : (heads, rows, block) in the accumulator's type
    scale : number of that type
    indptr : (rows + 1,) ; indices : (blocks,) columns of blocks, each once in a row
    kind : (blocks,) the index in `bits` of each block's elements, 0 for blocks with all elements;
        callers check its range
    bits : (kinds, block, block / 16) int16: bit ii % 16 of [kind, ji, ii // 16] says whether
        (ii, ji) of a block of this kind is an element; [0] is not read

    `rows` and `cols` count blocks of queries and of keys. Local buffers have the queries of a block
    as their last axis, so that a step does the same for neighbours, whether it sums over features
    or keys.
    """
    dtype, acc, block = problem.dtype, problem.accumulator, problem.block
    feat, width, number = problem.feat, problem.width, getattr(T, problem.accumulator)
    zero, one, least = tirx.const(0.0, acc), tirx.const(1.0, acc), tirx.const(-math.inf, acc)

    @T.prim_func
    def block_attention(
        q: T.handle, k: T.handle, v: T.handle, out: T.handle, lse: T.handle, scale: number,
        indptr: T.handle, indices: T.handle, kind: T.handle, bits: T.handle, heads: T.int32,
        rows: T.int32, cols: T.int32, blocks: T.int32, kinds: T.int32,
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
        OUT = T.match_sparse_buffer(out, (H, IO, II, W), dtype)
        LSE = T.match_sparse_buffer(lse, (H, IO, II), acc)
        KIND = T.match_sparse_buffer(kind, (IO, JO), "int32")
        BITS = T.match_sparse_buffer(bits, (KINDS, JI, WORDS), "int16")
        QUERY = T.alloc_sparse_buffer((F, II), acc, "local")
        SCORE = T.alloc_sparse_buffer((JI, II), acc, "local")
        TOTAL = T.alloc_sparse_buffer((W, II), acc, "local")
        TOP = T.alloc_sparse_buffer((II,), acc, "local")
        NEXT = T.alloc_sparse_buffer((II,), acc, "local")
        FADE = T.alloc_sparse_buffer((II,), acc, "local")
        SUM = T.alloc_sparse_buffer((II,), acc, "local")
        with T.sp_iter([H, IO], "SS", "rows") as [h, io]:
            with T.sp_iter([F, II], "SS", "query") as [f, ii]:
                QUERY[f, ii] = T.cast(Q[h, io, ii, f], acc) * scale
            with T.sp_iter([II], "S", "begin") as [ii]:
                NEXT[ii] = least
                SUM[ii] = zero
            with T.sp_iter([W, II], "SS", "clear") as [w, ii]:
                TOTAL[w, ii] = zero
            with T.sp_iter([JO], "R", "keys") as [jo]:
                T.sp_iter_attr({"ordered": 1})  # each visit updates the running values
                with T.sp_iter([JI, II, F], "SSR", "score") as [ji, ii, f]:
                    with T.init():
                        SCORE[ji, ii] = zero
                    SCORE[ji, ii] = SCORE[ji, ii] + T.cast(K[h, jo, ji, f], acc) * QUERY[f, ii]
                with T.sp_iter([JI, II], "SS", "hide") as [ji, ii]:
                    if KIND[io, jo] != 0:
                        SCORE[ji, ii] = T.Select(
                            is_element(BITS[KIND[io, jo], ji, ii // WORD], ii), SCORE[ji, ii], least
                        )
                with T.sp_iter([II], "S", "before") as [ii]:
                    TOP[ii] = NEXT[ii]
                with T.sp_iter([JI, II], "RS", "top") as [ji, ii]:
                    NEXT[ii] = tirx.max(NEXT[ii], SCORE[ji, ii])
                with T.sp_iter([II], "S", "fade") as [ii]:
                    FADE[ii] = T.Select(NEXT[ii] == least, one, T.exp(TOP[ii] - NEXT[ii]))
                with T.sp_iter([JI, II], "SS", "powers") as [ji, ii]:
                    SCORE[ji, ii] = T.exp(
                        SCORE[ji, ii] - T.Select(NEXT[ii] == least, zero, NEXT[ii])
                    )
                with T.sp_iter([II], "S", "less") as [ii]:
                    SUM[ii] = SUM[ii] * FADE[ii]
                with T.sp_iter([JI, II], "RS", "sum") as [ji, ii]:
                    SUM[ii] = SUM[ii] + SCORE[ji, ii]
                with T.sp_iter([W, II], "SS", "shrink") as [w, ii]:
                    TOTAL[w, ii] = TOTAL[w, ii] * FADE[ii]
                with T.sp_iter([W, II, JI], "SSR", "weigh") as [w, ii, ji]:
                    TOTAL[w, ii] = TOTAL[w, ii] + T.cast(V[h, jo, ji, w], acc) * SCORE[ji, ii]
            with T.sp_iter([II], "S", "lse") as [ii]:
                LSE[h, io, ii] = NEXT[ii] + T.log(SUM[ii])
            with T.sp_iter([W, II], "SS", "write") as [w, ii]:
                OUT[h, io, ii, w] = T.cast(
                    TOTAL[w, ii] / T.Select(SUM[ii] == zero, one, SUM[ii]), dtype
                )

    func, _ = assume(cast(Any, block_attention), "coordinates", buffer="KIND", axis="KINDS")
    return func
