"""Reductions of several vectors at once by a tree of shuffles (CPU).

Reducing the lanes of one vector takes a shuffle and an addition per halving, on ever fewer useful
lanes. Several vectors share them: a step deinterleaves the lanes of two vectors and adds, so that
one vector holds the sums of two. Sums of four vectors of four lanes::

    a0 a1 a2 a3   b0 b1 b2 b3   c0 c1 c2 c3   d0 d1 d2 d3
    a0+a1 a2+a3 b0+b1 b2+b3     c0+c1 c2+c3 d0+d1 d2+d3
    a0+a1+a2+a3 b0+b1+b2+b3 c0+c1+c2+c3 d0+d1+d2+d3

The first steps stay within 128-bit segments and the others move whole segments: these are the
shuffles that x86 has as single instructions.

`add_lanes(func, "sums0")` rewrites the nest of such a block. Before::

    for g, l in T.grid(8, 16):
        with T.sblock("sums0"):
            with T.init():
                sums[vg] = 0.0
            sums[vg] = sums[vg] + parts[vg, vl]

After::

    sums[0:8] = T.Shuffle(...) + T.Shuffle(...)

A block in one loop, over lanes only, reduces one vector. Products, `T.max` and `T.min` are treated
the same. Extrema expressed by a select remain loops: a select repeats its operands, and TVM's
passes take seconds on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.nests import find_nest, replaced
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.reduction import reduction_of

SEGMENT_BITS = 128


def add_lanes(func: tirx.PrimFunc, block: str) -> tirx.PrimFunc:
    """Replace the loops around a block that reduces lanes by a tree of shuffles.

    func : a stage-II function, which is not modified
    block : sums[..., g] = sums[..., g] + parts[..., g, l] with an init of zero, or another operator
        and its identity, in loops over g and l of constant powers of two, g at most l, and nothing
        else, or without g; `parts` of no scope that :func:`lower_sparse_buffer` flattens

    Raises ScheduleError if there is no such nest.
    """
    nest = find_nest("add_lanes", func, block)
    store, reduction = nest.body, reduction_of(nest.body)
    if reduction is None or not isinstance(reduction.term, ir.TensorLoad) or len(nest.loops) > 2:
        raise ScheduleError(
            f"add_lanes: argument 'block': expected '{block}' to combine lanes by an operator, got "
            f"{store}"
        )
    if isinstance(store.value, tirx.Select):
        return func
    *groups, lanes = nest.extents("add_lanes")
    parts, outer = reduction.term, store.indices[: len(store.indices) - len(groups)]
    each = [[g] for g in range(groups[0])] if groups else [[]]
    rows = [tirx.BufferLoad(parts.source, [*outer, *g, _ramp(lanes)]) for g in each]
    total = add_up(rows, lanes, str(store.buffer.ty.dtype), reduction.combine)
    body = tirx.BufferStore(store.buffer, total, [*outer, *map(_ramp, groups)])

    def region(buffer: Any, *sizes: int) -> Any:
        ranges = [ir.Range.from_min_extent(i, 1) for i in outer]
        return tirx.BufferRegion(buffer, [*ranges, *(ir.Range(0, s) for s in sizes)])

    reads, writes = [region(parts.source, *groups, lanes)], [region(store.buffer, *groups)]
    done = s_tir.SBlock([], reads, writes, block, body)
    return replaced(func, nest, s_tir.SBlockRealize([], True, done))


def _ramp(lanes: int) -> Any:
    return tirx.Ramp(0, 1, lanes) if lanes > 1 else tirx.IntImm("int32", 0)


def add_up(rows: list[Any], lanes: int, dtype: str, combine: Callable[[Any, Any], Any]) -> Any:
    """The lanes of each of `rows` reduced, as one vector in the same order.

    Vectors that are shuffled twice are bound to variables: as expressions used twice they would
    double in size with each step, for all later passes.
    """
    segment = min(lanes, SEGMENT_BITS // tvm.DataType(dtype).bits)
    within = segment.bit_length() - 1
    named: list[tuple[Any, Any]] = []

    def name(vector: Any) -> Any:
        named.append((tirx.Var(f"lanes{len(named)}", str(vector.ty.dtype)), vector))
        return named[-1][0]

    for step in range(lanes.bit_length() - 1):
        rows = [name(row) for row in rows]
        width = _lanes(rows[0])
        unit = 1 if step < within else segment  # lanes that move together
        pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        if step < within and len(rows) > 1:  # each segment: half of the first, half of the second
            places = [
                vector * width + start + lane
                for start in range(0, width, segment)
                for vector in range(2)
                for lane in range(0, segment, 2)
            ]
        else:
            places = [i for i in range(width * len(pairs[0])) if i // unit % 2 == 0]
        rows = [
            combine(_shuffle(p, places), _shuffle(p, [i + unit for i in places])) for p in pairs
        ]
        if step < within and len(pairs[0]) == 1:
            segment //= 2
    total = rows[0]
    for var, vector in reversed(named):
        total = tirx.Let(var, vector, total)
    return total


def _shuffle(vectors: list[Any], places: list[int]) -> Any:
    return tirx.Shuffle(vectors, [tirx.IntImm("int32", i) for i in places])


def _lanes(vector: Any) -> int:
    return tvm.DataType(str(vector.ty.dtype)).lanes
