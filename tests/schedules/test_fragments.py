"""Two products of which the second takes the sums of the first, as attention has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import tirx

from cuda_runner import CudaFunction, requires_cuda_text
from sparsetir.schedules.gpu.passes.fragments import (
    LEFT,
    RIGHT,
    SUMS,
    Tile,
    left_of_sums,
    load_left,
    load_right,
    place_of_sum,
    registers,
)
from sparsetir.schedules.gpu.passes.ptx import multiply
from sparsetir.schedules.passes.nests import allocated, block_of, for_threads, unrolled
from sparsetir.schedules.passes.parallel_loops import thread_axis
from sparsetir.sparse_ir.nodes import buffer_var
from sparsetir.sparse_ir.tir import as_dtype, barrier, loop_over
from spmm_gpu_common import as_dtype as numpy_dtype
from spmm_gpu_common import bfloat16_arrays

pytestmark = requires_cuda_text
N = 16


def two_products(dtype: str) -> tirx.PrimFunc:
    """O = P V where P = round(Q K'), of 16 by 16, for one warp; K and V lie in the same order."""
    q, k, v = (buffer_var([N, N], dtype, name) for name in "QKV")
    o = buffer_var([N, N], "float32", "O")
    shared = [buffer_var([N, N + 8], dtype, f"{x.name}_ws", "shared", align=64) for x in (q, k, v)]
    left, right = registers([LEFT], "left"), registers([2 * RIGHT], "right")
    s, out = (buffer_var([2, SUMS], "float32", name, "local") for name in ("S", "OUT"))

    def at(buffer: Any, *indices: Any) -> Any:
        return tirx.BufferLoad(buffer, [as_dtype(i, "int32") for i in indices])

    def tile(buffer: Any, along_sum: bool) -> Tile:
        def element(place: Any, depth: Any) -> Any:
            return at(buffer, *((place, depth) if along_sum else (depth, place)))

        return Tile(element, along_sum, dtype)

    def zero(buffer: Any) -> Any:
        return unrolled(
            [2, SUMS], lambda j, e: tirx.BufferStore(buffer, tirx.const(0, "float32"), [j, e])
        )

    of_left = [at(left, n) for n in range(LEFT)]

    def product(sums: Any) -> list[Any]:
        return [
            multiply(
                dtype, [at(sums, j, e) for e in range(SUMS)], of_left,
                [at(right, RIGHT * j + e) for e in range(RIGHT)],
            )
            for j in range(2)
        ]  # fmt: skip

    def code(_: Any, lane: Any) -> Any:
        def copy(u: Any) -> Any:
            number = u * 32 + lane
            place = [number // N, number % N]
            return tirx.SeqStmt(
                [
                    tirx.BufferStore(to, tirx.BufferLoad(x, place), place)
                    for x, to in zip((q, k, v), shared, strict=True)
                ]
            )

        def write(j: Any, e: Any) -> Any:
            row, column = place_of_sum(lane, e)
            return tirx.BufferStore(o, at(out, j, e), [row, j * 8 + column])

        first = tirx.IntImm("int32", 0)
        both = [at(right, n) for n in range(2 * RIGHT)]
        sums = [[at(s, j, e) for e in range(SUMS)] for j in range(2)]
        return tirx.SeqStmt([
            unrolled([N * N // 32], copy), barrier(), zero(s), zero(out),
            load_left(of_left, tile(shared[0], True), first, first, lane),
            load_right(both, tile(shared[1], True), first, first, lane),
            *product(s),
            left_of_sums(of_left, *sums, dtype),
            load_right(both, tile(shared[2], False), first, first, lane),
            *product(out),
            unrolled([2, SUMS], write),
        ])  # fmt: skip

    block = tirx.Var("block", "int32")
    body = block_of("visit", for_threads("products", 1, code))
    body = loop_over(block, 1, body, tirx.ForKind.THREAD_BINDING, thread_axis("blockIdx.x"))
    func = tirx.PrimFunc([q, k, v, o], block_of("root", body))
    for buffer in (*shared, left, right, s, out):
        func = allocated(func, buffer)
    return func


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_as_a_factor(dtype):
    function = CudaFunction(two_products(dtype), "sm_80")
    rng = np.random.default_rng(0)
    q, k, v = (rng.integers(-4, 5, (N, N)).astype(numpy_dtype(dtype)) for _ in range(3))
    out = np.zeros((N, N), "float32")
    with bfloat16_arrays():
        found = function({"Q": q, "K": k, "V": v, "O": out}, seeds=(0, 1))["O"]
    p = (q.astype("float64") @ k.astype("float64").T).astype(numpy_dtype(dtype)).astype("float64")
    np.testing.assert_array_equal(found, p @ v.astype("float64"))
