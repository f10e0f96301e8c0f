"""The rows at which the blocks of a GPU begin, for searches of their threads.

Before, where `positions(.., rows="blocks")` has set how rows are found::

    T.func_attr({"computed": {"i_at": ..}, "rows": {"I_at": {"from": "blocks"}}})

After `parallelize(ij0, "block", race="atomics")`, where a block has 3584 elements::

    T.func_attr({
        "computed": {
            "i_at": ..,
            "i_at_starts": {"recipe": "rows_of_blocks", "indptr": "$indptr", "size": 3584},
        },
        "rows": {
            "I_at": {"from": "blocks", "starts": "I_at_starts", "loop": "I_J0", "per_block": 1},
        },
    })
    I_at_starts = T.match_sparse_buffer(i_at_starts, [I_J0_bounds], "int32")

The row of an element of block b is in I_at_starts[b] .. I_at_starts[b + 1] (Senanayake's thesis,
figure 2-2). A loop over blocks that positions do not depend on changes nothing.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    accesses_of,
    iterations_around,
)
from sparsetir.sparse_ir.recipes.positions import rows_of_blocks, rows_of_positions
from sparsetir.sparse_ir.rows import ROWS, found_rows, recipe_of_rows, step_of, unbounded
from sparsetir.sparse_ir.schedule.loops import Loop, inside
from sparsetir.sparse_ir.schedule.visit_order import VisitOrder
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars


def with_block_starts(
    caller: str, func: SparseFunc, it: SparseIteration, loops: list[Loop], per_block: int
) -> SparseFunc:
    """The function with the rows at which blocks begin, if rows are searched for between these.

    loops : the loops that are divided among blocks
    per_block : visits of the loop per block
    """
    said = found_rows(func)
    open_ = [name for name, how in said.items() if how == {"from": "blocks"}]
    searched = [b for b in map(func.buffer, open_) if _searches(func, b)]
    for loop in loops:
        for buffer in searched:
            position = _position(it, buffer)
            if position is not None and free_vars(position) & set(loop.vars):
                return _BlockStarts(caller, func, it, loop).run(searched, position, per_block)
    return func


class _BlockStarts(VisitOrder):
    def run(self, tables: list[SparseBuffer], position: Any, per_block: int) -> SparseFunc:
        """The function with the rows of the first elements of the loop's visits."""
        func, it, loop = self.func, self.it, self.loop
        size = self._size(position, per_block)
        one = as_dtype(1, self.idtype)
        count = loop.node.length
        if per_block > 1:
            more = as_dtype(per_block - 1, self.idtype)
            count = tirx.floordiv(count + more, as_dtype(per_block, self.idtype))
        bounds = self.dense("bounds", count + one)
        number = Analyzer().simplify(count)
        blocks = {"blocks": int(number)} if isinstance(number, tirx.IntImm) else {}
        said, new_tables = found_rows(func), dict[str, SparseBuffer]()
        for table in tables:  # each after the one that holds the positions to look up in it
            recipe = recipe_of_rows(func, table)
            assert recipe is not None  # verified
            name, indptr = f"{table.name}_starts", recipe.array
            if recipe.order is None:
                new = self.table(name, [bounds], rows_of_blocks, indptr=indptr, size=size, **blocks)
            else:
                starts = new_tables[recipe.order.name]
                new = self.table(name, [bounds], rows_of_positions, indptr=indptr, positions=starts)
            new_tables[table.name] = new
            said[table.name] |= {"starts": new.name, "loop": loop.name, "per_block": per_block}
        return self.replaced(it, **{ROWS: said})

    def _size(self, position: Any, per_block: int) -> int:
        """The number of consecutive positions of a block."""
        (var,) = self.loop.vars
        plain = unbounded(position, var)
        analyzer, step = Analyzer(), step_of(plain, var)
        loops = [self.it, *iterations_around(self.func, self.it), *inside(self.it)]
        for axis, other, _ in [entry for n in loops for entry in n.axis_of()]:
            if not other.same_as(var) and axis.kind == "dense_fixed":
                zero = as_dtype(0, axis.idtype)
                analyzer.bind(other, ir.Range(zero, as_dtype(axis.length, axis.idtype)))
        if step is not None:
            within = plain - var * as_dtype(step, dtype_of(var))
            if analyzer.can_prove(within >= 0) and analyzer.can_prove(within < step):
                return step * per_block
        self.refuse(
            "rows by blocks: expected a block to have positions in a row, as that of the outermost "
            f"loop of a split, got '{self.loop.name}' at {position}; legal is rows=\"search\""
        )


def _searches(func: SparseFunc, table: SparseBuffer) -> bool:
    recipe = recipe_of_rows(func, table)
    return recipe is not None and recipe.searches


def _position(it: SparseIteration, table: SparseBuffer) -> Any:
    """The position at which an iteration reads a table, or None if it does not."""
    accesses = accesses_of(it.body, table.var)
    return accesses[0].indices[0] if accesses else None
