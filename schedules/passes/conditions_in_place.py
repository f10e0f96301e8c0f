"""Keep conditions inside branches that have an `else`.

`HoistIfThenElse` of TVM 0.27 hoists a condition out of loops together with everything around it,
including an `else` for which it does not hold. It skips conditions with an `else` of their own.
Values that are bound next to the condition do not keep it there: unused ones are removed first.
Before and after::

    for i in range(m):                for i in range(m):
        if F[i]:                          if F[i]:
            if n > 3: ...                     if n > 3: ...
        else: ...                             else: pass
                                          else: ...
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from sparsetir.sparse_ir.tir import block_with, loop_with, with_body
from sparsetir.sparse_ir.traversal import map_expr


def conditions_in_place(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-III function whose conditions TVM does not hoist out of other branches."""

    def visit(branch: Any) -> Any:
        if branch.else_case is None:
            return branch
        cases = _in_place(branch.then_case), _in_place(branch.else_case)
        return tirx.IfThenElse(branch.condition, *cases, branch.span)

    return with_body(func, map_expr(func.body, [(tirx.IfThenElse, visit)]))


def _in_place(case: Any) -> Any:
    """A case whose conditions, if loops and branches hold nothing else, get an `else`."""
    if isinstance(case, tirx.For):
        return loop_with(case, body=_in_place(case.body))
    if isinstance(case, s_tir.SBlockRealize):
        block = block_with(case.block, body=_in_place(case.block.body))
        return s_tir.SBlockRealize(case.iter_values, case.predicate, block, case.span)
    if isinstance(case, tirx.SeqStmt):
        bound = [isinstance(step, tirx.Bind) for step in case.seq]
        if bound.count(False) != 1:
            return case
        steps = [step if b else _in_place(step) for step, b in zip(case.seq, bound, strict=True)]
        return tirx.SeqStmt(steps, case.span)
    if not isinstance(case, tirx.IfThenElse) or case.else_case is not None:
        return case
    then = _in_place(case.then_case)
    return tirx.IfThenElse(case.condition, then, tirx.Evaluate(tirx.IntImm("int32", 0)), case.span)
