"""Parallel loops over rows, in parts of about equal work.

TVM gives each thread an equal number of visits of a parallel loop, but visits of long rows take
longer. If the number of elements of a row is a difference of offsets, the offsets give the work
before a row; the start of a part is found by a search for its share. Before::

    for i in T.parallel(m):                                # marked by :data:`EQUAL_WORK`
        for j in range(indptr[i + 1] - indptr[i]):
            ...

After `equal_work(func, 16)`, where `work(i)` is `indptr[i] + 2 * i`::

    for part in T.parallel(16):
        first = ...                                        # the first i with work(i) >= share(part)
        last = ...                                         # the same for part + 1
        for i in range(last - first):
            for j in range(indptr[first + i + 1] - indptr[first + i]):
                ...

For nested offsets, such as the levels of CSF, the work is the sum over all levels. Like the stage-I
primitive `divide(..., by="work")`, but without an array. (Senanayake's thesis, chapter 5.)
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.nodes import nodes_of, stores_of, substitute
from sparsetir.sparse_ir.search import load_one, lower_bound, scalar_buffer
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, loop_over, loop_with, uncast, values_of
from sparsetir.sparse_ir.traversal import map_expr

# Annotation of a parallel loop that may be divided into such parts.
EQUAL_WORK = "sparsetir.equal_work"
# Work of a row besides its elements.
ROW_COST = 2
# The least number of parts: a kernel may be exported to a machine with more threads than this one.
LEAST_PARTS = 16


def equal_work(func: tirx.PrimFunc, threads: int) -> tirx.PrimFunc:
    """Divide the marked loops of a stage-III function into parts.

    threads : the divisor of the number of parts
    """
    parts = threads * -(-LEAST_PARTS // threads)

    def visit(loop: Any) -> Any:
        if EQUAL_WORK not in loop.annotations:
            return loop
        rest = {k: v for k, v in loop.annotations.items() if k != EQUAL_WORK}
        loop = loop_with(loop, annotations=rest)
        if loop.kind != tirx.ForKind.PARALLEL or threads == 1:
            return loop
        offsets = _offsets(loop)
        return _in_parts(loop, offsets, parts) if offsets else loop

    marked = any(EQUAL_WORK in loop.annotations for loop in nodes_of(tirx.For, func.body))
    return func.with_body(map_expr(func.body, [(tirx.For, visit)])) if marked else func


def _offsets(loop: Any) -> list[Any]:
    """Loads of offsets at a loop's variable: the elements before its visit, per level."""
    written = {store.buffer for store in stores_of(loop.body)}
    values: dict[Any, Any] = {}
    for realize in nodes_of(s_tir.SBlockRealize, loop.body):
        values |= values_of(realize)
    levels: list[Any] = []
    place: Any = loop.loop_var  # the index of a level's offset
    for inner in nodes_of(tirx.For, loop.body):
        extent = uncast(inner.extent)
        if not isinstance(extent, tirx.Sub):
            continue
        after, before = uncast(extent.a), uncast(extent.b)
        if not all(isinstance(x, ir.TensorLoad) and len(x.indices) == 1 for x in (after, before)):
            continue
        if not after.source.same_as(before.source) or before.source in written:
            continue
        first_of = substitute(before.indices[0], values)
        ends = substitute(after.indices[0], values)
        if affine(first_of) != affine(place) or affine(ends) != affine(first_of + 1):
            continue
        start = levels[-1] if levels else loop.loop_var
        levels.append(tirx.BufferLoad(before.source, [as_dtype(start, dtype_of(first_of))]))
        place = as_dtype(substitute(before, values), dtype_of(first_of)) + as_dtype(
            inner.loop_var, dtype_of(first_of)
        )
    return levels


def _in_parts(loop: Any, offsets: list[Any], parts: int) -> Any:
    """A parallel loop over parts of another one."""
    var, kind = loop.loop_var, dtype_of(loop.loop_var)
    part, first, last, row = (
        tirx.Var(f"{var.name}_{x}", kind) for x in ("part", "first", "last", "row")
    )
    low, high = (scalar_buffer(f"{var.name}_{end}", kind) for end in ("lo", "hi"))

    def work(number: Any) -> Any:
        before = (as_dtype(substitute(load, {var: number}), "int64") for load in offsets)
        return sum(before, as_dtype(number, "int64") * as_dtype(ROW_COST, "int64"))

    begin, end = work(as_dtype(0, kind)), work(loop.extent)
    steps: list[Any] = []
    for result, end_of in ((first, part), (last, part + as_dtype(1, kind))):
        share = tirx.Var(f"{result.name}_share", "int64")
        wanted = (end - begin) * as_dtype(end_of, "int64")
        steps.append(tirx.Bind(share, begin + tirx.floordiv(wanted, as_dtype(parts, "int64"))))
        steps += lower_bound(low, high, loop.extent, lambda n, share=share: work(n) < share)
        steps.append(tirx.Bind(result, load_one(low)))
    body = substitute(loop.body, {var: first + row})
    steps.append(
        loop_with(loop, loop_var=row, extent=last - first, kind=tirx.ForKind.SERIAL, body=body)
    )
    block = s_tir.SBlock(
        [], [], [], f"{var.name}_parts", tirx.SeqStmt(steps), alloc_buffers=[low, high]
    )
    return loop_over(part, parts, s_tir.SBlockRealize([], True, block), tirx.ForKind.PARALLEL)
