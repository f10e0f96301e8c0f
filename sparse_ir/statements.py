"""Loops and blocks of stage II, made, changed and read."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from sparsetir.sparse_ir.expressions import as_dtype, dtype_of


def loop_over(
    var: Any,
    extent: Any,
    body: Any,
    kind: Any = tirx.ForKind.SERIAL,
    thread: Any = None,
    annotations: Any = None,
) -> tirx.For:
    """A loop from 0 on. extent : an expression of the variable's type, or an int"""
    start, extent = as_dtype(0, dtype_of(var)), as_dtype(extent, dtype_of(var))
    return tirx.For(var, start, extent, kind, body, thread, annotations)


def as_one(statements: list[Any]) -> Any:
    """Statements as one; TVM has no sequence of a single one."""
    return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]


def barrier() -> Any:
    """All threads of a block wait for each other."""
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def loop_with(loop: Any, **changes: Any) -> tirx.For:
    """A loop with some fields changed."""
    fields = ("loop_var", "min", "extent", "kind", "body", "thread_binding", "annotations",
              "step", "span")  # fmt: skip
    return tirx.For(*(changes.get(f, getattr(loop, f)) for f in fields))


def block_with(block: Any, **changes: Any) -> Any:
    """A block with some fields changed."""
    fields = ("iter_vars", "reads", "writes", "name_hint", "body", "init", "alloc_buffers",
              "match_buffers", "annotations", "span")  # fmt: skip
    return s_tir.SBlock(*(changes.get(f, getattr(block, f)) for f in fields))


def nest_of(stmt: Any) -> tuple[list[Any], Any]:
    """Loops with nothing but each other in them, from a statement on, and what the last holds."""
    loops: list[Any] = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    return loops, stmt


def values_of(realize: Any) -> dict[Any, Any]:
    """What the variables of a block are."""
    return {v.var: x for v, x in zip(realize.block.iter_vars, realize.iter_values, strict=True)}
