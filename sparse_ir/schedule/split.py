"""Cut a loop over the coordinates of a dense axis into several (Senanayake's thesis, chapter 5).

Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `split(k, [None, 4, 16])`, where K has 128 coordinates::

    with T.sp_iter([I, J, K0, K1, K2], "SRSSS", "spmm") as [i, j, k0, k1, k2]:
        C[i, k0 * 64 + k1 * 16 + k2] = ... + A[i, j] * B[j, k0 * 64 + k1 * 16 + k2]

The last of the outermost loop's tiles may exceed the axis. `tail` selects what happens there:

"guard" : coordinates beyond the axis are skipped. Stores outside of a buffer are discarded
    anyway; where that is not enough, as for a reduction, the body is guarded.
"shift" : the tile begins earlier: `at_most(k0 * 64, feat - 64)` for `k0 * 64`, under the condition
    that the coordinate was not in the tile before. The lowering drops the condition where computing
    something twice is harmless, which
    :func:`sparsetir.sparse_ir.tail_predicates.resolve_tails` proves, and makes it a choice between
    a term and the operator's identity in a reduction: vectors stay vectors. The axis must hold at
    least one tile; if its length is not constant, kernels check that in each call.
"repeat" : coordinates beyond the axis repeat the last one: `at_most(k0 * 64 + k1, feat - 1)`, under
    the condition that they do not. The lowering resolves the condition as for "shift". Loads need
    no guards, whatever the length.
"exact" : no tile does: the length is a multiple of the tile. If it is not constant, that is a
    promise, which kernels check in each call.

Factors without None fix the number of tiles: `split(k, [2, 16], tail="shift")` has
straight-line code for 16 to 32 coordinates. A length that is not constant is promised to fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    declared,
    nodes_of,
    stores_of,
    substitute,
)
from sparsetir.sparse_ir.schedule.cut_space import space_of, without_choice
from sparsetir.sparse_ir.schedule.facts import promised
from sparsetir.sparse_ir.schedule.loops import MOST, Change, Loop, SpIter, change_of, changed
from sparsetir.sparse_ir.schedule.positions import slots_counted
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.split_positions import is_stored, split_positions
from sparsetir.sparse_ir.tile_marks import at_most
from sparsetir.sparse_ir.tile_marks import tail as tail_of
from sparsetir.sparse_ir.tir import as_dtype, size_text

NAME = "split"
TAILS = ("guard", "shift", "repeat", "exact")


@primitive
def split(
    func: SparseFunc, loop: SpIter, factors: Sequence[int | None], *, tail: str = "guard"
) -> tuple[SparseFunc, list[SpIter]]:
    """Cut a loop into tiles.

    Parameters
    ----------
    loop : SpIter
        A loop over a dense axis without children, cut by coordinates; or over stored elements, cut
        by positions (:mod:`sparsetir.sparse_ir.schedule.split_positions`). Slots of sparse_fixed
        axes are first made a dense axis, as by `positions`.
    factors : sequence of int or None
        An extent for each new loop; the first may be None, for as many as are needed. Otherwise
        their product is at least the length, or, with "exact", the length, which is then constant.
    tail : {"guard", "shift", "repeat", "exact"}
        What happens to coordinates beyond the axis: "guard" skips them, with conditions; "shift"
        lets the last tile begin earlier; "repeat" visits the last coordinate again; "exact"
        promises that there are none. By positions only "guard".

    Returns
    -------
    list of SpIter
        The new loops, outermost first. A loop of fused rows and columns gives three: chunks, pieces
        of rows, elements of a piece.
    """
    change = change_of(NAME, func, loop)
    extents = _extents(change, factors)
    change.check_word("tail", tail, TAILS)
    func, loop = slots_counted(NAME, func, loop)
    change = change_of(NAME, func, loop)
    it, (old,) = change.it, change.chosen
    if space_of(it, old) == "positions" or is_stored(old.node):
        return split_positions(change, extents, factors[0], tail)
    axis, tile = _splittable(change, old), math.prod(extents)
    length, idtype = axis.length, axis.idtype
    whole = Analyzer().can_prove_equal(
        tirx.floormod(as_dtype(length, idtype), as_dtype(tile, idtype)), as_dtype(0, idtype)
    )
    _refuse_tail(change, axis, tile, tail, whole)
    count = _count(factors[0], length, tile, idtype, exact=tail == "exact" or whole)
    if factors[0] is not None:
        visited = int(factors[0]) * tile
        _refuse_uncovered(change, axis, visited, tail)
        whole = whole and isinstance(length, tirx.IntImm) and visited == int(length)
    new = _new_loops(func, old, [count, *(as_dtype(e, idtype) for e in extents)])
    start, first = _start(new[0].var, tile, length, idtype, tail == "shift" and not whole)
    coordinate, weight = first, tile
    for new_loop, extent in zip(new[1:], extents, strict=True):
        weight //= extent
        step = new_loop.var * as_dtype(weight, idtype) if weight > 1 else new_loop.var
        coordinate = coordinate + step
    condition, end = None, as_dtype(length, idtype)
    if not whole and tail == "shift":
        condition = tail_of(coordinate, end, start)
    elif not whole and tail == "repeat":
        condition = tail_of(coordinate, end, coordinate)
        coordinate = at_most(coordinate, end - as_dtype(1, idtype))
    elif not whole and tail == "guard" and not _bounds_stores(func, it, old.var, axis):
        condition = tail_of(coordinate, end)
    body, init = it.body, it.init
    if condition is not None:
        body = tirx.IfThenElse(condition, body, None)
        if init is not None and old.kinds == "S":
            init = tirx.IfThenElse(condition, init, None)
    mapping = {old.var: coordinate}
    iteration = changed(
        it,
        change.with_loops(*new),
        body=substitute(body, mapping),
        init=None if init is None else substitute(init, mapping),
        annotations=without_choice(it, old),
    )
    out = change.put(iteration, axes=[new_loop.node for new_loop in new])
    kind = {"exact": "multiple", "shift": "min"}.get(tail)
    if kind is not None and not whole and not isinstance(length, tirx.IntImm):
        out = promised(change, out, length, kind, tile)
    if factors[0] is not None and not isinstance(length, tirx.IntImm):
        out = promised(change, out, length, "max", visited)
    return out, change.handles(*new)


def _splittable(change: Change, loop: Loop) -> Axis:
    """The axis of a loop that can be cut by coordinates."""
    it, axis = change.it, change.dense_axis(loop, "; divide cuts other loops by their positions")
    for other in change.func.axes:
        if other.parent is not None and other.parent.name == axis.name and _visited(it, other):
            change.refuse(
                f"axis '{other.name}' would be separated from its parent '{axis.name}'; to keep it "
                "there call pos first, so that positions of the loop are split, or use divide"
            )
    nodes = [m for n in it.axes for m in getattr(n, "of", None) or [n]]
    attached = [n.name for n in nodes if getattr(getattr(n, "to", None), "name", "") == axis.name]
    if attached:
        change.refuse(
            f"axis '{attached[0]}' is attached to '{axis.name}', which cannot be cut by "
            "coordinates; divide can cut it"
        )
    return axis


def _visited(it: SparseIteration, axis: Axis) -> bool:
    """Whether an iteration, or one inside it, visits an axis."""
    inside = nodes_of(SparseIteration, it)
    return any(a.name == axis.name for node in inside for a, _, _ in node.axis_of())


def _extents(change: Change, factors: Any) -> list[int]:
    """The extents of all new loops but the outermost."""
    listed = list(factors) if isinstance(factors, list | tuple) else []
    numbers = len(listed) >= 2 and all(_is_count(f) for f in listed[1:])
    numbers = numbers and (listed[0] is None or _is_count(listed[0]))
    if not numbers:
        change.refuse(
            "argument 'factors': expected two or more positive integers, the first of which may be "
            f"None, got {factors!r}"
        )
    tile = math.prod(listed[1:])
    if tile >= MOST or (listed[0] or 1) * tile >= 2**31:  # rounding a length up would overflow
        change.refuse(
            f"argument 'factors': expected tiles of less than {MOST} visits, and a product below "
            f"2**31, got {factors!r}"
        )
    return listed[1:]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _refuse_tail(change: Change, axis: Axis, tile: int, tail: str, whole: bool) -> None:
    length = axis.length
    if tail == "exact" and not whole and isinstance(length, tirx.IntImm):
        change.refuse(
            f"argument 'tail': \"exact\" expects axis '{axis.name}' to be a multiple of {tile} "
            f'long, got {int(length)}; "guard", "shift" and "repeat" are legal'
        )
    if tail == "shift" and isinstance(length, tirx.IntImm) and int(length) < tile:
        change.refuse(
            f"argument 'tail': \"shift\" expects axis '{axis.name}' to hold a tile of {tile}, got "
            f'{int(length)} coordinates; "guard" and "repeat" are legal'
        )


def _refuse_uncovered(change: Change, axis: Axis, visited: int, tail: str) -> None:
    """Refuse factors whose product misses coordinates, or exceeds them unguarded."""
    length = int(axis.length) if isinstance(axis.length, tirx.IntImm) else 0
    if length == visited or length < visited and tail != "exact":
        return
    what = "be" if tail == "exact" else "reach"
    change.refuse(
        f"argument 'factors': expected their product to {what} the length of axis '{axis.name}', "
        f"{size_text(axis.length)}, got {visited}; None as the first is as many as it takes"
    )


def _count(first: Any, length: Any, tile: int, idtype: str, *, exact: bool) -> Any:
    """The number of tiles."""
    if first is not None:
        return as_dtype(int(first), idtype)
    length, size = as_dtype(length, idtype), as_dtype(tile, idtype)
    more = length if exact else length + as_dtype(tile - 1, idtype)
    return Analyzer().simplify(tirx.floordiv(more, size))


def _new_loops(func: SparseFunc, old: Loop, extents: list[Any]) -> list[Loop]:
    """Loops over dense axes of these lengths, named after the original loop."""
    out: list[Loop] = []
    for number, extent in enumerate(extents):
        name = fresh_name(func, f"{old.name}{number}")
        idtype = old.node.idtype
        axis = Axis(name=name, kind="dense_fixed", length=extent, idtype=idtype)
        out.append(Loop(axis, [tirx.Var(f"{old.var.name}{number}", idtype)], old.kinds))
    return out


def _start(var: Any, tile: int, length: Any, idtype: str, shift: bool) -> tuple[Any, Any]:
    """The start of a tile by its number, and its start if the last one begins earlier."""
    start = var if tile == 1 else var * as_dtype(tile, idtype)
    if not shift:
        return start, start
    return start, at_most(start, as_dtype(length, idtype) - as_dtype(tile, idtype))


def _bounds_stores(func: SparseFunc, it: SparseIteration, var: Any, axis: Axis) -> bool:
    """Whether each store has the coordinate as an index of an axis of this length."""
    names = declared(func)

    def bounded(store: Any) -> bool:
        buffer = names.buffer_of(store.buffer)
        if buffer is None or buffer.axes is None:
            return False
        return any(
            isinstance(index, ir.Var)
            and index.same_as(var)
            and a.kind == "dense_fixed"
            and tvm_ffi.structural_equal(a.length, axis.length)
            for a, index in zip(buffer.axes, store.indices, strict=True)
        )

    return all(bounded(s) for s in stores_of(it.body, it.init))
