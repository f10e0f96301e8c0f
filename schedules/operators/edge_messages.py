"""Values of edges computed from the features of their ends.

OUT[e, h, k] = op(L[lhs[e], h, k], R[rhs[e], h, k]) for each edge e; an operand with features of
edges is indexed by e itself. For "dot" OUT[e, h] is the sum over k of the products. Each operand
may lack h or k, and is then broadcast. (Generalised SDDMM.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect_one_of
from sparsetir.schedules.operators.messages import DIMS, combined, dims
from sparsetir.schedules.operators.names import BINARY
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer, cast, reduced

OPS = ("copy_lhs", "copy_rhs", *BINARY, "dot")


@dataclass(frozen=True)
class EdgeMessages(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    op : one of OPS
    lhs, rhs : dimensions of the operands, each one of `messages.DIMS`; "" for an unused one
    lhs_at, rhs_at : "node" for an operand with features of nodes, else "edge"
    dtype : the type of operands and result; sums are float32 (float64 for float64)
    idtype : the type of the nodes of edges
    """

    op: str = "add"
    lhs: str = "f"
    rhs: str = "f"
    lhs_at: str = "node"
    rhs_at: str = "node"
    dtype: str = "float32"
    idtype: str = "int32"

    def __post_init__(self) -> None:
        ends = ("node", "edge")
        expect_one_of(self, op=OPS, lhs=DIMS, rhs=DIMS, lhs_at=ends, rhs_at=ends)


@memoized
def program(problem: EdgeMessages) -> SparseFunc:
    """The operator as a stage-I function.

    Its arrays, with those of the dimensions h and k that the problem names:
    lhs, rhs : (nodes, heads, feat), or (nnz, heads, feat) for edges
    lhs_of, rhs_of : (nnz,) the node of each edge, in any order; callers check their range. Absent
        for operands with features of edges
    out : (nnz, heads, feat), for "dot" (nnz, heads)
    """
    dtype, acc, op = problem.dtype, problem.accumulator, problem.op
    sides = [x for x in ("lhs", "rhs") if op.removeprefix("copy_") in (x, op)]
    of_nodes = [x for x in sides if getattr(problem, f"{x}_at") == "node"]
    write = Writer("gsddmm", problem.idtype)
    write.dense(E="nnz", H="heads", K="feat")
    for x in of_nodes:
        axis = f"{x[0].upper()}N"
        write.dense(**{axis: f"{x}_nodes"})
        write.buffer(f"{x}_of", "E", problem.idtype)
        write.fact("coordinates", buffer=f"{x.upper()}_OF", axis=axis)
    values = {"lhs": "", "rhs": ""}
    for x in sides:
        axis, at = (f"{x[0].upper()}N", f"{x.upper()}_OF[e]") if x in of_nodes else ("E", "e")
        kind = getattr(problem, x)
        write.buffer(x, [axis, *dims(kind, "H", "K")], dtype)
        values[x] = write.load(x.upper(), [at, *dims(kind, "h", "k")], acc)
    if op == "dot":
        write.buffer("out", "E H", dtype)
        term = combined("mul", **values)
        lines = reduced("sum", "OUT[e, h]", term, acc, dtype, f"T.{dtype}(0)")
    else:
        write.buffer("out", "E H K", dtype)
        lines = [f"OUT[e, h, k] = {cast(combined(op, **values), acc, dtype)}"]
    write.visit("gsddmm", "E H K", "SSR" if op == "dot" else "SSS", lines)
    return write.program("lhs rhs out lhs_of rhs_of lhs_nodes rhs_nodes nnz heads feat")
