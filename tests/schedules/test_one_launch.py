"""one_launch: parallel loops that follow each other as one."""

import numpy as np
import pytest

import sparsetir
from small import text_of
from sparsetir.schedules.passes.one_launch import one_launch
from sparsetir.sparse_ir.errors import ScheduleError

TWO = text_of("two", """
with T.sp_iter([I], "S", "first") as [i]:
    A[i] = 2.0 * A[i]
with T.sp_iter([J], "S", "second") as [j]:
    B[j] = 3.0 * C[j]
""", "J = T.dense_fixed(n)", A="I", B="J", C="J")  # fmt: skip


def lowered(program, *parallel):
    sch = sparsetir.Schedule(sparsetir.from_source(program))
    for name in parallel:
        sch.parallelize(sch.get_sp_iters(sch.get_sparse_iteration(name)))
    sch.lower()
    return sch


@pytest.mark.parametrize("m, n", [(0, 0), (3, 0), (0, 4), (5, 2), (7, 7), (2, 30)])
def test_loops_of_any_lengths(m, n):
    sch = lowered(TWO, "first", "second")
    sch.rewrite(one_launch, ["first", "second"])
    kernel = sparsetir.build(sch)
    assert kernel.stages["III"].script().count("T.parallel(") == 1
    a, b, c = np.ones(m, "float32"), np.full(n, np.nan, "float32"), np.arange(n, dtype="float32")
    kernel(a, b, c)
    assert (a == 2).all() and (b == 3 * c).all()


def test_what_meets_is_refused():
    meets = TWO.replace("3.0 * C[j]", "3.0 * A[j]")
    sch = lowered(meets, "first", "second")
    with pytest.raises(ScheduleError, match="'second' reads or writes 'A', which 'first' writes"):
        sch.rewrite(one_launch, ["first", "second"])
    sch.rewrite(one_launch, ["first", "second"], race="ignore")
    with pytest.raises(ValueError, match="argument 'race': expected 'none' or 'ignore', got 'no'"):
        sch.rewrite(one_launch, ["first", "second"], race="no")


def test_what_one_writes_that_another_read_is_refused():
    sch = lowered(TWO.replace("A[i] = 2.0 * A[i]", "A[i] = 2.0 * B[i]"), "first", "second")
    with pytest.raises(ScheduleError, match="'second' writes 'B', which 'first' reads"):
        sch.rewrite(one_launch, ["first", "second"])


@pytest.mark.parametrize(
    "parallel, names",
    [(["first"], ["first", "second"]), (["first", "second"], ["second", "first"]),
     (["first", "second"], ["first"]), (["first", "second"], ["first", "third"])],
)  # fmt: skip
def test_other_iterations_are_refused(parallel, names):
    sch = lowered(TWO, *parallel)
    with pytest.raises(ScheduleError, match="expected some that follow each other, outermost"):
        sch.rewrite(one_launch, names)
