"""SDDMM on a GPU: run as OpenCL and as CUDA on a CPU, and compiled by nvcc."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest

import spmm_gpu_common
from gpu_runner import cuda_source, requires_nvcc, requires_opencl
from sparsetir import lower_sparse_buffer
from sparsetir.schedules.gpu.sddmm import FusedNonzeros
from sparsetir.schedules.operators.problems import Sddmm
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.sparse_ir.computed import compute
from sparsetir.sparse_ir.position_space import SIGNATURE
from spmm_gpu_common import (
    MASKS,
    RUNNERS,
    as_dtype,
    check,
    compile_cuda,
    kernel,
    pattern_of,
    run_kernel,
)

HEADS = 3
TEMPLATE = TEMPLATES[FusedNonzeros, Sddmm]
scheduled = functools.partial(spmm_gpu_common.scheduled, TEMPLATE)


def run(
    mask: np.ndarray, feat: int, problem: Sddmm, config: FusedNonzeros, as_cuda: bool = False
) -> None:
    """Run on operands with NaN and infinities among them, and compare with float64."""
    rng = np.random.default_rng(5)
    before = (HEADS,) if problem.batched else ()
    x, y = (rng.standard_normal((*before, size, feat)) for size in mask.shape)
    if mask.shape[0] > 5:
        x[..., 1, 0], x[..., 4, -1], x[..., 5, 0] = np.nan, np.inf, -np.inf
    x, y = x.astype(as_dtype(problem.dtype)), y.astype(as_dtype(problem.dtype))
    pattern = pattern_of(mask, problem.idtype)
    arranged = TEMPLATE.arrange(pattern, problem, config)
    out = np.full((*before, pattern.nnz), np.nan).astype(x.dtype)
    args: dict[str, Any] = {"x": x, "y": y, "out": out, "heads": HEADS, "feat": feat}
    args |= arranged.arguments
    signature = scheduled(problem, config).attrs[SIGNATURE]
    function = kernel(TEMPLATE, problem, config, as_cuda=as_cuda)
    result = run_kernel(function, args | compute(signature, args))["out"]
    rows = np.repeat(np.arange(mask.shape[0]), np.diff(pattern.indptr))
    with np.errstate(invalid="ignore"):
        left, right = x.astype("float64")[..., rows, :], y.astype("float64")
        expected = (left * right[..., pattern.indices, :]).sum(-1)
    check(result, expected, problem.dtype)


@requires_opencl
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_patterns(mask):
    run(mask, 20, Sddmm(), FusedNonzeros.for_features(20))


@pytest.mark.parametrize("as_cuda", RUNNERS)
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", pytest.param("float64", marks=pytest.mark.slow)]
)
def test_types_and_heads(dtype, as_cuda):
    problem = Sddmm(dtype, "int64", batched=True)
    run(MASKS["empty rows"], 24, problem, FusedNonzeros.for_features(24, dtype), as_cuda)


@requires_nvcc
@pytest.mark.parametrize(
    "arch, feat, dtype",
    [
        ("sm_90", 128, "float32"),
        pytest.param("sm_80", 128, "float16", marks=pytest.mark.slow),
        # any multiple of a tile
        pytest.param("sm_90", None, "float32", marks=pytest.mark.slow),
        *(pytest.param("sm_90", f, "float32", marks=pytest.mark.slow) for f in (32, 512, 1000)),
        pytest.param("sm_90", 100, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_cuda_loads_vectors_and_reduces_by_shuffles(arch, feat, dtype, tmp_path):
    config = FusedNonzeros.for_features(feat, dtype) if feat else FusedNonzeros()
    problem = Sddmm(dtype)
    source = cuda_source(lower_sparse_buffer(scheduled(problem, config)), arch)
    compiled = compile_cuda(source, tmp_path, arch)
    loads = 2 * config.work * config.coarsen
    wide = {8: r"ld\.global\.nc\.v4", 4: r"ld\.global\.nc\.v[42]"}[config.vector]
    assert len(re.findall(wide, compiled.ptx)) >= loads
    assert "shfl.sync" in compiled.ptx
    assert "bar.sync" not in compiled.ptx
    assert compiled.spills == 0
