"""Arguments, targets and results of `sparsetir.build`."""

from __future__ import annotations

import functools
import platform
import re

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.ir.instrument import pass_instrument
from tvm.script import tirx as T

import sparsetir
from kernel_common import right
from programs import PROGRAMS
from refusals import refusals
from sparsetir.schedules.default import default_schedule
from sparsetir.schedules.targets import DEFAULT_CUDA_ARCH, resolve_target


def spmm():
    return PROGRAMS["spmm"].make("float32", "int32")


@T.prim_func(s_tir=True)
def scale(x: T.Buffer((1024,), "float32"), y: T.Buffer((1024,), "float32"), s: T.float32):
    for i in range(1024):
        with T.sblock("scale"):
            vi = T.axis.spatial(1024, i)
            y[vi] = x[vi] * s


@functools.cache
def assembly_of_spmm():
    return sparsetir.build(spmm()).source("asm")


def cpu_flags():
    if platform.machine() != "x86_64":  # an emulated process of ARM reads those of the machine
        return set()
    try:
        with open("/proc/cpuinfo") as file:
            return set(next(line for line in file if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return set()


# -- targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flag, register", [("avx512f", "zmm"), ("avx2", "ymm"), ("sse2", "xmm")])
def test_vector_width_of_the_cpu_is_used(flag, register):
    flags = cpu_flags()
    if flag not in flags:
        pytest.skip(f"this CPU has no {flag}")
    assembly = assembly_of_spmm()
    assert re.search(rf"%{register}\d", assembly)


def test_generic_llvm_target_is_left_as_it_is():
    built = sparsetir.build(spmm(), {"kind": "llvm"})
    assert "mcpu" not in built.target.attrs
    assert "%zmm" not in built.source("asm")
    right(built)


def test_cuda_without_a_gpu_is_the_default_arch():
    device = tvm.runtime.device("cuda", 0)
    arch = str(resolve_target("cuda").attrs["arch"])
    if device.exist:
        assert arch == f"sm_{device.compute_version.replace('.', '')}"
    else:
        assert arch == DEFAULT_CUDA_ARCH == "sm_80"


# -- what is built ----------------------------------------------------------------------------


def test_stage_two_with_threads_for_a_gpu():
    target = resolve_target("cuda")
    scheduled = default_schedule(sparsetir.lower_sparse_iter(spmm()), target)
    assert "__global__" in sparsetir.build(scheduled, target).source()


def test_module_with_several_functions_of_all_stages():
    sddmm = sparsetir.lower_sparse_iter(PROGRAMS["sddmm"].make("float32", "int32"))
    assert sparsetir.build(tvm.IRModule({"product": spmm()})).name == "product"
    kernels = sparsetir.build(tvm.IRModule({"spmm": spmm(), "sddmm": sddmm, "scale": scale}))
    assert set(kernels) == {"spmm", "sddmm", "scale"}
    assert all(kernels[name].name == name for name in kernels)
    right(kernels["spmm"])
    x, y = np.ones(1024, "float32"), np.zeros(1024, "float32")
    kernels["scale"](x, y, 2)
    assert (y == 2).all()
    rng = np.random.default_rng(0)
    args = PROGRAMS["sddmm"].inputs(rng, "small", "float32", "int32")
    kernels["sddmm"](**args)
    np.testing.assert_allclose(args["out"], PROGRAMS["sddmm"].oracle(args)["out"], rtol=1e-5)


def test_plain_prim_func_takes_arrays_of_any_alignment():
    """Its buffers are 64-byte aligned by default; vector code then crashes the process."""
    schedule = s_tir.Schedule(scale)
    (loop,) = schedule.get_loops("scale")
    schedule.vectorize(schedule.split(loop, [None, 16])[1])
    built = sparsetir.build(schedule)
    for start in range(1, 17):
        x = np.arange(1024 + start, dtype="float32")[start:]
        y = np.zeros(1024 + start, "float32")[start:]
        built(x, y, 2)
        np.testing.assert_array_equal(y, 2 * x)


# -- source -----------------------------------------------------------------------------------


@T.prim_func(s_tir=True)
def rows(x: T.Buffer((8, 4), "float32"), y: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("rows"):
            w = T.sblock_alloc_buffer((8, 64), "float32")
            w[i, 0] = x[i, 3]
            y[i] = w[i, 0]


def test_passes_over_buffers_run_where_there_is_something_to_do():
    """Kernels of programs access flat buffers, and what they allocate fits the stack."""

    @pass_instrument
    class Noted:
        def run_before_pass(self, _, info):
            names.append(str(info.name).rpartition(".")[2])

    flat = (PROGRAMS[name].make("float32", "int32") for name in ("spmv", "sddmm"))
    for func, runs in [*((func, False) for func in flat), (rows, True)]:
        names: list[str] = []
        with tvm.transform.PassContext(instruments=[Noted()]):
            sparsetir.build(func)
        assert "StorageRewrite" in names
        assert {"CompactBufferAllocation" in names, "FlattenBuffer" in names} == {runs}


def test_source_kinds():
    built = sparsetir.build(spmm())
    assert "define" in built.source() and built.source() == built.source("ll")
    assert ".text" in built.source("asm")


X, Y = np.arange(1024, dtype="float32"), np.zeros(1024, "float32")
OBJECT = "expected a stage-I function, a PrimFunc, a Schedule, an s_tir.Schedule or an IRModule"
test_refusals = refusals(
    f"""
sparsetir.build(spmm(), None)  # TypeError: build: argument 'target': expected 'cpu', 'cuda', a
sparsetir.build(spmm(), ["llvm"])  # TypeError: build: argument 'target': expected 'cpu', 'cuda', a
sparsetir.build(spmm(), "nonsense")  # ValueError: expected 'cpu', .. got 'nonsense': Target
sparsetir.build(spmm(), {{"kind": "llvm", "nonsense": 1}})  # ValueError: 'target': .. nonsense
sparsetir.build(sparsetir.lower_sparse_iter(spmm()), "cuda")  # ScheduleError: lower: 'spmm' is
sparsetir.build(tvm.IRModule({{}}))  # ValueError: 'obj': the module has no functions
sparsetir.build(3)  # TypeError: build: argument 'obj': {OBJECT}, got int
sparsetir.build("spmm")  # TypeError: build: argument 'obj': {OBJECT}, got str
sparsetir.build(spmm()).source("cuda")  # ValueError: spmm: source: argument 'kind': .. got 'cuda'
sparsetir.build(spmm(), "cuda").source("ptx")
    # ValueError: 'kind': expected 'cuda' (nvcc -ptx compiles it to PTX), or of the host part
sparsetir.build(scale)(X, Y)  # TypeError: argument 's' is missing, and no array's shape implies
sparsetir.build(scale)(X, Y, "a")  # TypeError: argument 's': expected a number, got str 'a'
sparsetir.build(scale)(X, X, 1)  # ValueError: argument 'y' is written and shares memory with 'x'
sparsetir.build(scale)(X[:4], Y, 1)  # ValueError: argument 'x': expected shape (1024,), got (4,)
""",
    globals(),
)


@pytest.mark.parametrize(
    ("init", "update", "expected"),
    [(0.0, "Y[i] + X[i, j] - X[i, j] * 2.0 + 1.0", "(1 - x).sum(1)"),
     (1.0, "Y[i] * X[i, j] * X[i, j]", "(x * x).prod(1)")],
)  # fmt: skip
def test_update_of_several_terms(init: float, update: str, expected: str) -> None:
    """A value after the total is one term, in any number of parts."""
    func = sparsetir.from_source(
        "@T.prim_func\ndef f(x: T.handle, y: T.handle, m: T.int32, n: T.int32):\n"
        "    I = T.dense_fixed(m)\n    J = T.dense_fixed(n)\n"
        "    X = T.match_sparse_buffer(x, (I, J), 'float32')\n"
        "    Y = T.match_sparse_buffer(y, (I,), 'float32')\n"
        "    with T.sp_iter([I, J], 'SR', 'sum') as [i, j]:\n"
        f"        with T.init():\n            Y[i] = {init}\n        Y[i] = {update}\n"
    )
    x, y = np.random.default_rng(0).random((3, 4), "float32"), np.empty(3, "float32")
    sparsetir.build(func)(x, y)
    np.testing.assert_allclose(y, eval(expected, {"x": x}), rtol=1e-5)
