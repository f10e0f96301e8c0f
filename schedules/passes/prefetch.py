"""Prefetch gathered rows some nonzeros before they are needed (CPU).

The row of B of a sparse element is anywhere in memory, and hardware cannot predict it. The
index array is read in order, so the address some elements ahead is known. Before::

    for j in range(J_indptr[vi + 1] - J_indptr[vi]):
        for k in T.vectorized(16):
            with T.sblock("sum0"): ...                # acc[k] += A[vi, j] * B[J_indices[vi, j], k]

After `prefetch_gathered(func, "sum", "B", distance=8, span=16)`, with 64-byte lines::

    for j in range(J_indptr[vi + 1] - J_indptr[vi]):
        prefetch(address of B[J_indices[vi, min(j + 8, nnz - 1 - J_indptr[vi])], 0])
        for k in T.vectorized(16):
            with T.sblock("sum0"): ...

Positions continue from row to row, so short rows are prefetched too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm_ffi import structural_equal

from sparsetir.schedules.passes.nests import is_offset_of, of_params, with_loop
from sparsetir.schedules.passes.parallel_loops import innermost_block
from sparsetir.sparse_ir.computed import COMPUTED
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseFunc,
    SparseIteration,
    loads_of,
    nodes_of,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.position_space import LAYOUTS, in_one_row
from sparsetir.sparse_ir.recipes.locality import reuse_distance
from sparsetir.sparse_ir.tir import as_dtype, as_one, dtype_of, free_vars, loop_with, values_of

CACHE_LINE = 64
# Of the default schedule: visits ahead, and vectors of the narrowest tile that prefetches rows.
PREFETCH, PREFETCHING = 8, 4
REUSE = "_reuse"  # suffix of the parameter's name, after that of an array of indices


def prefetch_gathered(
    func: tirx.PrimFunc, iteration: Any, buffer: str, distance: int, span: int
) -> tirx.PrimFunc:
    """Prefetch an iteration's reads of a buffer at a loaded index; one of the last steps.

    func : a stage-II function, which is not modified
    iteration : a sparse iteration, by reference or name, whose innermost block reads `buffer`
        at `indices[..., j]`, where j is one of its loops
    distance : the number of visits of that loop to prefetch ahead
    span : the elements of a row that one visit needs, from the first that the block reads

    Raises ScheduleError if the block has no such read.
    """
    for what, value in (("distance", distance), ("span", span)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(
                f"prefetch_gathered: argument '{what}': expected a positive integer, got {value!r}"
            )
    realize, loops, values = _visits(func, iteration, "prefetch_gathered")
    block = realize.block.name_hint
    load = next((x for x in gathering_loads(realize.block.body) if x.source.name == buffer), None)
    if load is None:
        raise ScheduleError(
            f"prefetch_gathered: argument 'buffer': block '{block}' reads no '{buffer}' at an "
            "index that it loads"
        )
    index = next(i for i in load.indices if isinstance(i, ir.TensorLoad))
    position = substitute(index.indices[-1], values)
    depth = [n for n, loop in enumerate(loops) if loop.loop_var in free_vars(position)]
    if not depth:
        raise ScheduleError(
            "prefetch_gathered: argument 'iteration': expected one with a loop of its own over "
            f"{position}, where '{index.source.name}' is read, got that of block '{block}'; after "
            "precompute it is the second of the iterations that it returns"
        )
    inner = {lp.loop_var: as_dtype(0, dtype_of(lp.loop_var)) for lp in loops[depth[-1] + 1 :]}
    values = {var: substitute(value, inner) for var, value in values.items()}
    prefetches = row_ahead(func, load, values, distance, span)
    return _with_first(func, loops[depth[-1]].loop_var, prefetches)


def prefetch_streams(func: tirx.PrimFunc, iteration: Any, distance: int) -> tirx.PrimFunc:
    """Prefetch sequential reads of an iteration; one of the last steps.

    Hardware prefetchers recognise such streams, but stop at the end of a page, and do not fetch far
    ahead. (Zen 5, one thread, SpMV: 1.0 to 3.5 times as fast with 900,000 elements and more, 0.93
    to 1.1 times with fewer.) Before::

        for s in range(S_indptr[vg + 1] - S_indptr[vg]):
            for l in T.vectorized(16):
                with T.sblock("sum0"): ...                # acc[l] += A[vg, s, l] * ...

    After `prefetch_streams(func, "sum", distance=32)`::

        for s in range(S_indptr[vg + 1] - S_indptr[vg]):
            prefetch(address of A[vg, s + 32, 0])
            for l in T.vectorized(16):
                with T.sblock("sum0"): ...

    The address may be past the end of the buffer: such a prefetch has no effect.

    func : a stage-II function, which is not modified
    iteration : a sparse iteration, by reference or name, whose innermost block is in two loops of
        its own, the inner one a vector that reads at most a cache line of a buffer
    distance : the number of visits of the outer one to prefetch ahead

    Raises ScheduleError if the block has no sequential reads.
    """
    realize, loops, values = _visits(func, iteration, "prefetch_streams")
    reads = [
        tirx.BufferLoad(load.source, [substitute(i, values) for i in load.indices])
        for load in nodes_of(ir.TensorLoad, realize.block.body)
        if not nodes_of(ir.TensorLoad, load.indices[-2:])
    ]
    s, l = (loop.loop_var for loop in loops[-2:]) if len(loops) > 1 else (None, None)
    streams = [x for x in reads if s is not None and {s, l} <= free_vars(x)]
    if not streams:
        raise ScheduleError(
            f"prefetch_streams: argument 'iteration': expected '{realize.block.name_hint}' to read "
            f"at two loops of its own, got {[str(x) for x in reads]}"
        )
    ahead = {s: s + as_dtype(distance, dtype_of(s)), l: as_dtype(0, dtype_of(l))}
    prefetches = [
        prefetch(tirx.BufferLoad(x.source, [substitute(i, ahead) for i in x.indices]))
        for x in streams
    ]
    return _with_first(func, s, prefetches)


def _with_first(func: tirx.PrimFunc, var: Any, first: list[tirx.Stmt]) -> tirx.PrimFunc:
    """The function with statements at the start of each visit of a loop."""
    return with_loop(func, var, lambda x: loop_with(x, body=tirx.SeqStmt([*first, x.body])))


def rows_ahead(
    func: tirx.PrimFunc, body: Any, visited: Any, along: Any, values: Any, span: int, cache: int
) -> list[tirx.Stmt]:
    """Prefetches of rows at sequentially loaded indices, unless they are near.

    body : the statement with the loads, in terms of loops
    visited : the index of the loads of indices
    along : the variable of the loop over an element of a row
    values, span : see :func:`row_ahead`
    cache : bytes; rows of smaller buffers are near, and so are rows that the pattern reuses while
        half of it holds them
    """
    layouts = {str(k): v for k, v in func.attrs[LAYOUTS].items()}
    reused = {str(p.name): p for p in func.params if isinstance(p.ty, ir.PrimType)}
    out: list[tirx.Stmt] = []
    loads = gathering_loads(body)
    for n, load in enumerate(loads):
        if any(structural_equal(load, x) for x in loads[:n]):
            continue  # the term of a maximum occurs several times
        index = next(i for i in load.indices if isinstance(i, ir.TensorLoad))
        layout, source = layouts.get(index.source.name), layouts.get(load.source.name)
        if layout is None or source is None:  # plain arrays, not over axes
            continue
        gathers = index.indices[-1].same_as(visited)
        dense = all(axis.kind == "dense_fixed" for axis in source.axes)
        if not gathers or not dense or not is_offset_of(load.indices[-1], along):
            continue
        used = reused.get(f"{index.source.name}{REUSE}")
        extents = [as_dtype(extent, "int64") for extent in load.source.ty.shape]
        if used is not None:
            row = next(n for n, i in enumerate(load.indices) if i.same_as(index))
            extents[row] = tirx.min(extents[row], used)
        size = bytes_of(load.source, extents)
        prefetches = as_one(row_ahead(func, load, values, PREFETCH, span))
        near = cache if used is None else cache // 2  # a reuse distance ignores other operands
        out.append(tirx.IfThenElse(size > as_dtype(near, "int64"), prefetches, None))
    return out


def bytes_of(buffer: Any, extents: Sequence[Any] | None = None) -> Any:
    """The size of a buffer in bytes, or of a part with other extents; an int64."""
    size = as_dtype(tvm.DataType(str(buffer.ty.dtype)).bits // 8, "int64")
    for extent in buffer.ty.shape if extents is None else extents:
        size = size * as_dtype(extent, "int64")
    return size


def with_reuse_distances(func: SparseFunc) -> SparseFunc:
    """A stage-I function with a parameter for each array of indices that gathers rows.

    For :func:`rows_ahead`: the number of rows that a cache must hold to keep those reused soon.
    """
    computed_by: dict[str, dict[str, Any]] = {}
    computed = dict(func.attrs.get(COMPUTED, {}).items())
    for it in sparse_iterations(func):
        for array, handle in _indices_of_rows(func, it):
            how = {"recipe": reuse_distance.__name__, "indices": f"${handle}"}
            computed_by[f"{array}{REUSE}"] = how
    computed_by = {name: how for name, how in computed_by.items() if fresh_name(func, name) == name}
    if not computed_by:
        return func
    params = [*func.params, *(ir.Var(name, ir.PrimType("int64")) for name in computed_by)]
    return func.with_attr(COMPUTED, {**computed, **computed_by}).replace(params=params)


def _indices_of_rows(func: SparseFunc, it: SparseIteration) -> Iterator[tuple[str, str]]:
    """Arrays by whose values an iteration indexes a dense buffer, other than along its last axis.

    Coordinates, or computed ones: the name in stage II, and the parameter's.
    """
    computed = func.attrs.get(COMPUTED, {})
    handles = {b.var: str(b.handle.name) for b in func.buffers if b.handle is not None}
    dense = [b for b in func.buffers if b.axes and all(a.kind == "dense_fixed" for a in b.axes)]
    for buffer in dense:
        for load in loads_of(it.body, buffer.var):
            for index in load.indices[:-1]:
                if isinstance(index, ir.TensorLoad) and handles.get(index.source, "") in computed:
                    yield index.source.name, handles[index.source]
                of = [a for a, var, _ in it.axis_of() if a.is_sparse and index.same_as(var)]
                for by in (a for a in of if a.indices is not None):
                    yield f"{by.name}_indices", str(by.indices.name)


def row_ahead(
    func: tirx.PrimFunc, load: Any, values: dict[Any, Any], distance: int, span: int
) -> list[tirx.Stmt]:
    """Prefetches of the row that a load at a loaded index reads some visits later.

    load : `B[.., indices[.., j], .., k]`
    values : the variables' values, for k that of the first element
    distance, span : as for :func:`prefetch_gathered`
    """
    index = next(i for i in load.indices if isinstance(i, ir.TensorLoad))
    ahead = _position_ahead(func, index, substitute(index.indices[-1], values), distance)
    ahead = tirx.BufferLoad(index.source, [*index.indices[:-1], ahead])
    place = [substitute(ahead if i.same_as(index) else i, values) for i in load.indices]
    per_line = CACHE_LINE * 8 // tvm.DataType(str(load.source.ty.dtype)).bits
    prefetches: list[Any] = []
    for first in range(0, span, per_line):
        last = place[-1] + as_dtype(first, dtype_of(place[-1]))
        prefetches.append(prefetch(tirx.BufferLoad(load.source, [*place[:-1], last])))
    return prefetches


def prefetch(load: Any) -> tirx.Stmt:
    """Prefetch the cache line of a load for reading, into all cache levels."""
    read, keep, data = (tirx.IntImm("int32", n) for n in (0, 3, 1))
    address = tirx.address_of(load)
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, read, keep, data))


def _position_ahead(func: tirx.PrimFunc, index: Any, position: Any, distance: int) -> Any:
    """The position `distance` further, or the last one that exists."""
    layout = {str(k): v for k, v in func.attrs[LAYOUTS].items()}[index.source.name]
    left = _from_here(func, layout, list(index.indices))  # of 64 bits where they could overflow 32
    one, further = (as_dtype(n, dtype_of(left)) for n in (1, distance))
    ahead = tirx.min(as_dtype(position, dtype_of(left)) + further, left - one)
    return as_dtype(ahead, dtype_of(position))


def _from_here(func: tirx.PrimFunc, layout: Any, positions: list[Any]) -> Any:
    """The number of an axis's elements from the first under this parent to the end of the axis.

    positions : of the axis's ancestors and its own; they select as many axes of the layout
    """
    *above, axis = layout.axes[: len(positions)]
    size = partial(of_params, func)
    if not above or axis.kind == "dense_fixed":
        return size(axis.length)
    *parents, _ = positions
    if in_one_row(axis):
        return size(axis.nnz)
    if axis.is_variable:
        indptr = layout.indptr[len(above)]
        starts = next(p for p in func.params if tirx.is_buffer_var(p) and p.name == indptr)
        begin = tirx.BufferLoad(starts, parents)
        return size(axis.nnz) - as_dtype(begin, dtype_of(axis.nnz))
    rows = as_dtype(_from_here(func, layout, parents), "int64") - as_dtype(parents[-1], "int64")
    return rows * as_dtype(size(axis.nnz_cols), "int64")


def _visits(
    func: tirx.PrimFunc, iteration: Any, caller: str
) -> tuple[Any, list[Any], dict[Any, Any]]:
    """An iteration's innermost block, the loops around it, and the values of its variables."""
    sch = s_tir.Schedule(func)
    block = sch.get(innermost_block(sch, iteration, caller))
    realize = next(r for r in nodes_of(s_tir.SBlockRealize, func.body) if r.block.same_as(block))
    # Prefetches that were inserted before are statements between two of the loops.
    loops = [
        loop
        for loop in nodes_of(tirx.For, func.body)
        if any(realize.same_as(x) for x in nodes_of(s_tir.SBlockRealize, loop.body))
    ]
    return realize, loops, values_of(realize)


def gathering_loads(body: Any) -> list[Any]:
    """The loads of a block's body at a loaded index."""
    loads = nodes_of(ir.TensorLoad, body)
    return [x for x in loads if any(isinstance(i, ir.TensorLoad) for i in x.indices)]
