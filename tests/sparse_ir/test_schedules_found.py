"""Schedules that random ones have found: kernels could not be built of them, or were wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from programs import PROGRAMS
from schedule_common import opened, program, steps, table
from small import text_of
from sparsetir.schedules.passes.parallel_loops import run_in_parallel
from sparsetir.schedules.passes.sound_tail_hints import sound_tail_hints

# By program: a schedule, and what was wrong of it.
FOUND = """
[spmm_bsr]
sparse_fuse(it, [jo, ii])
    loops over spatial and reduction axes at once cannot be brought inside
[spmm_csc]
sparse_reorder(it, [k, j, i])
    threads over what columns store would add to rows that others add to for other columns
[spmm_coo]
positions(sparse_fuse(it, [o, i]))
    rows that store nothing are set, too
[row_sum]
_, lane = strip_mine_rows(j, 32); start, *_ = precompute("Y", i, [], lanes=[lane])
split(sch.get_sp_iters(start)[0], [None, 3], tail="shift")
    it is not seen that visits have it for themselves, so that it lies outside of the kernel
[spmv]
precompute("Y", j, [], scope="global")
    rows are divided among threads, which shared one element of memory
[spmm]
_, lanes = split(k, [None, 4]); parallelize(lanes, "vector")
    loops of which it was said what they become are not cut for threads
k0, k1 = split(k, [None, 2], tail="repeat"); k2, k3 = split(k1, [4, 2], tail="repeat")
sparse_reorder(it, [i, k0, j, k2, k3])
    TVM parted the loop over `k0` at a place before its begin
precompute("C", i, [k], scope="global")
    of a size that is not known, in loops over blocks and threads
precompute("C", i, [k], scope="global"); parallelize(sch.get_sp_iters(it)[0], "thread", per_block=3)
    the same in stage I
"""
TABLE = table(FOUND)


def scheduled(name: str, code: str) -> Any:
    sch, it, _ = opened(program(name))
    steps(code, sch, it)[1]()
    return sch


@requires_cuda_text
@pytest.mark.parametrize(("name", "code", "_"), TABLE)
def test_gpu(name: str, code: str, _: Any) -> None:
    kernel = CudaStages(scheduled(name, code), None)
    for case in ("small", "empty", "single_column"):
        given = PROGRAMS[name].inputs(np.random.default_rng(0), case, "float32", "int32")
        got = kernel(given, equal=True)  # of what a tile sets twice
        for output, want in PROGRAMS[name].oracle(given).items():
            np.testing.assert_allclose(got[output], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "code", "_"), [TABLE[2], TABLE[6]])
def test_cpu(name: str, code: str, _: Any) -> None:
    """One column in memory that goes on: what is written beyond it is seen."""
    sch = scheduled(name, code)
    given = PROGRAMS[name].inputs(np.random.default_rng(0), "single_column", "float32", "int32")
    memory = np.full((len(given["c"]) + 40, 1), 7, "float32")
    given["c"] = memory[20:-20]
    sparsetir.build(sch)(**given)
    np.testing.assert_allclose(given["c"], PROGRAMS[name].oracle(given)["c"], rtol=1e-5, atol=1e-5)
    assert (memory[:20] == 7).all() and (memory[-20:] == 7).all()


@pytest.mark.parametrize("outer", [[], ["block"]])
def test_loops_whose_length_the_host_would_read(outer: list[str]) -> None:
    """Blocks for what a row stores, whose number is known to the device alone."""
    sch, _, (i, j) = opened(program("row_sum"), "row_sum")
    for unit in outer:
        sch.parallelize(i, unit)
    sch.parallelize(j, "thread", race="atomics", per_block=4)
    with pytest.raises(sparsetir.ScheduleError) as error:
        sparsetir.lower(sch, target={"kind": "cuda", "arch": "sm_90"})
    assert str(error.value) == (
        "lower: 'row_sum' has loops over blocks or threads inside of others, for which the host "
        "would access 'J_indptr' in the extent of 'j_0'; legal is a loop over blocks or threads "
        "around these, and a constant number of threads inside of it"
    )


def test_sums_that_the_host_would_compute() -> None:
    """Of three steps in a loop over rows, one is divided among threads."""
    sch, _, (i, _, k) = opened(program())
    start, _, _ = sch.precompute("C", i, [k], scope="global")
    sch.parallelize(sch.get_sp_iters(start)[-1], "thread", per_block=32)
    with pytest.raises(sparsetir.ScheduleError, match="the host would access 'J_indptr' in 'j';"):
        sparsetir.lower(sch, target={"kind": "cuda", "arch": "sm_90"})


def test_threads_over_what_columns_store_are_refused() -> None:
    sch, it, (j, i, k) = opened(program("spmm_csc"))
    sch.sparse_reorder(it, [k, j, i])
    func = sch.lower()
    inner = func.get_loops(func.get_sblock("spmm1"))[-1]
    with pytest.raises(sparsetir.ScheduleError) as error:
        run_in_parallel(func, inner, "threadIdx.x")
    assert "differs between visits of 'vj' (reduction: C), which may meet" in str(error.value)
    run_in_parallel(func, inner, "parallel")  # threads of a CPU wait at the end of each loop


@pytest.mark.parametrize(("inside", "stays"), [(4, True), (5, False), (8, False)])
def test_conditions_that_part_loops(inside: int, stays: bool) -> None:
    """Those of tiles that are no longer than a step stay likely, by which TVM parts loops."""

    @T.prim_func(s_tir=True)
    def zeros(n: T.int32, C: T.Buffer((n,), "float32")):
        for a in range((n + 3) // 4):
            for b in range(inside):
                if T.likely(a * 4 + b < n):
                    C[a * 4 + b] = T.float32(0)

    after = sound_tail_hints(zeros)
    assert ("T.likely" in after.script()) == stays
    assert "T.likely" in zeros.script()


ROW_SUMS = text_of("row_sums", """
with T.sp_iter([I, J], "SR", "sums") as [i, j]:
    with T.init():
        B[i] = 0.0
    B[i] = B[i] + A[i, j]
""", "J = T.dense_fixed(n)", A="I J", B="I")  # fmt: skip


@pytest.mark.parametrize("tail", ["guard", "repeat"])
def test_what_peel_has_left_may_begin_beyond_the_end(tail: str) -> None:
    """TVM parts no loop there: of 5 columns the part without a condition would end before 0."""
    sch, _, (_, j) = opened(sparsetir.from_source(ROW_SUMS), "sums")
    tiles, _ = sch.split(j, [None, 3], tail=tail)
    sch.peel(tiles, 2)
    kernel = sparsetir.build(sch)
    for n in range(13):
        A, B = np.arange(4 * n, dtype="float32").reshape(4, n), np.zeros(4, "float32")
        kernel(A, B)
        np.testing.assert_array_equal(B, A.sum(1))
