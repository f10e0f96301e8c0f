"""Promises about extents: checked when a kernel is called, relied upon by its code."""

from __future__ import annotations

from typing import Any

from tvm import ir

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, SparseIteration, declared
from sparsetir.sparse_ir.schedule.loops import show

__all__ = ["promised"]

PROMISES = "promises"


def promised(
    who: str, func: SparseFunc, it: SparseIteration, extent: Any, kind: str, value: int
) -> SparseFunc:
    """The function with one more promise in its attribute "promises".

    extent : an integer parameter of the function
    kind : "exact", "max", "min" or "multiple", of `value`
    """
    if not isinstance(extent, ir.Var) or str(extent.name) not in declared(func).params:
        raise ScheduleError(
            f"{who}: expected the length of the axis to be a parameter of '{func.name}' or a "
            f"number, for a promise that kernels can check, got {extent}\n{show(it)}"
        )
    new = {"param": str(extent.name), "kind": kind, "value": value}
    old = [dict(p.items()) for p in func.attrs.get(PROMISES, [])]
    if new in [{k: (int(v) if k == "value" else str(v)) for k, v in p.items()} for p in old]:
        return func
    return func.with_attr(PROMISES, [*old, new])
