"""Sgap's groups beyond SpMM: SDDMM, MTTKRP and TTM (equations 2a to 2c), as CUDA on a CPU."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_default, by_turns
from programs import CASES, PROGRAMS, Program
from sparsetir import Schedule
from sparsetir.schedules.gpu.features import vector_width
from sparsetir.schedules.gpu.spmm_groups import Groups, apply
from sparsetir.schedules.passes.parallel_loops import in_vectors


def check(program: Program, schedule: Any, dtype: str = "float32", idtype: str = "int32") -> None:
    """Against the oracle, on every case of the program.

    schedule : of a number of features, (schedule of the program, its config)
    """
    rng = np.random.default_rng(0)
    made: dict[int, CudaStages] = {}
    for case in CASES:
        args = program.inputs(rng, case, dtype, idtype)
        feat = args["feat"]
        if feat not in made:
            made[feat] = CudaStages(program.make(dtype, idtype), *schedule(feat))
        with np.errstate(invalid="ignore"):
            wanted = program.oracle(args)
        for name, exact in wanted.items():
            found = made[feat](args)[name]
            tolerance = 1e-4 if dtype == "float32" else 1e-10
            np.testing.assert_allclose(found, exact, rtol=tolerance, atol=tolerance)


def sddmm(feat: int, lanes: int, group: int) -> Any:
    """Threads share a non-zero, whose features each r of them add up."""

    def schedule(sch: Schedule) -> None:
        it = sch.get_sparse_iteration("sddmm")
        i, j, k = sch.get_sp_iters(it)
        elements = sch.positions(sch.sparse_fuse(it, [i, j]))
        sch.bound(k, feat, "exact")
        vectors, one = sch.split(k, [None, vector_width(feat, "float32")], tail="exact")
        steps, lane = sch.split(vectors, [None, lanes], tail="repeat")
        sch.sparse_reorder(it, [elements, lane, steps, one])
        _, reduce, _ = sch.precompute("OUT", lane, [])
        sch.parallelize(elements, "thread", per_block=64 // lanes)
        sch.parallelize(lane, "thread", race=f"group({group})")
        steps, one = sch.get_sp_iters(reduce)
        copies = [copy for name in "XY" for copy in sch.precompute(name, steps, [one])]
        loops = sch.lower()
        for copy in copies:
            in_vectors(sch, copy, loops=1)
        rest = loops.get_sblock(f"{reduce.name}_rest0")
        loops.unroll(loops.get_loops(rest)[-1])

    return schedule


@requires_cuda_text
@pytest.mark.parametrize(("lanes", "group"), by_turns([(8, 4), (8, 8), (32, 32)], 3))
def test_sddmm(lanes: int, group: int) -> None:
    """With r < g the groups of a non-zero add atomically."""
    check(PROGRAMS["sddmm"], lambda feat: (sddmm(feat, lanes, group),))


# Of MTTKRP the template takes those that need no steps or pieces of what two levels store.
MTTKRP = {
    "1 row": Groups("rows", threads=2, block=16),
    "x row": Groups("rows", work=2, threads=2, block=16),
    "1 nnz": Groups("non-zeros", group=8, threads=2, block=32),
    "1 nnz, r = 32": Groups("non-zeros", group=32, threads=2, block=64),
}


def of_features(config: Groups, dtype: str = "float32", schedule: Any = apply) -> Any:
    return lambda feat: (schedule, replace(config, vector=vector_width(feat, dtype), feat=feat))


@requires_cuda_text
@pytest.mark.slow  # in its place `test_cuda`
@pytest.mark.parametrize("name", MTTKRP)
def test_mttkrp(name: str) -> None:
    check(PROGRAMS["mttkrp"], of_features(MTTKRP[name]))


@requires_cuda_text
@pytest.mark.slow
@pytest.mark.parametrize("name", MTTKRP)
def test_mttkrp_in_64_bits(name: str) -> None:
    check(PROGRAMS["mttkrp"], of_features(MTTKRP[name], "float64"), "float64", "int64")


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
    check(PROGRAMS["ttm"], of_features(TTM[name], schedule=ttm))
