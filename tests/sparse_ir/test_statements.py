"""Statements in bodies: loops with steps, nests, whiles, conditions, divisions."""

from __future__ import annotations

import re

import numpy as np
import tvm_ffi

import sparsetir
from programs import copied
from small import text_of
from sparsetir.sparse_ir.script import from_source

AXES = "J = T.sparse_variable(I, (n, nnz), (indptr, indices))\nK = T.dense_fixed(32)"
# Of rows 0 to 3, the second empty.
MATRIX = {
    "a": np.array([1, 2, 3, 4, 5, 6], "float32"), "d": np.array([2, 0, -3, 1], "int32"),
    "indptr": np.array([0, 2, 2, 4, 6], "int32"), "indices": np.array([0, 1, 1, 3, 0, 3], "int32"),
    "w": np.array([0, 1, 2, 3], "int32"), "x": np.array([0, 9, 1, -7], "int32"),
    "m": 4, "n": 4, "nnz": 6,
}  # fmt: skip


def results(lines: list[str], **buffers: str) -> list[np.ndarray]:
    """The results of the interpreter and a kernel for statements that each set a column of Y."""
    body = ["with T.sp_iter([I], 'S', 'f') as [i]:"]
    for number, line in enumerate(lines):
        body += ["    " + x for x in line.replace("Y", f"Y[i, {number}]").splitlines()]
    text = text_of("f", "\n".join(body), AXES, "float32", Y="I K int32", **buffers)
    text = re.sub(r"W = T.match_sparse_buffer.*", "W = T.match_buffer(w, (n,), 'int32')", text)
    func = from_source(text)
    assert tvm_ffi.structural_equal(from_source(func.script()), func)
    names = [str(p.name) for p in func.params]
    arguments = {**MATRIX, "y": np.zeros((4, 32), "int32")}
    outs = []
    for run in (lambda x: sparsetir.interpret(func, x), lambda x: sparsetir.build(func)(**x)):
        args = copied({name: arguments[name] for name in names})
        run(args)
        outs.append(args["y"][:, : len(lines)].T)
    return outs


LOOP = "for q{at} in {loop}:\n    Y = Y * 10 + q{at}"
STEPS = {
    "range(0, 6, 2)": [24] * 4, "range(5, 0, -2)": [531] * 4, "range(0, 5, 2)": [24] * 4,
    "range(1, 8, 3)": [147] * 4, "T.serial(3, 9, step=2)": [357] * 4,
    "range(4, -1, -1)": [43210] * 4,
    "T.unroll(0, 7, step=3)": [36] * 4, "T.unroll(7, 0, step=-3)": [741] * 4,
    "range(i, i + 3, 2)": [2, 13, 24, 35], "range(6, i, -3)": [63, 63, 63, 6],
    "range(1, 9, n)": [15] * 4, "range(5, 2, 1)": [0] * 4, "range(2, 5, -1)": [0] * 4,
    "range(0, 4, D[i] * D[i] + 1)": [0, 123, 0, 2],
    "range(3, 0, -D[i] * D[i] - 1)": [3, 321, 3, 31],
    "range(0, 5, T.max(D[i], 1))": [24, 1234, 1234, 1234], "range(3, X[i], X[i] - 3)": [3, 3, 3, 3],
    "range(T.int64(0), T.int64(6), T.int64(4))": [4] * 4,
}  # fmt: skip


def test_steps_of_loops() -> None:
    lines = [LOOP.format(at=n, loop=loop) for n, loop in enumerate(STEPS)]
    lines = [x.replace("+ q", "+ T.cast(q") + ", 'int32')" for x in lines]
    for result in results(lines, D="I int32", X="I int32"):
        np.testing.assert_array_equal(result, list(STEPS.values()))


# What passes of TVM 0.27 take for something else.
NESTS = {
    "for q{at} in range(1, 4):\n    for r{at} in range(q{at}, 4):\n        Y = Y * 10 + r{at}":
        [123233] * 4,
    "for q{at} in range(1, 4):\n    if D[i] > 0:\n        if n > 9:\n            Y = 5\n"
    "    else:\n        Y = Y + 1": [0, 3, 3, 0],
    "for q{at} in range(1, 4):\n    if D[i] > 0:\n        Y = Y + 1\n    else:\n"
    "        for r{at} in range(2):\n            if n > 9:\n                Y = 5": [3, 0, 0, 3],
    "for q{at} in range(1, 4):\n    if D[i] > 0:\n        if n > 9:\n            Y = 5\n"
    "        z{at}: T.let[T.int32] = n\n    else:\n        Y = Y + 1": [0, 3, 3, 0],
}  # fmt: skip


def test_nests() -> None:
    lines = [text.format(at=n) for n, text in enumerate(NESTS)]
    for result in results(lines, D="I int32"):
        np.testing.assert_array_equal(result, list(NESTS.values()))


# Y = q after these, where q is 0 before.
WHILES = {
    "while q < n and A[i, q] == 0.0:\n    q = q + 1": [0, 4, 1, 0],
    "while q < 3 and A[i, q] < 5.0:\n    q = q + 1\n    if q == 2:\n        continue": [3, 3, 3, 0],
    "while A[i, q] > 0.0:\n    q = q + 1\n    if A[i, q] == 0.0:\n        break": [2, 0, 0, 1],
    "while q == 3 or q < 6 and A[i, 6 // (q - 3) + 2] == 0.0:\n    q = q + 1": [0, 6, 6, 0],
    "while A[i, q] > 0.0:\n    while A[i, q] > 0.0:\n        q = q + 1\n    q = q + 1":
        [3, 0, 0, 2],
}  # fmt: skip


def test_searches_in_conditions_of_whiles() -> None:
    lines = []
    for n, line in enumerate(WHILES):
        named = line.replace("q", f"q{n}").replace("e" + f"q{n}", "eq")
        lines.append(f"q{n} = T.int32(0)\n{named}\nY = q{n}")
    for result in results(lines, A="I J"):
        np.testing.assert_array_equal(result, list(WHILES.values()))


ELEMENT = "T.cast(A[i, 6 // D[i] - 3], 'int32')"
DIVISIONS = {
    f"if D[i] != 0:\n    Y = {ELEMENT}": [1, 0, 0, 6],
    f"Y = T.if_then_else(D[i] != 0, {ELEMENT}, 7)": [1, 7, 0, 6],
    f"Y = T.Select(D[i] != 0, {ELEMENT}, 7)": [1, 7, 0, 6],
    f"if D[i] != 0 and {ELEMENT} > 0:\n    Y = 1": [1, 0, 0, 1],
    f"if D[i] == 0 or {ELEMENT} > 0:\n    Y = 1": [1, 1, 0, 1],
    f"for q{{at}} in range(0, D[i] * D[i], 2):\n    Y = Y + {ELEMENT}": [2, 0, 0, 6],
    "Y = D[i] % 2 // -2": [0, 0, -1, -1], "Y = D[i] % -2 // 2": [0, 0, -1, -1],
    "Y = T.Select(D[i] != 0, 7 // D[i], 9)": [3, 9, -3, 7],
    "Y = T.Select(D[i] > 0, 7 // D[i], 9)": [3, 9, 9, 7],
    "if D[i] > 0 and 7 // D[i] > 3:\n    Y = 1": [0, 0, 0, 1],
    "Y = T.Select(D[i] != 0, -7 % D[i], 9)": [1, 9, -1, 0],
    "Y = T.Select(D[i] != 0, T.truncdiv(-7, D[i]), 9)": [-3, 9, 2, -7],
    "Y = T.Select(D[i] != 0, T.truncmod(-7, D[i]), 9)": [-1, 9, -1, 0],
    "Y = T.if_then_else(D[i] != 1, T.int32(-2147483648) // T.min(D[i], -1), 9)":
        [-(2**31), -(2**31), 715827882, 9],
    "Y = T.if_then_else(D[i] > 0, 7 // T.max(D[i], -1), 9)": [3, 9, 9, 7],
    "Y = T.Select(D[i] > 0, 7 // T.Select(i != 3, D[i], 1), 9)": [3, 9, 9, 7],
    "if X[i] >= 0 and X[i] < n:\n    Y = T.cast(A[i, W[X[i]]], 'int32')": [1, 0, 3, 0],
    "Y = T.cast(T.Select(X[i] >= 0 and X[i] < n, A[i, W[X[i]]], 0.0), 'int32')": [1, 0, 3, 0],
    "if X[i] >= 0 and X[i] < n and W[X[i]] == 1:\n    Y = 1": [0, 0, 1, 0],
    # Choices inside of each other, which take TVM 0.27 minutes to simplify where a let binds them.
    "s: T.let[T.int32] = T.if_then_else(D[i] == 0 or X[i] % D[i] > 2, 3, X[i])\n"
    "t: T.let[T.int32] = T.Select(s == 0 or D[i] % s > X[i], D[i], i) % 64\n"
    "u: T.let[T.int32] = T.cast(T.cast(t, 'bfloat16'), 'int32')\n"
    "Y = u": [2, 1, 2, 1],
}  # fmt: skip


def test_divisions_and_searches_behind_their_conditions() -> None:
    """A division by zero ends the process, as does the least integer over -1."""
    lines = [line.format(at=n) if "{at}" in line else line for n, line in enumerate(DIVISIONS)]
    for result in results(lines, A="I J", D="I int32", X="I int32", W="N int32"):
        np.testing.assert_array_equal(result, list(DIVISIONS.values()))


def test_divisions_by_a_size_where_it_is_zero_are_compiled():
    """TVM fails on a guarded quotient in a branch that asks for a divisor of zero."""
    body = """
with T.sp_iter([I, J], "SS", "f") as [i, j]:
    if n != 0:
        E[i, j] = X[i] // n
    else:
        E[i, j] = T.if_then_else(n == 0 or X[i] // n > 2, 7, i)"""
    func = from_source(text_of("f", body, AXES, "float32", X="I int32", E="I J int32"))
    outs = []
    for run in (sparsetir.interpret, lambda f, x: sparsetir.build(f)(**x)):
        args = copied({**MATRIX, "e": np.zeros(6, "int32")})
        run(func, args := {str(p.name): args[str(p.name)] for p in func.params})
        outs.append(args["e"])
    np.testing.assert_array_equal(*outs)
