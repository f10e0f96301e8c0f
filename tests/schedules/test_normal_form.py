"""The form in which the default schedule of CPUs takes reductions: inits, and rows outermost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetir
from programs import copied
from small import small
from sparsetir.schedules.passes.normal_form import ROWS_OF_BLOCKS, normal_form
from sparsetir.sparse_ir.nodes import sparse_iterations

AXES = """
D = T.dense_fixed(nd)
R = T.dense_fixed(m)
"""
INIT = """
with T.sp_iter([I, K], "SS", "zero") as [i, k]:
    C[i, k] = 0.0
"""
# Diagonals: B is read outside of its bounds, where it is zero.
DIAGONALS = """
with T.sp_iter([D, R, K], "RSS", "sum") as [d, r, k]:
    C[r, k] = C[r, k] + A[d, r] * B[r + O[d], k]
"""
BUFFERS = {"A": "D R", "O": "D int32", "B": "N K", "C": "I K"}


def loops(func: Any) -> dict[str, tuple[list[str], bool]]:
    """The loops of each iteration, and whether it has an init."""
    return {
        it.name: ([axis.name for axis in it.axes], it.init is not None)
        for it in sparse_iterations(func)
    }


def diagonals() -> dict[str, Any]:
    """Infinities and NaN among values, some of them where there is no row of B."""
    rng = np.random.default_rng(0)
    a = rng.integers(-3, 4, (5, 40)).astype("float32")
    a[0, 3], a[1, 39], a[4, 38], a[2, 7] = np.inf, np.nan, -np.inf, np.nan
    return {"a": a, "o": np.array([-30, 2, 0, -1, 35], "int32")}


@pytest.mark.parametrize("body", [INIT + DIAGONALS, DIAGONALS], ids=["set before", "added to"])
def test_diagonals(body: str) -> None:
    func = small("f", body, AXES, **BUFFERS)
    expected = (["R", "D", "K"], body != DIAGONALS)
    assert loops(normal_form(func)) == {"sum": expected}
    kernel, args = sparsetir.build(func), diagonals()
    rng = np.random.default_rng(1)
    for feat in (0, 1, 20, 70):
        b = rng.integers(-3, 4, (37, feat)).astype("float32")
        outs = [np.full((40, feat), 2, "float32") for _ in range(2)]
        kernel(**args, b=b, c=outs[0])
        sizes = {"m": 40, "n": 37, "feat": feat, "nd": 5}
        sparsetir.interpret(func, {**args, "b": b, "c": outs[1], **sizes})
        np.testing.assert_array_equal(outs[0], outs[1])


def test_bounds_are_asked_for_once_for_all_lanes() -> None:
    text = sparsetir.lower(small("f", INIT + DIAGONALS, AXES, **BUFFERS))["II scheduled"].script()
    lines = [line for line in text.splitlines() if "_lane]" in line and "B[" in line]
    assert lines and not any("if_then_else" in line for line in lines)


def test_orders_that_a_schedule_asks_for_stay() -> None:
    def apply(sch: Any) -> None:
        it = sch.get_sparse_iteration("sum")
        d, r, k = sch.get_sp_iters(it)
        sch.sparse_reorder(it, [d, k, r])

    func = small("f", INIT + DIAGONALS, AXES, **BUFFERS)
    assert loops(sparsetir.lower(func, apply)["I"])["sum"] == (["D", "K", "R"], False)
    assert loops(sparsetir.lower(func)["I"]) == {"sum": (["R", "D", "K"], True)}


STAY = {
    "one element for several rows": DIAGONALS.replace("C[r, k]", "C[P[r], k]"),
    "contiguous alone": """
with T.sp_iter([D, R], "RS", "sum") as [d, r]:
    E[r] = E[r] + A[d, r]
""",
    "rows begin": """
with T.sp_iter([I, J, R, K], "SRSS", "sum") as [i, j, r, k]:
    C[i * m + r, k] = C[i * m + r, k] + A[j, r] * B[j, k]
""",
    "rows of a block": DIAGONALS.replace("R,", "S,"),
    "under the reduction": """
with T.sp_iter([I, J, K], "RSS", "sum") as [i, j, k]:
    C[j, k] = C[j, k] + B[i, k]
""",
    "no reduction": DIAGONALS.replace("RSS", "SSS").replace("C[r, k] + ", ""),
    "visits follow each other": DIAGONALS.replace(
        "    C", '    T.sp_iter_attr({"ordered": 1})\n    if C[0, 0] < 9.0:\n        C', 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("body", STAY)
def test_loops_stay(body: str) -> None:
    axes = AXES + f"S = T.dense_fixed({ROWS_OF_BLOCKS})"
    func = small("f", STAY[body], axes, **BUFFERS, P="R int32", E="R")
    assert loops(normal_form(func)) == loops(func)


ELEMENTS = {
    "a sum of all": ("RR", "S[0] = S[0] + A[i, j] * A[i, j]"),
    "by columns": ("RR", "S[0] = S[0] + A[i, j] * X[j]"),
    "each by itself": ("SS", "E[i, j] = A[i, j] + X[j]"),
    "by rows": ("RR", "S[0] = S[0] + A[i, j] * Y[i]"),
    "rows themselves": ("SS", "E[i, j] = A[i, j] * i"),
}


@pytest.mark.parametrize("body", ELEMENTS)
def test_elements_by_position(body: str) -> None:
    """One loop over all elements, where rows are not asked for; rows may be empty."""
    buffers = {"A": "I J", "E": "I J", "S": "ONE", "X": "N", "Y": "I"}
    kinds, step = ELEMENTS[body]
    text = f'with T.sp_iter([I, J], "{kinds}", "sum") as [i, j]:\n    {step}'
    func = small("f", text, "ONE = T.dense_fixed(1)", **buffers)
    by_rows = "rows" in body
    assert loops(normal_form(func)) == {"sum": (["I", "J"] if by_rows else ["I_J"], False)}
    kernel, rng = sparsetir.build(func), np.random.default_rng(2)
    for lengths in ([], [0, 0], [1, 0, 13, 2, 0], [200]):
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
        nnz = int(indptr[-1])
        given = {
            "a": rng.integers(-3, 4, nnz).astype("float32"), "x": np.arange(300, dtype="float32"),
            "y": rng.integers(-3, 4, len(lengths)).astype("float32"), "indptr": indptr,
            "indices": np.concatenate([np.arange(n) for n in lengths] or [[]]).astype("int32"),
        }  # fmt: skip
        outs = [{"e": np.full(nnz, np.nan, "float32"), "s": np.ones(1, "float32")} for _ in "ab"]
        sizes = {"m": len(lengths), "n": 300, "nnz": nnz}
        names = {str(p.name) for p in func.params}
        args = [{k: v for k, v in (given | out | sizes).items() if k in names} for out in outs]
        kernel(**args[0])
        sparsetir.interpret(func, args[1])
        np.testing.assert_array_equal(outs[0]["e"], outs[1]["e"])
        np.testing.assert_array_equal(outs[0]["s"], outs[1]["s"])


FIBRES = {
    "sums": ("SSR", ["I_J", "I_J_K"], "Z[i, j] = Z[i, j] + A[i, j, k] * X[k]"),
    "sums of products with rows": ("SSR", ["I", "J", "K"], "Z[i, j] = Z[i, j] + A[i, j, k] * Y[i]"),
    "with their coordinate": ("SSR", ["I_J", "I_J_K"], "Z[i, j] = Z[i, j] + A[i, j, k] * W[j]"),
    "into rows by coordinate": ("SSR", ["I", "J", "K"], "U[j] = U[j] + A[i, j, k]"),
    "of all": ("SSR", ["I", "J", "K"], "V[i, j] = V[i, j] + A[i, j, k]"),
}


@pytest.mark.parametrize("body", FIBRES)
def test_fibres_are_rows(body: str) -> None:
    """Rows of a matrix, where what is above them is not asked for; fibres may be empty."""
    kinds, expected, step = FIBRES[body]
    axes = (
        "J = T.sparse_variable(I, (n, nj), (p0, i0))\nK = T.sparse_variable(J, (l, nnz), (p1, i1))"
    )
    axes += "\nL = T.dense_fixed(l)\nN = T.dense_fixed(n)\nI = T.dense_fixed(m)"
    axes = "\n".join(sorted(axes.splitlines(), key=lambda line: "sparse" in line))
    buffers = {"A": "I J K", "X": "L", "Y": "I", "W": "N", "Z": "I J", "V": "I N", "U": "N"}
    text = f'with T.sp_iter([I, J, K], "{kinds}", "sum") as [i, j, k]:\n    {step}'
    func = small("f", text, axes, **{n: over for n, over in buffers.items() if f"{n}[" in step})
    assert loops(normal_form(func)) == {"sum": (expected, False)}
    kernel, rng, m, n, l = sparsetir.build(func), np.random.default_rng(2), 700, 30, 50
    where = rng.random((m, n, l)) < 0.03
    where[3], where[5, 7] = False, True
    some = where.any(2) | (rng.random((m, n)) < 0.2)  # fibres, some of them without elements
    lengths = where.sum(2)[some]
    args = {
        "p0": np.cumsum([0, *some.sum(1)]), "i0": np.nonzero(some)[1],
        "p1": np.cumsum([0, *lengths]), "i1": np.nonzero(where)[2],
    }  # fmt: skip
    args = {name: array.astype("int32") for name, array in args.items()}
    nj, nnz = int(args["p0"][-1]), int(args["p1"][-1])
    sizes = {"m": m, "n": n, "l": l, "nj": nj, "nnz": nnz}
    shapes = {"a": nnz, "x": l, "y": m, "w": n, "z": nj, "v": (m, n), "u": n}
    args |= {n: rng.integers(-3, 4, shape).astype("float32") for n, shape in shapes.items()} | sizes
    args = {name: args[name] for name in map(str, (p.name for p in func.params))}
    (out,) = {"z", "v", "u"} & {*args}
    before, once = args[out].copy(), copied(args)
    sparsetir.interpret(func, once)
    for count in (1, 2, 3):  # the third call may have another order of rows
        kernel(**args)
        np.testing.assert_array_equal(args[out], before + count * (once[out] - before))
