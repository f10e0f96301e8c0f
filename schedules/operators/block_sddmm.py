"""Dense times dense where a matrix stores blocks, for all heads of a batch.

OUT[h, io, jo, ii, ji] = sum over f of X[h, io, ii, f] * Y[h, jo, ji, f]: scores of attention with a
mask in blocks, and gradients of weights in blocks. (SparseTIR, section 4.3.1.)
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
class BlockSddmm(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    rows, cols : of a block
    feat : features of X and Y
    dtype : of X, Y and OUT; sums are in float32 (float64 for float64)
    """

    rows: int = 32
    cols: int = 32
    feat: int = 64
    dtype: str = "float16"

    def __post_init__(self) -> None:
        expect_at_least(self, rows=1, cols=1, feat=1)
        expect_one_of(self, dtype=DTYPES)


@memoized
def program(problem: BlockSddmm) -> SparseFunc:
    """The operator as a stage-I function.

    x : (heads, mb, rows, feat) ; y : (heads, nb, cols, feat)
    out : (heads * blocks, rows, cols), by heads, then in the order of the stored blocks
    indptr : (mb + 1,) ; indices : (blocks,) columns of blocks, each once in a row
    """
    dtype, acc = problem.dtype, problem.accumulator
    rows, cols, feat = problem.rows, problem.cols, problem.feat
    zero = tirx.const(0.0, dtype)

    @T.prim_func
    def block_sddmm(
        x: T.handle, y: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        heads: T.int32, mb: T.int32, nb: T.int32, blocks: T.int32,
    ) -> None:  # fmt: skip
        H = T.dense_fixed(heads)
        IO = T.dense_fixed(mb)
        JO = T.sparse_variable(IO, (nb, blocks), (indptr, indices))
        II = T.dense_fixed(rows)
        JI = T.dense_fixed(cols)
        KO = T.dense_fixed(nb)
        F = T.dense_fixed(feat)
        X = T.match_sparse_buffer(x, (H, IO, II, F), dtype)
        Y = T.match_sparse_buffer(y, (H, KO, JI, F), dtype)
        OUT = T.match_sparse_buffer(out, (H, IO, JO, II, JI), dtype)
        with T.sp_iter([H, IO, JO, II, JI, F], "SSSSSR", "sddmm") as [h, io, jo, ii, ji, f]:
            with T.init():
                OUT[h, io, jo, ii, ji] = zero
            OUT[h, io, jo, ii, ji] = T.cast(
                T.cast(OUT[h, io, jo, ii, ji], acc)
                + T.cast(X[h, io, ii, f], acc) * T.cast(Y[h, jo, ji, f], acc),
                dtype,
            )

    return cast(Any, block_sddmm)
