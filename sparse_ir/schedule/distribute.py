"""Move loops of an iteration into each of its steps: loop distribution.

Before::

    TOP = T.alloc_sparse_buffer((), "float32", "local")
    with T.sp_iter([I, H0, H1], "SSS", "rows") as [i, h0, h1]:
        with T.sp_iter([J], "R", "top") as [j]:
            with T.init():
                TOP[()] = -inf
            TOP[()] = max(TOP[()], X[i, j, h0 * 16 + h1])
        with T.sp_iter([J], "S", "powers") as [j]:
            Y[i, j, h0 * 16 + h1] = exp(X[i, j, h0 * 16 + h1] - TOP[()])

After `distribute([h1])`, where each step completes all of H1 before the next one begins::

    TOP_16 = T.alloc_sparse_buffer((H1,), "float32", "local")
    with T.sp_iter([I, H0], "SS", "rows") as [i, h0]:
        with T.sp_iter([J, H1], "RS", "top") as [j, h1]:
            with T.init():
                TOP_16[h1] = -inf
            TOP_16[h1] = max(TOP_16[h1], X[i, j, h0 * 16 + h1])
        with T.sp_iter([J, H1], "SS", "powers") as [j, h1]:
            Y[i, j, h0 * 16 + h1] = exp(X[i, j, h0 * 16 + h1] - TOP_16[h1])

The loops become the innermost of each step. Buffers private to a visit get an element per
coordinate of these loops. Legal for loops free of races: no visit reads what another one writes, so
that steps of different visits may interleave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.legal import parallelizable
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    nodes_of,
)
from sparsetir.sparse_ir.races import FREE, private_buffers
from sparsetir.sparse_ir.reduction import add_guards
from sparsetir.sparse_ir.schedule.cut_space import without_choice
from sparsetir.sparse_ir.schedule.loops import (
    Change,
    SparseIterationRef,
    SpIter,
    change_of,
    changed,
    inside,
    loops_of,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.steps import over_fresh_vars
from sparsetir.sparse_ir.tir import size_text
from sparsetir.sparse_ir.traversal import access_rules, map_expr

NAME = "distribute"


@primitive
def distribute(
    func: SparseFunc, loop: SpIter | Sequence[SpIter]
) -> tuple[SparseFunc, list[SparseIterationRef]]:
    """Move the innermost loops of an iteration into each of its steps.

    Parameters
    ----------
    loop : SpIter or sequence of SpIter
        The innermost loop of an iteration, or several of them, outermost first; over dense axes,
        of constant extents if a visit has a private "local" buffer.

    Returns
    -------
    list of SparseIterationRef
        The steps.

    Notes
    -----
    A step is a nested iteration without further ones, or a store, which becomes one.
    """
    handles = [loop] if isinstance(loop, SpIter) else list(loop)
    if not handles:
        raise ScheduleError(f"{NAME}: argument 'loop': expected one or more loops, got none")
    change = change_of(NAME, func, *handles)
    it, moved, places = change.it, change.chosen, change.places
    outer = change.loops[: -len(moved)]
    if places != list(range(len(outer), len(change.loops))) or not outer:
        change.refuse(
            "argument 'loop': expected the innermost of several loops, in their order, got "
            f"{[x.name for x in moved]}; sparse_reorder can bring them there"
        )
    private = private_buffers(func, it)
    temporaries = [b for b in func.buffers if b.var in private]
    _refuse(change, temporaries)
    steps = _Steps(NAME, func, it, moved)
    steps.names = []
    expanded = {b.var: steps.expanded(b) for b in temporaries}
    renamed = {old: new.var for old, new in expanded.items()}
    steps.own = set(renamed.values())
    body = _at_places(it.body, renamed, [x.var for x in moved])
    notes = it
    for gone in moved:
        notes = changed(notes, annotations=without_choice(notes, gone))
    whole = changed(notes, outer, body=steps.of(body, []))
    buffers = [expanded.get(b.var, b) for b in func.buffers]
    change.func = func.replace(buffers=buffers)
    out = change.put(whole, trusted=False)
    return out, [SparseIterationRef(name) for name in steps.names]


def _refuse(change: Change, temporaries: list[SparseBuffer]) -> None:
    """Refuse programs that would change their meaning, or whose private buffers cannot grow."""
    if change.it.init is not None:
        change.refuse("expected an iteration without an init")
    facts = parallelizable(change.func, change.it)
    local = [b.name for b in temporaries if str(b.var.ty.storage_scope) == "local"]
    for place, loop in zip(change.places, change.chosen, strict=True):
        if not loop.is_dense:
            change.refuse(f"expected loops over dense axes, got '{loop.name}'")
        if facts[place] != FREE:
            change.refuse(
                f"loop '{loop.name}' is not proven free of races ({facts[place]}): a step of one "
                "visit may read what a later step of another has written"
            )
        if local and not loop.is_constant:
            change.refuse(
                f"expected loops of constant extent, as '{local[0]}' in scope \"local\" gets a "
                f"place for each visit, got '{loop.name}' of {size_text(loop.node.length)}; split "
                "it first"
            )


class _Steps(Change):
    """The steps of an iteration, with the chosen loops moved inside."""

    names: list[str]  # of the steps
    own: set[Any]  # buffers private to each visit

    def expanded(self, buffer: SparseBuffer) -> SparseBuffer:
        """A buffer with an element per coordinate of the loops."""
        more = [loop.node for loop in self.chosen]
        shape = [*buffer.var.ty.shape, *(axis.length for axis in more)]
        # Versions of a function differ in constant extents, so these are in the name.
        extents = "_".join(str(loop.node.length) for loop in self.chosen if loop.is_constant)
        name = fresh_name(self.func, f"{buffer.name}_{extents or 'each'}")
        var = buffer_var(shape, buffer.dtype, name, str(buffer.var.ty.storage_scope))
        axes = None if buffer.axes is None else [*buffer.axes, *more]
        return SparseBuffer(var=var, axes=axes, handle=None)

    def of(self, stmt: Any, conditions: list[Any]) -> Any:
        """A statement with the loops moved into each step."""
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([self.of(part, conditions) for part in stmt.seq])
        if (
            isinstance(stmt, tirx.IfThenElse)
            and stmt.else_case is None
            and not nodes_of(ir.TensorLoad, stmt.condition)
        ):
            return self.of(stmt.then_case, [*conditions, stmt.condition])
        if isinstance(stmt, tirx.BufferStore):
            name = fresh_name(self.func, f"{self.it.name}_step", self.names)
            empty = changed(self.it, [], name=name, annotations={})
            return self._step(empty, stmt, conditions)
        if isinstance(stmt, SparseIteration) and not inside(stmt):
            return self._step(stmt, stmt.body, conditions)
        if isinstance(stmt, SparseIteration) and stmt.init is None:
            return changed(stmt, body=self.of(stmt.body, conditions))
        self.refuse(
            f"expected stores and iterations in '{self.it.name}', those around others without an "
            f"init, got {type(stmt).__name__}"
        )

    def _step(self, step: SparseIteration, body: Any, conditions: list[Any]) -> SparseIteration:
        self.names.append(step.name)
        loops = [*loops_of(step), *self.chosen]
        init = None if step.init is None else self._guarded(conditions, step.init)
        body = self._guarded(conditions, body)
        return over_fresh_vars(changed(step, loops, init=init, body=body))

    def _guarded(self, conditions: list[Any], stmt: Any) -> Any:
        """A statement under conditions, omitted where it is harmless and needs no bounds."""
        if isinstance(stmt, tirx.BufferStore) and stmt.buffer in self.own:
            if all(load.source in self.own for load in nodes_of(ir.TensorLoad, stmt.value)):
                return stmt
        return add_guards(conditions, stmt)


def _at_places(stmt: Any, buffers: dict[Any, Any], more: list[Any]) -> Any:
    """A statement with buffers replaced, and further indices appended to theirs."""

    def place(buffer: Any, indices: Any) -> Any:
        return (buffers[buffer], [*indices, *more]) if buffer in buffers else None

    return map_expr(stmt, access_rules(place))
