"""Products of blocks on tensor cores, their CUDA text run on a CPU under orders of warps."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import scipy.sparse as sp

from cuda_runner import requires_cuda_text
from gpu_runner import requires_nvcc
from pairs import by_turns
from sparsetir.formats import BSR, DBSR, ELL, SRBCRS
from sparsetir.planning.plan import requested as request
from sparsetir.runtime.pipeline import kernel_of, lower_template
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.search.by_format import by_format
from sparsetir.schedules.search.choose import choose
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.registry import TEMPLATES
from spmm_gpu_common import compile_cuda, instructions
from tensor_cores_common import batched_kernel, check, kernel, pattern

COUNTS = [0, 1, 2, 5, 3]  # blocks of a row: none, one, fewer and more than stages
SHAPE = (150, 200)  # which no block divides
GPU = resolve_target({"kind": "cuda", "arch": "sm_80"})

FORMATS = (
    BSR(32, 32), SRBCRS(16, 16), BSR(8, 8), SRBCRS(16, 32), DBSR(16, 16), BSR(64, 64),
    SRBCRS(8, 32), BSR(16, 8), DBSR(8, 32), BSR(24, 40), SRBCRS(8, 16), BSR(16, 16), DBSR(64, 64),
)  # fmt: skip
TYPES = (
    ("float16", "float32"), ("bfloat16", "bfloat16"), ("int8", "int32"), ("float16", "float16"),
    ("bfloat16", "float32"),
)  # fmt: skip
FEATURES = (72, 129, 36, 16, 30, 1, 256)


@requires_cuda_text
@pytest.mark.parametrize(
    ("fmt", "types", "feat"), by_turns(itertools.product(FORMATS, TYPES, FEATURES), 179), ids=str
)
@pytest.mark.default(3)
def test_formats(fmt, types, feat):
    """Each format with each type and any number of features, under three orders of warps."""
    config = TensorCores.for_features(fmt, feat, types[0])
    check(kernel(config, *types), pattern(fmt, SHAPE, COUNTS), feat)


@requires_cuda_text
def test_nothing_stored():
    for fmt in (BSR(32, 32), SRBCRS(8, 16), DBSR(16, 16)):
        result = check(kernel(TensorCores.for_features(fmt, 40)), np.zeros((40, 50), bool), feat=40)
        assert not result.any()


@requires_cuda_text
@pytest.mark.parametrize("heads", [3])
@pytest.mark.slow
def test_batches(heads):
    """A user's program, where many dense operands share the matrix: heads are in the grid."""
    batched_kernel(TensorCores(BSR(32, 32), tile=32, warps=(1, 1)), heads, SHAPE, COUNTS, feat=40)


# -- padding ------------------------------------------------------------------------------------


def operands(mask, feat):
    return np.random.default_rng(2).standard_normal((mask.shape[1], feat)).astype("float16")


@requires_cuda_text
@pytest.mark.parametrize("fmt", [BSR(32, 32), SRBCRS(8, 16)], ids=str)
def test_infinities_where_nothing_is_padding(fmt):
    """Rows of B that no block reads, and full blocks, give the right results."""
    config = TensorCores.for_features(fmt, 40)
    mask = pattern(fmt, (64, 96), [1, 2], share=1.0)
    if isinstance(fmt, SRBCRS):
        mask[:, 5] = False
    unread, read = np.flatnonzero(~mask.any(axis=0)), np.flatnonzero(mask.any(axis=0))
    b = operands(mask, 40)
    b[unread] = np.nan
    b[read[0], 3], b[read[0], 5] = np.inf, np.nan
    result = check(kernel(config), mask, 40, b=b)
    others = np.delete(result, [3, 5], axis=1)
    assert np.isfinite(others).all()
    assert (np.isfinite(result[:, 3]) == ~mask[:, read[0]]).all()
    assert (np.isnan(result[:, 5]) == mask[:, read[0]]).all()


@requires_cuda_text
def test_padding_is_zero_times_finite():
    """Zeros that fill a block are multiplied, NaN where B has infinities; empty slots are not."""
    mask = np.zeros((32, 32), bool)
    mask[0, 0] = True
    b = operands(mask, 40)
    b[7] = np.inf  # no element is in this column
    result = check(kernel(TensorCores.for_features(BSR(32, 32), 40)), mask, 40, b=b)
    assert np.isnan(result).all()
    result = check(kernel(TensorCores.for_features(SRBCRS(8, 16), 40)), mask, 40, b=b)
    assert np.isfinite(result).all()
    b[0] = np.inf  # of one element in a tile of 8 rows
    result = check(kernel(TensorCores.for_features(SRBCRS(8, 16), 40)), mask, 40, b=b)
    assert np.isinf(result[0]).all() and np.isnan(result[1:8]).all() and not result[8:].any()


# -- plans, searches ----------------------------------------------------------------------------


def block_matrix(share):
    mask = pattern(BSR(32, 32), (256, 192), [1, 2, 3], share)
    return sp.csr_array(mask.astype("float16").astype("float32"))


def test_chosen_for_full_blocks_and_for_formats_that_are_named():
    """Chosen by default where there is no padding; and for any format that a user names."""
    for share, dtype, kind in ((1.0, "bfloat16", TensorCores), (1.0, "float32", RowSplit)):
        wanted = request("spmm", block_matrix(share), 64, dtype=dtype, target=GPU)
        assert isinstance(choose(wanted.problem, wanted.statistics, GPU), kind)
    wanted = request("spmm", block_matrix(0.9), 64, dtype="float16", target=GPU)
    assert isinstance(choose(wanted.problem, wanted.statistics, GPU), RowSplit)
    args = wanted.pattern.coordinates, wanted.statistics, GPU
    config = by_format(DBSR(16, 16), wanted.problem, *args)
    assert config == TensorCores.for_features(DBSR(16, 16), 64)
    for fmt in (BSR(4, 4), ELL()):  # of other blocks, and of none
        assert isinstance(by_format(fmt, wanted.problem, *args), Decomposed)
    assert isinstance(by_format(BSR(16, 16), Spmm(), *args), Decomposed)


# -- what nvcc makes of it ----------------------------------------------------------------------

SASS = {
    "BSR float16 sm_80": (BSR(32, 32), "float16", "sm_80", r"HMMA\.16816\.F32 "),
    "SR-BCRS bfloat16 sm_90": (SRBCRS(8, 16), "bfloat16", "sm_90", r"HMMA\.16816\.F32\.BF16"),
    "BSR int8 sm_80": (BSR(32, 32), "int8", "sm_80", r"IMMA\.16832\.S8\.S8"),
    "DBSR bfloat16 sm_90": (DBSR(64, 64), "bfloat16", "sm_90", r"HMMA\.16816\.F32\.BF16"),
    "BSR of 8 float16 sm_90": (BSR(8, 8), "float16", "sm_90", r"HMMA\.16816\.F32 "),
}


@requires_nvcc
@pytest.mark.parametrize("name", by_turns(SASS, 5))
def test_instructions(name, tmp_path):
    fmt, dtype, arch, product = SASS[name]
    config = TensorCores.for_features(fmt, 128, dtype)
    problem = Spmm(dtype, out="int32" if dtype == "int8" else "float32")
    target = resolve_target({"kind": "cuda", "arch": arch})
    stages = lower_template(TEMPLATES[TensorCores, Spmm], problem, config, target)
    compiled = compile_cuda(kernel_of(stages, target).source("cuda"), tmp_path, arch)
    assert compiled.spills <= 16 and compiled.registers <= 160
    code = instructions(compiled.cubin)
    for opcode in (product, r"\bLDSM\.", r"\bLDGSTS\.E\.BYPASS\.128"):
        assert re.search(opcode, code), opcode


# -- refusals -----------------------------------------------------------------------------------


@requires_cuda_text
def test_more_shared_memory_than_kernels_declare():
    """A dynamic array of the launch: 8 stages of 64 rows and 32 terms of both."""
    config = TensorCores(BSR(64, 64), tile=64, warps=(2, 2), stages=8)
    built = kernel(config)
    check(built, pattern(config.format, SHAPE, COUNTS), feat=72)
    script = built.run.stages["II scheduled"].script()
    assert script.count('scope="shared.dyn"') == 1 and 'scope="shared")' not in script
