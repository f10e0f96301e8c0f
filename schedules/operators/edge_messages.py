"""Values of edges made of the features of their ends.

OUT[e, h, k] = op(L[lhs[e], h, k], R[rhs[e], h, k]) for each edge e; an operand that holds
features of edges is read at e itself. For "dot" OUT[e, h] is the sum over k of the products. Each
operand may lack h or k, along which it is the same for all. (Generalised SDDMM.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.arguments import expect_one_of
from sparsetir.schedules.operators.messages import DIMS, combined, dims
from sparsetir.schedules.operators.problems import Problem, memoized, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.facts import assume

OPS = ("copy_lhs", "copy_rhs", "add", "sub", "mul", "div", "dot")


@dataclass(frozen=True)
class EdgeMessages(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    op : one of OPS
    lhs, rhs : dimensions of the operands, each one of `messages.DIMS`; "" where one is not used
    lhs_at, rhs_at : "node" for an operand that holds features of nodes, else "edge"
    dtype : of operands and result; sums are in float32 (float64 for float64)
    idtype : of the nodes of edges
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

    Its arrays; of the dimensions h and k of the operands those that the problem names:

    lhs, rhs : (nodes, heads, feat), or (nnz, heads, feat) of edges
    lhs_of, rhs_of : (nnz,) the node of each edge, in any order; callers see that there are such
        nodes. Absent for operands that hold features of edges
    out : (nnz, heads, feat), for "dot" (nnz, heads)
    """
    dtype, idtype, acc, op = problem.dtype, problem.idtype, problem.accumulator, problem.op
    size, dot = getattr(T, idtype), op == "dot"
    with_lhs, with_rhs = op != "copy_rhs", op != "copy_lhs"
    lhs_node, rhs_node = problem.lhs_at == "node", problem.rhs_at == "node"
    zero = tirx.const(0.0, dtype)

    def read(array: Any, nodes: Any, kind: str, e: Any, h: Any, k: Any) -> Any:
        if array is None:
            return None
        return T.cast(array[(e if nodes is None else nodes[e], *dims(kind, h, k))], acc)

    @T.prim_func
    def gsddmm(
        lhs: T.handle, rhs: T.handle, out: T.handle, lhs_of: T.handle, rhs_of: T.handle,
        lhs_nodes: size, rhs_nodes: size, nnz: size, heads: size, feat: size,
    ) -> None:  # fmt: skip
        E = T.dense_fixed(nnz, idtype)
        H = T.dense_fixed(heads, idtype)
        K = T.dense_fixed(feat, idtype)
        if with_lhs and lhs_node:
            LN = T.dense_fixed(lhs_nodes, idtype)
            LHS_OF = T.match_sparse_buffer(lhs_of, (E,), idtype)
        if with_rhs and rhs_node:
            RN = T.dense_fixed(rhs_nodes, idtype)
            RHS_OF = T.match_sparse_buffer(rhs_of, (E,), idtype)
        if with_lhs:
            LHS = T.match_sparse_buffer(
                lhs, [LN if lhs_node else E, *dims(problem.lhs, H, K)], dtype
            )
        if with_rhs:
            RHS = T.match_sparse_buffer(
                rhs, [RN if rhs_node else E, *dims(problem.rhs, H, K)], dtype
            )
        OUT = T.match_sparse_buffer(out, (E, H) if dot else (E, H, K), dtype)
        with T.sp_iter([E, H, K], "SSR" if dot else "SSS", "gsddmm") as [e, h, k]:
            left = T.meta_var(
                read(LHS if with_lhs else None, LHS_OF if with_lhs and lhs_node else None,
                     problem.lhs, e, h, k)
            )  # fmt: skip
            right = T.meta_var(
                read(RHS if with_rhs else None, RHS_OF if with_rhs and rhs_node else None,
                     problem.rhs, e, h, k)
            )  # fmt: skip
            if dot:
                with T.init():
                    OUT[e, h] = zero
                OUT[e, h] = T.cast(T.cast(OUT[e, h], acc) + left * right, dtype)
            else:
                OUT[e, h, k] = T.cast(combined(op, left, right), dtype)

    unused = {
        "lhs": not with_lhs,
        "rhs": not with_rhs,
        "lhs_of": not (with_lhs and lhs_node),
        "rhs_of": not (with_rhs and rhs_node),
        "lhs_nodes": not (with_lhs and lhs_node),
        "rhs_nodes": not (with_rhs and rhs_node),
    }
    func = with_parameters(gsddmm, unused)
    for buffer, axis in (("LHS_OF", "LN"), ("RHS_OF", "RN")):
        if any(b.name == buffer for b in func.buffers):
            func, _ = assume(func, "coordinates", buffer=buffer, axis=axis)
    return func
