"""Values of edges made of the features of their ends, on CPUs.

OUT[e, h, k] = op(L[lhs[e], h, k], R[rhs[e], h, k]) for each edge e; an operand that holds
features of edges is read at e itself. For "dot" OUT[e, h] is the sum over k of the products. Each
operand may lack h or k, along which it is the same for all. (Generalised SDDMM.)

Edges come in any order, and threads get equal numbers of them.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from tvm import s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.messages import DIMS, combined, dims
from sparsetir.schedules.operators.problems import accumulator, one_of
from sparsetir.schedules.passes.lane_sums import add_lanes
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.message_tiles import (
    Tile,
    in_vectors,
    on_threads,
    without_guards,
)
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["OPS", "EdgeMessages", "program", "schedule"]

OPS = ("copy_lhs", "copy_rhs", "add", "sub", "mul", "div", "dot")


@dataclass(frozen=True)
class EdgeMessages:
    """What a kernel is compiled for.

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
        for name, allowed in (
            ("op", OPS), ("lhs", DIMS), ("rhs", DIMS),
            ("lhs_at", ("node", "edge")), ("rhs_at", ("node", "edge")),
        ):  # fmt: skip
            one_of("EdgeMessages", name, getattr(self, name), allowed)

    @property
    def accumulator(self) -> str:
        """The type that sums are in."""
        return accumulator(self.dtype)


def program(problem: EdgeMessages, config: Tile) -> SparseFunc:
    """The stage-I function.

    Its arrays; of the dimensions h and k of the operands those that the problem names:

    lhs, rhs : (nodes, heads, feat), or (nnz, heads, feat) of edges
    lhs_of, rhs_of : (nnz,) the node of each edge; absent for operands that hold features of edges
    out : (nnz, heads, feat), for "dot" (nnz, heads)

    feat is rest + config.tile.
    """
    dtype, idtype, acc, op = problem.dtype, problem.idtype, problem.accumulator, problem.op
    size, dot = getattr(T, idtype), op == "dot"
    with_lhs, with_rhs = op != "copy_rhs", op != "copy_lhs"
    lhs_node, rhs_node = problem.lhs_at == "node", problem.rhs_at == "node"
    tile, lanes, vectors, place = config.tile, config.lanes, config.vectors, config.place
    zero = tirx.const(0.0, acc)

    def read(array: Any, nodes: Any, kind: str, e: Any, h: Any, k: Any) -> Any:
        if array is None:
            return None
        return T.cast(array[(e if nodes is None else nodes[e], *dims(kind, h, k))], acc)

    def once(value: Any, p: Any, v: Any, lane: Any, rest: Any) -> Any:
        """Zero in a last tile where the one before has it too."""
        if tile == 1:
            return value
        return T.Select(place(p, v, lane, rest) >= p * tile, value, zero)

    @T.prim_func
    def gsddmm(
        lhs: T.handle, rhs: T.handle, out: T.handle, lhs_of: T.handle, rhs_of: T.handle,
        lhs_nodes: size, rhs_nodes: size, nnz: size, heads: size, tiles: size, rest: size,
    ) -> None:  # fmt: skip
        E = T.dense_fixed(nnz, idtype)
        H = T.dense_fixed(heads, idtype)
        P = T.dense_fixed(tiles, idtype)
        K = T.dense_fixed(rest + tile, idtype)
        V = T.dense_fixed(vectors, idtype)
        L = T.dense_fixed(lanes, idtype)
        ONE = T.dense_fixed(1, idtype)
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
        if dot:
            PARTS = T.alloc_sparse_buffer((ONE, L), acc, "local")
            SUM = T.alloc_sparse_buffer((ONE,), acc, "local")
            with T.sp_iter([E, H], "SS", "edges") as [e, h]:
                with T.sp_iter([ONE, P, V, L], "SRRS", "parts") as [g, p, v, l]:
                    with T.init():
                        PARTS[g, l] = zero
                    PARTS[g, l] = PARTS[g, l] + once(
                        read(LHS, LHS_OF if lhs_node else None, problem.lhs, e, h,
                             place(p, v, l, rest))
                        * read(RHS, RHS_OF if rhs_node else None, problem.rhs, e, h,
                               place(p, v, l, rest)),
                        p, v, l, rest,
                    )  # fmt: skip
                with T.sp_iter([ONE, L], "SR", "sums") as [g, l]:
                    with T.init():
                        SUM[g] = zero
                    SUM[g] = SUM[g] + PARTS[g, l]
                with T.sp_iter([ONE], "S", "write") as [g]:
                    OUT[e, h] = T.cast(SUM[g], dtype)
        else:
            with T.sp_iter([E, H, P], "SSS", "edges") as [e, h, p]:
                with T.sp_iter([V, L], "SS", "write") as [v, l]:
                    OUT[e, h, place(p, v, l, rest)] = T.cast(
                        combined(
                            op,
                            read(LHS if with_lhs else None,
                                 LHS_OF if with_lhs and lhs_node else None,
                                 problem.lhs, e, h, place(p, v, l, rest)),
                            read(RHS if with_rhs else None,
                                 RHS_OF if with_rhs and rhs_node else None,
                                 problem.rhs, e, h, place(p, v, l, rest)),
                        ),
                        dtype,
                    )  # fmt: skip

    unused = {
        "lhs": not with_lhs,
        "rhs": not with_rhs,
        "lhs_of": not (with_lhs and lhs_node),
        "rhs_of": not (with_rhs and rhs_node),
        "lhs_nodes": not (with_lhs and lhs_node),
        "rhs_nodes": not (with_rhs and rhs_node),
    }
    func = cast(Any, gsddmm)
    return func.replace(params=[p for p in func.params if not unused.get(p.name)])


def schedule(
    func: tirx.PrimFunc, problem: EdgeMessages, config: Tile, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage-II form of :func:`program`; the function given is left as it is."""
    func = without_guards(func)
    if target is not None and is_gpu(target):
        return on_threads(func, "edges0")
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    if config.parallel:
        run_in_parallel(sch, sch.get_loops(sch.get_sblock("edges0"))[0], "parallel")
    if problem.op != "dot":
        in_vectors(sch, sch.get_sblock("write0"))
        return apply_kinds(sch.mod["main"])
    parts = sch.get_sblock("parts0")
    in_vectors(sch, parts)
    init = sch.decompose_reduction(parts, sch.get_loops(parts)[1])
    sch.vectorize(sch.get_loops(init)[-1])
    func = sch.mod["main"]
    return apply_kinds(add_lanes(func, "sums0") if config.lanes > 1 else func)
