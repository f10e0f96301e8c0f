"""The hyb template: run as OpenCL and as CUDA on a CPU, and compiled by nvcc."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import spmm_gpu_common
from cuda_runner import KernelError, requires_cuda_text
from gpu_runner import ATOMIC_ADD_PRELUDE, cuda_source, requires_nvcc, requires_opencl
from pairs import by_turns
from sparsetir import ScheduleError, lower_sparse_buffer
from sparsetir.runtime.pipeline import lower_template
from sparsetir.schedules.gpu.spmm_hyb import HybRows, apply, arrange, program
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.operators.spmm import program as operator
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.position_space import SIGNATURE
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.script.parser import from_source
from spmm_gpu_common import (
    MASKS,
    compile_cuda,
    edited,
    kernel,
    name_of,
    of_mask,
    on_runners,
    run_kernel,
)

TEMPLATE = TEMPLATES[HybRows, Spmm]
scheduled = functools.partial(spmm_gpu_common.scheduled, TEMPLATE)


def run(
    problem: Spmm,
    config: HybRows,
    matrix: CsrPattern,
    feat: int,
    special: bool = False,
    as_cuda: bool = False,
    **options: Any,
) -> None:
    """Run, and compare with the oracle."""
    stored = spmm_gpu_common.operands(matrix, problem, feat, special=special)
    arranged = arrange(matrix, problem, config)
    assert not arranged.stored.keeps_order
    args: dict[str, Any] = {**arranged.arguments, **arranged.stored.values(A=stored["a"])}
    args |= {"b": stored["b"], "feat": feat}
    args |= arranged.computed(scheduled(problem, config).attrs[SIGNATURE], {"feat": feat})
    args["out"] = np.full((matrix.shape[0], feat), np.nan, stored["b"].dtype)
    made = kernel(TEMPLATE, problem, config, ATOMIC_ADD_PRELUDE, as_cuda)
    c = run_kernel(made, args, **options)["out"]
    spmm_gpu_common.check(c, spmm_gpu_common.oracle(matrix, problem, **stored), problem.dtype)


@requires_opencl
@pytest.mark.parametrize("name", MASKS)
def test_matrices(name: str) -> None:
    """Buckets of up to four: rows are stored whole, and in many pieces."""
    run(Spmm(), HybRows(1, 2, 8, 2, 4), of_mask(MASKS[name], "int32"), 32)


@requires_cuda_text
def test_matrices_as_cuda() -> None:
    for mask in MASKS.values():
        run(Spmm(), HybRows(1, 2, 8, 2, 4), of_mask(mask, "int32"), 32, as_cuda=True)


CONFIGS = {
    "column parts": (HybRows(2, 1, 4, 2, 2), 16),
    "lanes left over": (HybRows(1, 1, 4, 2, 2, coarsen=2, feat=22), 22),
    "little work, slots in steps": (HybRows(1, 3, 4, 1, 1, feat=4, unroll=2, work=1), 4),
    "one thread": (HybRows(1, 0, 1, 1, 1, occupancy=None), 1),
}


@requires_opencl
@pytest.mark.parametrize("case", by_turns(CONFIGS, 2))
def test_configs(case: str) -> None:
    config, feat = CONFIGS[case]
    run(Spmm(), config, of_mask(MASKS["random"], "int32"), feat)


@requires_cuda_text
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case == "lanes left over" else pytest.mark.slow)
        for case in CONFIGS
    ],
)
def test_configs_as_cuda(case: str) -> None:
    """Tiles that overlap write some sums twice, and equal."""
    config, feat = CONFIGS[case]
    overlap = "lanes left over" in case
    matrix = of_mask(MASKS["random"], "int32")
    run(Spmm(), config, matrix, feat, as_cuda=True, equal=overlap)


@requires_cuda_text
def test_a_missing_atomic_is_found() -> None:
    matrix = of_mask(MASKS["one dense row"], "int32")
    with edited("atomicAdd(", "[](float* at, float x) { *at += x; }("):
        with pytest.raises(KernelError, match=r"race: block \d+, thread .* C\["):
            run(Spmm(), HybRows(1, 2, 8, 2, 4), matrix, 32, as_cuda=True)


PROBLEMS = [
    (Spmm("float64", "int64"), HybRows(1, 1, 4, 2, 2)),
    (Spmm(reduce="mean"), HybRows(1, 1, 4, 2, 4)),
    (Spmm(reduce="max"), HybRows(1, 2, 4, 2, 4)),
    (Spmm(reduce="min"), HybRows(1, 2, 4, 2, 4)),
    (Spmm("float16", "int64", reduce="mean"), HybRows(1, 2, 4, 2, 8)),
    (Spmm("bfloat16"), HybRows(1, 2, 4, 2, 8)),
]


# As CUDA: atomics of float64, vectors of eight.
@pytest.mark.parametrize("problem, config, as_cuda", on_runners(PROBLEMS, (0, 3)), ids=name_of)
def test_problems(problem: Spmm, config: HybRows, as_cuda: bool) -> None:
    mask = MASKS["empty rows"].copy()
    mask[:, 4:] = False  # rows of up to four elements
    matrix = of_mask(mask, problem.idtype)
    run(problem, config, matrix, config.tile, as_cuda=as_cuda)
    if problem.dtype == "float32":
        run(problem, config, matrix, config.tile, special=True, as_cuda=as_cuda)


@requires_opencl
def test_nan_and_infinities() -> None:
    """Padded slots load nothing of B."""
    run(Spmm(), HybRows(1, 2, 8, 2, 4), of_mask(MASKS["random"], "int32"), 32, special=True)


@requires_opencl
@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 3, 5])
@pytest.mark.parametrize("c", [1, 2])
def test_formats(c: int, k: int) -> None:
    for name in MASKS:
        run(Spmm(), HybRows(c, k, 8, 4, 4), of_mask(MASKS[name], "int32"), 64)


def test_shared_rows() -> None:
    """Only rows of several pieces are marked, whichever buckets and parts these are in."""
    mask = np.zeros((5, 12), bool)
    mask[0, :4] = mask[1, :5] = mask[2, [0, 11]] = mask[3, 11] = True
    matrix = of_mask(mask, "int32")
    for config, expected in (
        (HybRows(1, 2), [0, 1, 0, 0, 0]),  # the fifth element of row 1 is a piece
        (HybRows(2, 3), [0, 0, 1, 0, 0]),  # both halves of row 2 hold some
        (HybRows(1, 3), [0, 0, 0, 0, 0]),
    ):
        func = scheduled(Spmm(), config).attrs[SIGNATURE]
        flags = arrange(matrix, Spmm(), config).computed(func, {})
        np.testing.assert_array_equal(flags["c_shared"], expected)
        for problem in (Spmm(reduce="max"), Spmm("float16")):
            if sum(expected) == 0:
                func = scheduled(problem, config).attrs[SIGNATURE]
                assert not arrange(matrix, problem, config).computed(func, {})
                continue
            with pytest.raises(ScheduleError, match=rf"2 pieces of row {expected.index(1)} with"):
                arrange(matrix, problem, config)


@pytest.mark.parametrize("problem", [Spmm(), Spmm("float16", "int64", "max")], ids=str)
def test_program_is_printed(problem: Spmm) -> None:
    """What the schedule makes in stage I is a program of the language."""
    config = HybRows(2, 1, 4, 2, 4, feat=24)
    func = lower_template(TEMPLATE, problem, config, spmm_gpu_common.GPU)["I"]
    assert len(list(sparse_iterations(func))) > 1 + 2 * 2
    assert tvm_ffi.structural_equal(from_source(func.script()), func)


def test_launches() -> None:
    """One sets C to zero, the other does all buckets of all parts."""
    assert count_launches(scheduled(Spmm(), HybRows(2, 1, 4, 2, 2))) == 2


def test_rows_in_turn() -> None:
    config = HybRows(k=3)
    assert [config.rows_in_turn(1 << b) for b in range(4)] == [8, 4, 2, 1]
    config = HybRows(k=3, work=2)
    assert [config.rows_in_turn(1 << b) for b in range(4)] == [2, 1, 1, 1]


CUDA = [
    pytest.param(Spmm(), HybRows(1, 3, 32, 4, 4, feat=128), True, id="float32"),
    pytest.param(Spmm(), HybRows(1, 2, 32, 4, 4, feat=600), True, id="lanes left over"),
    pytest.param(
        Spmm("float16"), HybRows(1, 2, 16, 8, 8, feat=128), False, id="half",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@requires_nvcc
@pytest.mark.parametrize("problem, config, atomics", CUDA)
def test_cuda(problem: Spmm, config: HybRows, atomics: bool, tmp_path: Any) -> None:
    """Loads of columns and of B are 128 bits wide, and sums stay in registers."""
    source = cuda_source(lower_sparse_buffer(scheduled(problem, config)))
    assert "__syncthreads" not in source
    found = compile_cuda(source, tmp_path)
    assert len(re.findall(r"ld\.global\.nc\.v4\.", found.ptx)) > 1 << config.k
    stores = re.findall(r"st\.global\.\S+", found.ptx)
    assert len(stores) > config.k and all(".v4." in s for s in stores)
    assert ("red." in found.ptx or "atom." in found.ptx) == atomics
    assert found.spills == 0 and found.registers <= 64


BAD = {
    "c": ({"c": 100}, "c * (k + 1) to be at most 120, got 600"),
    "unroll": ({"unroll": 3}, "a power of two, got 3"),
    "work": ({"work": 0}, "a power of two, got 0"),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_configs(argument: str) -> None:
    fields, message = BAD[argument]
    expected = re.escape(f"HybRows: argument '{argument}': expected {message}")
    with pytest.raises(ValueError, match=expected):
        HybRows(**fields)
    with pytest.raises(ValueError, match="RowSplit: argument 'vector'"):
        HybRows(vector=3)


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="'problem': expected no batch, got one"):
        program(Spmm(batched=True), HybRows())
    with pytest.raises(ScheduleError, match="vectors of at most 4 float32, got 8"):
        scheduled(Spmm(), HybRows(vector=8))
    for text, expected in (
        (operator(Spmm()).script(), "an iteration that sets the result, and others that add to it"),
        (two_operators(), r"one operator, got \['max', 'sum'\]"),
    ):
        message = f"HybRows: argument 'sch': expected {expected} in 'spmm'"
        with pytest.raises(ScheduleError, match=message):
            apply(Schedule(from_source(text)), HybRows())


def two_operators() -> str:
    """A sum with a maximum in one of its parts."""
    text = program(Spmm(), HybRows(k=1)).script()
    head, _, term = text.rpartition("C[ib, k] = C[ib, k] + ")
    return f"{head}C[ib, k] = T.max(C[ib, k], {term.rstrip()})\n"
