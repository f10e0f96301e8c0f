"""The row split template: run as OpenCL and as CUDA on a CPU, and compiled by nvcc."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from tvm import s_tir

import gpu_runner
import spmm_gpu_common
from cuda_runner import KernelError, requires_cuda_text
from gpu_runner import cuda_source, requires_nvcc, requires_opencl
from sparsetir import from_source, lower_sparse_buffer, lower_sparse_iter
from sparsetir.runtime.pipeline import lower
from sparsetir.schedules.gpu.passes.row_loops import opaque_row_index
from sparsetir.schedules.gpu.spmm import RowSplit, apply
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program as operator
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.sparse_ir.position_space import SIGNATURE
from sparsetir.sparse_ir.promises import promises_of
from spmm_gpu_common import (
    MASKS,
    RUNNERS,
    SCALED_SUMS,
    compile_cuda,
    edited,
    name_of,
    of_mask,
    on_runners,
    run_kernel,
    run_spmm,
)

TEMPLATE = TEMPLATES[RowSplit, Spmm]
scheduled = functools.partial(spmm_gpu_common.scheduled, TEMPLATE)
run = functools.partial(run_spmm, as_cuda=False)


@pytest.mark.parametrize("as_cuda", RUNNERS)
def test_matrices(as_cuda: bool) -> None:
    for mask in MASKS.values():
        run(Spmm(), RowSplit(8, 4, 4), of_mask(mask, "int32"), 32, as_cuda=as_cuda)


CONFIGS = {
    "several tiles": (RowSplit(4, 3, 2), 24),
    "one thread": (RowSplit(1, 1, 1), 1),
    "coarsened": (RowSplit(4, 2, 2, coarsen=3), 48),
    "a constant size": (RowSplit(8, 4, 4, feat=64), 64),
    "lanes left over": (RowSplit(8, 4, 2, coarsen=2, feat=38), 38),
    "fewer vectors than threads": (RowSplit(16, 2, 1, feat=7, occupancy=None), 7),
    "row cache": (RowSplit(8, 1, 2, row_cache=True), 16),
    "row cache, lanes left over": (RowSplit(32, 1, 1, coarsen=2, feat=33, row_cache=True), 33),
}


@requires_opencl
@pytest.mark.parametrize("case", CONFIGS)
def test_configs(case: str) -> None:
    config, feat = CONFIGS[case]
    for name in ("random", "one dense row"):
        run(Spmm(), config, of_mask(MASKS[name], "int32"), feat)


@requires_cuda_text
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if "row cache" in case else pytest.mark.slow) for case in CONFIGS],
)
def test_configs_as_cuda(case: str) -> None:
    """Tiles that overlap write some sums twice, and equal."""
    config, feat = CONFIGS[case]
    overlap = "lanes left over" in case
    matrix = of_mask(MASKS["random"], "int32")
    run(Spmm(), config, matrix, feat, as_cuda=True, equal=overlap)
    if overlap:
        with pytest.raises(KernelError, match=r"race: block .* writes C\[.*which block"):
            run(Spmm(), config, matrix, feat, as_cuda=True)


@requires_cuda_text
def test_a_missing_barrier_is_found() -> None:
    """Each of the two: before columns are written again, and before they are read.

    Without the second, a thread takes a column from where none is yet, which holds -1.
    """
    matrix = of_mask(MASKS["one dense row"], "int32")
    for after, message in (
        ("if", r"race: block \d+, thread .* \w+_shared_ptr\["),
        ("for", r"out of bounds: block \d+, thread .* at -64 from the begin of B"),
    ):
        with edited(f"__syncthreads();\n    {after}", after):
            with pytest.raises(KernelError, match=message):
                run(Spmm(), RowSplit(8, 1, 2, row_cache=True), matrix, 16, as_cuda=True)


PROBLEMS = [
    (Spmm("float16"), RowSplit(4, 4, 8)),
    (Spmm("bfloat16", reduce="max"), RowSplit(4, 4, 8)),
    (Spmm("float64", "int64"), RowSplit(4, 4, 2)),
    (Spmm(idtype="int64", reduce="mean", batched=True), RowSplit(4, 4, 4)),
    (Spmm("float16", reduce="mean"), RowSplit(4, 1, 8, row_cache=True)),
    (Spmm(reduce="min"), RowSplit(4, 4, 4)),
    (Spmm(reduce="max", batched=True), RowSplit(4, 1, 4, row_cache=True)),
]


# As CUDA: bfloat16, float64 and 64-bit offsets, shared memory with vectors of eight.
@pytest.mark.parametrize("problem, config, as_cuda", on_runners(PROBLEMS, (1, 2, 4)), ids=name_of)
def test_problems(problem: Spmm, config: RowSplit, as_cuda: bool) -> None:
    for name in ("random", "empty rows"):
        matrix = of_mask(MASKS[name], problem.idtype)
        run(problem, config, matrix, config.tile * 2, as_cuda=as_cuda)


@requires_opencl
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_nan_and_infinities(reduce: str) -> None:
    matrix = of_mask(MASKS["random"], "int32")
    run(Spmm(reduce=reduce), RowSplit(4, 4, 4), matrix, 16, special=True)


CUDA = [
    (Spmm(), RowSplit(8, 16, 4, feat=32), "v4", 48),
    (Spmm(reduce="max", batched=True), RowSplit(32, 4, 4), "v4", 64),
    (Spmm("float16", "int64"), RowSplit(16, 8, 8), "v4", 64),
]


@requires_nvcc
@pytest.mark.parametrize("problem, config, width, registers", CUDA, ids=["float32", "max", "half"])
def test_cuda(problem: Spmm, config: RowSplit, width: str, registers: int, tmp_path: Any) -> None:
    """Loads of B and stores of C are 128 bits wide, and sums stay in registers."""
    source = cuda_source(lower_sparse_buffer(scheduled(problem, config)))
    assert "__syncthreads" not in source
    found = compile_cuda(source, tmp_path)
    assert re.search(rf"ld\.global\.nc\.{width}\.", found.ptx)
    assert re.search(rf"st\.global\.{width}\.", found.ptx)
    assert "local" not in found.ptx and found.spills == 0
    assert found.registers <= registers


@requires_opencl
@pytest.mark.parametrize("config", [RowSplit(4, 2, 2), RowSplit(8, 1, 1, row_cache=True)])
def test_a_program_of_a_user(config: RowSplit) -> None:
    args, wanted = spmm_gpu_common.scaled_sums()
    program = from_source(SCALED_SUMS)
    func = lower(program, apply, config, spmm_gpu_common.GPU)["III"]
    flat = (str(p.name) for p in func.params)
    names = dict(zip(flat, (str(p.name) for p in program.params), strict=True))
    out = run_kernel((gpu_runner.OpenCLFunction(func), names), args)["out"]
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


def test_promises() -> None:
    """Tiles hold all features, and rows are numbered in 32 bits."""
    rows = ("m", "max", 2**31 - 1)
    for problem, config, expected in (
        (Spmm(), RowSplit(), [("feat", "multiple", 128)]),
        (Spmm(), RowSplit(feat=96), [("feat", "exact", 96)]),
        (Spmm(idtype="int64"), RowSplit(), [rows, ("feat", "multiple", 128)]),
    ):
        found = promises_of(scheduled(problem, config).attrs[SIGNATURE])
        assert [(p["param"], p["kind"], p["value"]) for p in found] == expected


def test_row_numbers_stay_in_one_piece() -> None:
    """Of sums of casts nvcc does not see that stores are aligned."""
    for idtype, value in (
        ("int32", "i_0 * 4 + i_1 | 0"),
        ("int64", 'T.Cast("int64", T.Cast("int32", i_0 * T.int64(4) + i_1) | 0)'),
    ):
        sch = s_tir.Schedule(lower_sparse_iter(operator(Spmm(idtype=idtype))))
        rows, *_ = sch.get_loops(sch.get_sblock("spmm0"))
        sch.split(rows, [None, 4])
        (func,) = sch.mod.functions.values()
        text = opaque_row_index(func, "spmm0").script()
        (line,) = [line for line in text.splitlines() if " | 0" in line]
        assert line.endswith(f", {value})")
