"""Sums of rows that a format stores in several pieces (thesis, chapter 7, "atomics").

Iterations over rows stored in pieces update what an iteration before them has set. Most rows have
one piece. Before::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0.0
    with T.sp_iter([IB, X], "SS", "spmm_b0") as [ib, x]:
        ...                                       # C_ws, the sum of a piece of the row ib
        with T.sp_iter([W, L], "SS", "spmm_b0_write") as [w, l]:
            C[ib, w * 4 + l] = C[ib, w * 4 + l] + C_ws[w, l]

After `combine_row_pieces([write], race="atomics")`, with a flag for each row, computed from the
pieces::

        with T.sp_iter([W, L], "SS", "spmm_b0_write") as [w, l]:
            if C_shared[ib] == 0:
                C[ib, w * 4 + l] = C_ws[w, l]
        with T.sp_iter([W, L], "SS", "spmm_b0_write_add") as [w, l]:
            T.sp_iter_attr({"atomic": 1})
            if C_shared[ib] != 0:
                C[ib, w * 4 + l] = C[ib, w * 4 + l] + C_ws[w, l]

Rows of one piece are written with vector stores, the others are updated atomically on a GPU (see
:mod:`sparsetir.sparse_ir.atomics`). With covers=True, only the others are set before::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        if C_shared[i] != 0:
            C[i, k] = 0.0

With race="ignore", the caller guarantees that every row is one piece: only the first iteration
remains, without the flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.sparse_ir.annotations import ATOMIC
from sparsetir.sparse_ir.atomics import ATOMIC_KINDS, UPDATE, atomic_reduction, has_atomics
from sparsetir.sparse_ir.computed import keyword
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    accesses_of,
    buffer_var,
    declared,
    iterations_around,
    loads_of,
    same_indices,
)
from sparsetir.sparse_ir.recipes.general import shared_rows
from sparsetir.sparse_ir.reduction import Reduction, add_guards, reduction_of, split_guards
from sparsetir.sparse_ir.schedule.loops import (
    SparseIterationRef,
    change_in,
    changed,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.steps import over_fresh_vars
from sparsetir.sparse_ir.tir import cast, dtype_of, size_text, statements_of
from sparsetir.sparse_ir.traversal import map_expr

NAME = "combine_row_pieces"
RACES = ("atomics", "ignore")


@primitive
def atomic(func: SparseFunc, iteration: SparseIterationRef) -> tuple[SparseFunc, None]:
    """Let an iteration update its result atomically, on a GPU, whatever workers visit it.

    Visits may then update one element concurrently, so all loops may be divided among blocks and
    threads. `parallelize(.., race="atomics")` does this for single loops.

    Parameters
    ----------
    iteration : SparseIterationRef
        One with a body `X[..] = X[..] + term` (or max, min) of a type that has atomics and no
        init; an iteration before it has set the result.
    """
    change = change_in("atomic", func, iteration)
    if atomic_reduction(change.it) is None:
        change.refuse(f"expected {UPDATE}, got another body")
    annotations = {**dict(change.it.annotations.items()), ATOMIC: 1}
    return change.put(changed(change.it, annotations=annotations)), None


@primitive
def combine_row_pieces(
    func: SparseFunc, iterations: Sequence[SparseIterationRef], *, race: str, covers: bool = False
) -> tuple[SparseFunc, list[SparseIterationRef]]:
    """Choose how iterations combine the pieces of a row.

    Parameters
    ----------
    iterations : sequence of SparseIterationRef
        All that update a result, `X[i, ..] = X[i, ..] + term` (or *, max, min), where `i` is the
        coordinate of a sparse axis; an iteration before them has set the result.
    race : {"atomics", "ignore"}
        "atomics", for sums of float32, float64 or int32 whose initial value is zero, and maxima and
        minima of float32 or int32 whose initial value is an infinity (the least or greatest
        integer): rows of several pieces are updated atomically. "ignore": the caller guarantees
        that no row is stored in several pieces, and that the result holds the operator's identity
        wherever a row is stored.
    covers : bool
        For "atomics": whether the caller guarantees that each iteration updates all elements of its
        row that are set before, so that rows of one piece need not be.

    Returns
    -------
    list of SparseIterationRef
        The iterations that update atomically.
    """
    changes = [change_in(NAME, func, handle) for handle in iterations]
    if not changes:
        raise ScheduleError(f"{NAME}: argument 'iterations': expected one or more, got none")
    changes[0].check_word("race", race, RACES)
    writes = [change.it for change in changes]
    updates = [_update(it) for it in writes]
    target = _target(func, writes, updates)
    _refuse_others(func, writes, target)
    if race == "ignore":
        bodies = {it.name: _overwriting(u) for it, u in zip(writes, updates, strict=True)}
        return _with(func, writes, {n: [{"body": body}] for n, body in bodies.items()}), []
    _refuse_atomics(func, writes, updates, target)
    rows = [_row(func, it, update) for it, update in zip(writes, updates, strict=True)]
    func, flags = _with_flags(func, target, writes, rows)
    steps: dict[str, list[dict[str, Any]]] = {}
    none = tirx.const(0, "int8")
    for it, update, (var, _) in zip(writes, updates, rows, strict=True):
        flag = tirx.BufferLoad(flags.var, [var])
        steps[it.name] = [
            {"body": tirx.IfThenElse(flag == none, _overwriting(update), None)},
            {
                "body": tirx.IfThenElse(flag != none, it.body, None),
                "name": fresh_name(func, f"{it.name}_add"),
                "annotations": {**dict(it.annotations.items()), ATOMIC: 1},
            },
        ]
    added = [SparseIterationRef(s[1]["name"]) for s in steps.values()]
    if covers:
        init: Any = _first(func, target)
        _, store = split_guards(init.body)
        row = next(n for n, i in enumerate(updates[0].store.indices) if i.same_as(rows[0][0]))
        needed = tirx.BufferLoad(flags.var, [store.indices[row]]) != none
        steps[init.name] = [{"body": tirx.IfThenElse(needed, init.body, None)}]
    return _with(func, writes, steps), added


def _with(
    func: SparseFunc, writes: list[SparseIteration], steps: dict[str, list[dict[str, Any]]]
) -> SparseFunc:
    """The function with the named iterations replaced by the given steps, as changed fields."""

    def visit(it: Any) -> Any:
        if it.name not in steps:
            return it
        first, *more = steps[it.name]
        copies = [changed(it, **first), *(over_fresh_vars(changed(it, **m)) for m in more)]
        return tirx.SeqStmt(copies) if more else copies[0]

    last = writes[-1]
    body = map_expr(
        func.body, [(SparseIteration, lambda n: n if n.name == last.name else visit(n))]
    )
    return replaced(NAME, func.replace(body=body), last, visit(last), trusted=False)


def _refuse(it: SparseIteration, message: str) -> NoReturn:
    raise ScheduleError(f"{NAME}: {message}\n{show(it)}")


def _update(it: SparseIteration) -> Reduction:
    """The update that an iteration performs."""
    reduction = reduction_of(it.body)
    if reduction is None or it.init is not None or "R" in it.kinds:
        _refuse(
            it,
            "expected spatial loops around X[..] = X[..] + term (or *, max, min), without an init; "
            "precompute makes such an iteration of a reduction",
        )
    return reduction


def _overwriting(update: Reduction) -> Any:
    value = cast(update.term, dtype_of(update.store.value))
    store = tirx.BufferStore(update.store.buffer, value, update.store.indices)
    return add_guards(update.conditions, store)


def _target(func: SparseFunc, writes: list[SparseIteration], updates: list[Reduction]) -> Any:
    """The result that all iterations update."""
    var = updates[0].store.buffer
    for it, update in zip(writes, updates, strict=True):
        if not update.store.buffer.same_as(var):
            _refuse(it, f"expected all to add to '{var.name}', got '{update.store.buffer.name}'")
    return declared(func).buffers[var.name]


def _refuse_others(func: SparseFunc, writes: list[SparseIteration], target: SparseBuffer) -> None:
    """Refuse accesses of the result other than by one iteration before these."""
    init = _first(func, target)
    if init is None:
        _refuse(writes[0], f"expected an iteration that sets '{target.name}' before it is added to")
    inside = sum(len(accesses_of(it, target.var)) for it in [init, *writes])
    if len(accesses_of(func.body, target.var)) != inside:
        names = [it.name for it in writes]
        _refuse(writes[0], f"'{target.name}' is accessed outside of {names} and '{init.name}'")


def _first(func: SparseFunc, target: SparseBuffer) -> SparseIteration | None:
    """The first iteration that accesses a buffer, if it sets elements and reads none."""
    first = next((s for s in statements_of(func.body) if accesses_of(s, target.var)), None)
    if not isinstance(first, SparseIteration) or first.init is not None:
        return None
    _, store = split_guards(first.body)
    plain = isinstance(store, tirx.BufferStore) and not loads_of(store, target.var)
    return first if plain else None


def _refuse_atomics(
    func: SparseFunc, writes: list[SparseIteration], updates: list[Reduction], target: SparseBuffer
) -> None:
    for it, update in zip(writes, updates, strict=True):
        if not has_atomics(update.operator, target.dtype):
            _refuse(
                it,
                f'race="atomics" expects {ATOMIC_KINDS}, got a {update.operator} of '
                f"{target.dtype}; legal is a format that stores each row in one piece, with "
                'race="ignore"',
            )
    init = _first(func, target)
    _, store = split_guards(init.body if init is not None else None)
    first = updates[0].identity(target.dtype)
    if not same_indices([store.value], [first]):
        _refuse(
            writes[0], f"expected '{target.name}' to be set to {first} before, got {store.value}"
        )


def _row(func: SparseFunc, it: SparseIteration, update: Reduction) -> tuple[Any, Axis]:
    """The coordinate of the row, and its axis."""
    axes = {v: a for x in [*iterations_around(func, it), it] for a, v, _ in x.axis_of()}
    rows = [
        (i, axes[i])
        for i in update.store.indices
        if isinstance(i, ir.Var) and i in axes and axes[i].is_sparse
    ]
    if len(rows) != 1:
        _refuse(it, f"expected one coordinate of a sparse axis among {list(update.store.indices)}")
    return rows[0]


def _with_flags(
    func: SparseFunc,
    target: SparseBuffer,
    writes: list[SparseIteration],
    rows: list[tuple[Any, Axis]],
) -> tuple[SparseFunc, SparseBuffer]:
    """The function with a computed parameter that flags rows of other than one piece."""
    index = list(_update(writes[0]).store.indices)
    place = next(n for n, i in enumerate(index) if i.same_as(rows[0][0]))
    axis = target.axes[place] if target.axes is not None else None
    if axis is None or axis.kind != "dense_fixed":
        _refuse(writes[0], f"expected '{target.name}' to be over a dense axis of rows")
    name = fresh_name(func, f"{target.name}_shared")
    handle = ir.Var(name.lower(), ir.PointerType(ir.PrimType("void")))
    length, size = axis.length, keyword(axis.length)
    if size is None:
        _refuse(
            writes[0], f"expected a number of rows that is a parameter, got {size_text(length)}"
        )
    how: dict[str, Any] = {"recipe": shared_rows.__name__, "length": size}
    for number, (_, over) in enumerate(rows):
        how[f"rows{number}"] = f"${over.indices.name}"
    computed = {**dict(func.attrs.get("computed", {}).items()), str(handle.name): how}
    flags = SparseBuffer(var=buffer_var([length], "int8", name), axes=[axis], handle=handle)
    out = func.replace(params=[*func.params, handle], buffers=[*func.buffers, flags])
    return out.with_attr("computed", computed), flags
