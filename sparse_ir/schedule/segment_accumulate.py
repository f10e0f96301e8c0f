"""Accumulate runs of elements of one row; write where the row changes (Senanayake, figure 2-2).

Before, where a thread adds each of its elements to memory::

    with T.sp_iter([I_J0, I_J1, K], "SSS", "spmm") as [ij0, ij1, k]:
        if T.tail(..):
            C[I_at[p], k] = C[I_at[p], k] + A[p] * B[J_at[p], k]

After `segment_accumulate(ij1)`, where J_ptr holds the offsets of rows, as bound by
`positions(.., rows="search")`::

    with T.sp_iter([I_J0], "S", "spmm") as [ij0]:
        with T.sp_iter([K], "S", "spmm_start") as [k]:
            C_run[k] = 0.0
        with T.sp_iter([I_J1], "S", "spmm_each") as [ij1]:
            with T.sp_iter([K], "S", "spmm_reduce") as [k]:
                if T.tail(..):
                    C_run[k] = C_run[k] + A[p] * B[J_at[p], k]
            with T.sp_iter([K], "S", "spmm_write") as [k]:
                if T.tail(..):
                    if ij1 == 15 or p + 1 >= J_ptr[I_at[p] + 1]:
                        C[I_at[p], k] = C[I_at[p], k] + C_run[k]
            with T.sp_iter([K], "S", "spmm_again") as [k]:
                if T.tail(..):
                    if ij1 == 15 or p + 1 >= J_ptr[I_at[p] + 1]:
                        C_run[k] = 0.0

With rows from a table, the last element of a run is one whose successor has another row in `I_at`,
or that of the loop's last visit. Summation order changes; `race="atomics"` of the loops around then
adds once per run.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.annotations import ATOMIC, ORDERED
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    declared,
    nodes_of,
    substitute,
)
from sparsetir.sparse_ir.reduction import Reduction, add_guards, reduction_of, widened
from sparsetir.sparse_ir.rows import found_rows, recipe_of_rows
from sparsetir.sparse_ir.schedule.loops import Change, SparseIterationRef, SpIter, change_of
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.steps import Steps
from sparsetir.sparse_ir.schedule.workspaces import workspace
from sparsetir.sparse_ir.tile_marks import is_bound, is_tail, predicate_of
from sparsetir.sparse_ir.tir import as_dtype, cast, dtype_of, free_vars
from sparsetir.sparse_ir.workers import divided

NAME = "segment_accumulate"


@primitive
def segment_accumulate(
    func: SparseFunc, loop: SpIter, *, dtype: str | None = None, name: str | None = None
) -> tuple[SparseFunc, list[SparseIterationRef]]:
    """Let visits of a loop accumulate the elements of one row, and write where the row changes.

    Parameters
    ----------
    loop : SpIter
        A loop over a dense axis, whose visits update rows given by a table; loops inside it are
        spatial, of constant extent, and have separate accumulators.
    dtype : str, optional
        The type of the sums; that of the result by default.
    name : str, optional
        Name of the workspace of the sums.

    Returns
    -------
    list of SparseIterationRef
        Start, reduce, write, and again, which resets the sums.
    """
    return _Runs(change_of(NAME, func, loop)).run(dtype, name)


class _Runs(Steps):
    def __init__(self, change: Change) -> None:
        super().__init__(change)
        (self.loop,), (place,) = self.chosen, self.places
        self.outer, self.inner = self.loops[:place], self.loops[place + 1 :]
        self._refuse_loops()
        reduction = reduction_of(self.it.body)
        if reduction is None or reduction.operator != "sum":
            self.refuse("expected a body of the form X[..] = X[..] + term, got another")
        self.reduction: Reduction = reduction
        self.position, self.table = self._row()
        # Without tails a visit does not exist; other conditions skip its term, not the run's end.
        self.tails = [c for c in self.reduction.conditions if is_tail(c)]

    def run(self, dtype: str | None, name: str | None) -> tuple[SparseFunc, list[Any]]:
        """The rewritten function and the handles."""
        it, store = self.it, self.reduction.store
        target = declared(self.func).buffers[store.buffer.name]
        dtype = dtype or target.dtype
        wish = fresh_name(self.func, name or f"{target.name}_run")
        ws = workspace(self.func, wish, self.inner, dtype, "local")
        at = [loop.var for loop in self.inner]
        held, zero = tirx.BufferLoad(ws.var, at), tirx.const(0, dtype)
        term = widened(self.reduction.term, dtype, lambda _: None)
        total = cast(tirx.BufferLoad(store.buffer, store.indices), dtype) + held
        added = tirx.BufferStore(store.buffer, cast(total, target.dtype), store.indices)
        last = [*self.tails, self._last()]
        reset, more = (tirx.BufferStore(ws.var, value, at) for value in (zero, held + term))
        steps = [
            self.step("start", self.inner, reset),
            self.step("reduce", self.inner, add_guards(self.reduction.conditions, more)),
            self.step("write", self.inner, add_guards(last, added)),
            self.step("again", self.inner, add_guards(last, reset)),
        ]
        notes = {**dict(it.annotations.items()), ORDERED: 1}
        each = self.step("each", [self.loop], tirx.SeqStmt(steps[1:]), annotations=notes)
        self.buffers.append(ws)
        before = [] if it.init is None else self.split_init()
        func = self.put_steps(self.outer, [steps[0], each], before)
        return func, [SparseIterationRef(s.name) for s in steps]

    # -- end of a run -------------------------------------------------------------------------

    def _row(self) -> tuple[Any, SparseBuffer]:
        """The position of a visit, and the table that its row is read from."""
        buffers = [b for b in self.func.buffers if b.handle is not None]
        tables = {b.var: b for b in buffers if len(b.axes or ()) == 1}
        moving = [i for i in self.reduction.store.indices if set(self.loop.vars) & free_vars(i)]
        loads = [i for i in moving if isinstance(i, ir.TensorLoad) and i.source in tables]
        if len(loads) != 1 or len(moving) != 1:
            self.refuse(
                f"expected visits of '{self.loop.name}' to add to the rows that a table gives, got "
                f"{list(self.reduction.store.indices)}; `positions` makes one, and where all "
                "visits add to one element, precompute keeps their sum"
            )
        return loads[0].indices[0], tables[loads[0].source]

    def _last(self) -> Any:
        """Whether a visit is at the last element of a run."""
        (var,), position = self.loop.vars, self.position
        length = self.loop.node.length
        one = as_dtype(1, dtype_of(var))
        ends: Any = tirx.EQ(var, as_dtype(length, dtype_of(var)) - one)
        # The position of the next visit; loops in between may make it larger.
        following = substitute(position, {var: var + one})
        searched = self.table.name in found_rows(self.func)
        bounded = any(map(is_bound, nodes_of(ir.Call, position)))
        if not searched or bounded:  # else positions beyond have no row
            for tail in (c for c in self.tails if var in free_vars(c)):
                ends = tirx.Or(ends, tirx.Not(substitute(predicate_of(tail), {var: var + one})))
        if searched:
            end = self._end(self.table, tirx.BufferLoad(self.table.var, [position]))
            return tirx.Or(ends, tirx.GE(following, end))
        over = list(self.table.axes or ())
        step = as_dtype(1, dtype_of(position))
        last = as_dtype(over[0].length, dtype_of(position)) - step
        row, other = (
            tirx.BufferLoad(self.table.var, [p]) for p in (position, tirx.min(following, last))
        )
        return tirx.Or(ends, tirx.NE(row, other))

    def _end(self, table: SparseBuffer, row: Any) -> Any:
        """The position after a row's last element."""
        recipe = recipe_of_rows(self.func, table)
        assert recipe is not None
        at = row + as_dtype(1, dtype_of(row))
        while recipe is not None:
            at = tirx.BufferLoad(recipe.array.var, [at])
            recipe = recipe_of_rows(self.func, recipe.order) if recipe.order is not None else None
        return at

    # -- refusals -----------------------------------------------------------------------------

    def _refuse_loops(self) -> None:
        if not self.loop.is_dense:
            self.refuse(f"expected a loop over a dense axis, got '{self.loop.name}'")
        if nodes_of(SparseIteration, self.it.body) or ATOMIC in self.it.annotations:
            self.refuse("expected an iteration without nested ones, before parallelize")
        for loop in self.inner:
            if not loop.is_constant or loop.kinds != "S":
                self.refuse(
                    f"expected spatial loops of constant extent inside of '{self.loop.name}', got "
                    f"'{loop.name}'; split and sparse_reorder can put it outside"
                )
        for group in divided(self.it):
            if {x.name for x in [self.loop, *self.inner]} & set(group):
                self.refuse(f"{group} is divided among workers; expected {NAME} before parallelize")
