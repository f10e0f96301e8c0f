"""Expressions and statements of plain TIR in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from programs import PROGRAMS, tolerance
from sparsetir.sparse_ir import script as T
from sparsetir.sparse_ir.interpret import interpret


def test_arithmetic_is_that_of_the_type():
    @T.prim_func
    def arithmetic(f: T.handle, n: T.handle, x: T.float16, y: T.int32, z: T.int32):
        I = T.dense_fixed(8)
        F = T.match_buffer(f, (3,), "float16")
        N = T.match_sparse_buffer(n, (I,), "int32")
        F[0] = x + T.float16(1)
        F[1] = x * x
        F[2] = T.if_then_else(y > 0, x, F[y])
        N[0] = y * 65536
        N[1] = -7 // y
        N[2] = T.truncdiv(0 - y, 2)
        N[3] = T.floormod(0 - y, 4)
        N[4] = T.truncmod(0 - y, 4)
        N[5] = T.Select(y > 0, 1, y // z)
        N[6] = T.Cast("int32", T.float32(-2.7))
        N[7] = T.max(y, 5) + T.min(y, 5) + T.shift_left(y, 2)

    f, n = np.zeros(3, "float16"), np.zeros(8, "int32")
    interpret(arithmetic, {"f": f, "n": n, "x": 2048.0, "y": 65537, "z": 0})
    np.testing.assert_array_equal(f, [2048, np.inf, 2048])
    np.testing.assert_array_equal(n[:7], [65536, -1, -32768, 3, -1, 1, -2])
    assert n[7] == 65537 + 5 + 4 * 65537


def test_statements():
    @T.prim_func
    def statements(y: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        Y = T.match_sparse_buffer(y, (I,), "int32")
        for i in range(1, m, 2):
            Y[i] = i
        n = T.int32(0)
        while n < 5:
            n = n + 1
            if n == 3:
                continue
            if n == 5:
                break
            Y[0] = Y[0] + n
        if Y[0] > 100:
            Y[2] = 1
        else:
            Y[2] = 2
        z: T.let[T.int32] = Y[2] + 1
        assert z == 3, "z is three"
        Y[4] = z

    y = np.zeros(5, "int32")
    interpret(statements, [y, 5])
    np.testing.assert_array_equal(y, [7, 1, 2, 3, 3])


def test_assertions_raise():
    @T.prim_func
    def refuse(m: T.int32):
        assert m > 3, "m is small"
        T.evaluate(0)

    interpret(refuse, [4])
    with pytest.raises(AssertionError, match="refuse: m is small"):
        interpret(refuse, [3])


INTRINSICS = dict.fromkeys(["exp", "exp2", "log", "sqrt", "tanh", "abs", "floor", "ceil"])
INTRINSICS |= {"rsqrt": lambda x: x**-0.5, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", INTRINSICS)
def test_intrinsics(name, dtype):
    call, expected = getattr(T, name), INTRINSICS[name] or getattr(np, name)

    @T.prim_func
    def apply(x: T.handle, y: T.handle):
        I = T.dense_fixed(3)
        X = T.match_sparse_buffer(x, (I,), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I], "S", "apply") as [i]:
            Y[i] = call(X[i])

    x = np.array([0.25, 0.75, 1.5]).astype(dtype)
    y = np.zeros_like(x)
    interpret(apply, [x, y])
    tolerances = tolerance(dtype)
    np.testing.assert_allclose(y.astype("float64"), expected(x.astype("float64")), **tolerances)


def spmm():
    return PROGRAMS["spmm"].make("float32", "int32")


def spmm_args():
    return PROGRAMS["spmm"].inputs(np.random.default_rng(0), "small", "float32", "int32")


TWISTED = np.zeros((7, 13), "float32").T
WRONG = [  # (argument, value, error, what is expected of it)
    ("b", None, TypeError, "expected a NumPy array, got NoneType"),
    ("a", np.zeros(3), TypeError, "buffer 'A': expected dtype float32, got float64"),
    ("a", np.zeros(3, "float32"), ValueError, r"'A': expected \d+ elements, got shape \(3,\)"),
    ("indptr", np.zeros(3, "int32"), ValueError, "axis 'J': expected 14 elements, got shape .3,"),
    ("c", TWISTED, ValueError, "buffer 'C': expected a C-contiguous array"),
    ("m", 13.0, TypeError, "expected a number of type int32, got 13.0"),
    ("m", 2**40, ValueError, "expected a number of type int32, got 10995"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_arguments(name, value, error, message):
    with pytest.raises(error, match=f"spmm: argument '{name}': .*{message}"):
        interpret(spmm(), {**spmm_args(), name: value})


def test_wrong_names_and_numbers_of_arguments():
    args = spmm_args()
    with pytest.raises(TypeError, match="spmm: unknown argument 'q'"):
        interpret(spmm(), {**args, "q": 1})
    del args["b"]
    with pytest.raises(TypeError, match="spmm: argument 'b' is missing"):
        interpret(spmm(), args)
    with pytest.raises(TypeError, match="spmm: expected 9 arguments .*, got 1"):
        interpret(spmm(), [1])
