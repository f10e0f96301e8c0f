"""Parallel and thread loops by the lowering's proof that they have no races.

TVM's `parallel` and `bind` ask for more than freedom of races: that each block is the only writer
of its output, for one, also where a buffer is private to a loop body. A schedule marks such loops
instead, and `apply_marks` makes them what they are marked as when all else is done.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import map_expr

__all__ = ["apply_marks", "mark"]

# Loop annotation: what `apply_marks` makes of the loop.
KIND = "sparsetir.kind"


def mark(sch: Any, loop: Any, kind: str) -> None:
    """Mark a loop of a schedule as "parallel", or to be bound to a thread such as "threadIdx.x"."""
    sch.annotate(loop, KIND, kind)


def apply_marks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the marked loops parallel or bind them to threads."""

    def visit(loop: Any) -> Any:
        kind = loop.annotations.get(KIND)
        if kind is None:
            return loop
        rest = {k: v for k, v in loop.annotations.items() if k != KIND}
        if kind == "parallel":
            how, thread = tirx.ForKind.PARALLEL, None
        else:
            how, thread = tirx.ForKind.THREAD_BINDING, thread_axis(str(kind))
        return tirx.For(loop.loop_var, loop.min, loop.extent, how, loop.body, thread, rest)

    return func.with_body(map_expr(func.body, [(tirx.For, visit)]))


def thread_axis(tag: str) -> Any:
    """The iteration variable of a thread dimension."""
    return tirx.IterVar(None, tirx.Var(tag, "int32"), tirx.IterVar.ThreadIndex, tag)
