"""Visit rows under several parents by ranges of rows, in tiles.

Before, where each relation stores some rows::

    with T.sp_iter([R, I, J, K, L], "RSRRS", "rgms") as [r, i, j, k, l]:

After `ranges(i, "ranges", 8)`, the rows of each relation in ranges of about equal work, and those
of a range in tiles of 8; the last tile may have fewer::

    I_ranges = T.sparse_fixed(R, (ranges, ranges), I_ids)
    I_tiles = T.dense_variable(I_ranges, (I_count, I_count), I_tile_ptr)
    I_part = T.dense_variable(I_tiles, (m, nnz_rows), I_starts)
    with T.sp_iter([R, I_ranges, I_tiles, T.part(I, I_part), J, K, L], "RSSSRRS", "rgms") as [...]:
        T.sp_iter_attr({"ranges": ["I_ranges"]})

A range has the same rows for all relations, so that different ranges write different elements even
if all relations update them: the loop over ranges is free of races, and stage II may move it
outside that over relations. Where ranges and tiles begin is computed: kernels are called as before.
"""

from __future__ import annotations

from typing import Any

from sparsetir.sparse_ir.annotations import RANGES
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, flat_axes
from sparsetir.sparse_ir.recipes.ranges import range_tile_ptr, range_tile_starts
from sparsetir.sparse_ir.schedule.cut_space import without_choice
from sparsetir.sparse_ir.schedule.loops import SpIter, inside
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.visit_order import VisitOrder, chosen_loops

NAME = "ranges"


@primitive(reorders=True)
def ranges(
    func: SparseFunc,
    loop: SpIter,
    parts: int | str,
    tile: int,
    *,
    cost: int = 8,
    default: int | dict[str, Any] = 1,
) -> tuple[SparseFunc, list[SpIter]]:
    """Visit rows under several parents by ranges that are equal for all parents, in tiles.

    Parameters
    ----------
    loop : SpIter
        A loop over a sparse_variable axis under a root axis, with distinct, ordered coordinates.
    parts : int or str
        The number of ranges, or a name: then the number is a computed parameter of that name, which
        is `default`, or that recipe's result, unless the plan overrides it; it is not compiled in.
    tile : int
        Rows per tile.
    cost : int
        The work of a row, besides one for each element under it.
    default : int or dict
        The number of ranges if `parts` is a name and the plan does not override it; or a recipe.

    Returns
    -------
    list of SpIter
        The loops over ranges, tiles, and the rows of a tile.
    """
    it, (chosen,) = chosen_loops(NAME, func, loop)
    order, axis = VisitOrder(NAME, func, it, chosen), chosen.node
    fits = isinstance(axis, Axis) and axis.kind == "sparse_variable" and axis.unique
    if not fits or axis.parent.kind != "dense_fixed":
        order.refuse(
            "expected a loop over a sparse_variable axis under a root axis, whose coordinates "
            f"differ, got '{chosen.name}'"
        )
    order.check_count("tile", tile, below=2**15)
    order.check_count("cost", cost, below=2**15)
    order.check_count("parts", parts, or_name=True)
    if not isinstance(default, dict):
        order.check_count("default", default)
    count = order.choice(parts, default)
    how: dict[str, Any] = {
        "ptr": axis.indptr, "rows": axis.indices, "m": axis.length, "parts": count, "cost": cost,
        "size": tile,
    }  # fmt: skip
    below = [a for node in [it, *inside(it)] for a in flat_axes(node.axes) if a.is_variable]
    children = [a for a in below if a.parent.name == axis.name]
    if children:
        how["indptr"] = children[0].indptr
    by_range = order.counted("ranges", axis.parent, count)
    tiles = order.ragged("tiles", by_range, range_tile_ptr, ptr="tile_ptr", count="count", how=how)
    starts = order.array("starts", range_tile_starts, **how)
    part = order.part(tiles, axis.length, axis.nnz, starts)
    new = order.loops(range=(by_range, chosen.kinds), tile=(tiles, chosen.kinds))
    said = [*it.annotations.get(RANGES, []), by_range.name]
    annotations = {**without_choice(it, chosen), RANGES: said}
    return order.instead([*new, order.within(part)], annotations=annotations)
