"""Messages of edges and their reduction at the targets, on CPUs.

C[i, h, k] = reduce over the elements (i, j) of op(U[j, h, k], E[(i, j), h, k]), where U holds
features of sources, E those of edges, and each of the two may lack h or k, along which it is the
same for all. (Generalised SpMM; message passing with a built-in message and reduction.)

As in :mod:`sparsetir.schedules.templates.spmm`, a tile of features of a row is reduced in
registers, and threads get rows with equal numbers of elements.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from tvm import s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.problems import accumulator, one_of
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.message_tiles import Tile, in_vectors, on_threads, without_guards
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["DIMS", "OPS", "REDUCTIONS", "Messages", "combined", "dims", "program", "schedule"]

# What becomes of the features of a source, a, and of an edge, b.
OPS = ("copy_u", "copy_e", "add", "sub", "mul", "div")
REDUCTIONS = ("sum", "mean", "max", "min")
# Dimensions that an operand may have beside its nodes or edges: heads and features.
DIMS = ("", "h", "f", "hf")


@dataclass(frozen=True)
class Messages:
    """What a kernel is compiled for.

    op : one of OPS
    reduce : one of REDUCTIONS; a row without elements is zero in all of them, and a maximum or
        minimum keeps NaN
    u, e : dimensions of the operands, each one of DIMS; "" where an operand is not used
    dtype : of U, E and C; sums are in float32 (float64 for float64)
    idtype : of the pattern's arrays
    ordered : rows of E are in another order than the elements, which ORDER gives
    arg : for a maximum or minimum: also the place in ORDER of the first element that has it, -1 in
        a row without elements; with `ordered`
    """

    op: str = "mul"
    reduce: str = "sum"
    u: str = "f"
    e: str = ""
    dtype: str = "float32"
    idtype: str = "int32"
    ordered: bool = False
    arg: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("op", OPS), ("reduce", REDUCTIONS), ("u", DIMS), ("e", DIMS)):
            one_of("Messages", name, getattr(self, name), allowed)
        if self.arg and (self.reduce not in ("max", "min") or not self.ordered):
            raise ValueError(
                "Messages: argument 'arg': expected False without 'ordered' and a maximum or "
                "minimum, got True"
            )

    @property
    def accumulator(self) -> str:
        """The type that sums are in."""
        return accumulator(self.dtype)


def combined(op: str, a: Any, b: Any) -> Any:
    """The expression of a message; for a copy of one operand the other may be None."""
    if op in ("copy_u", "copy_lhs"):
        return a
    if op in ("copy_e", "copy_rhs"):
        return b
    return {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "div": lambda: a / b,
    }[op]()


def dims(kind: str, h: Any, k: Any) -> list[Any]:
    """Those of a head and a feature that an operand has, by one of DIMS."""
    return [*([h] if "h" in kind else []), *([k] if "f" in kind else [])]


def program(problem: Messages, config: Tile) -> SparseFunc:
    """The stage-I function, over blocks of rows.

    Its arrays; of the dimensions h and k of U and E those that the problem names:

    u : (n, heads, feat) ; e : (nnz, heads, feat) ; out : (m, heads, feat)
    arg : (m, heads, feat) of the index type, with `problem.arg`
    row : (m,) in the accumulator's type; for a mean what a row's sum is multiplied with, for a
        maximum or minimum what it begins with: an infinity, and 0 in a row without elements; absent
        for a sum
    block_ptr : (blocks + 1,) first row of each block
    indptr : (m + 1,) ; indices : (nnz,) columns in any order; absent without U
    order : (nnz,) row of E of each element, with `problem.ordered`

    feat is rest + config.tile.
    """
    dtype, idtype, acc, op, reduce = (
        problem.dtype, problem.idtype, problem.accumulator, problem.op, problem.reduce,
    )  # fmt: skip
    size, ordered, arg = getattr(T, idtype), problem.ordered, problem.arg
    with_u, with_e = op != "copy_e", op != "copy_u"
    extremum = reduce in ("max", "min")
    tile, lanes, vectors, place = config.tile, config.lanes, config.vectors, config.place
    zero, nowhere = tirx.const(0.0, acc), tirx.const(-1, idtype)

    def stored(o: Any, i: Any, j: Any, edge: Any) -> list[Any]:
        return [edge] if ordered else [o, i, j]

    def place_of(load: Any, *at: Any) -> list[Any]:
        return [load[at]] if ordered else list(at)

    def wins(term: Any, total: Any) -> Any:
        better = term > total if reduce == "max" else term < total
        return tirx.any(better, tirx.isnan(term))

    def reduced(total: Any, term: Any) -> Any:
        return tirx.Select(wins(term, total), term, total) if extremum else total + term

    @T.prim_func
    def gspmm(
        u: T.handle, e: T.handle, out: T.handle, arg_out: T.handle, row: T.handle,
        block_ptr: T.handle, indptr: T.handle, indices: T.handle, order: T.handle,
        blocks: size, m: size, n: size, nnz: size, heads: size, tiles: size, rest: size,
    ) -> None:  # fmt: skip
        O = T.dense_fixed(blocks, idtype)
        I = T.dense_variable(O, (m, m), block_ptr, idtype)
        if with_u:
            J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
            N = T.dense_fixed(n, idtype)
        else:
            J = T.dense_variable(I, (nnz, nnz), indptr, idtype)
        EDGE = T.dense_fixed(nnz, idtype)
        H = T.dense_fixed(heads, idtype)
        P = T.dense_fixed(tiles, idtype)
        K = T.dense_fixed(rest + tile, idtype)
        V = T.dense_fixed(vectors, idtype)
        L = T.dense_fixed(lanes, idtype)
        if with_u:
            U = T.match_sparse_buffer(u, [N, *dims(problem.u, H, K)], dtype)
        if with_e:
            E = T.match_sparse_buffer(e, [*stored(O, I, J, EDGE), *dims(problem.e, H, K)], dtype)
        if ordered:
            ORDER = T.match_sparse_buffer(order, (O, I, J), idtype)
        C = T.match_sparse_buffer(out, (O, I, H, K), dtype)
        if arg:
            ARG = T.match_sparse_buffer(arg_out, (O, I, H, K), idtype)
            WINNER = T.alloc_sparse_buffer((V, L), idtype, "local")
        if reduce != "sum":
            ROW = T.match_sparse_buffer(row, (O, I), acc)
        ACC = T.alloc_sparse_buffer((V, L), acc, "local")
        with T.sp_iter([O], "S", "outer") as [o]:
            with T.sp_iter([I, H, P], "SSS", "rows") as [i, h, p]:
                with T.sp_iter([J, V, L], "RSS", "reduce") as [j, v, l]:
                    with T.init():
                        ACC[v, l] = ROW[o, i] if extremum else zero
                        if arg:
                            WINNER[v, l] = nowhere
                    term = T.meta_var(
                        combined(
                            op,
                            T.cast(U[(j, *dims(problem.u, h, place(p, v, l, rest)))], acc)
                            if with_u
                            else None,
                            T.cast(
                                E[
                                    (
                                        *place_of(ORDER if ordered else None, o, i, j),
                                        *dims(problem.e, h, place(p, v, l, rest)),
                                    )
                                ],
                                acc,
                            )
                            if with_e
                            else None,
                        )
                    )
                    if arg:
                        WINNER[v, l] = tirx.Select(
                            tirx.any(wins(term, ACC[v, l]), WINNER[v, l] < 0),
                            ORDER[o, i, j],
                            WINNER[v, l],
                        )
                    ACC[v, l] = reduced(ACC[v, l], term)
                with T.sp_iter([V, L], "SS", "write") as [v, l]:
                    C[o, i, h, place(p, v, l, rest)] = T.cast(
                        ACC[v, l] * ROW[o, i] if reduce == "mean" else ACC[v, l], dtype
                    )
                if arg:
                    with T.sp_iter([V, L], "SS", "write_arg") as [v, l]:
                        ARG[o, i, h, place(p, v, l, rest)] = WINNER[v, l]

    unused = {
        "row": reduce == "sum",
        "u": not with_u,
        "n": not with_u,
        "indices": not with_u,
        "e": not with_e,
        "order": not ordered,
        "arg_out": not arg,
    }
    func = cast(Any, gspmm)
    return func.replace(params=[p for p in func.params if not unused.get(p.name)])


def schedule(
    func: tirx.PrimFunc, problem: Messages, config: Tile, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage-II form of :func:`program`; the function given is left as it is."""
    func = without_guards(func)
    if target is not None and is_gpu(target):
        return on_threads(func, "outer0")
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    if config.parallel:
        run_in_parallel(sch, sch.get_loops(sch.get_sblock("outer0"))[-1], "parallel")
    reduce = sch.get_sblock("reduce0")
    for block in (reduce, sch.get_sblock("write0")):
        in_vectors(sch, block)
    if problem.arg:
        in_vectors(sch, sch.get_sblock("write_arg0"))
    in_vectors(sch, sch.decompose_reduction(reduce, sch.get_loops(reduce)[0]))
    return apply_kinds(sch.mod["main"])
