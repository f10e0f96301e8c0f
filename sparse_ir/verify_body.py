"""The rules of stage I on iterations and statements; see :mod:`sparsetir.sparse_ir.verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.annotations import RACE, gallop_problems, range_problems
from sparsetir.sparse_ir.legal import parallelizable
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    PartAxis,
    SparseFunc,
    SparseIteration,
    attached_axes,
    declared,
    flat_axes,
    names_inside,
    stores_of,
    visited_axes,
    visited_node,
)
from sparsetir.sparse_ir.operations import operation_problems
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.tir import size_text
from sparsetir.sparse_ir.traversal import ADVANCE, SKIP, visit_nodes
from sparsetir.sparse_ir.verify_parts import parts_problems
from sparsetir.sparse_ir.verify_sites import (
    STATEMENTS,
    Broken,
    Found,
    Site,
    Texts,
    sites,
    used_variables,
)


def index_dtype(expr: Any) -> bool:
    """Whether an expression is an int32 or int64 scalar."""
    return ir.is_prim_expr(expr) and str(expr.ty.dtype) in ("int32", "int64")


def names(axes: Any) -> str:
    """The names of some axes for a message."""
    return "[" + ", ".join(a.name for a in axes) + "]"


def body_problems(func: SparseFunc, known: Sequence[Any] = ()) -> Found:
    """The broken rules of the body, in textual order.

    known : verified iterations in it, of a function with no more declarations than this one
    """
    right, seen = frozenset(known), set[str]()
    others: list[SparseIteration] = []

    def visit(it: SparseIteration) -> Any:
        if it in right:
            return SKIP
        others.append(it)
        return ADVANCE

    visit_nodes(func.body, [(SparseIteration, visit)])
    named = [(it, [it.name, *names_inside(it)]) for it in known]
    for it, all_names in [*named, *((it, [it.name]) for it in others)]:
        for name in all_names:
            if name in seen:
                yield Broken(
                    it.span,
                    f"two sparse iterations are named '{name}'; schedules find them by name",
                )
            seen.add(name)
    for site in sites(Site(func, func.body, declared(func), known=right)):
        visits = isinstance(site.stmt, SparseIteration)
        of = site.stmt.name if visits else ""
        for text in (t for rule in (ITERATION if visits else STATEMENT) for t in rule(site)):
            yield Broken(getattr(site.stmt, "span", None), text, of)


# Iterations: the problems, without the name of the iteration


def _enclosing(site: Site) -> list[Axis]:
    return [a for it in site.iterations for a in visited_axes(it.axes)]


def _kinds(site: Site) -> Texts:
    node, axes = site.stmt, site.axes
    if len(node.kinds) != len(axes) or set(node.kinds) - set("SR"):
        yield (
            f"expected {len(axes)} kinds S or R, one for each of {names(axes)}, got '{node.kinds}'"
        )


def _coordinates(site: Site) -> Texts:
    node, axes = site.stmt, site.axes
    if len(node.vars) != len(axes):
        yield (
            f"expected {len(axes)} coordinate variables, one for each of {names(axes)}, got "
            f"{len(node.vars)}"
        )
    for axis, var in zip(axes, node.vars, strict=False):
        if not ir.is_prim_expr(var) or str(var.ty.dtype) != axis.idtype:
            yield (
                f"expected variable '{var.name}' of type {axis.idtype}, the idtype of axis "
                f"'{axis.name}', got {var.ty.dtype}"
            )
    before = set[int]()
    for var in node.vars:
        if site.defines(var) or var.__chandle__() in before:
            yield f"variable '{var.name}' is bound twice"
        before.add(var.__chandle__())


def _axes_known(site: Site) -> Texts:
    targets = [a.to for a in attached_axes(site.stmt.axes)]
    parts = [a.by for a in site.stmt.axes if isinstance(a, PartAxis)]
    for axis in [*site.axes, *targets, *parts]:
        if axis.name not in site.names.axes:
            yield f"'{axis.name}' is not an axis of '{site.func.name}'"
        elif not tvm_ffi.structural_equal(axis, site.names.axes[axis.name]):
            yield (
                f"its axis '{axis.name}' differs from the axis of that name in '{site.func.name}'"
            )


def _axis_once(site: Site) -> Texts:
    seen = {a.name for a in _enclosing(site)}
    for axis in visited_axes(site.stmt.axes):
        if axis.name in seen:
            around = axis.name in {a.name for a in _enclosing(site)}
            where = "here and in an enclosing iteration" if around else "twice"
            yield f"axis '{axis.name}' is iterated {where}"
        seen.add(axis.name)


def _axis_order(site: Site) -> Texts:
    node, before = site.stmt, {a.name for a in _enclosing(site)}
    every = before | {a.name for a in visited_axes(node.axes)}
    for item in map(visited_node, node.axes):
        to = {a.axis.name: a.to for a in attached_axes([item])}
        for axis in visited_axes([item]):
            attached = axis.name in to
            needed = to[axis.name] if attached else axis.parent
            if needed is not None and needed.name not in before:
                what = "which it is attached to" if attached else "its parent"
                got = "comes after it" if needed.name in every else "is not iterated"
                yield (
                    f"expected axis '{needed.name}', {what}, before '{axis.name}' in "
                    f"{names(flat_axes(node.axes))} or around it, but '{needed.name}' {got}"
                )
            before.add(axis.name)


def _merged(site: Site) -> Texts:
    """Merged axes are loops of their own."""
    groups = [a for a in site.stmt.axes if not isinstance(a, Axis)]
    parts = [a.by for a in groups if isinstance(a, PartAxis)]
    for axis in [*flat_axes(groups), *parts]:
        if axis.is_merged:
            yield (
                f"the {axis.kind} '{axis.name}' cannot be fused, attached or visited in parts; "
                "expected it as an entry of its own"
            )


def _attached(site: Site) -> Texts:
    for item in attached_axes(site.stmt.axes):
        parent = item.axis.parent
        label = f"attach('{item.axis.name}', '{item.to.name}')"
        if parent is None or parent.kind != "dense_fixed":
            got = "no parent" if parent is None else f"parent '{parent.name}' ({parent.kind})"
            yield f"{label}: expected '{item.axis.name}' under a dense_fixed axis, got {got}"
        elif not tvm_ffi.structural_equal(parent.length, item.to.length):
            yield (
                f"{label}: expected '{parent.name}', the parent of '{item.axis.name}', to be as "
                f"long as '{item.to.name}' ({size_text(item.to.length)}), got "
                f"{size_text(parent.length)}"
            )


def _fused(site: Site) -> Texts:
    for item in (a for a in map(visited_node, site.stmt.axes) if isinstance(a, FusedAxis)):
        for previous, axis in zip(item.axes, item.axes[1:], strict=False):
            if axis.parent is not None and axis.parent.name != previous.name:
                yield (
                    f"fuse{tuple(a.name for a in item.axes)}: expected '{axis.name}' right after "
                    f"its parent '{axis.parent.name}', got it after '{previous.name}'"
                )


def _init_stores(site: Site) -> Texts:
    if site.stmt.init is not None and not stores_of(site.stmt.init):
        yield "its init stores nothing"


# Statements


def _statement_kind(site: Site) -> Texts:
    kind = type(site.stmt)
    if kind not in STATEMENTS:
        yield f"a statement of type {kind.__name__} cannot occur in stage I"
    if kind is tirx.For and site.stmt.thread_binding is not None:
        yield (
            f"loop '{site.stmt.loop_var.name}' is bound to "
            f"'{site.stmt.thread_binding.thread_tag}'; stage I has no threads"
        )


def _races(site: Site) -> Texts:
    """Visits of parallel and vectorised loops do not race, unless annotated with RACE."""
    loop = site.stmt
    kinds = (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)
    if not isinstance(loop, tirx.For) or loop.kind not in kinds:
        return
    said = loop.annotations.get(RACE)
    if said not in (None, "ignore"):
        yield f"loop '{loop.loop_var.name}': annotation '{RACE}': expected \"ignore\", got {said!r}"
    if said is not None:
        return
    dtype = str(loop.loop_var.ty.dtype)
    length = tirx.Cast(dtype, loop.extent) if str(loop.extent.ty.dtype) != dtype else loop.extent
    axis = Axis(name=str(loop.loop_var.name), kind="dense_fixed", length=length, idtype=dtype)
    visits = SparseIteration(
        axes=[axis], kinds="S", name=axis.name, vars=[loop.loop_var], init=None, body=loop.body,
        annotations={}, span=loop.span,
    )  # fmt: skip
    fact = parallelizable(site.func, visits)[0]
    if fact.buffers and constant_length(axis) != 1:
        yield (
            f"loop '{axis.name}' is not proven free of races ({fact}): expected visits that each "
            f'write elements of their own, a serial loop, or annotations={{"{RACE}": "ignore"}} '
            "where you know better"
        )


def _loop_variable(site: Site) -> Texts:
    if isinstance(site.stmt, tirx.For) and site.defines(site.stmt.loop_var):
        yield f"variable '{site.stmt.loop_var.name}' is bound twice"


def _loop_step(site: Site) -> Texts:
    step: Any = site.stmt.step if isinstance(site.stmt, tirx.For) else None
    if isinstance(step, tirx.IntImm) and not int(step):
        yield f"loop '{site.stmt.loop_var.name}': expected a step other than 0"


def _defined(site: Site) -> Texts:
    for var in used_variables(*site.expressions):
        if not site.defines(var):
            yield (
                f"variable '{var.name}' is used but not defined: it is no parameter, coordinate "
                "or loop variable here"
            )
    for buffer, _ in site.accesses:
        if not site.defines(buffer):
            yield f"buffer '{buffer.name}' is used but not declared"


def _index_type(site: Site) -> Texts:
    for buffer, indices in site.accesses:
        for position, index in enumerate(indices):
            if not index.ty.dtype.startswith(("int", "uint")):
                yield (
                    f"buffer '{buffer.name}': expected an integer as index {position}, got "
                    f"{index.ty.dtype}"
                )


def _init_reduction(site: Site) -> Texts:
    if site.init_of is None:
        return
    indices = site.stmt.indices if isinstance(site.stmt, tirx.BufferStore) else ()
    for var in used_variables(*indices, *site.expressions):
        name, owner = site.reduced.get(var, ("", ""))
        if owner == site.init_of.name:
            yield (
                f"sp_iter '{owner}': its init uses the reduction variable '{name}'; an init runs "
                "once for every point of the spatial axes"
            )


def _init_reads(site: Site) -> Texts:
    node = site.init_of
    if node is None:
        return
    written = {store.buffer for store in stores_of(node.init, node.body)}
    for buffer in (load.source for load in site.loads):
        if buffer in written:
            yield f"sp_iter '{node.name}': its init reads buffer '{buffer.name}', which it writes"


def _reduction_write(site: Site) -> Texts:
    if not site.reduced or not isinstance(site.stmt, tirx.BufferStore):
        return
    for var in used_variables(*site.stmt.indices):
        if var in site.reduced:
            name, owner = site.reduced[var]
            yield (
                f"sp_iter '{owner}': buffer '{site.stmt.buffer.name}' is written at an index "
                f"that depends on the reduction variable '{name}'"
            )


Rule = Callable[[Site], Texts]
ITERATION: tuple[Rule, ...] = (
    _kinds,
    _coordinates,
    _axes_known,
    _axis_once,
    _merged,
    _attached,
    _axis_order,
    _fused,
    parts_problems,
    range_problems,
    gallop_problems,
    _init_stores,
)
STATEMENT: tuple[Rule, ...] = (
    _statement_kind,
    _races,
    _loop_variable,
    _loop_step,
    _defined,
    _index_type,
    operation_problems,
    _init_reduction,
    _init_reads,
    _reduction_write,
)
