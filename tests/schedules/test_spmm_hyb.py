"""The hyb template: run as OpenCL and as CUDA on a CPU, and compiled by nvcc."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest

import spmm_gpu_common
from gpu_runner import cuda_source, requires_nvcc, requires_opencl
from sparsetir import ScheduleError, lower_sparse_buffer
from sparsetir.schedules.gpu.spmm_hyb import HybRows, arrange
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.sparse_ir.position_space import SIGNATURE
from spmm_gpu_common import MASKS, RUNNERS, compile_cuda, name_of, of_mask, on_runners

TEMPLATE = TEMPLATES[HybRows, Spmm]
scheduled = functools.partial(spmm_gpu_common.scheduled, TEMPLATE)
run = functools.partial(spmm_gpu_common.run_spmm, as_cuda=False)


@pytest.mark.parametrize("as_cuda", RUNNERS)
def test_matrices(as_cuda: bool) -> None:
    """Buckets of up to four: rows are stored whole, and in many pieces."""
    for mask in MASKS.values():
        run(Spmm(), HybRows(1, 2, 8, 2, 4), of_mask(mask, "int32"), 32, as_cuda=as_cuda)


CONFIGS = {
    "column parts": (HybRows(2, 1, 4, 2, 2), 16),
    "lanes left over": (HybRows(1, 1, 4, 2, 2, coarsen=2, feat=22), 22),
    "little work, slots in steps": (HybRows(1, 3, 4, 1, 1, feat=4, unroll=2, work=1), 4),
    "one thread": (HybRows(1, 0, 1, 1, 1, occupancy=None), 1),
}


@pytest.mark.parametrize(
    ("case", "as_cuda"), on_runners([(case,) for case in CONFIGS], (1, 3)), ids=str
)
def test_configs(case: str, as_cuda: bool) -> None:
    """Tiles that overlap write some sums twice, and equal."""
    config, feat = CONFIGS[case]
    equal = {"equal": "lanes left over" in case} if as_cuda else {}
    run(Spmm(), config, of_mask(MASKS["random"], "int32"), feat, as_cuda=as_cuda, **equal)


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
