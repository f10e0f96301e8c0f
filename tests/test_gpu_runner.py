"""Tests of `gpu_runner`, on functions written by hand."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from gpu_runner import (
    ATOMIC_ADD_PRELUDE,
    OpenCLFunction,
    cuda_source,
    nvcc_compile,
    requires_nvcc,
    requires_opencl,
    run_opencl,
)
from pairs import by_default


def make_stencil(shift):
    @T.prim_func(s_tir=True)
    def reverse(x: T.handle, y: T.handle, n: T.int32):
        X = T.match_buffer(x, (n * 64,), "float32")
        Y = T.match_buffer(y, (n * 64,), "float32")
        S = T.sblock_alloc_buffer((n * 64,), "float32", scope="shared")
        for i in T.thread_binding(n, "blockIdx.x"):
            for j in T.thread_binding(64, "threadIdx.x"):
                with T.sblock("load"):
                    v = T.axis.spatial(n * 64, i * 64 + j)
                    S[v] = X[v]
            for j in T.thread_binding(64, "threadIdx.x"):
                with T.sblock("store"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    Y[vi * 64 + vj + shift] = S[vi * 64 + 63 - vj]

    return tvm.s_tir.renew_defs(reverse)


@requires_opencl
def test_shared_memory_must_lie_inside_the_kernel():
    @T.prim_func(s_tir=True)
    def func(x: T.handle, n: T.int32):
        X = T.match_buffer(x, (n,), "float32")
        S = T.alloc_buffer((n,), "float32", scope="shared")
        for i in T.thread_binding(n, "blockIdx.x"):
            S[i] = X[i]

    with pytest.raises(ValueError, match="outside of the kernel"):
        OpenCLFunction(func)


@requires_opencl
def test_host_must_not_touch_buffers():
    @T.prim_func(s_tir=True)
    def func(x: T.handle, n: T.int32):
        X = T.match_buffer(x, (n,), "float32")
        for i in range(n):
            with T.sblock("unbound"):
                v = T.axis.spatial(n, i)
                X[v] = T.float32(1)
        for i in T.thread_binding(n, "blockIdx.x"):
            with T.sblock("bound"):
                v = T.axis.spatial(n, i)
                X[v] = X[v] + T.float32(1)

    with pytest.raises(ValueError, match="X is accessed outside"):
        OpenCLFunction(func)


@requires_opencl
@pytest.mark.parametrize("scope", ["shared.dyn", "warp"])
def test_unsupported_memory(scope):
    @T.prim_func(s_tir=True)
    def func(x: T.handle):
        X = T.match_buffer(x, (32,), "float32")
        for _ in T.thread_binding(1, "blockIdx.x"):
            for j in T.thread_binding(32, "threadIdx.x"):
                S = T.alloc_buffer((32,), "float32", scope=scope)
                S[j] = X[j]
                X[j] = S[31 - j]

    with pytest.raises(ValueError, match=scope):
        OpenCLFunction(func)


@requires_opencl
def test_scalars_vectors_and_host_loop():
    @T.prim_func(s_tir=True)
    def func(x: T.handle, n: T.int64, times: T.int32, scale: T.float32):
        X = T.match_buffer(x, (n * T.int64(4),), "float16")
        for _ in range(times):
            for i in T.thread_binding(n, "threadIdx.x"):
                for j in T.vectorized(T.int64(4)):
                    X[i * T.int64(4) + j] = X[i * T.int64(4) + j] * T.cast(scale, "float16")

    compiled = OpenCLFunction(func)
    assert "half4" in compiled.source
    x = np.arange(12, dtype="float16")
    out = compiled({"X": x, "n": np.int64(3), "times": 3, "scale": 2.0})
    np.testing.assert_array_equal(out["X"], 8 * x)
    assert compiled.launches == [("func_kernel", (1, 1, 1), (3, 1, 1))] * 3


@requires_opencl
@pytest.mark.parametrize("shift", [1, -1])
def test_write_outside_is_reported(shift):
    x = np.zeros(64, "float32")
    with pytest.raises(AssertionError, match="outside of Y"):
        run_opencl(make_stencil(shift), {"X": x, "Y": x, "n": 1})


@requires_opencl
def test_arguments_are_checked():
    func = OpenCLFunction(make_stencil(0))
    x = np.zeros(64, "float32")
    with pytest.raises(TypeError, match="parameters are"):
        func({"X": x, "Y": x})
    with pytest.raises(TypeError, match="dtype"):
        func({"X": x.astype("float64"), "Y": x, "n": 1})
    with pytest.raises(ValueError, match="shape"):
        func({"X": x[1:], "Y": x, "n": 1})


@requires_opencl
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_atomic_add(dtype):
    @T.prim_func(s_tir=True)
    def histogram(i: T.handle, c: T.handle, n: T.int32, m: T.int32):
        index = T.match_buffer(i, (n,), "int32")
        C = T.match_buffer(c, (m,), dtype)
        for b in T.thread_binding((n + 255) // 256, "blockIdx.x"):
            for t in T.thread_binding(256, "threadIdx.x"):
                with T.sblock("add"):
                    T.where(b * 256 + t < n)
                    v = T.axis.spatial(n, b * 256 + t)
                    T.reads(index[v])
                    T.writes(C[0:m])
                    T.evaluate(
                        T.call_extern(
                            dtype, "atomicAdd", T.address_of(C[index[v]]), T.cast(1, dtype)
                        )
                    )

    index = np.random.default_rng(2).integers(0, 5, 10000).astype("int32")
    args = {"index": index, "C": np.zeros(5, dtype), "n": 10000, "m": 5}
    out = run_opencl(histogram, args, prelude=ATOMIC_ADD_PRELUDE)
    np.testing.assert_array_equal(out["C"], np.bincount(index, minlength=5))


@requires_nvcc
@pytest.mark.parametrize("arch", by_default(["sm_80", "sm_90"], "sm_80"))
def test_nvcc(arch):
    assert nvcc_compile(cuda_source(make_stencil(0), arch), arch)[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match="error"):
        nvcc_compile("__global__ void f() { nothing(); }", arch)
