"""Each argument of each stage-I primitive, given something odd: taken, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import sparsetir
from schedule_common import opened, program, steps
from sparsetir.sparse_ir.schedule.loops import SparseIterationRef, SpIter

Call = tuple[Any, str, tuple[Any, ...], dict[str, Any]]
ODD: tuple[Any, ...] = (
    None, "", "Ä b", -1, 2**31, 2**70, True, math.nan, np.array([2]), [], {"a": 1}, [None],
    object(), SpIter("spmm", ("Z",)), SparseIterationRef("nope"),
)  # fmt: skip


# Calls that are fine, a row to a line; the last is the one that is given odd arguments.
CALLS = """
[spmm]
get_sp_iters(it)
get_sparse_iteration("spmm")
sparse_reorder(it, [k, i, j])
sparse_fuse(it, [i, j])
split(k, [None, 4], tail="guard")
pos(j)
coord(j)
divide(i, "parts", by="work", cost=2, default=4, ahead="ahead")
positions(sparse_fuse(it, [i, j]), parts="parts", default=2, rows="table")
peel(k, 4)
distribute([i])
parallelize(i, "thread", race="none", per_block=32)
bound(k, 4, "multiple")
combine_row_pieces([it], race="atomics")
atomic(it)
annotate(it, "key", 3)
sell_slices(i, j, 4, longest="longest", window=8, filled=90)
sort_rows_by_length(i, j, 8)
group_columns_by_pattern(i, j, 3, by="count")
strip_mine_rows(j, 4)
outer, inner = split(k, [None, 4]); sparse_reorder(it, [i, outer, j, inner])\
; precompute("C", outer, [inner], lanes=[], scope="local", dtype="float64", hoist=False, name="w")
sell_slices(i, j, 2); pack("A", it)
_, reduce, _ = precompute("C", it, [i, k], scope="global")\
; tiles("B", reduce, {"K": [4]}, order=["K0", "J_", "K1"])
p = positions(sparse_fuse(it, [i, j])); assume("coordinates", axis="I", buffer="I_at")
outer, inner = split(k, [None, 4]); p = positions(sparse_fuse(it, [i, j]))\
; sparse_reorder(it, [outer, p, inner]); segment_accumulate(p, dtype="float64", name="w")
[relational_csf]
ranges(i, "ranges", 4, cost=8, default=1)
_, tile, row = ranges(i, 2, 4)\
; aggregate("Y", tile, row, [sch.get_sp_iters(it)[4]], dtype="float32")
"""


def calls() -> list[tuple[str, str]]:
    name, rows = "", []
    for line in CALLS.strip().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        else:
            rows.append((name, line))
    return rows


@pytest.mark.parametrize(("name", "code"), calls())
def test_odd_arguments(name: str, code: str) -> None:
    """Refusals name the primitive; what is taken prints, parses back, and is in the trace."""

    def call() -> tuple[Any, str, Any]:
        sch, it, _ = opened(program(name))
        return (sch, *steps(code, sch, it))

    sch, primitive, act = call()
    for slot in [*range(len(act.args)), *act.keywords]:
        for odd in ODD:
            given, named = list(act.args), dict(act.keywords)
            if isinstance(slot, int):
                given[slot] = odd
            else:
                named[slot] = odd
            before = sch.func
            try:
                act.func(*given, **named)
            except sparsetir.ScheduleError as error:
                says = primitive in str(error) or "no sparse iteration" in str(error)
                assert says, f"{primitive} of {odd!r} as {slot}: {error}"
                assert sch.func is before
            else:
                assert primitive in sch.trace.as_python()
                if sch.func is not before:
                    sparsetir.from_source(sch.func.script())
                    sch, primitive, act = call()
