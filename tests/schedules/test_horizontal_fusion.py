"""Many nests on one grid: the text, runs as OpenCL on a CPU, and CUDA text."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.script import tirx as TIR

import sparsetir
from cuda_runner import CudaFunction, requires_cuda_text
from gpu_runner import (
    ATOMIC_ADD_PRELUDE,
    OpenCLFunction,
    cuda_source,
    nvcc_compile,
    requires_nvcc,
    requires_opencl,
)
from programs import PROGRAMS
from sparsetir.formats import Hyb, Operand, Pattern
from sparsetir.schedules.gpu.passes.horizontal_fuse import horizontal_fuse
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds, run_in_parallel
from sparsetir.sparse_ir.traversal import map_expr
from stage2 import golden, plain_text

GPU = tvm.target.Target("opencl")
RUNNERS = [
    pytest.param(OpenCLFunction, marks=requires_opencl, id="OpenCL"),
    pytest.param(CudaFunction, marks=requires_cuda_text, id="CUDA"),
]


def run(function: OpenCLFunction, args: list[Any]) -> list[Any]:
    """The arguments, by position, after a run."""
    names = [p.name for p in function._params]
    out = function(dict(zip(names, args, strict=True)))
    return [out.get(name, value) for name, value in zip(names, args)]


def kernels(text: str) -> int:
    """How many kernels a CUDA text has."""
    return len(set(re.findall(r"__global__ void.*?(\w+_kernel\w*)\(", text)))


# --- three nests of different shapes ------------------------------------------------------------


@TIR.prim_func(s_tir=True)
def three(
    x: TIR.handle, left: TIR.handle, right: TIR.handle, total: TIR.handle,
    m: TIR.int32, n: TIR.int32, w: TIR.int32,
) -> None:  # fmt: skip
    TIR.func_attr({"tirx.noalias": True})
    X = TIR.match_buffer(x, (m, 32), "float32")
    LEFT = TIR.match_buffer(left, (m, 32), "float32")
    RIGHT = TIR.match_buffer(right, (n * w, 8), "float32")
    TOTAL = TIR.match_buffer(total, (m,), "float32")
    for i in TIR.thread_binding(m, thread="blockIdx.x"):
        for k in TIR.thread_binding(32, thread="threadIdx.x"):
            with TIR.sblock("left"):
                vi, vk = TIR.axis.remap("SS", [i, k])
                LEFT[vi, vk] = X[vi, vk] + TIR.float32(1)
    for i in TIR.thread_binding(n, thread="blockIdx.y"):
        for j in TIR.thread_binding(w, thread="blockIdx.x"):
            for k in TIR.thread_binding(8, thread="threadIdx.x"):
                with TIR.sblock("right"):
                    vi, vj, vk = TIR.axis.remap("SSS", [i, j, k])
                    RIGHT[vi * w + vj, vk] = TIR.cast(vi * 100 + vj * 10 + vk, "float32")
    for o in TIR.thread_binding((m + 3) // 4, thread="blockIdx.x"):
        for i in TIR.thread_binding(4, thread="threadIdx.y"):
            for k in range(32):
                with TIR.sblock("total"):
                    vi = TIR.axis.spatial(m, o * 4 + i)
                    vk = TIR.axis.reduce(32, k)
                    TIR.where(o * 4 + i < m)
                    with TIR.init():
                        TOTAL[vi] = TIR.float32(0)
                    TOTAL[vi] = TOTAL[vi] + X[vi, vk]


def test_golden() -> None:
    before = tvm_ffi.structural_hash(three)
    fused = horizontal_fuse(three)
    assert plain_text(fused) == golden("horizontal_fusion")
    assert s_tir.analysis.verify_well_formed(fused)
    assert tvm_ffi.structural_hash(three) == before


@pytest.mark.parametrize("kind", RUNNERS)
def test_nests_of_different_shapes(kind: Any) -> None:
    fused = kind(horizontal_fuse(three))
    for m, n, w in [(5, 3, 2), (9, 0, 4), (0, 2, 3), (4, 3, 0), (0, 0, 0)]:
        x = np.random.default_rng(m).random((m, 32), "float32")
        args = [x, np.zeros_like(x), np.zeros((n * w, 8), "float32"), np.zeros(m, "float32")]
        out = run(fused, [*args, m, n, w])
        i, j, k = np.indices((n, w, 8))
        np.testing.assert_array_equal(out[1], x + 1)
        np.testing.assert_array_equal(out[2].reshape(n, w, 8), i * 100 + j * 10 + k)
        np.testing.assert_allclose(out[3], x.sum(axis=1), rtol=1e-5)
        # Nothing to do is one block that does nothing: CUDA refuses to launch none.
        grid = max(1, m + n * w + (m + 3) // 4)
        assert fused.launches == [("three_kernel", (grid, 1, 1), (32, 4, 1))]


def test_some_nests_only() -> None:
    """The fused nest stands where the first of them stood; the others stay."""
    fused = horizontal_fuse(three, ["total", "left"])
    assert (count_launches(three), count_launches(fused)) == (3, 2)
    first, second = fused.body.block.body.seq
    names = [re.findall(r'T.sblock\("(\w+)"\)', part.script()) for part in (first, second)]
    assert names == [["left_nest", "left", "total_nest", "total"], ["right"]]
    assert kernels(cuda_source(fused)) == 2
    assert tvm_ffi.structural_equal(horizontal_fuse(three, ["left"]), three)


# --- nests whose threads work together ----------------------------------------------------------


@TIR.prim_func(s_tir=True)
def together(
    x: TIR.handle, back: TIR.handle, total: TIR.handle, plain: TIR.handle,
    m: TIR.int32, n: TIR.int32,
) -> None:  # fmt: skip
    TIR.func_attr({"tirx.noalias": True})
    X = TIR.match_buffer(x, (m, 64), "float32")
    BACK = TIR.match_buffer(back, (m, 64), "float32")
    TOTAL = TIR.match_buffer(total, (m,), "float32")
    PLAIN = TIR.match_buffer(plain, (n, 64), "float32")
    with TIR.sblock("root"):
        S = TIR.sblock_alloc_buffer((64,), "float32", scope="shared")
        for i in TIR.thread_binding(m, thread="blockIdx.x"):
            for k in TIR.thread_binding(64, thread="threadIdx.x"):
                with TIR.sblock("load"):
                    vi, vk = TIR.axis.remap("SS", [i, k])
                    S[vk] = X[vi, vk]
            for k in TIR.thread_binding(64, thread="threadIdx.x"):
                with TIR.sblock("back"):
                    vi, vk = TIR.axis.remap("SS", [i, k])
                    BACK[vi, vk] = S[63 - vk]
        for i in TIR.thread_binding(m, thread="blockIdx.x"):
            for k in TIR.thread_binding(64, thread="threadIdx.x"):
                with TIR.sblock("total"):
                    vi, vk = TIR.axis.remap("SR", [i, k])
                    with TIR.init():
                        TOTAL[vi] = TIR.float32(0)
                    TOTAL[vi] = TOTAL[vi] + X[vi, vk]
        for i in TIR.thread_binding(n, thread="blockIdx.x"):
            for k in TIR.thread_binding(64, thread="threadIdx.x"):
                with TIR.sblock("plain"):
                    vi, vk = TIR.axis.remap("SS", [i, k])
                    PLAIN[vi, vk] = TIR.float32(2)


@pytest.mark.parametrize("kind", RUNNERS)
def test_shared_memory_and_reductions_over_threads(kind: Any) -> None:
    fused = kind(horizontal_fuse(together))
    for m, n in [(3, 2), (4, 0), (0, 3), (0, 0)]:
        x = np.random.default_rng(m).random((m, 64), "float32")
        args = [x, np.zeros_like(x), np.zeros(m, "float32"), np.zeros((n, 64), "float32"), m, n]
        _, back, total, plain, *_ = run(fused, args)
        np.testing.assert_array_equal(back, x[:, ::-1])
        np.testing.assert_allclose(total, x.sum(axis=1), rtol=1e-5)
        np.testing.assert_array_equal(plain, np.full((n, 64), 2))
        assert fused.launches == [("together_kernel", (max(1, 2 * m + n), 1, 1), (64, 1, 1))]


@requires_nvcc
@pytest.mark.parametrize("func", [three, together], ids=["branches", "loops"])
def test_compiles_for_a_gpu(func: tirx.PrimFunc) -> None:
    text = cuda_source(horizontal_fuse(func), "sm_90")
    assert kernels(text) == 1
    assert nvcc_compile(text, "sm_90")


# --- two products in one program ----------------------------------------------------------------


# --- composable formats -------------------------------------------------------------------------

SPMM = PROGRAMS["spmm"].make("float32", "int32")


@functools.cache
def decomposed(fmt: Hyb) -> tuple[Any, Any]:
    """The stage-I function that computes in the format, and its stage II."""
    rules = fmt.rules(Operand.of(SPMM, "A"))
    _, compute = sparsetir.extract_preprocess(sparsetir.decompose_format(SPMM, rules))
    return compute, sparsetir.lower_sparse_iter(compute)


def buckets(fmt: Hyb) -> list[str]:
    return [f"spmm_{rule.name}0" for rule in fmt.rules(Operand.of(SPMM, "A"))]


def of_rows(lengths: Any, columns: int = 14) -> Pattern:
    """A matrix with rows of these lengths."""
    rng = np.random.default_rng(1)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    cols = [np.sort(rng.permutation(columns)[:n]) for n in lengths]
    coords = [rows, np.concatenate([*cols, np.zeros(0, int)])]
    return Pattern([c.astype("int32") for c in coords], (len(lengths), columns))


def check_spmm(function: OpenCLFunction, fmt: Hyb, pattern: Pattern) -> None:
    """Run SpMM in a format, and compare with scipy."""
    compute, _ = decomposed(fmt)
    rng = np.random.default_rng(2)
    stored = rng.standard_normal(pattern.nnz).astype("float32")
    (m, n), feat = pattern.shape, 35
    b = rng.standard_normal((n, feat)).astype("float32")
    converted = fmt.convert(pattern, Operand.of(SPMM, "A"))
    arguments = converted.arguments(A=stored) | {"b": b, "m": m, "n": n, "feat": feat}
    arguments["c"] = np.full((m, feat), np.nan, "float32")
    names = [str(p.name) for p in compute.params]
    out = run(function, [arguments[name] for name in names])[names.index("c")]
    a = sp.coo_array((stored, tuple(pattern.coords)), pattern.shape)
    np.testing.assert_allclose(out.reshape(m, feat), a @ b, rtol=1e-4, atol=1e-5)


@requires_opencl
@pytest.mark.parametrize("stage", ["II", "III"])
def test_buckets_of_hyb(stage: str) -> None:
    """Rows fit their buckets, so that each is written by one nest."""
    fmt = Hyb(1, 2)
    func = sparsetir.default_schedule(decomposed(fmt)[1], GPU)
    assert count_launches(func) == 4
    if stage == "II":
        fused = sparsetir.lower_sparse_buffer(
            horizontal_fuse(func, buckets(fmt), independent=["C"])
        )
    else:  # all runs: the init, which writes what the others read, stays on its own
        fused = horizontal_fuse(sparsetir.lower_sparse_buffer(func), independent=["C"])
    assert (count_launches(fused), kernels(cuda_source(fused))) == (2, 2)
    function = OpenCLFunction(fused)
    lengths = np.random.default_rng(0).integers(0, 5, 40)
    for pattern in (of_rows(lengths), of_rows([1, 0, 1]), of_rows([4] * 9), of_rows([0, 0])):
        check_spmm(function, fmt, pattern)
        assert len(function.launches) == 2


def rows_over_threads(func: tirx.PrimFunc, names: list[str]) -> tirx.PrimFunc:
    """Each bucket its own shape: 2, 4, 8, ... rows per block, 32, 16, 8, ... threads each."""
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    i, k = sch.get_loops(sch.get_sblock("spmm_init0"))
    run_in_parallel(sch, i, "blockIdx.x")
    run_in_parallel(sch, sch.split(k, [None, 32])[1], "threadIdx.x")
    for n, name in enumerate(names):
        io, ib, jb, k = sch.get_loops(sch.get_sblock(name))
        outer, inner = sch.split(ib, [None, 2 << n])
        tiles, lanes = sch.split(k, [None, 32 >> n])
        sch.reorder(io, outer, inner, lanes, tiles, jb)
        for loop, kind in ((outer, "blockIdx.x"), (inner, "threadIdx.y"), (lanes, "threadIdx.x")):
            run_in_parallel(sch, loop, kind, "ignore")  # as the fusion does
    (scheduled,) = sch.mod.functions.values()
    return materialize_loop_kinds(scheduled)


def adding_by_atomics(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """C[...] = C[...] + x as an atomic addition of x."""

    def visit(store: Any) -> Any:
        if store.buffer.name != "C" or not isinstance(store.value, tirx.Add):
            return store
        target, value = store.value.a, store.value.b
        assert isinstance(target, ir.TensorLoad)
        address = tirx.address_of(target)
        return tirx.Evaluate(tirx.call_extern("float32", "atomicAdd", address, value))

    return func.with_body(map_expr(func.body, [(tirx.BufferStore, visit)]))


@requires_opencl
def test_buckets_that_add_by_atomics() -> None:
    """Column parts and pieces of long rows add to the same elements; nothing has to be stated."""
    fmt = Hyb(2, 1)
    func = adding_by_atomics(rows_over_threads(decomposed(fmt)[1], buckets(fmt)))
    fused = horizontal_fuse(func)
    assert (count_launches(func), count_launches(fused)) == (5, 2)
    function = OpenCLFunction(sparsetir.lower_sparse_buffer(fused), ATOMIC_ADD_PRELUDE)
    lengths = np.random.default_rng(0).integers(0, 14, 30)
    for pattern in (of_rows(lengths), of_rows([14, 0, 1]), of_rows([0])):
        check_spmm(function, fmt, pattern)
        assert function.launches[1][2] == (32, 16, 1)


@TIR.prim_func(s_tir=True)
def alias(x: TIR.handle, y: TIR.handle, w: TIR.handle, m: TIR.int32):
    X = TIR.match_buffer(x, (m, 32), "float32")
    Y = TIR.match_buffer(y, (m, 32), "float32")
    W = TIR.match_buffer(w, (m, 32), "float32")
    Z = TIR.decl_buffer((m * 32,), "float32", data=Y.data)
    for i in TIR.thread_binding(m, thread="blockIdx.x"):
        for k in TIR.thread_binding(32, thread="threadIdx.x"):
            with TIR.sblock("one"):
                vi, vk = TIR.axis.remap("SS", [i, k])
                Y[vi, vk] = X[vi, vk] + TIR.float32(1)
    for i in TIR.thread_binding(m, thread="blockIdx.x"):
        for k in TIR.thread_binding(32, thread="threadIdx.x"):
            with TIR.sblock("two"):
                vi, vk = TIR.axis.remap("SS", [i, k])
                W[vi, vk] = Z[(m - 1 - vi) * 32 + vk]


@TIR.prim_func(s_tir=True)
def init_add(x: TIR.handle, c: TIR.handle, m: TIR.int32):
    X = TIR.match_buffer(x, (m, 32), "float32")
    C = TIR.match_buffer(c, (m, 32), "float32")
    for i in TIR.thread_binding(m, thread="blockIdx.x"):
        for k in TIR.thread_binding(32, thread="threadIdx.x"):
            with TIR.sblock("init"):
                vi, vk = TIR.axis.remap("SS", [i, k])
                C[vi, vk] = TIR.float32(0)
    for i in TIR.thread_binding(m, thread="blockIdx.x"):
        for k in TIR.thread_binding(32, thread="threadIdx.x"):
            with TIR.sblock("add"):
                vi, vk = TIR.axis.remap("SS", [i, k])
                TIR.evaluate(
                    TIR.call_extern("float32", "atomicAdd", TIR.address_of(C[vi, vk]), X[vi, vk])
                )


def test_memory_under_two_names_keeps_nests_apart():
    assert count_launches(horizontal_fuse(alias)) == 2


def test_an_init_stays_before_atomic_additions():
    assert count_launches(horizontal_fuse(init_add, independent=["C"])) == 2
