"""Floats in kernels are those of IEEE 754, not the real numbers of TVM's simplifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

import gpu_runner
import sparsetir
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
    """As numpy computes it."""
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
    given = {"a": a, "b": b, "o": np.zeros_like(wanted), "n": len(a)}
    names = [p.name for p in last.params]
    got = gpu_runner.run_opencl(last, dict(zip(names, given.values(), strict=True)))
    # What is multiplied and subtracted may be one instruction, which rounds once.
    np.testing.assert_allclose(got[names[2]].reshape(wanted.shape), wanted, atol=1e-12)
