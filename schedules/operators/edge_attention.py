"""Attention over the elements of each row in one kernel.

OUT[i, h] = sum over the elements (i, j) of softmax(scale * Q[i, h] . K[j, h]) * V[j, h]: the scores
of a row, their softmax and the weighted sum are computed together while all of it is in cache. A
row without elements gives zeros. (Sparse attention, SparseTIR section 4.3.1.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.operators.edge_softmax import powers
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer, reduced, visited


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

    def at(self, node: str, head: str, feature: str) -> list[str]:
        """The dimensions of an operand, or an element's indices in these."""
        return [head, node, feature] if self.heads_first else [node, head, feature]


@memoized
def program(problem: EdgeAttention) -> SparseFunc:
    """The operator as a stage-I function.

    q : (m, heads, feat) ; k : (n, heads, feat) ; v : (n, heads, width) ; out : (m, heads, width);
        with `heads_first` (heads, m, feat), and so on
    scores : (heads, nnz) in the accumulator's type, a workspace
    scale : number of that type
    indptr : (m + 1,) ; indices : (nnz,) columns in any order
    """
    dtype, acc, score = problem.dtype, problem.accumulator, "SCORES[h, i, j]"
    write = Writer("edge_attention", problem.idtype)
    write.dense(I="m")
    write.variable("J", "I", "n", "nnz", "indptr", "indices")
    write.dense(N="n", H="heads", F="feat", W="width")
    for array, node, feature in (*("qIF", "kNF", "vNW"), ("out", "I", "W")):
        write.buffer(array, problem.at(node, "H", feature), dtype)
    write.buffer("scores", "H I J", acc)
    write.number("scale", acc)
    write.local(acc, TOP="", TOTAL="", INVERSE="")
    query, key, value = (
        write.load(name, problem.at(node, "h", feature), acc)
        for name, node, feature in ("Qif", "Kjf", "Vjw")
    )
    out, one = write.load("OUT", problem.at("i", "h", "w")), f"T.{acc}(1)"
    products = reduced("sum", score, f"{query} * {key} * scale", acc, acc)
    weighted = f"{score} * {value} * INVERSE[()]"
    steps = [
        *visited("score", "J F", "SR", products),
        *powers(score, score, acc),
        f"INVERSE[()] = {one} / T.Select(TOTAL[()] == T.{acc}(0), {one}, TOTAL[()])",
        *visited("weigh", "W J", "SR", reduced("sum", out, weighted, acc, dtype, f"T.{dtype}(0)")),
    ]
    write.visit("rows", "I H", "SS", steps)
    sizes = "m n nnz heads feat width"
    return write.program(f"q k v out scores scale indptr indices {sizes}")


def fit(
    heads: int, feat: int, *, feat_in: int | None = None, scale: float | None = None
) -> dict[str, Any]:
    """The kernel of a call; feat_in : features of queries and keys, by default those of values."""
    of_keys = feat_in or feat
    scale = 1 / math.sqrt(of_keys) if scale is None else float(scale)
    return {
        "problem": EdgeAttention(), "features": (of_keys, feat), "callers": {"feat_in": of_keys},
        "sizes": {"heads": heads, "feat": of_keys, "width": feat, "scale": scale},
        "there": ("q", "k", "v", "out"),
    }  # fmt: skip


ATTENTION = register(
    Operator(
        "attention", EdgeAttention, "attention over the elements of each row",
        {"q": "m heads feat_in", "k": "n heads feat_in", "v": "n heads feat",
         "out": "m heads feat"}, False, None, reductions=(), program=program, on="edges",
        options=("heads", "feat_in", "scale"), fit=fit, scratch=("scores",),
    )
)  # fmt: skip
