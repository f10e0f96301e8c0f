"""Messages of edges and their reduction at the targets.

C[i, h, k] = reduce over the elements (i, j) of op(U[j, h, k], E[(i, j), h, k]), where U holds
features of sources, E those of edges, and each of the two may lack h or k, and is then broadcast.
(Generalised SpMM; message passing with a built-in message and reduction.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from sparsetir.reductions import EXTREMA, REDUCERS
from sparsetir.schedules.arguments import expect, expect_one_of
from sparsetir.schedules.operators.names import BINARY
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, memoized, reduce_at_rows
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer, cast

# Messages, from the features a of a source and b of an edge.
OPS = ("copy_u", "copy_e", *BINARY)
# Dimensions that an operand may have besides its nodes or edges: heads and features.
DIMS = ("", "h", "f", "hf")
PARAMETERS = "u e y g out arg_out indptr indices order m n nnz heads feat row"


@dataclass(frozen=True)
class Messages(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    op : one of OPS
    reduce : one of REDUCERS; a row without elements is zero in all of them, and a maximum or
        minimum keeps NaN
    u, e : dimensions of the operands, each one of DIMS; "" for an unused operand
    dtype : the type of U, E and C; sums are float32 (float64 for float64)
    idtype : the type of the pattern's arrays
    ordered : whether rows of E are in another order than the elements, given by ORDER
    arg : for a maximum or minimum: also compute the least place in ORDER of an element that attains
        it, the greatest number of its type in a row without elements; with `ordered`; for bfloat16
        only for copies
    backward : the gradients of messages instead, (nnz, heads, feat), given those of their reduction
        in steps, without `ordered`
    """

    op: str = "mul"
    reduce: str = "sum"
    u: str = "f"
    e: str = ""
    dtype: str = "float32"
    idtype: str = "int32"
    ordered: bool = False
    arg: bool = False
    backward: bool = False

    def __post_init__(self) -> None:
        expect_one_of(self, op=OPS, reduce=REDUCERS, u=DIMS, e=DIMS)
        extremum = self.reduce in EXTREMA and self.ordered
        wanted = "False without 'ordered' and a maximum or minimum"
        expect(self, "arg", extremum or not self.arg, wanted)
        # TVM does not round values to bfloat16 that are only compared.
        rounds = self.dtype != "bfloat16" or self.op.startswith("copy")
        wanted = f"no bfloat16 with 'arg' and {self.op!r}"
        expect(self, "dtype", rounds or not self.arg, wanted)


def combined(op: str, lhs: str, rhs: str) -> str:
    """The text of a message; for a copy of one operand the other is empty."""
    return f"{lhs} {BINARY[op]} {rhs}" if op in BINARY else lhs or rhs


def dims(kind: str, h: str, k: str) -> list[str]:
    """The dimensions of heads and features that an operand has, by one of DIMS."""
    return [*([h] if "h" in kind else []), *([k] if "f" in kind else [])]


@memoized
def program(problem: Messages) -> SparseFunc:
    """The operator as a stage-I function.

    Its arrays, with those of the dimensions h and k of U and E that the problem names:

    u : (n, heads, feat) ; e : (nnz, heads, feat) ; out : (m, heads, feat)
    arg_out : (m, heads, feat) of the index type, with `problem.arg`
    indptr : (m + 1,) ; indices : (nnz,) columns in any order; absent without U
    order : (nnz,) row of E of each element, with `problem.ordered`; callers check its range
    row : (m,) computed, in the accumulator's type; for a mean the factors of terms, for a maximum
        or minimum the initial values of rows: an infinity, and 0 without elements; absent for a
        sum
    """
    dtype, acc, op = problem.dtype, problem.accumulator, problem.op
    u, e, place, edges = "", "", "i, j", ["I", "J"]
    write = Writer("gspmm", problem.idtype)
    write.dense(I="m")
    if op != "copy_e":
        write.variable("J", "I", "n", "nnz", "indptr", "indices")
        write.dense(N="n")
    else:
        write.variable("J", "I", "nnz", "nnz", "indptr")
    write.dense(H="heads", K="feat")
    if op != "copy_e":
        write.buffer("u", ["N", *dims(problem.u, "H", "K")], dtype)
        u = write.load("U", ["j", *dims(problem.u, "h", "k")], acc)
    if problem.ordered:
        write.dense(EDGE="nnz")
        write.buffer("order", "I J", problem.idtype)
        place, edges = "ORDER[i, j]", ["EDGE"]
    if op != "copy_u":
        write.buffer("e", [*edges, *dims(problem.e, "H", "K")], dtype)
        e = write.load("E", [place, *dims(problem.e, "h", "k")], acc)
        if problem.ordered:
            write.fact("coordinates", buffer="ORDER", axis="EDGE")
    message = combined(op, u, e)
    if problem.backward:
        write.buffer("out", "I J H K", dtype)
        for name in ("y", "g"):
            write.buffer(name, "I H K", dtype)
        line = f"OUT[i, j, h, k] = gradient({message}, Y[i, h, k]) * G[i, h, k]"
        write.visit("gspmm", "I H J K", "SSSS", [line])
        steps = REDUCERS[problem.reduce].steps
        assert steps is not None
        return write.program(PARAMETERS, gradient=partial(steps.gradient, T))
    write.buffer("out", "I H K", dtype, "C")
    if problem.arg:
        write.buffer("arg_out", "I H K", problem.idtype, "ARG")
    at_rows = "C[i, h, k]", message, acc, dtype
    names = reduce_at_rows(write, "gspmm", "I H", "K", problem.reduce, *at_rows)
    if problem.arg:
        # NaN is found without isnan, which TVM does not vectorise.
        value, most = cast(f"({message})", acc, dtype), f'T.max_value("{problem.idtype}")'
        nan = f'T.Select({value} <= T.{dtype}("inf"), {most}, {place})'
        better = f"T.Select({value} == C[i, h, k], {place}, {nan})"
        lines = [f"    ARG[i, h, k] = {most}", f"ARG[i, h, k] = T.min(ARG[i, h, k], {better})"]
        write.visit("find", "I H J K", "SSRS", ["with T.init():", *lines])
    return write.program(PARAMETERS, **names)


def fit(
    heads: int, feat: int, *, kind: str, reduce: str, edge_feat: int | None = None
) -> dict[str, Any]:
    """The kernel of a call on u (n, heads, feat) and e (nnz, heads, edge_feat).

    kind : one of OPS
    edge_feat : None if values of the matrix take the place of e
    """
    per_edge = kind == "copy_e" or (kind != "copy_u" and edge_feat is not None)
    same = edge_feat is not None and edge_feat < feat  # for all features of a head
    kernel_heads = heads if same else 1  # a kernel otherwise treats heads as features
    both = heads * feat // kernel_heads
    h, f = "h" * (kernel_heads > 1), "f" * (both > 1)
    u, e = "" if kind == "copy_e" else h + f, h + f * (per_edge and not same)
    edge = "e" if per_edge else "a"
    read = {"copy_u": ("u",), "copy_e": (edge,)}.get(kind, ("u", edge))
    return {
        "problem": Messages(kind, reduce, u, e), "features": (both,), "there": (*read, "out"),
        "sizes": {"heads": kernel_heads, "feat": both}, "callers": {"edge_feat": edge_feat or feat},
    }  # fmt: skip


MESSAGES = register(
    Operator(
        "messages", Messages, "messages of edges, reduced at rows",
        {"u": "n heads feat", "e": "nnz heads edge_feat", "out": "m heads feat"}, True, None,
        program=program, on="edges", options=("heads", "reduce", "edge_feat"), function="gspmm",
        fit=fit,
    )
)  # fmt: skip
