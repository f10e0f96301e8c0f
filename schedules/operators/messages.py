"""Messages of edges and their reduction at the targets.

C[i, h, k] = reduce over the elements (i, j) of op(U[j, h, k], E[(i, j), h, k]), where U holds
features of sources, E those of edges, and each of the two may lack h or k, along which it is the
same for all. (Generalised SpMM; message passing with a built-in message and reduction.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.reductions import EXTREMA, REDUCERS, REDUCTIONS
from sparsetir.schedules.arguments import expect, expect_one_of
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, memoized, reduced, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.facts import assume

# What becomes of the features of a source, a, and of an edge, b.
OPS = ("copy_u", "copy_e", "add", "sub", "mul", "div")
# Dimensions that an operand may have beside its nodes or edges: heads and features.
DIMS = ("", "h", "f", "hf")


@dataclass(frozen=True)
class Messages(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    op : one of OPS
    reduce : one of REDUCTIONS; a row without elements is zero in all of them, and a maximum or
        minimum keeps NaN
    u, e : dimensions of the operands, each one of DIMS; "" where an operand is not used
    dtype : of U, E and C; sums are in float32 (float64 for float64)
    idtype : of the pattern's arrays
    ordered : rows of E are in another order than the elements, which ORDER gives
    arg : for a maximum or minimum: also the least place in ORDER of an element that has it, the
        greatest number of its type in a row without elements; with `ordered`; of bfloat16 only for
        copies
    given : with `arg`: C is given, and whose each element is is all that is looked for
    """

    op: str = "mul"
    reduce: str = "sum"
    u: str = "f"
    e: str = ""
    dtype: str = "float32"
    idtype: str = "int32"
    ordered: bool = False
    arg: bool = False
    given: bool = False

    def __post_init__(self) -> None:
        expect_one_of(self, op=OPS, reduce=REDUCTIONS, u=DIMS, e=DIMS)
        extremum = self.reduce in EXTREMA and self.ordered
        wanted = "False without 'ordered' and a maximum or minimum"
        expect(self, "arg", extremum or not self.arg, wanted)
        expect(self, "given", self.arg or not self.given, "False without 'arg'")
        # TVM does not round to bfloat16 what is only compared.
        rounds = self.dtype != "bfloat16" or self.op.startswith("copy")
        wanted = f"no bfloat16 with 'arg' and {self.op!r}"
        expect(self, "dtype", rounds or not self.arg, wanted)


def combined(op: str, a: Any, b: Any) -> Any:
    """The expression of a message; for a copy of one operand the other may be None."""
    if op in ("copy_u", "copy_lhs"):
        return a
    if op in ("copy_e", "copy_rhs"):
        return b
    return {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "div": lambda: a / b}[
        op
    ]()


def dims(kind: str, h: Any, k: Any) -> list[Any]:
    """The dimensions of heads and features that an operand has, by one of DIMS."""
    return [*([h] if "h" in kind else []), *([k] if "f" in kind else [])]


@memoized
def program(problem: Messages) -> SparseFunc:
    """The operator as a stage-I function.

    Its arrays; of the dimensions h and k of U and E those that the problem names:

    u : (n, heads, feat) ; e : (nnz, heads, feat) ; out : (m, heads, feat), only read if given
    arg_out : (m, heads, feat) of the index type, with `problem.arg`
    indptr : (m + 1,) ; indices : (nnz,) columns in any order; absent without U
    order : (nnz,) row of E of each element, with `problem.ordered`; callers see that there is one
    row : (m,) computed, in the accumulator's type; for a mean what terms are multiplied with, for a
        maximum or minimum what rows begin with: an infinity, and 0 without elements; absent for a
        sum, and where the result is given
    """
    dtype, idtype, acc, op, reduce = (
        problem.dtype, problem.idtype, problem.accumulator, problem.op, problem.reduce,
    )  # fmt: skip
    size, ordered, arg = getattr(T, idtype), problem.ordered, problem.arg
    with_u, with_e = op != "copy_e", op != "copy_u"
    with_row = REDUCERS[reduce].row is not None and not problem.given
    scaled = REDUCERS[reduce].is_scaled
    zero, nowhere = tirx.const(0.0, dtype), tirx.max_value(idtype)

    def message(u: Any, e: Any, order: Any, i: Any, h: Any, j: Any, k: Any) -> Any:
        place = [i, j] if order is None else [order[i, j]]
        a = None if u is None else T.cast(u[(j, *dims(problem.u, h, k))], acc)
        b = None if e is None else T.cast(e[(*place, *dims(problem.e, h, k))], acc)
        return combined(op, a, b)

    def found(value: Any, extremum: Any, place: Any) -> Any:
        """The place of a value that is the extremum, which is NaN where one of them is."""
        # Not by isnan, which TVM has no vectors of.
        inf = tirx.const(float("inf"), dtype)
        nan = tirx.Select(value <= inf, nowhere, place)
        return tirx.Select(value == extremum, place, nan)

    @T.prim_func
    def gspmm(
        u: T.handle, e: T.handle, out: T.handle, arg_out: T.handle, indptr: T.handle,
        indices: T.handle, order: T.handle, m: size, n: size, nnz: size, heads: size, feat: size,
        row: T.handle,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        if with_u:
            J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
            N = T.dense_fixed(n, idtype)
        else:
            J = T.dense_variable(I, (nnz, nnz), indptr, idtype)
        H = T.dense_fixed(heads, idtype)
        K = T.dense_fixed(feat, idtype)
        if with_u:
            U = T.match_sparse_buffer(u, [N, *dims(problem.u, H, K)], dtype)
        if ordered:
            EDGE = T.dense_fixed(nnz, idtype)
            ORDER = T.match_sparse_buffer(order, (I, J), idtype)
        if with_e:
            E = T.match_sparse_buffer(
                e, [*([EDGE] if ordered else [I, J]), *dims(problem.e, H, K)], dtype
            )
        C = T.match_sparse_buffer(out, (I, H, K), dtype)
        if arg:
            ARG = T.match_sparse_buffer(arg_out, (I, H, K), idtype)
        if with_row:
            ROW = T.match_sparse_buffer(row, (I,), acc)
        if not problem.given:
            with T.sp_iter([I, H, J, K], "SSRS", "gspmm") as [i, h, j, k]:
                with T.init():
                    C[i, h, k] = T.cast(ROW[i], dtype) if reduce in EXTREMA else zero
                term = T.meta_var(
                    message(U if with_u else None, E if with_e else None,
                            ORDER if ordered else None, i, h, j, k)
                )  # fmt: skip
                C[i, h, k] = T.cast(
                    reduced(reduce, T.cast(C[i, h, k], acc), term * ROW[i] if scaled else term),
                    dtype,
                )
        if arg:
            with T.sp_iter([I, H, J, K], "SSRS", "find") as [i, h, j, k]:
                with T.init():
                    ARG[i, h, k] = nowhere
                value = T.meta_var(
                    T.cast(
                        message(U if with_u else None, E if with_e else None, ORDER, i, h, j, k),
                        dtype,
                    )
                )
                ARG[i, h, k] = T.min(ARG[i, h, k], found(value, C[i, h, k], ORDER[i, j]))

    unused = {
        "row": not with_row,
        "u": not with_u,
        "n": not with_u,
        "indices": not with_u,
        "e": not with_e,
        "order": not ordered,
        "arg_out": not arg,
    }
    func = with_parameters(gspmm, unused, reduce)
    if ordered and with_e:
        func, _ = assume(func, "coordinates", buffer="ORDER", axis="EDGE")
    return func


def fit(
    heads: int, feat: int, *, kind: str, reduce: str, edge_feat: int | None = None
) -> dict[str, Any]:
    """The kernel of a call on u (n, heads, feat) and e (nnz, heads, edge_feat).

    kind : one of OPS
    edge_feat : None for values of the matrix in the place of e
    """
    per_edge = kind == "copy_e" or (kind != "copy_u" and edge_feat is not None)
    same = edge_feat is not None and edge_feat < feat  # for all features of a head
    kernel_heads = heads if same else 1  # of the kernel, which else takes heads for features
    both = heads * feat // kernel_heads
    h, f = "h" * (kernel_heads > 1), "f" * (both > 1)
    u, e = "" if kind == "copy_e" else h + f, h + f * (per_edge and not same)
    edge = "e" if per_edge else "a"
    read = {"copy_u": ("u",), "copy_e": (edge,)}.get(kind, ("u", edge))
    return {
        "problem": Messages(kind, reduce, u, e), "features": (both,), "there": (*read, "out"),
        "sizes": {"heads": kernel_heads, "feat": both}, "callers": {"f": edge_feat or feat},
    }  # fmt: skip


MESSAGES = register(
    Operator(
        "messages", Messages, "messages of edges, reduced at rows",
        {"u": "nhk", "e": "ehf", "out": "mhk"}, True, None, program=program, on="edges",
        options=("heads", "reduce", "edge_feat"), function="gspmm", fit=fit,
    )
)  # fmt: skip
