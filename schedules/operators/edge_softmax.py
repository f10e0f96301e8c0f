"""Softmax over the elements of each row, and its gradient.

Y[b, e, h] = exp(X[b, e, h] - top) / total, with the maximum and the sum over the elements e of the
row, for each head: h or b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.arguments import expect_one_of
from sparsetir.schedules.operators.names import SOFTMAX
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer, reduced, visited

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
    dtype, x, y, g = problem.dtype, "X[b, i, j, h]", "Y[b, i, j, h]", "G[b, i, j, h]"
    write = Writer("edge_softmax", problem.idtype)
    write.dense(B="batch", I="m")
    write.variable("J", "I", "nnz", "nnz", "indptr")
    write.dense(H="heads")
    write.buffer("x", "B I J H", dtype)
    write.buffer("out", "B I J H", dtype, "Y")
    write.local(dtype, TOTAL="")
    if problem.backward:
        write.buffer("g", "B I J H", dtype)
        total = reduced("sum", "TOTAL[()]", f"{x} * {g}", dtype, dtype)
        line = f"{y} = {x} * ({g} - TOTAL[()])"
        steps = [*visited("total", "J", "R", total), *visited("write", "J", "S", [line])]
    else:
        write.local(dtype, TOP="", INVERSE="")
        steps = [
            *powers(x, y, dtype),
            f"INVERSE[()] = T.{dtype}(1) / TOTAL[()]",
            *visited("divide", "J", "S", [f"{y} = {y} * INVERSE[()]"]),
        ]
    write.visit("rows", "I B H", "SSS", steps)
    return write.program("x g out indptr batch m nnz heads")


def powers(score: str, power: str, dtype: str) -> list[str]:
    """Lines for a row: the greatest score is TOP, a power exp(score - TOP), and their sum TOTAL."""
    return [
        *visited("top", "J", "R", reduced("max", "TOP[()]", score, dtype, dtype)),
        *visited("powers", "J", "S", [f"{power} = T.exp({score} - TOP[()])"]),
        *visited("total", "J", "R", reduced("sum", "TOTAL[()]", power, dtype, dtype)),
    ]


def _fit(heads: int, feat: int) -> dict[str, Any]:
    sizes = {"batch": 1, "heads": heads}
    return {"problem": EdgeSoftmax(), "features": (heads,), "sizes": sizes, "there": ("x", "out")}


for _name in SOFTMAX:
    register(
        Operator(
            _name, EdgeSoftmax, "softmax over the elements of each row",
            dict.fromkeys(("x", "out"), "nnz heads"), False, None, reductions=(),
            program=program, on="edges", options=("heads",), dtypes=DTYPES,
            function="edge_softmax" if _name == "edge_softmax" else "sparse_softmax", fit=_fit,
        )
    )  # fmt: skip
