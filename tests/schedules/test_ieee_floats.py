"""Floats in kernels are those of IEEE 754, not real numbers as in TVM's simplifier; casts round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

import gpu_runner
import sparsetir
from pairs import by_turns
from small import small
from sparsetir.schedules.default import default_schedule

EXPRESSIONS = (
    "A[i] - A[i]",
    "B[i] * (A[i] - A[i])",
    "(A[i] + B[i]) - B[i]",
    "A[i] - (A[i] + B[i])",
    "A[i] - A[0]",
    "A[i] * B[i] - A[i] * B[i]",
    "T.Mul(A[i], {z})",
    "T.Mul(-{z}, A[i])",
    "T.Div({z}, A[i])",
    "T.Div(A[i], {z})",
    "T.if_then_else(A[i] != B[i], {p}, {q})",
    "T.if_then_else(A[i] == A[i], {p}, {q})",
    "T.if_then_else(A[i] != A[i], {p}, {q})",
    "T.if_then_else(T.Not(A[i] < B[i]), {p}, {q})",
    "T.if_then_else(T.Not(A[i] == B[i]), {p}, {q})",
    "T.if_then_else(A[i] < B[i] or A[i] >= B[i], {p}, {q})",
    "T.if_then_else(A[i] < {p} or A[i] > {p}, {p}, {q})",
    "T.if_then_else(A[i] == B[i], {p}, T.if_then_else(A[i] != B[i], {q}, A[i]))",
    "T.if_then_else(A[i] < B[i], {p}, T.if_then_else(A[i] >= B[i], {q}, A[i]))",
    "T.Select(A[i] < B[i], {p}, T.Select(B[i] <= A[i], {q}, B[i]))",
)
NUMBERS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e-7, 3.0)


def program(dtype: str) -> Any:
    """A kernel that gives all expressions of all pairs of numbers."""
    p, q, z = (f"T.{dtype}({number})" for number in (1.0, 2.0, 0.0))
    stores = [f"O[{n}, i] = {e.format(p=p, q=q, z=z)}" for n, e in enumerate(EXPRESSIONS)]
    return sparsetir.from_source(
        "@T.prim_func\ndef f(a: T.handle, b: T.handle, o: T.handle, n: T.int32):\n"
        "    N = T.dense_fixed(n)\n"
        f"    R = T.dense_fixed({len(EXPRESSIONS)})\n"
        f"    A = T.match_sparse_buffer(a, (N,), '{dtype}')\n"
        f"    B = T.match_sparse_buffer(b, (N,), '{dtype}')\n"
        f"    O = T.match_sparse_buffer(o, (R, N), '{dtype}')\n"
        '    with T.sp_iter([N], "S", "x") as [i]:\n        ' + "\n        ".join(stores) + "\n"
    )  # fmt: skip


def pairs(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.meshgrid(np.array(NUMBERS, dtype), np.array(NUMBERS, dtype))
    return a.ravel(), b.ravel()


def expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The result as NumPy computes it."""
    z, p, q = a.dtype.type(0), a.dtype.type(1), a.dtype.type(2)
    with np.errstate(all="ignore"):
        return np.array([
            a - a, b * (a - a), (a + b) - b, a - (a + b), a - a[0], a * b - a * b, a * z, -z * a,
            z / a, a / z, np.where(a != b, p, q), np.where(a == a, p, q),
            np.where(a != a, p, q), np.where(~(a < b), p, q), np.where(~(a == b), p, q),
            np.where((a < b) | (a >= b), p, q), np.where((a < p) | (a > p), p, q),
            np.where(a == b, p, np.where(a != b, q, a)),
            np.where(a < b, p, np.where(a >= b, q, a)), np.where(a < b, p, np.where(b <= a, q, b)),
        ])  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_on_cpu(dtype: str) -> None:
    """Compiled and interpreted; NaN comes first, so `A[0]` is one."""
    a, b = pairs(dtype)
    func, wanted = program(dtype), expected(a, b)
    out = np.zeros_like(wanted)
    sparsetir.build(func)(a, b, out)
    np.testing.assert_array_equal(out, wanted)
    out[:] = 0
    sparsetir.interpret(func, {"a": a, "b": b, "o": out, "n": len(a)})
    np.testing.assert_array_equal(out, wanted)


@gpu_runner.requires_opencl
def test_on_gpu() -> None:
    a, b = pairs("float32")
    wanted = expected(a, b)
    stage_two = sparsetir.lower_sparse_iter(program("float32"))
    gpu = tvm.target.Target("opencl")
    last = sparsetir.lower(default_schedule(stage_two, gpu), target=gpu)["III"]
    inputs = {"a": a, "b": b, "o": np.zeros_like(wanted), "n": len(a)}
    names = [p.name for p in last.params]
    result = gpu_runner.run_opencl(last, dict(zip(names, inputs.values(), strict=True)))
    # What is multiplied and subtracted may be one instruction, which rounds once.
    np.testing.assert_allclose(result[names[2]].reshape(wanted.shape), wanted, atol=1e-12)


FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
TYPES = (*FLOATS, *INTEGERS, "bool")
# Ties, the ends of types, numbers that round to infinity, to zero, and twice.
CAST = (
    0, 1, -1, 2, 3, -7, 100, 127, -128, 128, 255, 256, 257, -257, 300, 2049, 32767, 65519, 65520,
    2**24 + 1, 2**31 - 1, -(2**31), 2**32 - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, 1.5,
    -2.5, 0.1, 1e-7, 1e-40, 1e-45, 3.39e38, 3.4e38, 1e39, np.nan, np.inf, -np.inf, -0.0, 1.00390625,
    1.01171875, 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-24 + 2.0**-50,
)  # fmt: skip
CHAINS = """
Y[{n} * 3, i] = T.cast(T.cast(A[i], "{to}"), "{dtype}")
v{n}: T.let[T.{to}] = T.cast(A[i], "{to}")
Y[{n} * 3 + 1, i] = T.cast(v{n}, "{dtype}")
l{n} = T.alloc_buffer((1,), "{to}", scope="local")
l{n}[0] = T.cast(A[i], "{to}")
Y[{n} * 3 + 2, i] = T.cast(l{n}[0], "{dtype}")
M{n}[i] = T.cast(A[i], "{to}")
"""


def numbers(dtype: str) -> np.ndarray:
    if dtype in INTEGERS:
        ends = np.iinfo(dtype)
        return np.array(
            [n for n in CAST if isinstance(n, int) and ends.min <= n <= ends.max], dtype
        )
    return np.array(CAST, "float64").astype(dtype)


def is_defined(values: np.ndarray, to: str) -> np.ndarray:
    """Whether casts mean something: to integers those of what they hold."""
    if str(values.dtype) not in FLOATS or to not in INTEGERS:
        return np.ones(len(values), bool)
    ends, whole = np.iinfo(to), np.trunc(values.astype("float64"))
    return np.array([bool(np.isfinite(x)) and ends.min <= int(x) <= ends.max for x in whole])


@pytest.mark.parametrize("dtype", by_turns(TYPES, 3))
@np.errstate(all="ignore")
@pytest.mark.default("uint16", "bool")
def test_casts(dtype: str) -> None:
    """Casts to each type and back, in an expression, a variable, a local array, and memory."""
    body = "".join(CHAINS.format(n=n, to=to, dtype=dtype) for n, to in enumerate(TYPES))
    body = 'with T.sp_iter([I], "S", "f") as [i]:\n' + body.replace("\n", "\n    ")
    buffers = {"A": f"I {dtype}", "Y": f"R I {dtype}"}
    buffers |= {f"M{n}": f"I {to}" for n, to in enumerate(TYPES)}
    func, a = small("f", body, f"R = T.dense_fixed({3 * len(TYPES)})", **buffers), numbers(dtype)
    for run in (sparsetir.interpret, lambda f, args: sparsetir.build(f)(**args)):
        memory = {f"m{n}": np.zeros(len(a), to) for n, to in enumerate(TYPES)}
        y = np.zeros((3 * len(TYPES), len(a)), dtype)
        run(func, {"a": a, "y": y, **memory, "m": len(a)})
        for n, to in enumerate(TYPES):
            wanted, defined = a.astype(to), is_defined(a, to)
            equal(memory[f"m{n}"], wanted, defined, to)
            defined &= is_defined(wanted, dtype)
            for back in y[3 * n : 3 * n + 3]:
                equal(back, wanted.astype(dtype), defined, to)


def equal(result: np.ndarray, wanted: np.ndarray, where: Any, message: str = "") -> None:
    """The same numbers, and NaN."""
    if str(result.dtype) in FLOATS:
        result, wanted = result.astype("float64"), wanted.astype("float64")
    np.testing.assert_array_equal(result[where], wanted[where], message)


def test_bfloat16_in_expressions() -> None:
    """Common subexpressions, which TVM makes variables; and a sum, which is in float32."""
    body = """
with T.sp_iter([I], "S", "f") as [i]:
    E[i] = T.exp(T.cast(A[i], "float32")) * T.cast(A[i], "float32")
    P[i] = T.cast(A[i] * A[i], "float32") * T.cast(A[i] * A[i], "float32")
    C[i] = T.if_then_else(A[i] * A[i] > A[i] + T.bfloat16(257.0), A[i], T.bfloat16(257.0))
    R[i] = T.reinterpret("uint16", A[i] * A[i])
    Q[i] = T.reinterpret("bfloat16", T.reinterpret("uint16", A[i]))
    s = T.alloc_buffer((1,), "bfloat16", scope="local")
    s[0] = T.bfloat16(256.0)
    for q in range(4):
        s[0] = s[0] + T.bfloat16(1.0)
    S[i] = T.cast(s[0], "float32")
"""
    kinds = {
        "E": "float32",
        "P": "float32",
        "C": "bfloat16",
        "R": "uint16",
        "Q": "bfloat16",
        "S": "float32",
    }
    func = small("f", body, A="I bfloat16", **{name: f"I {kind}" for name, kind in kinds.items()})
    a = np.array([0, 1.01, -1.5, 16.1, 30], "bfloat16")
    wide, square = a.astype("float32"), (a * a).astype("float32")
    big = np.array(256, "bfloat16")
    wanted = {
        "e": np.exp(wide) * wide, "p": square * square, "c": np.where(a * a > a + big, a, big),
        "r": (a * a).view("uint16"), "q": a, "s": np.full(5, 260, "float32"),
    }  # fmt: skip
    out = {n.lower(): np.zeros(5, kind) for n, kind in kinds.items()}
    sparsetir.build(func)(a=a, **out)
    np.testing.assert_allclose(out.pop("e"), wanted["e"], 1e-6)
    for name, result in out.items():
        equal(result, wanted[name], ..., name)


def test_exponentials_that_are_stored_in_bfloat16() -> None:
    """Vectors of them have variables, which TVM repeated with what it rounds."""
    func = small("f", """
with T.sp_iter([I, J], "SS", "f") as [i, j]:
    E[i, j] = T.cast(T.exp(T.cast(A[i, j], "float32") - T.cast(B[i], "float32")), "bfloat16")
""", A="I J bfloat16", B="I bfloat16", E="I J bfloat16")  # fmt: skip
    a, b = np.linspace(-3, 3, 100).astype("bfloat16"), np.zeros(4, "bfloat16")
    indptr, indices = np.arange(0, 101, 25, "int32"), np.tile(np.arange(25, dtype="int32"), 4)
    out = np.zeros_like(a)
    sparsetir.build(func)(a, b, out, indptr, indices, n=25)
    wanted = np.exp(a.astype("float32"))
    np.testing.assert_allclose(out.astype("float32"), wanted, rtol=2**-8)
