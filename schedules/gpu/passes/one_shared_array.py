"""Arrays in shared memory that are too large for a kernel become one that its launch asks for.

A kernel may declare 48 KB; what is more is one dynamic array. Before, and after::

    A_ws: 8 x 64 x 72 float16 in "shared"        shared_tiles: flat float16 in "shared.dyn"
    B_ws: 8 x 32 x 72 float16 in "shared"
    ... A_ws[s, i, j] ... B_ws[s, i, j]          ... shared_tiles[s * 4608 + i * 72 + j] ...
"""

from __future__ import annotations

import math
from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.schedules.gpu.passes.software_pipeline import MAX_SHARED
from sparsetir.schedules.passes.nests import element_bytes
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.expressions import as_dtype
from sparsetir.sparse_ir.nodes import buffer_var, map_expr, nodes_of, substitute
from sparsetir.sparse_ir.statements import block_with

__all__ = ["one_shared_array"]

WHO = "one_shared_array"
ALIGNED = 64  # elements that an array begins at a multiple of


def one_shared_array(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-II function with one dynamic array, where its shared ones take more than 48 KB.

    Raises ScheduleError for arrays of several types.
    """
    arrays = [
        s.buffer
        for s in nodes_of(tirx.AllocBuffer, func.body)
        if s.buffer.ty.storage_scope == "shared"
    ]
    shapes = [[int(n) for n in b.ty.shape] for b in arrays]
    sizes = [-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes]
    if sum(n * element_bytes(b) for n, b in zip(sizes, arrays, strict=True)) <= MAX_SHARED:
        return func
    dtypes = {str(b.ty.dtype) for b in arrays}
    if len(dtypes) != 1:
        raise ScheduleError(f"{WHO}: expected shared arrays of one type, got {sorted(dtypes)}")
    begins = {b: (sum(sizes[:n]), shapes[n]) for n, b in enumerate(arrays)}
    whole = buffer_var([sum(sizes)], dtypes.pop(), "shared_tiles", "shared.dyn", align=ALIGNED)

    def at(buffer: Any, indices: Any) -> list[Any]:
        begin, shape = begins[buffer]
        place: Any = as_dtype(0, "int32")
        for index, length in zip(indices, shape, strict=True):
            place = place * length + as_dtype(index, "int32")
        return [place + as_dtype(begin, "int32")]

    def load(node: Any) -> Any:
        if node.source not in begins:
            return node
        return tirx.BufferLoad(whole, at(node.source, node.indices))

    def store(node: Any) -> Any:
        if node.buffer not in begins:
            return node
        return tirx.BufferStore(whole, node.value, at(node.buffer, node.indices))

    def allocation(node: Any) -> Any:
        if node.buffer not in begins:
            return node
        return tirx.AllocBuffer(whole) if node.buffer.same_as(arrays[0]) else tirx.Evaluate(0)

    def block(node: Any) -> Any:
        return block_with(
            node,
            reads=[r for r in node.reads if r.source not in begins],
            writes=[r for r in node.writes if r.source not in begins],
        )

    rules = [
        (ir.TensorLoad, load), (tirx.BufferStore, store), (tirx.AllocBuffer, allocation),
        (s_tir.SBlock, block),
    ]  # fmt: skip
    body = map_expr(func.body, rules)
    return func.with_body(substitute(body, dict.fromkeys(arrays, whole)))
