"""The test table: every program through every step, from its text to a kernel.

Each step is a test of its own, named after its program: `test_print[spmm]`.
The interpreter's column is `sparse_ir/test_interpret.py`; `conftest.py` prints the table.
"""

from __future__ import annotations

import functools
import itertools
import zlib

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.analysis import verify_well_formed
from tvm.script import tirx as T

import sparsetir
from cuda_runner import CudaFunction, requires_cuda_text
from gpu_runner import OPENCL_TARGET, OpenCLFunction, nvcc_compile, requires_nvcc, requires_opencl
from pairs import by_turns
from programs import PROGRAMS, tolerance
from sparsetir.schedules.passes.equal_work import equal_work
from sparsetir.sparse_ir.nodes import SparseIteration, nodes_of
from sparsetir.sparse_ir.position_space import LAYOUTS
from stage2 import on_threads

TYPES = [("float32", "int32"), ("float64", "int64"), ("float16", "int32")]

each_program = pytest.mark.parametrize("name", PROGRAMS)


def some_programs(every: int) -> pytest.MarkDecorator:
    """Parameters: one program of every few; the others are slow."""
    return pytest.mark.parametrize("name", by_turns(PROGRAMS, every))


each_type = pytest.mark.parametrize(("dtype", "idtype"), TYPES, ids=[f"{d}-{i}" for d, i in TYPES])


def two_types() -> pytest.MarkDecorator:
    """Each program in float32, and every fourth one in another type; the rest is slow."""
    params = []
    for number, name in enumerate(PROGRAMS):
        for n, types in enumerate(TYPES):
            quick = n == 0 or (n - 1 == number // 4 % 2 and number % 4 == 0)
            slow = [] if quick else [pytest.mark.slow]
            params.append(pytest.param(name, *types, marks=slow, id=f"{name}-{'-'.join(types)}"))
    return pytest.mark.parametrize(("name", "dtype", "idtype"), params)


def one_type(turn: int) -> pytest.MarkDecorator:
    """Every second program, from `turn` on, in one type, by turns; the rest is slow."""
    params = []
    for number, name in enumerate(PROGRAMS):
        for n, types in enumerate(TYPES):
            quick = number % 2 == turn and n == number // 2 % len(TYPES)
            slow = [] if quick else [pytest.mark.slow]
            params.append(pytest.param(name, *types, marks=slow, id=f"{name}-{'-'.join(types)}"))
    return pytest.mark.parametrize(("name", "dtype", "idtype"), params)


@functools.cache
def stage_one(name, dtype="float32", idtype="int32"):
    return PROGRAMS[name].make(dtype, idtype)


@functools.cache
def stage_two(name, dtype="float32", idtype="int32"):
    func = stage_one(name, dtype, idtype)
    before, text = tvm_ffi.structural_hash(func), func.script()
    lowered = sparsetir.lower_sparse_iter(func)
    assert tvm_ffi.structural_hash(func) == before and func.script() == text
    return lowered


@functools.cache
def cuda_text(name, dtype, arch):
    kernel = sparsetir.build(stage_one(name, dtype), {"kind": "cuda", "arch": arch})
    return kernel.source()


@T.prim_func(s_tir=True)
def ordinary(x: T.Buffer((4,), "float32")):
    for i in range(4):
        with T.sblock("twice"):
            vi = T.axis.spatial(4, i)
            x[vi] = x[vi] * T.float32(2)


def arguments(name, case, dtype, idtype):
    rng = np.random.default_rng(zlib.crc32(f"{name} {case}".encode()))
    return PROGRAMS[name].inputs(rng, case, dtype, idtype)


def check_run(name, dtype, idtype, cases, run, bounds=None):
    """`run(args)` gives every array as the kernel left it, by the name of its parameter."""
    program, bounds = PROGRAMS[name], bounds or tolerance(dtype)
    for case in cases:
        args = arguments(name, case, dtype, idtype)
        with np.errstate(all="ignore"):
            expected = program.oracle(args)
        before = {k: np.copy(v) for k, v in args.items() if isinstance(v, np.ndarray)}
        after = run(args)
        assert set(expected) == set(program.outputs)
        for key in before:
            where, result = f"{name}: {case}: {key}", after[key].reshape(before[key].shape)
            if key in expected:
                want, have = expected[key], result.astype(np.float64)
                np.testing.assert_allclose(have, want, **bounds, err_msg=where)
            else:
                np.testing.assert_array_equal(result, before[key], err_msg=where)


def _type_key(kind: type) -> str:
    return getattr(kind, "__tvm_ffi_type_info__", None).type_key


def _classes(kind: type) -> set[type]:
    return {kind}.union(*map(_classes, kind.__subclasses__()))


OURS = tuple(
    kind
    for kind in _classes(tvm_ffi.Object)
    if "__tvm_ffi_type_info__" in vars(kind) and _type_key(kind).startswith("sparsetir")
)


def traces_of_ours(func: tirx.PrimFunc) -> set[str]:
    """Traces of sparsetir in a function: type keys, keys of attributes and annotations."""
    # A walk over the function leaves its attributes out.
    trees = [func, *(value for _, value in func.attrs.items())]
    names = {str(key) for key in func.attrs.keys()}
    for node in nodes_of((tirx.For, s_tir.SBlock), *trees):
        names.update(str(key) for key in node.annotations.keys())
    names.update(str(node.attr_key) for node in nodes_of(tirx.AttrStmt, *trees))
    names.update(_type_key(type(node)) for node in nodes_of(OURS, *trees))
    return {name for name in names if name.startswith("sparsetir")}


# -- stage I ----------------------------------------------------------------------------------


@each_type
@each_program
def test_parse(name, dtype, idtype):
    func = stage_one(name, dtype, idtype)
    assert isinstance(func, sparsetir.SparseFunc)
    assert {p.name for p in func.params} == set(arguments(name, "small", dtype, idtype))


@each_program
def test_print(name):
    func = stage_one(name)
    text = func.script()
    parsed = sparsetir.from_source(text)
    assert tvm_ffi.structural_equal(func, parsed, map_free_vars=True), text
    assert parsed.script() == text


@each_program
def test_json(name):
    func = stage_one(name)
    loaded = tvm.ir.load_json(tvm.ir.save_json(func))
    assert tvm_ffi.structural_equal(func, loaded, map_free_vars=True)


@each_type
@each_program
def test_verify(name, dtype, idtype):
    sparsetir.verify(stage_one(name, dtype, idtype))


# -- stage II -----------------------------------------------------------------------------------


@two_types()
def test_lower_sparse_iter(name, dtype, idtype):
    lowered = stage_two(name, dtype, idtype)  # leaves what it lowers as it was
    assert isinstance(lowered, tirx.PrimFunc)
    assert verify_well_formed(lowered)
    s_tir.Schedule(lowered)
    assert not nodes_of(SparseIteration, lowered)


@some_programs(4)
def test_lower_sparse_iter_as_a_pass(name):
    mod = tvm.IRModule({"ours": stage_one(name), "ordinary": ordinary})
    lowered = sparsetir.LowerSparseIter()(mod)
    assert lowered["ordinary"].same_as(ordinary)
    assert tvm_ffi.structural_equal(lowered["ours"], stage_two(name), map_free_vars=True)
    assert isinstance(mod["ours"], sparsetir.SparseFunc)


# -- stage III ----------------------------------------------------------------------------------


def check_stage_three(stage_two: tirx.PrimFunc, lowered: tirx.PrimFunc) -> None:
    assert verify_well_formed(lowered)
    assert not traces_of_ours(lowered)
    over_axes = {str(key) for key in stage_two.attrs[LAYOUTS].keys()}
    buffers = [p for p in lowered.params if tirx.is_buffer_var(p)]
    buffers += lowered.body.block.alloc_buffers
    assert over_axes & {b.name for b in buffers}
    for buffer in buffers:
        if buffer.name in over_axes:
            assert len(buffer.ty.shape) == 1, buffer.name


@two_types()
def test_lower_sparse_buffer(name, dtype, idtype):
    before = stage_two(name, dtype, idtype)
    hashed = tvm_ffi.structural_hash(before)
    check_stage_three(before, sparsetir.lower_sparse_buffer(before))
    assert tvm_ffi.structural_hash(before) == hashed
    assert {"sparsetir.Layout", LAYOUTS} <= traces_of_ours(before)


@pytest.mark.parametrize(("target", "name"), by_turns(
    [(target, name) for name in PROGRAMS for target in ("llvm", "cuda")], 3
))  # fmt: skip
def test_lower_sparse_buffer_after_the_default_schedule(name, target):
    spec = {"kind": "cuda", "arch": "sm_80"} if target == "cuda" else target
    scheduled = sparsetir.default_schedule(stage_two(name), tvm.target.Target(spec))
    assert verify_well_formed(scheduled)
    check_stage_three(scheduled, equal_work(sparsetir.lower_sparse_buffer(scheduled), 1))


@some_programs(4)
def test_lower_sparse_buffer_as_a_pass(name):
    mod = tvm.IRModule({"ours": stage_two(name), "ordinary": ordinary})
    lowered = sparsetir.LowerSparseBuffer()(mod)
    assert lowered["ordinary"].same_as(ordinary)
    alone = sparsetir.lower_sparse_buffer(stage_two(name))
    assert tvm_ffi.structural_equal(lowered["ours"], alone, map_free_vars=True)


# -- kernels ------------------------------------------------------------------------------------


@two_types()
def test_llvm(name, dtype, idtype):
    kernel = sparsetir.build(stage_one(name, dtype, idtype))
    inferred = {kernel.signature.names[step.scalar] for step in kernel.signature.inferences}

    def run(args):
        kernel(**{k: v for k, v in args.items() if k not in inferred})
        return args

    check_run(name, dtype, idtype, PROGRAMS[name].cases, run)


@some_programs(2)
def test_llvm_without_a_schedule(name):
    """Inits of reductions run although no schedule moved them out of their loops."""
    func = stage_one(name)
    mod = tvm.IRModule({"main": sparsetir.lower_sparse_buffer(stage_two(name))})
    run = tvm.compile(mod, target=tvm.target.Target("llvm"))["main"]

    def run_flat(args):
        values = [args[p.name] for p in func.params]
        run(*[v.reshape(-1) if isinstance(v, np.ndarray) else v for v in values])
        return args

    check_run(name, "float32", "int32", PROGRAMS[name].cases, run_flat)


@requires_nvcc
@pytest.mark.parametrize(("name", "dtype"), by_turns(
    itertools.product(["spmm", "sddmm", "row_softmax", "attention"], ["float32", "float16"]), 3
))  # fmt: skip
def test_nvcc(name, dtype):
    assert nvcc_compile(cuda_text(name, dtype, "sm_90"), "sm_90")


def check_on_threads(name, dtype, idtype, target, make, bounds=None):
    """Run the default schedule for a GPU as `make(stage III)` runs it."""
    func = stage_one(name, dtype, idtype)
    run = on_threads(func, stage_two(name, dtype, idtype), target, make)
    cases = PROGRAMS[name].cases if dtype == "float32" else ("small",)
    check_run(name, dtype, idtype, cases, run, bounds)


@requires_opencl
@one_type(1)
def test_opencl(name, dtype, idtype):
    # TVM writes constants into OpenCL text with seven digits; these two hold the least float64.
    rounded = dtype == "float64" and name in ("row_max", "row_max_ell")
    bounds = {"rtol": 1e-6} if rounded else None
    check_on_threads(name, dtype, idtype, OPENCL_TARGET, OpenCLFunction, bounds)


@requires_cuda_text
@one_type(0)
def test_cuda_run(name, dtype, idtype):
    target = {"kind": "cuda", "arch": "sm_90"}
    check_on_threads(name, dtype, idtype, target, CudaFunction)
