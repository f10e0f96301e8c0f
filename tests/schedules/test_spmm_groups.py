"""Sgap's algorithms for SpMM, SDDMM, MTTKRP and TTM: as CUDA on a CPU, and compiled by nvcc."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import spmm_gpu_common
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from gpu_runner import cuda_source, requires_nvcc
from pairs import by_default, by_turns
from programs import CASES, PROGRAMS, Program
from refusals import refuse
from sparsetir import Schedule, lower_sparse_buffer
from sparsetir.schedules.gpu.features import vector_width
from sparsetir.schedules.gpu.spmm_groups import Groups, apply
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates.registry import TEMPLATES
from spmm_gpu_common import MASKS, compile_cuda, instructions, pattern_of
from spmm_gpu_common import run_spmm as run

TEMPLATE = TEMPLATES[Groups, Spmm]
scheduled = functools.partial(spmm_gpu_common.scheduled, TEMPLATE)
PATTERNS = {
    **MASKS,
    "empty rows at block ends": (np.arange(48)[:, None] % 8 % 7 != 0) & (MASKS["random"][0] > -1),
}

# By the names of the paper; blocks are small, so that there are many.
ALGORITHMS = {
    "1 row": Groups("rows", threads=2, block=16, feat=8),
    "x row": Groups("rows", work=3, threads=2, block=16, feat=8),
    "1/g row": Groups("rows", lanes=8, group=8, threads=2, block=32, feat=8),
    "1/g row, r < g": Groups("rows", lanes=8, group=4, threads=2, block=32, feat=8),
    "g nnz": Groups("non-zeros", work=4, threads=2, block=16, feat=8),
    "g nnz, blocks": Groups("non-zeros", work=4, threads=2, block=16, feat=8, rows="blocks"),
    "1 nnz": Groups("non-zeros", group=8, threads=2, block=32, feat=8),
    "1 nnz, blocks": Groups("non-zeros", group=8, threads=2, block=32, feat=8, rows="blocks"),
}


@requires_cuda_text
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.default("1 row", "1/g row")
def test_matrices(name: str) -> None:
    for mask in PATTERNS.values():
        run(Spmm(), ALGORITHMS[name], pattern_of(mask, "int32"))


OVER = {"vector": 1, "coarsen": 2, "block": 32}  # some columns are left over
CONFIGS = [
    Groups("rows", lanes=4, group=4, threads=2, block=64),  # any number of features
    Groups("rows", threads=2, block=32, feat=40),  # many tiles
    Groups("rows", lanes=32, group=32, threads=1, block=64, feat=8),  # all lanes of a warp
    Groups("rows", lanes=64, group=32, threads=1, block=128, feat=4),  # rows of several warps
    Groups("rows", lanes=4, group=1, threads=2, block=64, feat=8),  # each lane for itself
    Groups("rows", 2, 8, 8, threads=2, block=64, feat=8),  # groups iterate over rows
    Groups("rows", 1, 4, 4, 4, feat=13, **OVER),
    Groups("rows", threads=8, vector=1, block=32, feat=5),  # fewer columns than threads
    Groups("non-zeros", 7, threads=4, vector=2, feat=10),
    Groups("non-zeros", threads=2, block=32, feat=8),  # chunks of one
    Groups("non-zeros", group=32, threads=1, block=64, feat=4),  # runs in a warp
    Groups("non-zeros", group=4, threads=4, feat=11, **OVER),
    Groups("non-zeros", 7, threads=2, feat=10, rows="search", **OVER),
    Groups("non-zeros", group=4, threads=4, vector=1, block=32, feat=11, rows="search"),
    Groups.for_features(1, lanes=32, group=32, block=64),  # SpMV
    Groups.for_features(1, split="non-zeros", work=5, block=32),
    Groups.for_features(1, split="non-zeros", group=32, block=64),
    Groups.for_features(602, split="non-zeros", group=8),
]


@requires_cuda_text
@pytest.mark.parametrize(
    "config", by_default(CONFIGS, *(CONFIGS[n] for n in (5, 6, 11, 16))), ids=repr
)
@pytest.mark.default(2)
def test_configs(config: Groups) -> None:
    for name in ("random", "one dense row"):
        run(Spmm(), config, pattern_of(PATTERNS[name], "int32"))


configs_of_space = functools.partial(
    spmm_gpu_common.configs_of_space, Groups, mask="one dense row", longest=150
)


@requires_cuda_text
@pytest.mark.slow
@pytest.mark.parametrize("step", [70, 9])
def test_configs_of_the_space(step: int) -> None:
    """Some configs, far from each other, each of which serves the problem."""
    for problem in (Spmm(), Spmm(reduce="max")):
        for config in configs_of_space(problem, 12)[::step]:
            run(problem, config, pattern_of(PATTERNS["one dense row"], "int32"))


def test_the_space() -> None:
    """All four algorithms, each with several groups; without atomics two of them.

    Groups of a warp are there for the columns of a thread alone.
    """
    configs = configs_of_space(Spmm(), 64)
    assert 200 <= len(configs) <= 500 and all(c.tiles(64) for c in configs)
    shapes = {(c.split, min(c.work, 2), c.lanes, c.group) for c in configs}
    assert {c.rows for c in configs} == {"table", "search", "blocks"}
    for shape in (
        ("rows", 1, 1, 1), ("rows", 2, 1, 1), ("rows", 1, 8, 8), ("rows", 1, 8, 4),
        ("non-zeros", 2, 1, 1), ("non-zeros", 1, 1, 8), ("non-zeros", 1, 1, 4),
    ):  # fmt: skip
        assert shape in shapes
    assert max(c.side_by_side for c in configs) == 8
    few = {(c.split, c.lanes, c.group) for c in configs_of_space(Spmm(), 4)}
    assert few >= {("rows", 32, 8), ("rows", 32, 32), ("non-zeros", 1, 32)}
    for problem in (Spmm("float16"), Spmm("float64", reduce="max")):
        assert not any(c.is_atomic for c in configs_of_space(problem, 64))


# Problem, and the algorithms that serve it.
ROWS = ("1 row", "x row", "1/g row")
PROBLEMS = [
    (Spmm("float16"), ROWS),
    (Spmm("bfloat16", reduce="max"), ROWS),
    (Spmm("float64", "int64"), tuple(ALGORITHMS)),
    (Spmm(reduce="mean"), tuple(ALGORITHMS)),
    (Spmm(reduce="max"), tuple(a for a in ALGORITHMS if "g nnz" not in a)),
    (Spmm(reduce="min"), tuple(a for a in ALGORITHMS if "g nnz" not in a)),
    (Spmm(idtype="int64", reduce="mean", batched=True), tuple(ALGORITHMS)),
]


@requires_cuda_text
@pytest.mark.parametrize(
    ("problem", "name"),
    by_turns([(p, name) for p, names in PROBLEMS for name in names], 3),
    ids=str,
)
@pytest.mark.default(3)
def test_problems(problem: Spmm, name: str) -> None:
    config = ALGORITHMS[name]
    if problem.dtype == "float64":
        config = replace(config, vector=2)
    for pattern in ("random", "empty rows"):
        run(problem, config, pattern_of(PATTERNS[pattern], problem.idtype))


# Algorithm, what is in its instructions and what is not, registers.
CUDA = {
    "1 row": (Groups.for_features(64), "", "SHFL RED ATOM", 64),
    "x row": (Groups.for_features(64, work=4), "", "SHFL RED ATOM", 64),
    "1/g row": (Groups.for_features(64, lanes=8, group=8), "SHFL", "RED ATOM", 64),
    "1/g row, r < g": (Groups.for_features(64, lanes=32, group=8), "SHFL RED", "", 64),
    "g nnz": (Groups.for_features(64, split="non-zeros", work=8), "RED", "SHFL", 64),
    "g nnz, blocks": (
        Groups.for_features(64, split="non-zeros", work=8, rows="blocks"), "RED", "SHFL", 64,
    ),
    "1 nnz": (Groups.for_features(64, split="non-zeros", group=8), "SHFL VOTE RED", "", 64),
    "1 nnz, 8 columns": (
        Groups.for_features(64, split="non-zeros", group=32, coarsen=2), "SHFL VOTE RED", "", 64,
    ),
}  # fmt: skip


@requires_nvcc
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("name", by_default(CUDA, "1/g row, r < g", "1 nnz"))
@pytest.mark.default("1/g row, r < g-sm_90")
def test_cuda(name: str, arch: str, tmp_path: Any) -> None:
    """Loads of B are 128 bits wide, and sums stay in registers."""
    config, present, absent, registers = CUDA[name]
    source = cuda_source(lower_sparse_buffer(scheduled(Spmm(), config)), arch)
    compiled = compile_cuda(source, tmp_path, arch)
    assert re.search(r"ld\.global\.nc\.v4\.", compiled.ptx)
    assert "local" not in compiled.ptx and compiled.spills == 0
    assert compiled.registers <= registers
    code = instructions(compiled.cubin)
    assert re.search(r"\bLDG\.E\.128\b", code)
    wide = re.search(r"\bSTG\.E\.128\b", code) is not None  # of rows, or of the init
    assert wide == (name != "1/g row")
    for opcode in present.split():
        assert re.search(rf"\b{opcode}G?\b", code), opcode
    for opcode in absent.split():
        assert not re.search(rf"\b{opcode}G?\b", code), opcode


def test_refusals() -> None:
    for config in (Groups(lanes=8, group=4), Groups("non-zeros", 4), Groups("non-zeros", group=8)):
        refuse("""
            scheduled(Spmm("float16"), config)  # ScheduleError: Groups: argument 'config': expected
                rows in one group, .. for float16, which atomics do not add, got split=
            scheduled(Spmm("float64", reduce="max"), replace(config, vector=2))
                # ScheduleError: a sum of .. got a max of float64
        """, globals(), locals())  # fmt: skip
        assert not config.serves(Spmm("float16"))
        assert not config.serves(Spmm("float64", reduce="max"))
        assert config.serves(Spmm(reduce="max")) == (config.work == 1)
        assert config.serves(Spmm(reduce="mean"))


def check(program: Program, config: Groups, schedule: Any = apply, cases: Any = CASES) -> None:
    """Against the oracle, on cases of the program, each with its number of features."""
    rng = np.random.default_rng(0)
    for case in cases:
        args = program.inputs(rng, case, "float32", "int32")
        feat = args["feat"]
        config_of = replace(config, vector=vector_width(feat, "float32"), feat=feat)
        result = CudaStages(program.make("float32", "int32"), schedule, config_of)(args)
        with np.errstate(invalid="ignore"):
            for name, exact in program.oracle(args).items():
                np.testing.assert_allclose(result[name], exact, rtol=1e-4, atol=1e-4)


# Of MTTKRP the template takes those that need no steps or pieces of what two levels store.
MTTKRP = {
    "1 row": Groups("rows", threads=2, block=16),
    "x row": Groups("rows", work=2, threads=2, block=16),
    "1 nnz": Groups("non-zeros", group=8, threads=2, block=32),
    "1 nnz, r = 32": Groups("non-zeros", group=32, threads=2, block=64),
}


@requires_cuda_text
@pytest.mark.slow  # in its place `test_cuda`
@pytest.mark.parametrize("name", MTTKRP)
def test_mttkrp(name: str) -> None:
    check(PROGRAMS["mttkrp"], MTTKRP[name])


def ttm(sch: Schedule, config: Groups) -> None:
    """Over the fibers of a tensor in CSF, which are the rows of a matrix."""
    it = sch.get_sparse_iteration("ttm")
    i, j, *_ = sch.get_sp_iters(it)
    sch.positions(sch.sparse_fuse(it, [i, j]))
    apply(sch, config)


TTM = {
    "x row": Groups("rows", work=2, threads=2, block=16),
    "1/g row": Groups("rows", lanes=8, group=8, threads=2, block=32),
    "g nnz": Groups("non-zeros", work=4, threads=2, block=16),
    "1 nnz": Groups("non-zeros", group=8, threads=2, block=32),
}


@requires_cuda_text
@pytest.mark.parametrize("name", by_default(TTM, "1/g row"))
def test_ttm(name: str) -> None:
    check(PROGRAMS["ttm"], TTM[name], ttm, ("small", "empty", "dense_row"))
