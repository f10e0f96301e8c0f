"""Operators for torch as a table: how each is called, what it takes, and what it is to give.

A row says all that the tests of `ops/test_all_operators.py` need: a new operator is a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops_common import Case, cases, reduced
from sparsetir import ops
from sparsetir.reductions import REDUCERS

F = 3  # features of all, so that kernels are shared
SIZES = {"k": F, "h": 2, "w": 2, "r": 4, "q": 6, "1": 1}
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


@dataclass(frozen=True)
class Op:
    """An operator with its options.

    call : (A, *operands) -> Tensor
    dims : names of the operands, and of each its dimensions, a letter each: m rows, n columns, e
        elements, h heads, k features, w others
    exact : (case, *float64 operands) -> Tensor, by torch's own operators
    ones : whether elements count once: for patterns without values
    close : by how much more its results may differ than sums
    counted : whether the pattern says how many rows its operands have
    """

    call: Callable[..., torch.Tensor]
    dims: dict[str, str]
    exact: Callable[..., torch.Tensor]
    ones: bool = False
    close: float = 1
    counted: bool = True

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        m, n = case.shape
        sizes = {"m": m, "n": n, "e": len(case.rows), **SIZES}
        return [tuple(sizes[d] for d in dims) for dims in self.dims.values()]

    def operands(self, case: Case, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """Numbers that the dtype has, and that may be divided by."""
        draw = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(s, generator=draw, dtype=torch.float64) for s in self.shapes(case))
        return [(x.sign() * (x.abs() + 0.5)).to(dtype).requires_grad_() for x in drawn]


def softmax(case: Case, x: torch.Tensor) -> torch.Tensor:
    highest = reduced(case, x.detach(), "max")[case.rows]
    powers = torch.exp(x - highest)
    return powers / reduced(case, powers)[case.rows]


def widened(e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A number for each element, for features of x."""
    return e.view(*e.shape, *[1] * (x.dim() - e.dim()))


def spmm(dims: dict[str, str], reduce: str = "sum") -> Op:
    def exact(case, a, b):
        terms = b[case.cols]
        a = a if a.dim() == 1 or terms.dim() == 3 else a[..., None]
        terms = terms if terms.dim() >= a.dim() else terms[:, None]
        return reduced(case, widened(a, terms) * terms, reduce)

    return Op(lambda A, a, b: ops.spmm(A, b, reduce, values=a), dims, exact)


def ones(reduce: str) -> Op:
    return Op(
        lambda A, b: ops.spmm(A, b, reduce), {"B": "nk"},
        lambda case, b: reduced(case, b[case.cols], reduce), ones=True,
    )  # fmt: skip


def gspmm(op: str, reduce: str, dims: dict[str, str]) -> Op:
    def call(A, *inputs):
        return ops.gspmm(A, op, reduce, **dict(zip(dims, inputs, strict=True)))

    def exact(case, *inputs):
        by_name = dict(zip(dims, inputs, strict=True))
        if op == "copy_e":
            return reduced(case, by_name["e"], reduce)
        u = by_name["u"][case.cols]
        return reduced(
            case, u if op == "copy_u" else BINARY[op[2:5]](u, widened(by_name["e"], u)), reduce
        )

    return Op(call, dims, exact)


def gsddmm(op: str, ends: str, *dims: str) -> Op:
    """ends : "uv" for sources on the left and targets on the right."""

    def exact(case, *inputs):
        rows_of = {"u": lambda x: x[case.cols], "v": lambda x: x[case.rows], "e": lambda x: x}
        a, b = (rows_of[end](x) for end, x in zip(ends, inputs, strict=True))
        return (a * b).sum(-1, keepdim=True) if op == "dot" else BINARY[op](a, b)

    named = dict(zip(("lhs", "rhs"), dims, strict=True))
    return Op(lambda A, x, y: ops.gsddmm(A, op, x, y, *ends), named, exact)


def copied(end: str, side: str, dims: str) -> Op:
    rows = {"u": lambda case, x: x[case.cols], "v": lambda case, x: x[case.rows]}[end]
    targets = {"lhs_target": end} if side == "lhs" else {"rhs_target": end}
    return Op(
        lambda A, x: ops.gsddmm(A, f"copy_{side}", **{side: x}, **targets), {side: dims}, rows
    )


def attention(*dims: str, scale: float | None = None) -> Op:
    def exact(case, q, k, v):
        by = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
        weights = softmax(case, (q[case.rows] * k[case.cols]).sum(-1) * by)
        return reduced(case, weights[..., None] * v[case.cols])

    return Op(
        lambda A, *x: ops.attention(A, *x, scale),
        dict(zip("qkv", dims, strict=True)),
        exact,
        close=4,
    )


def flipped(case: Case) -> Case:
    return Case(None, case.cols, case.rows, case.shape[::-1])


RELATIONS = torch.tensor([0, 1, 3])


def rgms(reduce: str, *dims: str) -> Op:
    """Edges of three relations by turns; the fourth has none."""

    def call(A, x, weight, a):
        edges, (n, m) = A if len(A) == 2 else (A.col, (A.n, A.m))
        kind = RELATIONS[torch.arange(edges.shape[1]) % 3].to(edges.dtype)
        return ops.rgms(x, weight, edges, kind, a, reduce, num_targets=m)

    def exact(case, x, weight, a):
        kind = RELATIONS[torch.arange(len(case.rows)) % 3]
        if reduce == "mean":
            same = (kind[:, None] == kind) & (case.rows[:, None] == case.rows)
            a = a / same.sum(1)
        weight = (
            torch.stack([torch.block_diag(*w) for w in weight]) if weight.dim() == 4 else weight
        )
        return reduced(case, a[:, None] * torch.einsum("ek,ekw->ew", x[case.cols], weight[kind]))

    return Op(
        call,
        dict(zip(("x", "weight", "edge_weight"), dims, strict=True)),
        exact,
        ones=True,
        close=4,
        counted=False,
    )


VB = {"values": "e", "B": "nk"}
OF = {"u": "n", "v": "m", "e": "e"}  # rows of operands at the ends of edges
XY = {"X": "mk", "Y": "nk"}
OPS = {
    **{f"spmm {reduce}": spmm(VB, reduce) for reduce in REDUCERS},
    **{f"spmm {reduce} of ones": ones(reduce) for reduce in REDUCERS},
    "spmm of heads": spmm({"values": "eh", "B": "nhk"}),
    "spmm max of heads": spmm({"values": "eh", "B": "nhk"}, "max"),
    "spmm mean, heads of values": spmm({"values": "eh", "B": "nk"}, "mean"),
    "spmm min, heads of B": spmm({"values": "e", "B": "nhk"}, "min"),
    "spmm logsumexp of heads": spmm({"values": "eh", "B": "nhk"}, "logsumexp"),
    "spmv": Op(
        lambda A, a, x: ops.spmv(A, x, values=a), {"values": "e", "x": "n"},
        lambda case, a, x: reduced(case, a * x[case.cols]),
    ),
    "spmv of heads": Op(
        lambda A, a, x: ops.spmv(A, x, values=a), {"values": "eh", "x": "nh"},
        lambda case, a, x: reduced(case, a * x[case.cols]),
    ),
    "sddmm": Op(ops.sddmm, XY, lambda case, x, y: (x[case.rows] * y[case.cols]).sum(-1)),
    "sddmm of heads": Op(
        ops.sddmm, {"X": "mhk", "Y": "nhk"},
        lambda case, x, y: (x[case.rows] * y[case.cols]).sum(-1),
    ),
    "sddmm, heads of Y": Op(
        ops.sddmm, {"X": "mk", "Y": "nhk"},
        lambda case, x, y: (x[case.rows][:, None] * y[case.cols]).sum(-1),
    ),
    "copy_u max": gspmm("copy_u", "max", {"u": "nhk"}),
    "copy_e min": gspmm("copy_e", "min", {"e": "ehk"}),
    "copy_e mean": gspmm("copy_e", "mean", {"e": "e1"}),
    "copy_e logsumexp": gspmm("copy_e", "logsumexp", {"e": "eh1"}),
    "u_add_e logsumexp": gspmm("u_add_e", "logsumexp", {"u": "nhk", "e": "eh1"}),
    "u_mul_e sum": gspmm("u_mul_e", "sum", {"u": "nhk", "e": "eh1"}),
    "u_div_e mean": gspmm("u_div_e", "mean", {"u": "nhk", "e": "eh1"}),
    "u_sub_e max": gspmm("u_sub_e", "max", {"u": "n1", "e": "ek"}),
    "u_add_e min": gspmm("u_add_e", "min", {"u": "n", "e": "e"}),
    "u_add_e sum": gspmm("u_add_e", "sum", {"u": "nh1k", "e": "e1wk"}),
    "u_mul_e mean": gspmm("u_mul_e", "mean", {"u": "nk", "e": "e"}),
    "u_mul_e max": gspmm("u_mul_e", "max", {"u": "nhk", "e": "ehk"}),
    "u_div_e min": gspmm("u_div_e", "min", {"u": "nhk", "e": "ehk"}),
    "u_mul_e, numbers of nodes": gspmm("u_mul_e", "sum", {"u": "nh1", "e": "ehk"}),
    "u_dot_v": gsddmm("dot", "uv", "nhk", "mhk"),
    "v_dot_u": gsddmm("dot", "vu", "mk", "nk"),
    "u_dot_v of one": gsddmm("dot", "uv", "nhk", "mh1"),
    "u_add_v": gsddmm("add", "uv", "nk", "mk"),
    "e_mul_v": gsddmm("mul", "ev", "eh1", "mhk"),
    "v_div_u": gsddmm("div", "vu", "mhk", "nhk"),
    "u_sub_e": gsddmm("sub", "ue", "nk", "ek"),
    "copy_v": copied("v", "lhs", "mk"),
    "copy_v of the right": copied("v", "rhs", "mhk"),
    "edge_softmax": Op(ops.edge_softmax, {"e": "eh1"}, softmax),
    "edge_softmax by sources": Op(
        lambda A, e: ops.edge_softmax(A, e, "src"), {"e": "e"},
        lambda case, e: softmax(flipped(case), e),
    ),
    "sparse_softmax": Op(lambda A, e: ops.sparse_softmax(A, e), {"values": "eh"}, softmax),
    "attention": attention("mk", "nk", "nw"),
    "attention of heads": attention("mhk", "nhk", "nhw", scale=0.3),
    "rgms": rgms("sum", "nk", "rkw", "e"),
    "rgms mean": rgms("mean", "nk", "rkw", "e"),
    "rgms in blocks": rgms("sum", "nq", "rhkw", "e"),
}  # fmt: skip


def taken(op: str, u: str, e: str) -> dict[str, str]:
    """The operands of a message, of these dimensions."""
    return {"copy_u": {"u": u}, "copy_e": {"e": e}}.get(op, {"u": u, "e": e})


# Every message and reduction, and every operation at each pair of ends, in other shapes.
MORE = {
    f"{op} {reduce} {u} {e}": gspmm(op, reduce, taken(op, u, e))
    for op in ("copy_u", "copy_e", *(f"u_{binary}_e" for binary in BINARY))
    for reduce in REDUCERS
    for u, e in (("nhk", "eh1"), ("nk", "e"), ("n1", "ek"), ("nh1k", "e1wk"))
} | {
    f"{ends} {op} {left} {right}": gsddmm(op, ends, OF[ends[0]] + left, OF[ends[1]] + right)
    for op in (*BINARY, "dot")
    for ends in ("uv", "vu", "ue", "ev", "vv", "ee")
    for left, right in (("hk", "hk"), ("hk", "h1"), ("1k", "hk"), ("k", "k"))
}  # fmt: skip


def edges(sources: list[int], targets: list[int], m: int, n: int, dtype=torch.int64) -> Case:
    index = torch.tensor([sources, targets], dtype=dtype).reshape(2, -1)
    return Case((index, (n, m)), index[1].long(), index[0].long(), (m, n))


# Sparse matrices of all kinds, and patterns that are extremes of some kind.
PATTERNS = {
    **cases(),
    "empty": edges([], [], 4, 3),
    "nothing": edges([], [], 0, 0),
    "no rows": edges([], [], 0, 3),
    "no columns": edges([], [], 3, 0),
    "one dense row": edges([*range(9), 4], [2] * 10, 4, 9),  # one of them twice
    "one column": edges([0, 0, 0, 0], [3, 1, 0, 1], 5, 1),
    "one element": edges([0], [0], 1, 1, torch.int32),
}
SMALL = edges([0, 1, 3, 3, 0, 2, 0, 1], [2, 0, 0, 2, 2, 0, 0, 2], 3, 4)
