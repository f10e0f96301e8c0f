"""A visit order is what it declares: one of a test's own means the same, and refusals say why."""

from __future__ import annotations

import numpy as np
import pytest

import sparsetir
from programs import PROGRAMS, copied
from sparsetir.sparse_ir.recipes.general import order_by_column_parts
from sparsetir.sparse_ir.recipes.positions import tile_ptr, tile_starts
from sparsetir.sparse_ir.schedule.loops import find_iteration, loops_of
from sparsetir.sparse_ir.schedule.visit_order import VisitOrder, chosen_loops
from sparsetir.sparse_ir.verify import verify


def opened(case="small"):
    program = PROGRAMS["spmm"]
    func = program.make("float32", "int32")
    sch = sparsetir.Schedule(func)
    loops = sch.get_sp_iters(sch.get_sparse_iteration("spmm"))
    return func, loops, program.inputs(np.random.default_rng(0), case, "float32", "int32")


@pytest.mark.parametrize("case", PROGRAMS["spmm"].cases)
def test_tiles_that_are_declared_by_hand(case):
    func, (_, columns, _), arguments = opened(case)
    it, (loop,) = chosen_loops("test", func, columns)
    order, axis = VisitOrder("test", func, it, loop), loop.node
    tiles = order.ragged("tiles", axis.parent, tile_ptr, indptr=axis.indptr, size=3)
    starts = order.array("starts", tile_starts, indptr=axis.indptr, size=order.choice("size", 3))
    part = order.part(tiles, axis.length, axis.nnz, starts)
    (outer,) = order.loops(tile=(tiles, "R"))
    new, handles = order.instead([outer, order.within(part)])
    verify(new)
    assert [h.name for h in handles] == ["J_tiles", "J"]
    assert loops_of(find_iteration(new, "spmm"))[1].var.name == "j_tile"
    assert set(new.attrs["computed"]) == {"J_tiles_ptr", "J_tiles_count", "size", "J_starts"}
    expected = copied(arguments)
    sparsetir.interpret(func, expected)
    sparsetir.interpret(new, arguments)
    np.testing.assert_allclose(arguments["c"], expected["c"], rtol=1e-5)


def test_names_are_new_and_sizes_are_parameters():
    func, (_, columns, _), _ = opened()
    it, (loop,) = chosen_loops("test", func, columns)
    order = VisitOrder("test", func, it, loop)
    names = [order.dense("x", 2).name for _ in range(3)]
    assert len({*names}) == 3
    with pytest.raises(sparsetir.ScheduleError, match="a new name, got 'nnz'.*has already"):
        order.choice("nnz", 1)
    with pytest.raises(sparsetir.ScheduleError, match=r"a number or a parameter, got .*2"):
        order.array("y", order_by_column_parts, n=loop.node.length * 2)
