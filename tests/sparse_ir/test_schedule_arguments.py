"""Each argument of each stage-I primitive, given something odd: taken, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

import sparsetir
from schedule_common import opened, program
from sparsetir.sparse_ir.schedule.loops import SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.primitives import wrong_argument

Call = tuple[Any, str, tuple[Any, ...], dict[str, Any]]
ODD: tuple[Any, ...] = (
    None, "", "Ä b", -1, 2**31, 2**70, True, math.nan, np.array([2]), [], {"a": 1}, [None],
    object(), SpIter("spmm", ("Z",)), SparseIterationRef("nope"),
)  # fmt: skip


def _elements() -> tuple[Any, Any, Any, Any]:
    sch, it, (i, j, k) = opened()
    outer, inner = sch.split(k, [None, 4])
    loop = sch.positions(sch.sparse_fuse(it, [i, j]))
    sch.sparse_reorder(it, [outer, loop, inner])
    return sch, it, loop, inner


def _calls() -> list[Callable[[], Call]]:
    """Calls that are fine, each of a schedule of its own."""

    def of(name: str, make: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
        def call() -> Call:
            sch, it, loops = opened()
            return (sch, name, *make(sch, it, *loops))

        call.__name__ = name
        return call

    def pack() -> Call:
        sch, it, (i, j, _) = opened()
        sch.sell_slices(i, j, 2)
        return sch, "pack", ("A", it), {}

    def tiles() -> Call:
        sch, it, (i, _, k) = opened()
        reduce = sch.precompute("C", it, [i, k], scope="global")[1]
        return sch, "tiles", ("B", reduce, {"K": [4]}), {"order": ["K0", "J_", "K1"]}

    def assume() -> Call:
        sch, _, _, _ = _elements()
        return sch, "assume", ("coordinates",), {"axis": "I", "buffer": "I_at"}

    def runs() -> Call:
        sch, _, loop, _ = _elements()
        return sch, "segment_accumulate", (loop,), {"dtype": "float64", "name": "w"}

    def of_relations(aggregated: bool) -> Callable[[], Call]:
        def call() -> Call:
            sch, it, loops = opened(program("relational_csf"), "relational")
            if not aggregated:
                return sch, "ranges", (loops[1], "ranges", 4), {"cost": 8, "default": 1}
            _, tile, rows = sch.ranges(loops[1], 2, 4)
            columns = sch.get_sp_iters(it)[4]
            return sch, "aggregate", ("Y", tile, rows, [columns]), {"dtype": "float32"}

        call.__name__ = "aggregate" if aggregated else "ranges"
        return call

    def result(sch: Any, it: Any, i: Any, j: Any, k: Any) -> Any:
        outer, inner = sch.split(k, [None, 4])
        sch.sparse_reorder(it, [i, outer, j, inner])
        options = {"lanes": [], "scope": "local", "dtype": "float64", "hoist": False, "name": "w"}
        return ("C", outer, [inner]), options

    work = {"by": "work", "cost": 2, "default": 4, "ahead": "ahead"}
    return [
        of("get_sp_iters", lambda s, it, i, j, k: ((it,), {})),
        of("get_sparse_iteration", lambda s, it, i, j, k: (("spmm",), {})),
        of("sparse_reorder", lambda s, it, i, j, k: ((it, [k, i, j]), {})),
        of("sparse_fuse", lambda s, it, i, j, k: ((it, [i, j]), {})),
        of("split", lambda s, it, i, j, k: ((k, [None, 4]), {"tail": "guard"})),
        of("pos", lambda s, it, i, j, k: ((j,), {})),
        of("coord", lambda s, it, i, j, k: ((j,), {})),
        of("divide", lambda s, it, i, j, k: ((i, "parts"), work)),
        of("positions", lambda s, it, i, j, k: (
            (s.sparse_fuse(it, [i, j]),), {"parts": "parts", "default": 2, "rows": "table"})),
        of("peel", lambda s, it, i, j, k: ((k, 4), {})),
        of("distribute", lambda s, it, i, j, k: (([i],), {})),
        of("parallelize", lambda s, it, i, j, k: (
            (i, "thread"), {"race": "none", "per_block": 32})),
        of("bound", lambda s, it, i, j, k: ((k, 4, "multiple"), {})),
        of("combine_row_pieces", lambda s, it, i, j, k: (([it],), {"race": "atomics"})),
        of("atomic", lambda s, it, i, j, k: ((it,), {})),
        of("annotate", lambda s, it, i, j, k: ((it, "key", 3), {})),
        of("sell_slices", lambda s, it, i, j, k: (
            (i, j, 4), {"longest": "longest", "window": 8, "filled": 90})),
        of("sort_rows_by_length", lambda s, it, i, j, k: ((i, j, 8), {})),
        of("group_columns_by_pattern", lambda s, it, i, j, k: ((i, j, 3), {"by": "count"})),
        of("strip_mine_rows", lambda s, it, i, j, k: ((j, 4), {})),
        of("precompute", result),
        pack, tiles, assume, runs, of_relations(False), of_relations(True),
    ]  # fmt: skip


@pytest.mark.parametrize("call", _calls(), ids=lambda call: call.__name__)
def test_odd_arguments(call: Callable[[], Call]) -> None:
    """Refusals name the primitive; what is taken prints, parses back, and is in the trace."""
    sch, primitive, inputs, options = call()
    for slot in [*range(len(inputs)), *options]:
        for odd in ODD:
            given, named = list(inputs), dict(options)
            if isinstance(slot, int):
                given[slot] = odd
            else:
                named[slot] = odd
            before = sch.func
            try:
                getattr(sch, primitive)(*given, **named)
            except sparsetir.ScheduleError as error:
                says = primitive in str(error) or "no sparse iteration" in str(error)
                assert says, f"{primitive} of {odd!r} as {slot}: {error}"
                assert sch.func is before
            else:
                assert primitive in sch.trace.as_python()
                if sch.func is not before:
                    sparsetir.from_source(sch.func.script())
                    sch, primitive, inputs, options = call()


def test_other_types_are_left_to_the_primitive():
    """Users' primitives may have any annotations, or none."""

    def mine(func, loop: SpIter, how: Callable[[int], int], share: float, word: Literal["a"], x):
        return func, None

    given = SpIter("spmm", ("i",)), abs, 1, "b", object()
    assert wrong_argument(mine, given, {}) == ""
    assert wrong_argument(mine, ("i", *given[1:]), {}).startswith("mine: argument 'loop': expected")


def test_a_mistake_of_a_primitive_is_not_the_users(monkeypatch):
    """What fails for another reason than an argument is raised as it is, or stays in sight."""
    sch, _, (i, _, _) = opened()
    mistake = KeyError("of the compiler")

    def split(func, loop: SpIter, factors: list[int | None], tail: str = "guard"):
        raise mistake

    monkeypatch.setattr(sch, "split", lambda *inputs: sch._apply(split, *inputs), raising=False)
    for factors in ([None, 4], [None, "4"]):
        with pytest.raises(KeyError) as raised:
            sch.split(i, factors)
        assert raised.value is mistake
    mistake = TypeError("of the argument")
    with pytest.raises(sparsetir.ScheduleError, match="split: argument 'factors'") as refused:
        sch.split(i, [None, "4"])
    assert refused.value.__cause__ is mistake
    mistake = RuntimeError("value 8 exceeds range of nothing")  # only TVM's words for numbers count
    with pytest.raises(RuntimeError, match="of nothing"):
        sch.split(i, [None, 4])
