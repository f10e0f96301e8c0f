"""The passes behind fused relational products: what they make of a program, what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from cuda_runner import requires_cuda_text, run_cuda
from schedule_common import says, table
from sparsetir import lower_sparse_buffer
from sparsetir.schedules.gpu.passes.atomic_products import matmul_then_dot, sum_then_matmul
from sparsetir.schedules.gpu.passes.cooperative_copy import cooperative_copy
from sparsetir.schedules.gpu.passes.cooperative_sums import cooperative_dot, cooperative_gather
from sparsetir.schedules.gpu.passes.software_pipeline import software_pipeline
from sparsetir.schedules.gpu.passes.thread_tiled_matmul import thread_tiled_matmul
from sparsetir.sparse_ir.errors import ScheduleError
from stage2 import golden, plain_text

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

STEPS = ["sums_start", "sums_write"]


@T.prim_func(s_tir=True)
def products(
    I: T.Buffer((3, 16), "int32"), J: T.Buffer((3, 16, 2), "int32"),
    A: T.Buffer((3, 16, 2), "float32"), X: T.Buffer((9, 8), "float32"),
    W: T.Buffer((3, 8, 32), "float32"), Y: T.Buffer((20, 32), "float32"),
) -> None:  # fmt: skip
    """Rows in three tiles, two elements of each, 8 features in two steps."""
    for t in T.thread_binding(3, thread="blockIdx.x"):
        for i, l, k0, k1, j in T.grid(16, 32, 2, 4, 2):
            with T.sblock("sums"):
                vt, vi, vl, vk0, vk1, vj = T.axis.remap("SSSRRR", [t, i, l, k0, k1, j])
                if I[vt, vi] >= 0 and J[vt, vi, vj] >= 0:
                    T.call_extern(
                        "float32", "atomicAdd", T.address_of(Y[I[vt, vi], vl]),
                        A[vt, vi, vj] * X[J[vt, vi, vj], vk0 * 4 + vk1] * W[vt, vk0 * 4 + vk1, vl],
                    )  # fmt: skip


def apart(func: Any = products) -> Any:
    return sum_then_matmul(func, "sums", outer=1, dtype="float32")


def on_threads() -> Any:
    func = cooperative_gather(apart(), "sums_gather", warps=1, vector=4)
    func = cooperative_copy(func, "sums_matrix", warps=1, vector=4)
    func = thread_tiled_matmul(func, "sums_product", STEPS, warps=1, shape=(4, 4))
    return software_pipeline(func, "sums_visit", ["sums_gather", "sums_matrix"], stages=2)


def test_golden() -> None:
    """The sums apart, and all passes one after the other."""
    assert plain_text(apart()) == golden("sum_then_matmul")
    assert plain_text(on_threads()) == golden("sum_then_matmul_on_threads")


@requires_cuda_text
def test_a_program_without_a_template() -> None:
    rng = np.random.default_rng(0)
    i, j = rng.integers(-1, 20, (3, 16)), rng.integers(-1, 9, (3, 16, 2))
    a, x, w = (rng.standard_normal(s).astype("f4") for s in ((3, 16, 2), (9, 8), (3, 8, 32)))
    args = {"I": i.astype("int32"), "J": j.astype("int32"), "A": a, "X": x, "W": w}
    zeros = np.zeros((20, 32), "float32")
    found = run_cuda(lower_sparse_buffer(on_threads()), {**args, "Y": zeros})["Y"]
    inner = (np.where(j[..., None] >= 0, x[j], 0) * a[..., None]).sum(axis=2) @ w
    expected = np.zeros((20, 32))
    np.add.at(expected, i[i >= 0], inner[i >= 0])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@T.prim_func(s_tir=True)
def dots(
    I: T.Buffer((3, 16), "int32"), J: T.Buffer((3, 16, 2), "int32"),
    E: T.Buffer((3, 16, 2), "int32"), X: T.Buffer((9, 32), "float32"),
    W: T.Buffer((3, 32, 8), "float32"), G: T.Buffer((20, 8), "float32"),
    Y: T.Buffer((96,), "float32"),
) -> None:  # fmt: skip
    """Two elements of each row, in three tiles of rows, 8 features of these in two steps."""
    for t in T.thread_binding(3, thread="blockIdx.x"):
        for i, j, k, l0, l1 in T.grid(16, 2, 32, 2, 4):
            with T.sblock("dots"):
                vt, vi, vj, vk, vl0, vl1 = T.axis.remap("SSSRRR", [t, i, j, k, l0, l1])
                if I[vt, vi] >= 0 and J[vt, vi, vj] >= 0:
                    T.call_extern(
                        "float32", "atomicAdd", T.address_of(Y[E[vt, vi, vj]]),
                        X[J[vt, vi, vj], vk]
                        * (W[vt, vk, vl0 * 4 + vl1] * G[I[vt, vi], vl0 * 4 + vl1]),
                    )  # fmt: skip


def dots_apart(func: Any = dots) -> Any:
    return matmul_then_dot(func, "dots", outer=1)


def dots_on_threads() -> Any:
    func = dots_apart()
    steps = ["dots_gather", "dots_matrix"]
    for step in steps:
        func = cooperative_copy(func, step, warps=1, vector=4)
    func = thread_tiled_matmul(
        func, "dots_product", ["dots_start", "dots_write"], warps=1, shape=(4, 4)
    )
    func = software_pipeline(func, "dots_visit", steps, stages=2)
    return cooperative_dot(func, "dots_dots", warps=1, vector=4)


def test_golden_of_products_first() -> None:
    assert plain_text(dots_apart()) == golden("matmul_then_dot")
    assert plain_text(dots_on_threads()) == golden("matmul_then_dot_on_threads")


@requires_cuda_text
def test_dots_without_a_template() -> None:
    rng = np.random.default_rng(0)
    i, j = rng.integers(-1, 20, (3, 16)), rng.integers(-1, 9, (3, 16, 2))
    x, w, g = (rng.standard_normal(s).astype("f4") for s in ((9, 32), (3, 32, 8), (20, 8)))
    index = {"I": i, "J": j, "E": rng.permutation(96).reshape(3, 16, 2)}
    args = {name: array.astype("int32") for name, array in index.items()}
    zeros = np.zeros(96, "float32")
    given = {**args, "X": x, "W": w, "G": g, "Y": zeros}
    found = run_cuda(lower_sparse_buffer(dots_on_threads()), given)["Y"]
    there = (i[..., None] >= 0) & (j >= 0)
    expected = np.zeros(96)
    expected[index["E"]] = np.where(there, np.einsum("tijk,tkl,til->tij", x[j], w, g[i]), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def edited(*changes: tuple[str, str], of: Any = products) -> Any:
    """The products with some of their text changed."""
    from tvm.script import from_source

    text = of.script()
    for what, instead in changes:
        assert what in text, text
        text = text.replace(what, instead)
    return from_source(text, s_tir=True)


STEP = "sums_product"
ATOMIC, SUMMED, TERMS = ("atomicAdd", "atomicMax"), (" * W[vt, vk0 * 4 + vk1, vl]", ""), (
    "W[vt, vk0 * 4 + vk1, vl]", "W[vt, vk1, vl]")  # fmt: skip
REFUSED = """
sum_then_matmul(products, "none", outer=1, dtype="float32")
    sum_then_matmul: expected a block in loops, among ['sums'], got 'none'
apart(edited(ATOMIC))
    argument 'block': expected an element to be added to atomically, got
apart(edited(SUMMED))
    expected products of what is gathered for a row with a matrix over columns
apart(edited(TERMS))
    expected a matrix over steps, terms and columns alone, in tiles of constant
apart(edited(("J[vt, vi, vj] >= 0", "J[vt, vi, vj] >= vl")))
    expected conditions of what is gathered, of the matrix or of the result alone
dots_apart(edited(ATOMIC, of=dots))
    matmul_then_dot: argument 'block': expected an element to be added to atomically
matmul_then_dot(products, "sums", outer=1)
    expected products with a matrix for rows of two loops, got
dots_apart(edited(("J[vt, vi, vj] >= 0", "J[vt, vi, vj] >= vl1"), of=dots))
    expected conditions of one factor, or of an element, alone
cooperative_dot(dots_apart(), "dots_dots", warps=1, vector=8)
    cooperative_dot: argument 'vector': expected a divisor of 32 neighbours, of at mos
cooperative_dot(dots_apart(), "dots_gather", warps=1, vector=4)
    cooperative_dot: argument 'dots': expected a block that adds products of rows, one
cooperative_gather(apart(), "sums_gather", warps=1, vector=8)
    argument 'vector': expected a divisor of 4 neighbours, of at most 16 bytes, got
cooperative_gather(apart(), "sums_matrix", warps=1, vector=4)
    argument 'gather': expected a block that sets a sum to zero and adds rows to it
thread_tiled_matmul(apart(), STEP, STEPS, warps=1, shape=(4, 8))
    argument 'shape': expected 32 tiles that make 16 by 32 sums, got (4, 8)
thread_tiled_matmul(apart(), "sums_start", STEPS, warps=1, shape=(4, 4))
    argument 'reduce': expected X[..] = X[..] + A[..] * B[..] of A and B in shared
thread_tiled_matmul(apart(), STEP, STEPS[:1], warps=1, shape=(4, 4))
    argument 'steps': expected the blocks of all accesses of the sums, got Y_ws
thread_tiled_matmul(apart(), STEP, [*STEPS, "sums_matrix"], warps=1, shape=(4, 4))
    argument 'steps': expected loops over rows and columns of the sums around block
"""


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_: str, code: str, words: list[str]) -> None:
    says(code, words, globals(), ScheduleError)
