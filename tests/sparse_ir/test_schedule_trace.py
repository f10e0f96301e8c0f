"""The trace of a schedule over both stages: prints as Python, replays, takes JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tvm
import tvm_ffi

import sparsetir
from schedule_common import opened, program
from sparsetir.schedules.passes.exact_constants import exact_constants
from sparsetir.sparse_ir.schedule import SparseIterationRef, SpIter

ScheduleError = sparsetir.ScheduleError


def all_of_them() -> Any:
    sch, it, (i, j, k) = opened()
    sch.bound(k, 2, "min")
    o, i = sch.divide(i, "blocks", by="work", default=4)
    p, v = sch.split(k, [None, 2], tail="shift")
    sch.sparse_reorder(it, [p, o, i, j, v])
    start, _, _ = sch.precompute("C", i, (v,), lanes=(), dtype="float64", name=None)
    (copy,) = sch.precompute("B", p, ["J_", v], scope="global")
    sch.annotate(copy, "note", "kept")
    (lane,) = sch.get_sp_iters(start)
    sch.bound(lane, 2, "exact")
    sch.parallelize([sch.get_sp_iters(it)[0]])
    return sch


def replayed(sch: Any) -> tuple[Any, Any]:
    """The same schedule of the plain program, by its text and by its trace."""
    names: dict[str, Any] = {}
    exec(sch.trace.as_python(), names)
    other = sparsetir.Schedule(program())
    names["apply"](other)
    return other, sch.trace.apply(program())


def test_the_trace_prints_and_replays() -> None:
    sch = all_of_them()
    text = sch.trace.as_python()
    assert "v8, v9, v10 = sch.precompute('C', v5, [v7], dtype='float64')" in text
    assert "(v11,) = sch.precompute('B', v6, ['J_', v7], scope='global')" in text
    assert "None" not in text.replace("[None, 2]", "")
    for again in replayed(sch):
        assert tvm_ffi.structural_equal(again.func, sch.func, map_free_vars=True)
        assert again.trace.as_python() == text
    wider = sch.trace.apply(program(dtype="float64"))
    assert 'B_ws = T.alloc_sparse_buffer((J_, K1), "float64")' in wider.func.script()


def test_arguments_are_json() -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, SpIter | SparseIterationRef):
            return value.name
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    for step in all_of_them().trace.instructions:
        given = [*map(plain, step.inputs), {k: plain(v) for k, v in step.options.items()}]
        assert json.loads(json.dumps(given)) == given


def test_one_trace_over_both_stages() -> None:
    sch, it, (i, j, k) = opened()
    k0, k1 = sch.split(k, [None, 4])
    sch.sparse_reorder(it, [i, k0, j, k1])
    _, reduce, _ = sch.precompute("C", k0, [k1])
    second = sch.lower()
    _, lanes = second.get_loops(second.get_sblock("spmm_reduce0"))
    second.unroll(lanes)
    third = sch.rewrite(exact_constants)
    third.vectorize(third.get_loops(third.get_sblock("spmm_write0"))[-1])
    text = sch.trace.as_python()
    assert text.splitlines()[6:] == [
        "    sch2 = sch.lower()",
        '    b0 = sch2.get_sblock(name="spmm_reduce0", func_name="main")',
        "    l1, l2 = sch2.get_loops(block=b0)",
        "    sch2.unroll(loop=l2)",
        "    from sparsetir.schedules.passes.exact_constants import exact_constants",
        "    sch2 = sch.rewrite(exact_constants)",
        '    b0 = sch2.get_sblock(name="spmm_write0", func_name="main")',
        "    l1, = sch2.get_loops(block=b0)",
        "    sch2.vectorize(loop=l1)",
    ]
    for again in replayed(sch):
        assert tvm_ffi.structural_equal(again.stage_two.mod, sch.stage_two.mod)
        assert again.trace.as_python() == text
    with pytest.raises(ScheduleError, match="split: the schedule has gone on to stage II, which"):
        sch.split(k, [None, 2])


def test_trace_of_another_function_is_refused() -> None:
    sch, it, (i, j, k) = opened()
    sch.sparse_fuse(it, [i, j])
    with pytest.raises(ScheduleError, match="no sparse iteration 'spmm'; there are"):
        sch.trace.apply(program("spmv"))


def test_other_stages_are_refused() -> None:
    lowered = sparsetir.lower_sparse_iter(program())
    with pytest.raises(TypeError, match=r"got PrimFunc \(stage II is scheduled with"):
        sparsetir.Schedule(lowered)
    with pytest.raises(TypeError, match="expected a module of one stage-I function, got 0"):
        sparsetir.Schedule(tvm.IRModule({"f": lowered}))
    assert sparsetir.Schedule(tvm.IRModule({"f": program()})).func.name == "spmm"
