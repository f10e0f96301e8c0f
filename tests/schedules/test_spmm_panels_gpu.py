"""SpMM over panels of rows on GPUs: run as CUDA on a CPU, and compiled by nvcc."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
import spmm_gpu_common
from cuda_plans import run_plans
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from gpu_runner import cuda_source, requires_nvcc
from pairs import by_default
from sparsetir import from_source, lower_sparse_buffer
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_panels import PanelThreads, apply
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates.registry import TEMPLATES
from spmm_gpu_common import (
    MASKS,
    SCALED_SUMS,
    check_offsets,
    compile_cuda,
    instructions,
    of_mask,
    of_the_space,
)
from spmm_gpu_common import run_spmm as run

TEMPLATE = TEMPLATES[PanelThreads, Spmm]


WAYS = {
    "panels": {},
    "atomics": {"atomics": True},
    "compact": {"compact": True},
    "compact, atomics": {"compact": True, "atomics": True},
}


def config(way: str) -> PanelThreads:
    return PanelThreads(3, 2, **WAYS[way], threads=8, vector=2, feat=16)


@requires_cuda_text
@pytest.mark.parametrize("way", WAYS)
def test_matrices(way: str) -> None:
    for mask in MASKS.values():
        run(Spmm(), config(way), of_mask(mask, "int32"))


@requires_cuda_text
@pytest.mark.parametrize("way", by_default(WAYS, "panels", "compact, atomics"))
def test_nan_and_infinities(way: str) -> None:
    """A row of B is added to the rows of a pattern alone."""
    run(Spmm(), config(way), of_mask(MASKS["random"], "int32"), special=True)


@requires_cuda_text
@pytest.mark.parametrize("way", by_default(WAYS, "compact, atomics"))
def test_values_of_a_run_are_read_by_their_places(way: str) -> None:
    own = config(way).unpacked
    assert own == replace(config(way), packed=False)
    assert replace(own, unroll=8).unpacked == own
    for name in ("random", "one dense row", "empty rows", "no rows"):
        run(Spmm(), own, of_mask(MASKS[name], "int32"), special=name == "random")
    assert own.by_rows == config(way).by_rows == RowSplit(8, 1, 2, 1, 16)


# Problem, config, features.
MEAN, MAX, HEADS = Spmm(reduce="mean"), Spmm(reduce="max"), Spmm(batched=True)
HALF, DOUBLE = Spmm("float16", out="float32"), Spmm("float64", "int64")
FEW = {"threads": 4, "vector": 2, "feat": 12}
# Types; several panels in a block, and warps; means, maxima and heads, also by atomics; columns
# that are left over; any number of features.
CASES = [
    (Spmm("float16"), PanelThreads(2, 2, threads=4, vector=8, feat=64), 64),
    (Spmm("bfloat16"), PanelThreads(2, 3, threads=4, vector=2, panels=4), 16),
    (HALF, PanelThreads(4, 4, True, threads=32, vector=2, feat=64, panels=2), 64),
    (Spmm("bfloat16", out="float32"), PanelThreads(5, 2, True, True, 8, 4, feat=36), 36),
    (DOUBLE, PanelThreads(7, 3, False, True, threads=4, vector=2, feat=10, panels=3), 10),
    (DOUBLE, PanelThreads(3, 3, True, threads=32, feat=70, panels=2), 70),
    (MEAN, PanelThreads(4, 2, **FEW), 12),
    (MEAN, PanelThreads(4, 2, True, **FEW), 12),
    (MAX, PanelThreads(2, 1, **FEW), 12),
    (MAX, PanelThreads(3, 2, True, **FEW), 12),
    (HEADS, PanelThreads(3, 1, **FEW), 12),
    (HEADS, PanelThreads(3, 1, True, True, **FEW), 12),
    (Spmm(), PanelThreads(4, 7, threads=4, coarsen=3, feat=29), 29),
    (Spmm(), PanelThreads(4, 3, True, True, threads=4, coarsen=2, feat=13), 13),
    (Spmm(), PanelThreads(8, 7, True, True, threads=4, coarsen=3, feat=29), 29),
    (Spmm(), PanelThreads(3, 2, threads=4, vector=2, panels=2), 24),
]


@requires_cuda_text
@pytest.mark.parametrize("case", by_default(CASES, CASES[0], CASES[8], CASES[13]), ids=str)
def test_types_and_sizes(case: tuple[Spmm, PanelThreads, int]) -> None:
    problem, config, feat = case
    for name in ("random", "one dense row", "empty rows"):
        run(problem, config, of_mask(MASKS[name], problem.idtype), feat)


# Name: (config, loads of B, products), of 15 patterns that are 32 rows, or of 4 counts, 10 rows.
UNROLLED = 4
CUDA = {"panels": (15, 32), "atomics": (15, 32), "compact": (4, 10), "compact, atomics": (4, 10)}


@requires_nvcc
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("way", by_default(CUDA, "panels", "compact, atomics"))
def test_cuda(way: str, arch: str, tmp_path: Any) -> None:
    """One load of B for all rows of an entry, 128 bits wide, and sums in registers.

    Each loop is there for steps of four entries and for what is left.
    """
    config = PanelThreads(4, UNROLLED, **WAYS[way], vector=4, feat=128, panels=2)
    source = cuda_source(
        lower_sparse_buffer(spmm_gpu_common.scheduled(TEMPLATE, Spmm(), config)), arch
    )
    loads, products = (n * (UNROLLED + 1) for n in CUDA[way])
    # Of other vectors: the result, where it is added to.
    assert len(re.findall(r"= \*\(float4\*\)\(B_ptr \+", source)) == loads
    found = compile_cuda(source, tmp_path, arch)
    assert "local" not in found.ptx and found.spills == 0 and found.registers <= 64
    code = instructions(found.cubin)
    added = 10 if way == "compact" else 0
    assert len(re.findall(r"\bLDG\.E\.128\b", code)) == loads + added
    assert len(re.findall(r"\bFFMA\b", code)) == products * 4
    assert bool(re.search(r"\b(?:RED|ATOM)G?\b", code)) == config.atomics


@requires_cuda_text
def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the plan are packed once; those of a run are read by their places."""
    kernels = run_plans(monkeypatch)
    a = sp.random_array((37, 29), density=0.4, format="csr", dtype="float32", rng=0)
    b = np.random.default_rng(0).random((29, 16), "float32")
    plan = sparsetir.plan(
        "spmm", a, 16, target={"kind": "cuda", "arch": "sm_90"}, config=config("panels")
    )
    np.testing.assert_allclose(plan(b), a @ b, rtol=1e-5)
    (kernel,) = kernels.values()
    assert "A_packed_ptr" in kernel.function.source
    np.testing.assert_allclose(plan(b, values=a.data * 2), 2 * (a @ b), rtol=1e-5)
    (other,) = (k for k in kernels.values() if k is not kernel)
    assert "A_packed_ptr" not in other.function.source and plan.padding == 0


@requires_cuda_text
def test_a_program_of_a_user() -> None:
    """One that gathers nothing."""
    args, wanted = spmm_gpu_common.scaled_sums()
    for way in ("panels", "compact, atomics"):
        out = CudaStages(from_source(SCALED_SUMS), apply, config(way))(args)["out"]
        np.testing.assert_allclose(out, wanted, rtol=1e-5)


@requires_cuda_text
@pytest.mark.slow
@pytest.mark.parametrize("problem", [Spmm(), Spmm("float16", reduce="mean")], ids=str)
def test_configs_of_the_space(problem: Spmm) -> None:
    for config in of_the_space(PanelThreads, problem, 12, "random", 16)[::23]:
        run(problem, config, of_mask(MASKS["one dense row"], "int32"))


def test_offsets_of_32_bits_do_not_overflow() -> None:
    for way in WAYS:
        check_offsets(Spmm(), config(way))
