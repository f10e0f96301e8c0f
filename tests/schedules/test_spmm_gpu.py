"""SpMM by rows, hyb and panels: run as OpenCL and as CUDA on a CPU, and compiled by nvcc."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import csr_zoo
import sparsetir
import spmm_gpu_common
from cuda_plans import run_plans
from cuda_runner import KernelError, requires_cuda_text
from cuda_stages import CudaStages
from gpu_runner import cuda_source, requires_nvcc
from pairs import by_default, by_turns
from sparsetir import ScheduleError, from_source, lower_sparse_buffer
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows, arrange
from sparsetir.schedules.gpu.spmm_panels import PanelThreads
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.sparse_ir.position_space import SIGNATURE
from spmm_gpu_common import (
    MASKS,
    RUNNERS,
    SCALED_SUMS,
    check_offsets,
    compile_cuda,
    configs_of_space,
    instructions,
    name_of,
    on_runners,
    pattern_of,
)
from spmm_gpu_common import run_spmm as run

WAYS = {
    "panels": {},
    "atomics": {"atomics": True},
    "compact": {"compact": True},
    "compact, atomics": {"compact": True, "atomics": True},
}


def panels(way: str) -> PanelThreads:
    return PanelThreads(3, 2, **WAYS[way], threads=8, vector=2, feat=16)


def scheduled(problem: Spmm, config: Any) -> Any:
    return spmm_gpu_common.scheduled(TEMPLATES[type(config), Spmm], problem, config)


@pytest.mark.parametrize("as_cuda", RUNNERS)
@pytest.mark.parametrize("config", [RowSplit(8, 4, 4), HybRows(1, 2, 8, 2, 4)], ids=name_of)
def test_matrices(config: Any, as_cuda: bool) -> None:
    """Rows of hyb are stored whole, and in many pieces."""
    for mask in MASKS.values():
        run(Spmm(), config, pattern_of(mask, "int32"), as_cuda=as_cuda)


@requires_cuda_text
@pytest.mark.parametrize("way", by_turns(WAYS, 2))
@pytest.mark.default("panels")
def test_matrices_in_panels(way: str) -> None:
    for mask in MASKS.values():
        run(Spmm(), panels(way), pattern_of(mask, "int32"))


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


def check_config(case: str, config: Any, feat: int, as_cuda: bool) -> None:
    """Tiles that overlap write some sums twice, and equal."""
    options = {"equal": "lanes left over" in case} if as_cuda else {}
    run(Spmm(), config, pattern_of(MASKS["random"], "int32"), feat, as_cuda=as_cuda, **options)


@pytest.mark.parametrize(
    ("case", "as_cuda"), on_runners([(case,) for case in CONFIGS], (6, 7)), ids=str
)
def test_configs(case: str, as_cuda: bool) -> None:
    config, feat = CONFIGS[case]
    check_config(case, config, feat, as_cuda)
    if not as_cuda:
        run(Spmm(), config, pattern_of(MASKS["one dense row"], "int32"), feat, as_cuda=False)


@requires_cuda_text
def test_tiles_that_overlap_are_a_race() -> None:
    config, feat = CONFIGS["lanes left over"]
    with pytest.raises(KernelError, match=r"race: block .* writes C\[.*which block"):
        run(Spmm(), config, pattern_of(MASKS["random"], "int32"), feat)


def without(after: str) -> Any:
    """An edit that takes the barrier before some text away."""
    return lambda source: source.replace(f"__syncthreads();\n    {after}", after)


@requires_cuda_text
def test_a_missing_barrier_is_found() -> None:
    """A barrier is missing before columns are written again, or before they are read.

    Without the second, a thread takes a column from where none is yet, which holds -1, or races.
    """
    matrix = pattern_of(MASKS["one dense row"], "int32")
    for after, message in (
        ("if", r"race: block \d+, thread .* \w+_shared_ptr\["),
        (
            "for",
            r"out of bounds: block \d+, thread .* at -64 from the begin of B|race: .*_shared_ptr",
        ),
    ):
        with pytest.raises(KernelError, match=message):
            run(Spmm(), RowSplit(8, 1, 2, row_cache=True), matrix, 16, edit=without(after))


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
@pytest.mark.parametrize(
    "problem, config, as_cuda", on_runners(PROBLEMS, (1, 4), (3, 5)), ids=name_of
)
def test_problems(problem: Spmm, config: RowSplit, as_cuda: bool) -> None:
    for name in ("random", "empty rows"):
        matrix = pattern_of(MASKS[name], problem.idtype)
        run(problem, config, matrix, config.tile * 2, as_cuda=as_cuda)


HYB_PROBLEMS = [
    (Spmm("float64", "int64"), HybRows(1, 1, 4, 2, 2)),
    (Spmm(reduce="mean"), HybRows(1, 1, 4, 2, 4)),
    (Spmm(reduce="max"), HybRows(1, 2, 4, 2, 4)),
    (Spmm(reduce="min"), HybRows(1, 2, 4, 2, 4)),
    (Spmm("float16", "int64", reduce="mean"), HybRows(1, 2, 4, 2, 8)),
    (Spmm("bfloat16"), HybRows(1, 2, 4, 2, 8)),
]


# As CUDA: atomics of float64, vectors of eight.
@pytest.mark.parametrize(
    "problem, config, as_cuda", on_runners(HYB_PROBLEMS, (0, 3), (2, 4)), ids=name_of
)
@pytest.mark.default("Spmm-HybRows-OpenCL2", "Spmm-HybRows-CUDA0")
def test_problems_of_hyb(problem: Spmm, config: HybRows, as_cuda: bool) -> None:
    mask = MASKS["empty rows"].copy()
    mask[:, 4:] = False  # rows of up to four elements
    matrix = pattern_of(mask, problem.idtype)
    run(problem, config, matrix, config.tile, as_cuda=as_cuda)
    if problem.dtype == "float32":
        run(problem, config, matrix, config.tile, special=True, as_cuda=as_cuda)


@requires_cuda_text
@pytest.mark.parametrize("way", by_default(WAYS, "panels", "compact, atomics"))
def test_nan_and_infinities_in_panels(way: str) -> None:
    """A row of B is added to the rows of a pattern alone."""
    run(Spmm(), panels(way), pattern_of(MASKS["random"], "int32"), special=True)


@requires_cuda_text
@pytest.mark.parametrize("way", by_default(WAYS, "compact, atomics"))
def test_values_of_a_run_are_read_by_their_places(way: str) -> None:
    config = panels(way).unpacked
    assert config == replace(panels(way), packed=False)
    assert replace(config, unroll=8).unpacked == config
    for name in ("random", "one dense row", "empty rows", "no rows"):
        run(Spmm(), config, pattern_of(MASKS[name], "int32"), special=name == "random")
    assert config.by_rows == panels(way).by_rows == RowSplit(8, 1, 2, 1, 16)


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
@pytest.mark.parametrize("case", by_default(CASES, CASES[0], CASES[13]), ids=str)
@pytest.mark.default(1)
def test_types_and_sizes(case: tuple[Spmm, PanelThreads, int]) -> None:
    problem, config, feat = case
    for name in ("random", "one dense row", "empty rows"):
        run(problem, config, pattern_of(MASKS[name], problem.idtype), feat)


def test_shared_rows() -> None:
    """Rows of other than one piece are marked, in whatever buckets and parts they are."""
    mask = np.zeros((5, 12), bool)
    mask[0, :4] = mask[1, :5] = mask[2, [0, 11]] = mask[3, 11] = True
    matrix = pattern_of(mask, "int32")
    for config, expected in (
        (HybRows(1, 2), [0, 1, 0, 0, 1]),  # the fifth element of row 1 is a piece
        (HybRows(2, 3), [0, 0, 1, 0, 1]),  # both halves of row 2 hold some
        (HybRows(1, 3), [0, 0, 0, 0, 1]),
    ):
        func = scheduled(Spmm(), config).attrs[SIGNATURE]
        flags = arrange(matrix, Spmm(), config).computed(func, {})
        np.testing.assert_array_equal(flags["c_shared"], expected)
        for problem in (Spmm(reduce="max"), Spmm("float16")):
            if sum(expected) == 1:
                func = scheduled(problem, config).attrs[SIGNATURE]
                assert not arrange(matrix, problem, config).computed(func, {})
                continue
            with pytest.raises(ScheduleError, match=rf"2 pieces of row {expected.index(1)} with"):
                arrange(matrix, problem, config)


@requires_cuda_text
@pytest.mark.parametrize("config", by_turns([
    RowSplit(4, 2, 2), RowSplit(8, 1, 1, row_cache=True), panels("compact, atomics"),
    panels("panels"), Groups("non-zeros", group=8, threads=2), Groups(lanes=4, group=4, threads=2),
], 2), ids=str)  # fmt: skip
@pytest.mark.default(1)
def test_a_program_of_a_user(config: Any) -> None:
    """A program that gathers nothing."""
    args, wanted = spmm_gpu_common.scaled_sums()
    apply = TEMPLATES[type(config), Spmm].apply
    out = CudaStages(from_source(SCALED_SUMS), apply, config)(args)["out"]
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


@requires_cuda_text
def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the plan are packed once; those of a run are read by their places."""
    kernels = run_plans(monkeypatch)
    a = sp.random_array((37, 29), density=0.4, format="csr", dtype="float32", rng=0)
    b = np.random.default_rng(0).random((29, 16), "float32")
    plan = sparsetir.plan(
        "spmm", a, 16, target={"kind": "cuda", "arch": "sm_90"}, config=panels("panels")
    )
    np.testing.assert_allclose(plan(b), a @ b, rtol=1e-5)
    (kernel,) = kernels.values()
    assert "A_packed_ptr" in kernel.function.source
    np.testing.assert_allclose(plan(b, values=a.data * 2), 2 * (a @ b), rtol=1e-5)
    (other,) = (k for k in kernels.values() if k is not kernel)
    assert "A_packed_ptr" not in other.function.source and plan.padding == 0


@requires_cuda_text
def test_reduction_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run_plans(monkeypatch)
    a, target = csr_zoo.ZOO["empty rows"], {"kind": "cuda", "arch": "sm_90"}
    b = np.random.default_rng(0).random((a.shape[1], 16), "float32")
    result = sparsetir.plan("spmm", a, 16, reduce="logsumexp", target=target)(b)
    wanted, _ = csr_zoo.expected(a, a.data, b, "logsumexp")
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


@requires_cuda_text
@pytest.mark.slow
@pytest.mark.parametrize("problem", [Spmm(), Spmm("float16", reduce="mean")], ids=str)
def test_configs_of_the_space(problem: Spmm) -> None:
    for config in configs_of_space(PanelThreads, problem, 12, "random", 16)[::23]:
        run(problem, config, pattern_of(MASKS["one dense row"], "int32"))


@pytest.mark.parametrize("way", by_default(WAYS, "panels", "compact, atomics"))
def test_offsets_of_32_bits_do_not_overflow(way: str) -> None:
    check_offsets(Spmm(), panels(way))


# -- what nvcc makes of it ----------------------------------------------------------------------

CUDA = [
    (Spmm(), RowSplit(8, 16, 4, feat=32), "v4", 48),
    (Spmm(reduce="max", batched=True), RowSplit(32, 4, 4), "v4", 64),
    (Spmm("float16", "int64"), RowSplit(16, 8, 8), "v4", 64),
]


@requires_nvcc
@pytest.mark.parametrize("problem, config, width, registers", CUDA, ids=["float32", "max", "half"])
@pytest.mark.default("max")
def test_cuda(problem: Spmm, config: RowSplit, width: str, registers: int, tmp_path: Any) -> None:
    """Loads of B and stores of C are 128 bits wide, and sums stay in registers."""
    source = cuda_source(lower_sparse_buffer(scheduled(problem, config)))
    assert "__syncthreads" not in source
    compiled = compile_cuda(source, tmp_path)
    assert re.search(rf"ld\.global\.nc\.{width}\.", compiled.ptx)
    assert re.search(rf"st\.global\.{width}\.", compiled.ptx)
    assert "local" not in compiled.ptx and compiled.spills == 0
    assert compiled.registers <= registers


HYB = [
    pytest.param(
        Spmm(), HybRows(1, 3, 32, 4, 4, feat=128), True, id="float32", marks=pytest.mark.slow
    ),
    pytest.param(Spmm(), HybRows(1, 2, 32, 4, 4, feat=600), True, id="lanes left over"),
    pytest.param(
        Spmm("float16"), HybRows(1, 2, 16, 8, 8, feat=128), False, id="half",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@requires_nvcc
@pytest.mark.parametrize("problem, config, atomics", HYB)
def test_hyb_in_cuda(problem: Spmm, config: HybRows, atomics: bool, tmp_path: Any) -> None:
    """Loads of columns and of B are 128 bits wide, and sums stay in registers."""
    source = cuda_source(lower_sparse_buffer(scheduled(problem, config)))
    assert "__syncthreads" not in source
    compiled = compile_cuda(source, tmp_path)
    assert len(re.findall(r"ld\.global\.nc\.v4\.", compiled.ptx)) > 1 << config.k
    stores = re.findall(r"st\.global\.\S+", compiled.ptx)
    assert len(stores) > config.k and all(".v4." in s for s in stores)
    assert ("red." in compiled.ptx or "atom." in compiled.ptx) == atomics
    assert compiled.spills == 0 and compiled.registers <= 64


# Name: (config, loads of B, products), of 15 patterns that are 32 rows, or of 4 counts, 10 rows.
UNROLLED = 4
PANELS = {"panels": (15, 32), "atomics": (15, 32), "compact": (4, 10), "compact, atomics": (4, 10)}


@requires_nvcc
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("way", by_default(PANELS, "panels", "compact, atomics"))
@pytest.mark.default("compact, atomics-sm_90")
def test_panels_in_cuda(way: str, arch: str, tmp_path: Any) -> None:
    """One load of B, 128 bits wide, for all rows of an entry, and sums in registers.

    Each loop is there for steps of four entries and for what is left.
    """
    config = PanelThreads(4, UNROLLED, **WAYS[way], vector=4, feat=128, panels=2)
    source = cuda_source(lower_sparse_buffer(scheduled(Spmm(), config)), arch)
    loads, products = (n * (UNROLLED + 1) for n in PANELS[way])
    # Of other vectors: the result, where it is added to.
    assert len(re.findall(r"= \*\(float4\*\)\(B_ptr \+", source)) == loads
    compiled = compile_cuda(source, tmp_path, arch)
    assert "local" not in compiled.ptx and compiled.spills == 0 and compiled.registers <= 64
    code = instructions(compiled.cubin)
    added = 10 if way == "compact" else 0
    assert len(re.findall(r"\bLDG\.E\.128\b", code)) == loads + added
    assert len(re.findall(r"\bFFMA\b", code)) == products * 4
    assert bool(re.search(r"\b(?:RED|ATOM)G?\b", code)) == config.atomics
