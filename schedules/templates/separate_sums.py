"""Accumulate a result of several iterations in a wider type, and round it once."""

from __future__ import annotations

import re
from typing import Any

from tvm import tirx

from sparsetir.formats.preprocess import statements
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    sparse_iterations,
)
from sparsetir.sparse_ir.reduction import widened
from sparsetir.sparse_ir.traversal import map_expr


def sums_in_one_iteration(func: SparseFunc) -> bool:
    """Whether a single iteration computes sums, each row in one piece with its features inside.

    Then registers of the default schedule hold all terms of an element in a wider type, and nothing
    is rounded before the last one. Rows of a block, inside its columns, are accumulated in memory.
    """
    sums = [it for it in sparse_iterations(func) if "R" in it.kinds]
    if len(sums) != 1 or not re.fullmatch("S+R+S", sums[0].kinds):
        return False
    kind_of = {axis.name: kind for axis, _, kind in sums[0].axis_of()}
    rows = [axis for axis, _, kind in sums[0].axis_of() if kind == "S"]
    above = [a.name for axis in rows for a in axis.ancestors()[:-1]]
    return all(axis.unique for axis in rows) and all(kind_of.get(a) != "R" for a in above)


def separate_sums(func: SparseFunc, result: str, dtype: str) -> SparseFunc:
    """Accumulate a result in a separate array of a wider type.

    Before::

        with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
            C[i, k] = T.float16(0.0)
        with T.sp_iter([O, IR, JC, K], "SSRS", "spmm_row_ell_4") as [o, ir, jc, k]:
            C[ir, k] = T.Cast("float16", T.Cast("float32", C[ir, k]) + ...)

    After `separate_sums(func, "C", "float32")`::

        C_sum = T.alloc_sparse_buffer((I, K), "float32")
        with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
            C_sum[i, k] = T.float32(0.0)
        with T.sp_iter([O, IR, JC, K], "SSRS", "spmm_row_ell_4") as [o, ir, jc, k]:
            C_sum[ir, k] = C_sum[ir, k] + ...
        with T.sp_iter([I, K], "SS", "C_round") as [i, k]:
            C[i, k] = T.Cast("float16", C_sum[i, k])
    """
    target = func.buffer(result)
    axes = list(target.axes or ())
    name = f"{result}_sum"
    sums = buffer_var([a.length for a in axes], dtype, name)

    def held(load: Any) -> Any:
        mine = load.source.same_as(target.var)
        return tirx.BufferLoad(sums, load.indices) if mine else None

    def store(node: Any) -> Any:
        if not node.buffer.same_as(target.var):
            return node
        return tirx.BufferStore(sums, widened(node.value, dtype, held), node.indices)

    point: list[Any] = [tirx.Var(str(a.name).lower(), a.idtype) for a in axes]
    value = tirx.Cast(target.dtype, tirx.BufferLoad(sums, point))
    last = SparseIteration(
        span=None, axes=axes, kinds="S" * len(axes), name=f"{result}_round", vars=point, init=None,
        body=tirx.BufferStore(target.var, value, point), annotations={}
    )  # fmt: skip
    body = [map_expr(part, [(tirx.BufferStore, store)]) for part in statements(func)]
    return func.replace(
        buffers=[*func.buffers, SparseBuffer(var=sums, axes=axes, handle=None)],
        body=tirx.SeqStmt([*body, last]),
    )
