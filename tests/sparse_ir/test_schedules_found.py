"""Schedules that random ones have found: kernels could not be built of them, or were wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from programs import PROGRAMS
from schedule_common import opened, program

ON_GPU: dict[str, tuple[str, str, Callable[..., Any]]] = {}


def on_gpu(name: str, iteration: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A schedule, `steps(sch, it, *loops)`, of an iteration of a program."""

    def add(steps: Callable[..., Any]) -> Callable[..., Any]:
        ON_GPU[steps.__name__] = name, iteration, steps
        return steps

    return add


@on_gpu("spmm_bsr", "spmm")
def loop_over_rows_and_sums(sch, it, io, jo, ii, ji, k):
    """Loops over spatial and reduction axes at once cannot be brought inside."""
    sch.sparse_fuse(it, [jo, ii])


@on_gpu("spmv", "spmv")
def value_for_each_thread(sch, it, i, j):
    """Rows are divided among threads, which shared one element of memory."""
    sch.precompute("Y", j, [], scope="global")


@on_gpu("spmm", "spmm")
def row_for_each_thread(sch, it, i, j, k):
    """Of a size that is not known, in loops over blocks and threads."""
    sch.precompute("C", i, [k], scope="global")


@on_gpu("spmm", "spmm")
def row_for_each_thread_of_stage_one(sch, it, i, j, k):
    sch.precompute("C", i, [k], scope="global")
    sch.parallelize(sch.get_sp_iters(it)[0], "thread", per_block=3)


@requires_cuda_text
@pytest.mark.parametrize("found", ON_GPU)
def test_gpu(found: str) -> None:
    name, iteration, steps = ON_GPU[found]
    sch, it, loops = opened(program(name), iteration)
    steps(sch, it, *loops)
    kernel = CudaStages(sch, None)
    for case in ("small", "empty"):
        given = PROGRAMS[name].inputs(np.random.default_rng(0), case, "float32", "int32")
        got = kernel(given)
        for output, want in PROGRAMS[name].oracle(given).items():
            np.testing.assert_allclose(got[output], want, rtol=1e-5, atol=1e-5)


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
