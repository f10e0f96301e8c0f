"""Dense times dense where a matrix stores blocks, for all heads of a batch.

OUT[h, io, jo, ii, ji] = sum over f of X[h, io, ii, f] * Y[h, jo, ji, f]: scores of attention with a
mask in blocks, and gradients of weights in blocks. (SparseTIR, section 4.3.1.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect_at_least, expect_one_of
from sparsetir.schedules.operators.names import DTYPES
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer


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
    dtype = problem.dtype
    write = Writer("block_sddmm")
    write.dense(H="heads", IO="mb")
    write.variable("JO", "IO", "nb", "blocks", "indptr", "indices")
    write.dense(II=problem.rows, JI=problem.cols, KO="nb", F=problem.feat)
    write.buffer("x", "H IO II F", dtype)
    write.buffer("y", "H KO JI F", dtype)
    write.buffer("out", "H IO JO II JI", dtype)
    elements = {"OUT": "H IO JO II JI", "X": "H IO II F", "Y": "H JO JI F"}
    write.products("sddmm", "H IO JO II JI F", "SSSSSR", elements, problem.accumulator)
    return write.program("x y out indptr indices heads mb nb blocks")
