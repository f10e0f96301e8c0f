"""Schedules as objects: methods made of the primitives, odd arguments, the trace of both stages."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tvm
import tvm_ffi

import sparsetir
from schedule_common import opened, program, steps
from sparsetir.schedules.passes.exact_constants import exact_constants
from sparsetir.sparse_ir.schedule import primitives
from sparsetir.sparse_ir.schedule.loops import SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.primitives import PRIMITIVES, Primitives, primitive

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
        args = [*map(plain, step.inputs), {k: plain(v) for k, v in step.options.items()}]
        assert json.loads(json.dumps(args)) == args


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


ROOT = Path(__file__).parents[2]
OURS = [n for n, f in PRIMITIVES.items() if f.__module__.startswith("sparsetir.")]


def stub_of(name: str) -> str:
    """The line of `primitives.pyi` that describes a method to type checkers and editors."""

    def text(parameter: inspect.Parameter) -> str:
        kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        return f"{parameter.name}{kind}{default}"

    signature = inspect.signature(getattr(Primitives, name))
    parameters = list(signature.parameters.values())
    words = [text(p) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    options = [text(p) for p in parameters if p.kind is p.KEYWORD_ONLY]
    words += ["*", *options] if options else []
    return f"    def {name}({', '.join(words)}) -> {signature.return_annotation}: ..."


def test_the_stub_file_is_that_of_the_primitives():
    text = Path(inspect.getfile(primitives)).with_suffix(".pyi").read_text()
    _, _, methods = text.partition("    _apply: Callable[..., Any]\n")
    assert methods == "".join(f"{stub_of(name)}\n" for name in sorted(OURS))


def test_the_table_of_the_docs_has_all_primitives():
    text = (ROOT / "docs/schedules.md").read_text().split("## The primitives")[1]
    table = text.split("\nStage II")[0]
    primitives = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| ")]
    assert {*re.findall(r"`(\w+)`", " ".join(primitives))} == {*OURS}


def test_a_primitive_of_a_user_is_a_method(monkeypatch):
    def twice(func, loop: SpIter, times: int = 2, *, how: Literal["so"] = "so", by: float = 0.5):
        """Do nothing; types that no primitive here has are left to it."""
        return func, {"so": lambda: [loop] * times}[how]()

    primitive(twice)
    try:
        sch, _, (i, *_) = opened()
        assert sch.twice(i, how="so") == [i, i]
        assert sch.trace.as_python().splitlines()[-1].strip().endswith("= sch.twice(v1, 2)")
        assert sch.twice(i, by=1) == [i, i]
        with pytest.raises(sparsetir.ScheduleError, match="twice: argument 'times': expected an"):
            sch.twice(i, "two")
        with pytest.raises(TypeError, match="hwo"):
            sch.twice(i, hwo="so")
        with pytest.raises(KeyError):  # the function's own mistake, for any argument
            sch.twice(i, "two", how="other")
        primitive(twice)  # as a module that is read again
    finally:
        delattr(Primitives, "twice")
        del PRIMITIVES["twice"]


def test_no_other_method_is_overwritten():
    def lower(func):
        """Another."""

    with pytest.raises(ValueError, match="primitive: argument 'function': .* another 'lower'"):
        primitive(lower)
    assert "lower" not in PRIMITIVES


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
fuse_steps([it], [i])
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
            args, named = list(act.args), dict(act.keywords)
            if isinstance(slot, int):
                args[slot] = odd
            else:
                named[slot] = odd
            before = sch.func
            try:
                act.func(*args, **named)
            except sparsetir.ScheduleError as error:
                says = primitive in str(error) or "no sparse iteration" in str(error)
                assert says, f"{primitive} of {odd!r} as {slot}: {error}"
                assert sch.func is before
            else:
                assert primitive in sch.trace.as_python()
                if sch.func is not before:
                    sparsetir.from_source(sch.func.script())
                    sch, primitive, act = call()
