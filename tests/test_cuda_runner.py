"""Tests of `cuda_runner`, on text written by hand: values, and what is found."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

from __future__ import annotations

import mmap
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm.script import tirx as T

import nvrtc
import tensor_cores_common
from cuda_runner import CudaFunction, KernelError, requires_cuda_text, run_cuda
from ptx import Global, Module, PtxError
from sparsetir.formats import BSR
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores

pytestmark = requires_cuda_text


def launch(text: str, *args: Any, block: int = 32, grid: int = 1, **options: Any) -> None:
    """Run the kernel `k` of a text on arrays, which it changes, and on int32."""
    memory = Global()
    values = [
        memory.add(f"arg{n}", x) if isinstance(x, np.ndarray) else x for n, x in enumerate(args)
    ]
    kernel = Module(nvrtc.ptx_of(text, "sm_90"))["k"]
    kernel.launch((grid, 1, 1), (block, 1, 1), values, memory, **options)


def kernel(parameters: str, body: str, before: str = "") -> str:
    head = f'{before}extern "C" __global__ void k({parameters})'
    return f"{head} {{\n  int t = threadIdx.x;\n{body}\n}}\n"


# --- values ----------------------------------------------------------------------------------


def test_what_lanes_that_ended_give_is_nan():
    out = np.zeros((2, 32), "float32")
    body = "  if (t >= 20) return;\n  out[t] = __shfl_down_sync(0xffffffffu, 1.0f, 8, 32);"
    launch(kernel("float* out", body), out)
    assert (out[0, :12] == 1).all() and np.isnan(out[0, 12:20]).all()


HALVES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
ADDED = ["int", "unsigned", "unsigned long long", "float", "double", "half", "nv_bfloat16"]
NUMPY = ["int32", "uint32", "uint64", "float32", "float64", "float16", ml_dtypes.bfloat16]


def test_atomics():
    """Sums of all types that CUDA adds; the largest and least; a swap that one thread wins."""
    lines = [f"  atomicAdd(a{n} + t % 3, ({kind})1.0f);" for n, kind in enumerate(ADDED)]
    lines += [
        "  atomicMax(m, t); atomicMin(m + 1, -t);",
        "  if (atomicCAS(m + 2, 0, t + 1) == 0) atomicAdd(m + 3, 1);",
        "  atomicAdd((half2*)h, make_half2(1.0f, 2.0f));",
    ]
    parameters = ", ".join(f"{kind}* a{n}" for n, kind in enumerate(ADDED))
    arrays = [np.zeros(3, dtype) for dtype in NUMPY]
    most, pair = np.zeros(4, "int32"), np.zeros(2, "float16")
    viewed = [a.view("uint16") if a.dtype.itemsize == 2 else a for a in (*arrays, most, pair)]
    text = kernel(f"{parameters}, int* m, half* h", "\n".join(lines), HALVES)
    launch(text, *viewed, block=64, seed=1)
    for array in arrays:
        assert list(array.astype("float64")) == [22, 21, 21]
    assert list(most[:2]) == [63, -63] and 1 <= most[2] <= 64 and most[3] == 1
    assert list(pair) == [64, 128]
    with pytest.raises(RuntimeError, match="(?s)NVRTC failed.*atomicAdd"):
        launch(kernel("long* a", "  atomicAdd(a, 1L);"))


MATRICES = """
  using namespace nvcuda::wmma;
  __shared__ half S[256];
  for (int i = t; i < 256; i += 32) S[i] = A[i];
  __syncthreads();
  fragment<matrix_a, 16, 16, 16, half, LAYOUT> a;
  fragment<matrix_b, 16, 16, 16, half, row_major> b;
  fragment<accumulator, 16, 16, 16, float> c;
  load_matrix_sync(a, S, 16);
  load_matrix_sync(b, B, 24);
  load_matrix_sync(c, C, 16, mem_col_major);
  mma_sync(c, a, b, c);
  store_matrix_sync(C, c, 16, mem_row_major);"""


@pytest.mark.parametrize("layout", ["row_major", "col_major"])
def test_matrices_of_wmma(layout):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, shape).astype("float16") for shape in ((16, 16), (16, 24)))
    c = rng.integers(-9, 9, (16, 16)).astype("float32")
    before = HALVES + "#include <mma.h>\n"
    text = kernel("half* A, half* B, float* C", MATRICES.replace("LAYOUT", layout), before)
    expected = c.T + (a if layout == "row_major" else a.T) @ b[:, :16]
    launch(text, a, b, c, races=False)
    np.testing.assert_array_equal(c, expected)
    with pytest.raises(PtxError, match="lanes of a warp do not come"):
        launch(text.replace("  load_m", "  if (t > 7)\n  load_m", 1), a, b, c)


# --- what is found -------------------------------------------------------------------------------


def test_copies_that_nobody_waits_for_are_found():
    config = TensorCores(BSR(16, 16), stages=2, tile=16, warps=(1, 1))
    waits = r"tvm_builtin_ptx_cp_async_wait_group\w*\(\);"
    built = tensor_cores_common.kernel(config, edit=lambda text: re.sub(waits, ";", text))
    mask = tensor_cores_common.pattern(config.format, (32, 48), [3])
    with pytest.raises(KernelError, match="asynchronous copy is on its way, not waited for"):
        tensor_cores_common.check(built, mask, 16)


# --- whole functions -----------------------------------------------------------------------------


@T.prim_func(s_tir=True)
def sums_of_blocks(x: T.handle, c: T.handle, n: T.int32, m: T.int32):
    X = T.match_buffer(x, (n,), "float32")
    C = T.match_buffer(c, (m,), "float32")
    S = T.sblock_alloc_buffer(((n + 63) // 64 * 64,), "float32", scope="shared")
    for b in T.thread_binding((n + 63) // 64, "blockIdx.x"):
        for t in T.thread_binding(64, "threadIdx.x"):
            with T.sblock("load"):
                v = T.axis.spatial((n + 63) // 64 * 64, b * 64 + t)
                S[v] = T.if_then_else(v < n, X[v], T.float32(0))
        for t in T.thread_binding(64, "threadIdx.x"):
            with T.sblock("add"):
                vb, vt = T.axis.remap("SS", [b, t])
                T.reads(S[vb * 64 + 63 - vt])
                T.writes(C[0:m])
                T.evaluate(
                    T.call_extern(
                        "float32", "atomicAdd", T.address_of(C[vt % m]), S[vb * 64 + 63 - vt]
                    )
                )


REMOVED = {
    "": ("", ""),
    r"race: block \d+, thread .* S": ("__syncthreads();", ""),
    r"race: block \d+, thread .* C\[": (r"atomicAdd(", "plain_add("),
    r"out of bounds: block \d+, thread .* X, in no buffer": ("< n", "<= n"),
}


@pytest.mark.parametrize("message", REMOVED)
def test_what_is_removed_from_a_kernel_is_found(message):
    """A barrier, an atomic, a bound; with all of them the sums are right."""
    removed, instead = REMOVED[message]

    def edit(source: str) -> str:
        assert removed in source
        plain = "__device__ void plain_add(float* at, float x) { *at += x; }\n"
        return plain + source.replace(removed, instead)

    x = np.random.default_rng(0).random(100, "float32")
    names = [p.name for p in sums_of_blocks.params]
    args = dict(zip(names, [x, np.zeros(7, "float32"), 100, 7], strict=True))
    function = CudaFunction(sums_of_blocks, edit=edit)
    if message:
        with pytest.raises(KernelError, match=f"(?s)sums_of_blocks_kernel: {message}"):
            function(args)
        return
    out = function(args, seeds=range(4))[names[1]]
    padded = np.concatenate([x, np.zeros(28, "float32")]).reshape(2, 64)[:, ::-1].sum(axis=0)
    sums = [padded[number::7].sum() for number in range(7)]
    np.testing.assert_allclose(out, sums, rtol=1e-5)
    counts = function.counts
    assert counts["atomics"] == 128 and counts["barriers"] == 2


def test_an_index_beyond_an_array_of_a_thread_is_found():
    @T.prim_func(s_tir=True)
    def double(x: T.handle):
        X = T.match_buffer(x, (32,), "float32")
        for t in T.thread_binding(8, "threadIdx.x"):
            Y = T.alloc_buffer((4,), "float32", scope="local")
            for i in range(4):
                Y[i] = X[t * 4 + i] * T.float32(2)
            for i in range(4):
                X[t * 4 + i] = Y[i]

    (name,) = [p.name for p in double.params]
    args = {name: np.ones(32, "float32")}
    assert (run_cuda(double, args)[name] == 2).all()
    for edited in ("Y_ptr[i]", "Y_ptr[i_1]"):
        edit = lambda text: text.replace(edited, edited.replace("i", "4 - i"))  # noqa: E731
        with pytest.raises(KernelError, match="is at a trap"):
            CudaFunction(double, edit=edit)(args)


def test_seeds_must_agree():
    @T.prim_func(s_tir=True)
    def last(x: T.handle):
        X = T.match_buffer(x, (1,), "int32")
        for b in T.thread_binding(9, "blockIdx.x"):
            with T.sblock("last"):
                v = T.axis.spatial(9, b)
                T.reads()
                T.writes(X[0:1])
                T.evaluate(T.call_extern("int32", "atomicExch", T.address_of(X[0]), v))

    (name,) = [p.name for p in last.params]
    with pytest.raises(KernelError, match=f"{name} depends on the order in which warps run"):
        run_cuda(last, {name: np.zeros(1, "int32")}, seeds=range(8))


def test_offsets_beyond_31_bits():
    """Untouched memory is not allocated; read-only memory is not copied."""

    @T.prim_func(s_tir=True)
    def gather(b: T.handle, i: T.handle, c: T.handle, n: T.int64):
        B = T.match_buffer(b, (n,), "int8")
        rows = T.match_buffer(i, (32,), "int64")
        C = T.match_buffer(c, (32,), "int8")
        for t in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("gather"):
                v = T.axis.spatial(32, t)
                C[v] = B[rows[v]]

    n = (1 << 31) + 4096
    big = np.frombuffer(mmap.mmap(-1, n), "int8")
    rows = n - 1 - np.arange(32, dtype="int64")
    big[rows] = np.arange(32)
    big.flags.writeable = False
    names = [p.name for p in gather.params]
    args = dict(zip(names, [big, rows, np.zeros(32, "int8"), n]))
    out = run_cuda(gather, args)
    np.testing.assert_array_equal(out[names[2]], np.arange(32))
    with pytest.raises(KernelError, match="B may only be read"):
        CudaFunction(gather, edit=lambda s: s.replace("C_ptr[((", "B_ptr[(("))(args)
    rows += 32
    with pytest.raises(KernelError, match="out of bounds: .* reads 1 bytes .* of B"):
        run_cuda(gather, args)
