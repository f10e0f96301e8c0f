"""Stage-I schedules: legal moves keep the result, illegal ones say why, traces replay."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi

import sparsetir
from pairs import by_turns
from programs import PROGRAMS, tolerance
from sparsetir.sparse_ir.nodes import sparse_iterations

Schedule, ScheduleError = sparsetir.Schedule, sparsetir.ScheduleError


def spmm() -> Any:
    return PROGRAMS["spmm"].make("float32", "int32")


def opened(func: Any, name: str) -> tuple[Any, Any, list[Any]]:
    sch = Schedule(func)
    it = sch.get_sparse_iteration(name)
    return sch, it, sch.get_sp_iters(it)


def test_reorder_and_fuse_print_as_the_paper_shows() -> None:
    func = spmm()
    before = tvm_ffi.structural_hash(func)
    sch, it, (i, j, k) = opened(func, "spmm")
    sch.sparse_reorder(it, [k, i, j])
    fused = sch.sparse_fuse(it, [i, j])
    assert fused.name == "I_J"
    assert 'with T.sp_iter([K, T.fuse(I, J)], "SSR", "spmm") as [k, i, j]:' in sch.func.script()
    assert tvm_ffi.structural_hash(func) == before


def test_trace_prints_as_python_and_replays() -> None:
    func = spmm()
    sch, it, (i, j, k) = opened(func, "spmm")
    sch.sparse_reorder(it, [k, i, j])
    sch.sparse_fuse(it, [i, j])
    sch.annotate(it, "note", "fused")
    assert sch.trace.as_python().splitlines() == [
        "def apply(sch):",
        "    v0 = sch.get_sparse_iteration('spmm')",
        "    v1, v2, v3 = sch.get_sp_iters(v0)",
        "    sch.sparse_reorder(v0, [v3, v1, v2])",
        "    v4 = sch.sparse_fuse(v0, [v1, v2])",
        "    sch.annotate(v0, 'note', 'fused')",
    ]
    replayed = sch.trace.apply(func)
    assert tvm_ffi.structural_equal(replayed.func, sch.func, map_free_vars=True)
    names: dict[str, Any] = {}
    exec(sch.trace.as_python(), names)
    other = Schedule(func)
    names["apply"](other)
    assert tvm_ffi.structural_equal(other.func, sch.func, map_free_vars=True)
    assert str(Schedule(func).trace) == "def apply(sch):\n    pass\n"


def test_trace_of_another_function_is_refused() -> None:
    sch, it, (i, j, k) = opened(spmm(), "spmm")
    sch.sparse_fuse(it, [i, j])
    with pytest.raises(ScheduleError, match="no sparse iteration 'spmm'; there are"):
        sch.trace.apply(PROGRAMS["spmv"].make("float32", "int32"))


def test_annotations_ride_on_blocks() -> None:
    sch, it, _ = opened(spmm(), "spmm")
    sch.annotate(it, "note", "kept")
    assert '"note": "kept"' in sch.func.script()
    text = sparsetir.lower_sparse_iter(sch.func).script()
    assert '"note": "kept"' in text


SHOWN = r'\n  in T.sp_iter\(\[I, J, K\], "SRS", "spmm"\)'


def test_illegal_moves_name_the_axis_and_show_the_iteration() -> None:
    func = spmm()
    sch, it, (i, j, k) = opened(func, "spmm")
    with pytest.raises(ScheduleError, match="expected axis 'I', its parent, before 'J'.*" + SHOWN):
        sch.sparse_reorder(it, [j, i, k])
    with pytest.raises(ScheduleError, match=r"each of \['I', 'J', 'K'\] once, got \['I', 'I', 'J'"):
        sch.sparse_reorder(it, [i, i, j])
    with pytest.raises(ScheduleError, match="expected neighbours .*'I', 'K'.*" + SHOWN):
        sch.sparse_fuse(it, [i, k])
    with pytest.raises(ScheduleError, match="at least two axes, got 1" + SHOWN):
        sch.sparse_fuse(it, [i])
    with pytest.raises(ScheduleError, match="no sparse iteration 'x'; there are"):
        sch.get_sparse_iteration("x")
    with pytest.raises(
        ScheduleError, match="expected a handle of get_sparse_iteration, got 'spmm'"
    ):
        sch.sparse_fuse("spmm", [i, j])
    with pytest.raises(ScheduleError, match="'Q' is not an axis of this iteration" + SHOWN):
        sch.sparse_reorder(it, ["Q", j, k])
    sch.sparse_fuse(it, [i, j])
    with pytest.raises(
        ScheduleError,
        match=r"'I' is not an axis of this iteration, but \['I_J', 'K'\] are: what cuts or fuses "
        "loops returns handles of new ones",
    ):
        sch.sparse_reorder(it, [i, k])
    assert "T.fuse(I, J)" in sch.func.script(), "what was refused changed nothing"


def test_axes_that_cannot_fuse() -> None:
    func = PROGRAMS["csf_sum"].make("float32", "int32")
    name = next(iter(sparse_iterations(func))).name
    sch, it, (i, j, k) = opened(func, name)
    sch.sparse_fuse(it, [j, k])  # below I, which is iterated around them

    func = PROGRAMS["hypergraph"].make("float32", "int32")
    name = next(iter(sparse_iterations(func))).name
    sch, it, axes = opened(func, name)
    with pytest.raises(ScheduleError, match="axis 'EV' is attached and cannot be fused"):
        sch.sparse_fuse(it, axes[1:3])


def test_other_stages_are_refused() -> None:
    lowered = sparsetir.lower_sparse_iter(spmm())
    with pytest.raises(TypeError, match=r"got PrimFunc \(stage II is scheduled with"):
        Schedule(lowered)
    with pytest.raises(TypeError, match="expected a module of one stage-I function, got 0"):
        Schedule(tvm.IRModule({"f": lowered}))
    assert Schedule(tvm.IRModule({"f": spmm()})).func.name == "spmm"


def _legal_schedule(func: Any, rng: random.Random) -> Any:
    """Random legal moves on every iteration of a function."""
    sch = Schedule(func)
    for name in [it.name for it in sparse_iterations(func)]:
        it = sch.get_sparse_iteration(name)
        for _ in range(6):  # most permutations put a child before its parent
            order = sch.get_sp_iters(it)
            rng.shuffle(order)
            try:
                sch.sparse_reorder(it, order)
                break
            except ScheduleError:
                continue
        handles = sch.get_sp_iters(it)
        if len(handles) > 1 and rng.random() < 0.5:
            at = rng.randrange(len(handles) - 1)
            try:
                sch.sparse_fuse(it, handles[at : at + 2])
            except ScheduleError:
                pass
    return sch


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 12), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", by_turns(PROGRAMS, 2))
def test_every_legal_order_keeps_the_result(name: str, seeds: range) -> None:
    program = PROGRAMS[name]
    func = program.make("float32", "int32")
    seen: set[str] = set()
    for seed in seeds:
        sch = _legal_schedule(func, random.Random(seed))
        text = sch.func.script()
        if text in seen:
            continue
        seen.add(text)
        kernel = sparsetir.build(sch.func)
        for case in program.cases:
            arguments = program.inputs(np.random.default_rng(seed), case, "float32", "int32")
            expected = program.oracle(arguments)
            kernel(**arguments)
            for output, values in expected.items():
                np.testing.assert_allclose(
                    np.asarray(arguments[output], np.float64).reshape(-1),
                    np.asarray(values, np.float64).reshape(-1),
                    **tolerance("float32"),
                    err_msg=f"{case}\n{text}",
                )
