"""SpMV on the CPU: the sliced template against float64 sums, on the zoo of patterns."""

import functools
import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import tvm_ffi

import sparsetir
from csr_zoo import CLOSE, ZOO, expected
from programs import PROGRAMS, copied
from sparsetir.runtime.build import build
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.operators.spmv import program
from sparsetir.schedules.templates.spmv import SlicedRows, apply, arrange, numbers

RNG = np.random.default_rng(0)


def uneven():
    """Lengths from 0 to 79, many of each sort, in no order."""
    lengths = RNG.permutation(np.repeat(np.arange(80), 3))
    indices = np.concatenate([np.sort(RNG.permutation(90)[:k]) for k in lengths])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return sp.csr_array((np.ones(len(indices), "float32"), indices, indptr), shape=(240, 90))


def band():
    """Diagonals, some of them with gaps, and in the middle rows of any columns."""
    a = sp.diags_array(np.ones((5, 150)), offsets=[-7, -1, 0, 1, 9], shape=(150, 140)).tolil()
    a[::3, 20:100] = 0
    a[70:80] = RNG.random((10, 140)) < 0.3
    return sp.csr_array(a, dtype="float32")


ZOO = {**ZOO, "uneven": uneven(), "long rows alone": sp.csr_array(np.ones((3, 37), "float32"))}
ZOO["band"] = band()
CONFIGS = [
    SlicedRows(),
    SlicedRows(long=16, window=32, blocks=3),
    SlicedRows(lanes=4, long=20, blocks=2, packed=False, prefetch=3),
    SlicedRows(lanes=1, long=3, window=1, blocks=100, prefetch=0),
    SlicedRows(diagonals=True),
    SlicedRows(lanes=4, long=20, blocks=2, packed=False, diagonals=True),
]


@functools.cache
def kernel_of(problem, config):
    """The kernel of a config as it is compiled."""
    return build(program(problem, config), schedule=apply, config=config)


def arranged(a, config, idtype="int32"):
    pattern = CsrPattern(a.indptr.astype(idtype), a.indices.astype(idtype), a.shape)
    return arrange(pattern, Spmm(idtype=idtype), config)


def product(a, values, x, config):
    """A x by a plan with its values, of torch tensors."""
    sparse = sparsetir.SparseMatrix.from_csr(a.indptr, a.indices, values, shape=a.shape)
    plan = sparsetir.plan("spmv", sparse, dtype=str(x.dtype).split(".")[1], config=config)
    out = torch.full((a.shape[0],), float("nan"), dtype=x.dtype)
    return plan(x, out=out)


def check(a, config, dtype="float32"):
    kind = getattr(torch, dtype)
    x = torch.from_numpy(RNG.standard_normal(a.shape[1])).to(kind)
    values = torch.from_numpy(RNG.standard_normal(a.nnz)).to(kind)
    result = product(a, values, x, config).double().numpy()
    want, size = expected(a, values.double().numpy(), x.double().numpy()[:, None])
    assert (np.abs(result - want[:, 0]) <= CLOSE[dtype] * (size[:, 0] + 1)).all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.default(4)
def test_patterns(name, config):
    check(ZOO[name], config)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    for name in ("uneven", "empty rows"):
        check(ZOO[name], SlicedRows(lanes=8, long=30), dtype)


def test_elements_beside_diagonals_take_no_part():
    """Slots without an element read x at columns of other rows, which may hold anything."""
    a, x = ZOO["band"], np.ones(140, "float32")
    x[45:60] = np.nan, np.inf, -np.inf, *(12 * [np.nan])
    for config in (SlicedRows(lanes=8, diagonals=True), SlicedRows(packed=False, diagonals=True)):
        result = product(a, torch.from_numpy(a.data), torch.from_numpy(x), config).numpy()
        np.testing.assert_allclose(result, a @ x, rtol=1e-5)


def test_every_loop_is_divided_among_the_threads():
    """Slices of diagonals, other slices, and long rows; kernels leave these numbers open."""
    given = numbers(SlicedRows(blocks=3, diagonals=True))
    assert {given[name] for name in ("band_blocks", "blocks", "long_blocks")} == {3}
    assert "band_blocks" not in numbers(SlicedRows(blocks=3))


def test_diagonals_are_chosen():
    """For bands, not for rows of random columns."""
    a = sp.diags_array(np.ones((3, 4000)), offsets=[-1, 0, 1], shape=(4000, 4000), format="csr")
    for matrix, chosen in ((a, True), (a[RNG.permutation(4000)], False), (a[:0], False)):
        plan = sparsetir.plan("spmv", sparsetir.SparseMatrix(matrix.astype("float32")))
        assert isinstance(plan.config, SlicedRows) and plan.config.diagonals == chosen


def test_a_program_of_ones_own():
    """The test program of SpMV, whose names are others, by the template's schedule."""
    case = PROGRAMS["spmv"]
    config = SlicedRows(lanes=4, long=8)
    kernel = build(case.make("float32", "int32"), schedule=apply, config=config)
    for which in case.cases:
        args = case.inputs(np.random.default_rng(1), which, "float32", "int32")
        want = copied(args)
        kernel(**args)
        sparsetir.interpret(case.make("float32", "int32"), want)
        for output in case.outputs:
            np.testing.assert_allclose(args[output], want[output], rtol=1e-4, atol=1e-5)


def test_the_code_keeps_sums_in_registers():
    """The loop over steps stores nothing, and asks for both of its streams ahead."""
    kernel = kernel_of(Spmm(), SlicedRows().compiled)
    loops = re.split(r"\n(?=\S+:)", kernel.source("ll"))
    loop = next(part for part in loops if "llvm.prefetch" in part)
    assert len(re.findall(r"call void @llvm.prefetch", loop)) == 2
    assert "store" not in loop
    assert "<16 x float>" in loop


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_values_of_all_kinds_of_arrays_are_packed(dtype):
    a = ZOO["uneven"]
    values = torch.from_numpy(RNG.standard_normal(a.nnz)).to(getattr(torch, dtype))
    kernel = kernel_of(Spmm(dtype=dtype), SlicedRows().compiled)
    computed = arranged(a, SlicedRows()).computed(kernel.signature.func, {})
    want = values[torch.from_numpy(computed["i_slots"]).long()].double().numpy()
    kinds = [values, tvm_ffi.from_dlpack(values)]
    for array in kinds if dtype == "bfloat16" else [*kinds, values.numpy()]:
        packed = kernel.of_values({"a": array}, computed)
        assert [*packed] == ["a_packed"] and str(packed["a_packed"].dtype) == dtype
        assert (packed["a_packed"].astype("float64") == want).all()
