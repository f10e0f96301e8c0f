"""Make the init of every reduction run, even where the reduction is empty.

A reduction block whose loop has extent zero never runs its `T.init()`. Before::

    for j in range(J_indptr[vi + 1] - J_indptr[vi]):
        with T.sblock("spmm1"):
            vj = T.axis.reduce(..., j)
            with T.init():
                C[vi] = 0.0
            C[vi] = C[vi] + A[vi, vj]

After::

    with T.sblock("spmm1_init"):
        C[vi] = 0.0
    for j in range(J_indptr[vi + 1] - J_indptr[vi]):
        with T.sblock("spmm1"):
            C[vi] = C[vi] + A[vi, vj]

TVM's `decompose_reduction` does this for one named block, and refuses blocks that share their
output. Here nothing can refuse: an init is idempotent, and only its place changes. Reductions
over threads are left alone: TVM separates their init from the loop itself.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import nodes_of, stores_of, substitute
from sparsetir.sparse_ir.tile_marks import conjuncts
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    block_with,
    dtype_of,
    free_vars,
    loop_with,
    map_parts,
    with_body,
)

# Inits still to be placed: the loop to place each in front of (None: the block itself), its nest.
_Pending = list[tuple[Any, tirx.Stmt]]


def hoist_init(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move the init of every reduction block in front of its outermost reduction loop.

    Raises LoweringError for a reduction over threads whose init has already been separated.
    """
    pending: _Pending = []
    body = _visit(func.body, [], pending)
    assert not pending, "an init found no place"
    return with_body(func, body)


def _visit(stmt: Any, path: list[Any], pending: _Pending) -> Any:
    """Rewrite a statement below the loops `path` of its block.

    pending : inits to place above are added, and those placed here removed
    """
    if isinstance(stmt, s_tir.SBlockRealize):
        return _realize(stmt, path, pending)
    inside = [*path, stmt] if isinstance(stmt, tirx.For) else path
    new = map_parts(stmt, lambda part: _visit(part, inside, pending))
    here = [init for target, init in pending if target is stmt]
    pending[:] = [(target, init) for target, init in pending if target is not stmt]
    return as_one([*here, new])


def _realize(realize: Any, path: list[Any], pending: _Pending) -> Any:
    block = realize.block
    if block.init is None:
        _refuse_race(realize, path)
    if not any(map(_needs_parent, nodes_of((s_tir.SBlock, tirx.For), realize))):
        return realize
    inner: _Pending = []
    body = _visit(block.body, [], inner)
    assert not inner, "an init found no place"
    hoisted = None if block.init is None else _init_nest(realize, path)
    changes = {} if hoisted is None else {"reads": [*block.writes, *block.reads], "init": None}
    new_block = block_with(block, body=body, **changes)
    new = s_tir.SBlockRealize(realize.iter_values, realize.predicate, new_block, realize.span)
    target, nest = hoisted or (None, None)
    if target is not None:
        pending.append((target, nest))
    return new if nest is None or target is not None else tirx.SeqStmt([nest, new])


def _needs_parent(node: Any) -> bool:
    """Whether a block or loop requires a look into the block around it."""
    if isinstance(node, tirx.For):
        return node.kind == tirx.ForKind.THREAD_BINDING
    return node.init is not None


def _refuse_race(realize: Any, path: list[Any]) -> None:
    """Refuse threads that share a reduction without an init: TVM derives the combiner from it."""
    threads = {loop.loop_var: loop for loop in path if loop.kind == tirx.ForKind.THREAD_BINDING}
    block = realize.block
    if not threads:
        return
    for iter_var, value in zip(block.iter_vars, realize.iter_values, strict=True):
        shared = free_vars(value) & set(threads)
        if iter_var.iter_type == tirx.IterVar.CommReduce and shared and stores_of(block.body):
            tag = threads[next(iter(shared))].thread_binding.thread_tag
            raise LoweringError(
                f"block '{block.name_hint}': its reduction is bound to {tag}, and it has no init: "
                "the threads would race; bind a loop of a block that has its init, and do not "
                "decompose that block"
            )


def _init_nest(realize: Any, path: list[Any]) -> tuple[Any, tirx.Stmt] | None:
    """The init under its own loops, and the loop to place it in front of."""
    block = realize.block
    reduced: set[Any] = set()
    for iter_var, value in zip(block.iter_vars, realize.iter_values, strict=True):
        if iter_var.iter_type != tirx.IterVar.DataPar:
            reduced |= free_vars(value)
    reduce_loops = [loop for loop in path if loop.loop_var in reduced]
    if any(loop.kind == tirx.ForKind.THREAD_BINDING for loop in reduce_loops):
        return None
    first = path.index(reduce_loops[0]) if reduce_loops else len(path)
    inside = path[first:]
    inside_vars = {loop.loop_var for loop in inside}

    loops: list[Any] = []  # what the init nest iterates, outermost first
    renamed: dict[Any, Any] = {}
    iter_vars: list[Any] = []
    values: list[Any] = []
    rename_iter: dict[Any, Any] = {}
    for iter_var, value in zip(block.iter_vars, realize.iter_values, strict=True):
        if iter_var.iter_type != tirx.IterVar.DataPar:
            continue
        used = free_vars(value) & inside_vars
        fresh = tirx.Var(iter_var.var.name, dtype_of(iter_var.var))
        rename_iter[iter_var.var] = fresh
        if used & reduced:
            # The spatial position shares a loop with the reduction: it gets its own.
            variable = tirx.Var(iter_var.var.name.removeprefix("v"), dtype_of(fresh))
            zero = as_dtype(0, dtype_of(variable))
            loops.append(
                tirx.For(variable, zero, iter_var.dom.extent, tirx.ForKind.SERIAL, tirx.Evaluate(0))
            )
            value = variable
        else:
            for loop in inside:
                if loop.loop_var in used and loop.loop_var not in renamed:
                    renamed[loop.loop_var] = tirx.Var(loop.loop_var.name, dtype_of(loop.loop_var))
                    loops.append(loop)
            value = substitute(value, renamed)
        iter_vars.append(tirx.IterVar(iter_var.dom, fresh, iter_var.iter_type))
        values.append(value)

    predicate = tirx.const(True, "bool")
    for term in conjuncts(realize.predicate):
        if not free_vars(term) & reduced:
            predicate = tirx.all(predicate, substitute(term, renamed))
    init_block = s_tir.SBlock(
        iter_vars,
        [],
        [substitute(w, rename_iter) for w in block.writes],
        f"{block.name_hint}_init",
        substitute(block.init, rename_iter),
    )
    nest: tirx.Stmt = s_tir.SBlockRealize(values, predicate, init_block)
    for loop in reversed(loops):
        var = renamed.get(loop.loop_var, loop.loop_var)
        extent = substitute(loop.extent, renamed)
        nest = loop_with(loop, loop_var=var, extent=extent, body=nest)
    return (reduce_loops[0] if reduce_loops else None), nest
