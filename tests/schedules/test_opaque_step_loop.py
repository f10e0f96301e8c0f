"""opaque_step_loop: loops over what rows store that LLVM leaves as they are."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from programs import PROGRAMS
from sparsetir.schedules.passes.opaque_step_loop import opaque_step_loop


def one_at_a_time(sch):
    i, _ = sch.get_sp_iters(sch.get_sparse_iteration("spmv"))
    _, reduce, _ = sch.precompute("Y", i, [])
    sch.lower()
    sch.rewrite(opaque_step_loop, reduce)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_rows_of_any_length(idtype):
    program = PROGRAMS["spmv"].make("float64", idtype)
    kernel = sparsetir.build(program, schedule=one_at_a_time)
    text = kernel.stages["III"].script()
    assert "while j_at[0] < J_indptr[vi + 1]" in text.replace("T.int64(1)", "1"), text
    for counts in ([], [0], [3], [0, 1, 0, 7, 40, 0, 2], [0, 0, 0]):
        rng = np.random.default_rng(len(counts))
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(idtype)
        indices = np.concatenate(
            [np.sort(rng.choice(50, count, replace=False)) for count in counts] or [[]]
        ).astype(idtype)
        a, x, y = rng.random(indptr[-1]), rng.random(50), np.full(len(counts), np.nan)
        kernel(a=a, x=x, y=y, indptr=indptr, indices=indices)
        np.testing.assert_allclose(y, sp.csr_array((a, indices, indptr), (len(counts), 50)) @ x)


def test_refused():
    sch = sparsetir.Schedule(PROGRAMS["spmv"].make("float32", "int32"))
    i, _ = sch.get_sp_iters(sch.get_sparse_iteration("spmv"))
    sch.precompute("Y", i, [])
    sch.lower()
    with pytest.raises(sparsetir.ScheduleError, match="'step': expected a parameter, got 'steps'"):
        sch.rewrite(opaque_step_loop, "spmv_reduce", "steps")
    with pytest.raises(sparsetir.ScheduleError, match="expected a block in a loop, got 'spmv_st"):
        sch.rewrite(opaque_step_loop, "spmv_start")
    with pytest.raises(sparsetir.ScheduleError, match="expected a sparse iteration among"):
        sch.rewrite(opaque_step_loop, "spmm")


def test_an_init_in_the_loop_is_refused():
    sch = sparsetir.Schedule(PROGRAMS["spmv"].make("float32", "int32"))
    sch.lower()
    with pytest.raises(sparsetir.ScheduleError, match="'spmv1', whose init is in the loop"):
        sch.rewrite(opaque_step_loop, "spmv")
