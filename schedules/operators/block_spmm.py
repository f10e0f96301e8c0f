"""Sparse times dense where the matrices of all heads of a batch store the same blocks.

OUT[h, io, ii, k] = sum over the blocks jo of row io, and over ji, of A[h, io, jo, ii, ji] *
B[h, jo, ji, k]: weights of attention with a mask in blocks, times values. (SparseTIR, section
4.3.1.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.arguments import expect_at_least, expect_one_of
from sparsetir.schedules.operators.names import DTYPES
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc


@dataclass(frozen=True)
class BlockSpmm(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    rows, cols : of a block
    dtype : of A, B and OUT; sums are in float32 (float64 for float64)
    """

    rows: int = 32
    cols: int = 32
    dtype: str = "float16"

    def __post_init__(self) -> None:
        expect_at_least(self, rows=1, cols=1)
        expect_one_of(self, dtype=DTYPES)


@memoized
def program(problem: BlockSpmm) -> SparseFunc:
    """The operator as a stage-I function.

    a : (heads * blocks, rows, cols), by heads, then in the order of the stored blocks
    b : (heads, nb, cols, feat) ; out : (heads, mb, rows, feat)
    indptr : (mb + 1,) ; indices : (blocks,) columns of blocks, each once in a row
    """
    dtype, acc, rows, cols = problem.dtype, problem.accumulator, problem.rows, problem.cols
    zero = tirx.const(0.0, dtype)

    @T.prim_func
    def block_spmm(
        a: T.handle, b: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        heads: T.int32, mb: T.int32, nb: T.int32, blocks: T.int32, feat: T.int32,
    ) -> None:  # fmt: skip
        H = T.dense_fixed(heads)
        IO = T.dense_fixed(mb)
        JO = T.sparse_variable(IO, (nb, blocks), (indptr, indices))
        II = T.dense_fixed(rows)
        JI = T.dense_fixed(cols)
        NO = T.dense_fixed(nb)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (H, IO, JO, II, JI), dtype)
        B = T.match_sparse_buffer(b, (H, NO, JI, K), dtype)
        OUT = T.match_sparse_buffer(out, (H, IO, II, K), dtype)
        with T.sp_iter([H, IO, JO, II, JI, K], "SSRSRS", "spmm") as [h, io, jo, ii, ji, k]:
            with T.init():
                OUT[h, io, ii, k] = zero
            OUT[h, io, ii, k] = T.cast(
                T.cast(OUT[h, io, ii, k], acc)
                + T.cast(A[h, io, jo, ii, ji], acc) * T.cast(B[h, jo, ji, k], acc),
                dtype,
            )

    return cast(Any, block_spmm)
