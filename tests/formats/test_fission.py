"""Fission: nests become plain iterations that mean the same."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from programs import PROGRAMS
from small import text_of
from sparsetir.formats.fission import fission
from sparsetir.sparse_ir.nodes import sparse_iterations


def function(body: str, more: str = "") -> Any:
    """A function on A, OUT over (I, J), D over (O, R, C) with stored rows R; and X, Y over them."""
    text = text_of("f", "", """
I_ = T.dense_fixed(m)
J_ = T.dense_fixed(n)
O = T.dense_fixed(1)
R = T.sparse_variable(O, (m, rows), (r_ptr, r_idx))
C = T.sparse_variable(R, (n, nnz2), (c_ptr, c_idx))
""", A="I J", OUT="I J", D="O R C", X="J_", Y="I_", YR="O R")  # fmt: skip
    lines = [*more.splitlines(), *body.splitlines()]
    return sparsetir.from_source(text + "".join(f"    {line}\n" for line in lines))


def arguments() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    args = PROGRAMS["spmv"].inputs(rng, "small", "float32", "int32")
    indptr, indices = args["indptr"], args["indices"]
    stored = np.flatnonzero(np.diff(indptr)).astype("int32")
    assert 0 < len(stored) < args["m"]
    args |= {
        "y": np.full(args["m"], 7, "float32"), "yr": np.full(len(stored), 7, "float32"),
        "d": args["a"] + 1, "out": np.full(len(indices), 7, "float32"), "rows": len(stored),
        "r_ptr": np.array([0, len(stored)], "int32"), "r_idx": stored, "nnz2": len(indices),
        "c_ptr": np.append(indptr[stored], indptr[-1]).astype("int32"), "c_idx": indices,
    }  # fmt: skip
    return args


def same(func: Any, buffers: list[str], names: list[str]) -> Any:
    """Split, check the names that result, and run both functions on the same arguments."""
    new = fission(func, buffers)
    sparsetir.verify(new)
    text = new.script()
    assert tvm_ffi.structural_equal(new, sparsetir.from_source(text), map_free_vars=True), text
    assert [it.name for it in sparse_iterations(new)] == names
    before = arguments()
    results = []
    for run in (lambda a: sparsetir.interpret(new, a), lambda a: sparsetir.build(new)(**a)):
        args = arguments()
        run({k: args[k] for k in (str(p.name) for p in new.params)})
        results.append(args)
    sparsetir.interpret(func, before)
    for args in results:
        for name in ("a", "out", "d", "y", "yr"):
            np.testing.assert_allclose(args[name], before[name], rtol=1e-5, err_msg=text)
    return new


SCALE = """
with T.sp_iter([I], "S", "scale") as [i]:
    with T.sp_iter([J], "R", "total") as [j]:
        with T.init():
            Y[i] = 0.0
        Y[i] = Y[i] + A[i, j]
    Y[i] = T.if_then_else(Y[i] == T.float32(0), T.float32(1), T.float32(1) / Y[i])
    with T.sp_iter([J], "S", "divide") as [j]:
        OUT[i, j] = A[i, j] * Y[i]
"""


def test_what_stays() -> None:
    """Nests without the buffers, and plain iterations."""
    func = function(SCALE)
    assert fission(func, ["D"]) is func
    plain = fission(func, ["A"])
    assert fission(plain, ["A"]) is plain
    with pytest.raises(KeyError, match="no buffer 'Q'"):
        fission(func, ["Q"])


def test_an_init_of_the_outer_iteration() -> None:
    func = function("""
with T.sp_iter([I], "S", "rows") as [i]:
    with T.init():
        Y[i] = 0.0
    with T.sp_iter([J], "R", "sum") as [j]:
        Y[i] = Y[i] + A[i, j]
""")
    same(func, ["A"], ["rows_init", "sum"])


def test_stored_rows() -> None:
    """An init on a buffer over the rows themselves only meets stored ones."""
    func = function("""
with T.sp_iter([O, R], "SS", "rows") as [o, r]:
    with T.sp_iter([C], "R", "sum") as [c]:
        with T.init():
            YR[o, r] = 0.0
        YR[o, r] = YR[o, r] + D[o, r, c]
    with T.sp_iter([C], "S", "subtract") as [c]:
        D[o, r, c] = D[o, r, c] - YR[o, r]
""")
    same(func, ["D"], ["sum", "subtract"])


@pytest.mark.parametrize("shape", ["(1,)", "(2, 1)"])
def test_temporaries(shape: str) -> None:
    """Shared temporaries get the outer axes; those of one part stay."""
    index = "0" if shape == "(1,)" else "1, 0"
    func = function(f"""
with T.sp_iter([I], "S", "rows") as [i]:
    once = T.alloc_buffer((1,), "float32")
    once[0] = 3.0
    t = T.alloc_buffer({shape}, "float32")
    t[{index}] = once[0]
    with T.sp_iter([J], "R", "sum") as [j]:
        with T.init():
            t[{index}] = 1.0
        t[{index}] = t[{index}] + A[i, j]
    with T.sp_iter([J], "S", "add") as [j]:
        OUT[i, j] = A[i, j] + t[{index}]
    Y[i] = t[{index}]
""")
    new = same(func, ["A"], ["rows", "sum", "add", "rows_"])
    text = new.script()
    axes = "(I,)" if shape == "(1,)" else "(I, t_0, t_1)"
    assert f't = T.alloc_sparse_buffer({axes}, "float32")' in text
    assert "once = T.alloc_buffer((1,)" in text


def test_a_temporary_over_stored_rows() -> None:
    func = function("""
with T.sp_iter([O, R], "SS", "rows") as [o, r]:
    t = T.alloc_buffer((1,), "float32")
    with T.sp_iter([C], "R", "sum") as [c]:
        with T.init():
            t[0] = 0.0
        t[0] = t[0] + D[o, r, c]
    YR[o, r] = t[0]
""")
    new = same(func, ["D"], ["sum", "rows"])
    assert 't = T.alloc_sparse_buffer((O, R), "float32")' in new.script()


SUM = """
    with T.sp_iter([J], "R", "sum") as [j]:
        X[0] = X[0] + A[i, j]"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('with T.sp_iter([I], "R", "o") as [i]:' + SUM, "reduces over 'I'"),
        ('with T.sp_iter([I], "S", "o") as [i]:' + SUM,
         "accesses 'X', which it writes, elsewhere than at its own 'i'"),
        ('with T.sp_iter([I, J], "SS", "o") as [i, j]:\n'
         '    with T.sp_iter([J_], "S", "in") as [q]:\n        X[q] = A[i, j]',
         "accesses 'X', which it writes, elsewhere than at its own 'i'"),
        ('with T.sp_iter([I], "S", "o") as [i]:\n    T.sp_iter_attr({"ordered": 1})\n'
         "    Y[i] = 1.0\n"
         '    with T.sp_iter([J], "S", "in") as [j]:\n        OUT[i, j] = A[i, j] + Y[i + 1]',
         "accesses 'Y', which it writes, elsewhere than at its own 'i'"),
        ('with T.sp_iter([I], "S", "o") as [i]:\n    z: T.let[T.float32] = Y[i]\n'
         '    with T.sp_iter([J], "S", "in") as [j]:\n        OUT[i, j] = A[i, j] + z',
         "gives 'z' a value for other parts of its body"),
        ('with T.sp_iter([I], "S", "o") as [i]:\n    if i > 1:\n'
         '        with T.sp_iter([J], "S", "in") as [j]:\n            OUT[i, j] = A[i, j]',
         "holds iterations inside of a IfThenElse"),
        ('with T.sp_iter([O, R], "SS", "o") as [o, r]:\n'
         '    with T.sp_iter([C], "R", "in") as [c]:\n        with T.init():\n'
         "            W[o, r] = 0.0\n        W[o, r] = W[o, r] + D[o, r, c]",
         "holds an init of 'W', which would run for coordinates that 'R' does not store"),
        ('with T.sp_iter([O, R], "SS", "o") as [o, r]:\n    with T.init():\n'
         '        W[o, r] = 0.0\n    with T.sp_iter([C], "R", "in") as [c]:\n'
         "        W[o, r] = W[o, r] + D[o, r, c]",
         "holds an init of 'W', which would run for coordinates that 'R' does not store"),
        ('with T.sp_iter([O, N], "SS", "o") as [o, k]:\n'
         '    with T.sp_iter([J_], "S", "in") as [q]:\n        A[k, q] = 1.0',
         "may visit a coordinate of 'N' twice"),
        ('with T.sp_iter([I], "S", "o") as [i]:\n    t = T.alloc_buffer((i + 1,), "float32")\n'
         '    with T.sp_iter([J], "R", "in") as [j]:\n        T.sp_iter_attr({"ordered": 1})\n'
         "        t[0] = A[i, j]\n    Y[i] = t[0]",
         "allocates 't', which cannot be stored over its axes"),
    ],
    ids=["kind", "sum", "other", "neighbour", "value", "if", "init", "outer", "twice", "sizes"],
)  # fmt: skip
def test_refusals(body: str, message: str) -> None:
    more = """
W = T.alloc_sparse_buffer((O, I_), "float32")
N = T.sparse_variable(O, (m, rows), (r_ptr, r_idx), unique=False)
"""
    message = f"fission: iteration 'o' of 'f' .*{re.escape(message)}; write plain iterations"
    with pytest.raises(sparsetir.LoweringError, match=message):
        fission(function(body, more), ["A", "D"])
