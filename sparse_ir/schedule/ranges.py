"""Go through rows under several parents by ranges of rows, in tiles.

Before, where each relation stores some rows::

    with T.sp_iter([R, I, J, K, L], "RSRRS", "rgms") as [r, i, j, k, l]:

After `ranges(i, "ranges", 8)`, the rows of each relation by ranges with about as much work, and
those of a range in tiles of 8, of which the last may hold fewer::

    I_ranges = T.sparse_fixed(R, (ranges, ranges), I_ids)
    I_tiles = T.dense_variable(I_ranges, (I_count, I_count), I_tile_ptr)
    I_part = T.dense_variable(I_tiles, (m, nnz_rows), I_starts)
    with T.sp_iter([R, I_ranges, I_tiles, T.part(I, I_part), J, K, L], "RSSSRRS", "rgms") as [...]:
        T.sp_iter_attr({"ranges": ["I_ranges"]})

A range is the same rows for all relations, so that ranges write elements of their own even where
all relations add to them: the loop over ranges is free of races, and stage II may bring it outside
of that over relations. Where ranges and tiles begin is computed: kernels are called as before.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.annotations import RANGES
from sparsetir.sparse_ir.expressions import as_dtype
from sparsetir.sparse_ir.nodes import Axis, PartAxis, SparseFunc, flat_axes
from sparsetir.sparse_ir.recipes import ranges as recipes
from sparsetir.sparse_ir.recipes.positions import last_of
from sparsetir.sparse_ir.schedule.cuts import Cut
from sparsetir.sparse_ir.schedule.handles import SpIter
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    inside,
    iteration_of,
    loops_of,
    place_of,
    refuse_order,
)
from sparsetir.sparse_ir.schedule.pos import without_choice
from sparsetir.sparse_ir.schedule.primitives import primitive

__all__ = ["ranges"]

WHO = "ranges"


@primitive
def ranges(
    func: SparseFunc,
    loop: SpIter,
    parts: int | str,
    tile: int,
    *,
    cost: int = 8,
    default: int | dict[str, Any] = 1,
) -> tuple[SparseFunc, list[SpIter]]:
    """Go through rows under several parents by ranges that are the same for all, in tiles.

    Parameters
    ----------
    loop : SpIter
        Over a sparse_variable axis under a root axis, whose coordinates differ and are in order.
    parts : int or str
        How many ranges, or a name: then the number is a computed parameter of that name, which is
        `default`, or what that recipe makes, unless whoever makes a plan says otherwise; it is not
        compiled in.
    tile : int
        Rows of a tile.
    cost : int
        Of a row in work, beside one for each element under it.
    default : int or dict
        How many there are by a name until somebody says another number; or a recipe.

    Returns
    -------
    list of SpIter
        Ranges, tiles, the rows of one.
    """
    it = iteration_of(WHO, func, loop)
    refuse_order(WHO, func, it)
    cut = Cut(WHO, func, it, loops_of(it)[place_of(WHO, func, it, loop)])
    axis = cut.loop.node
    fits = isinstance(axis, Axis) and axis.kind == "sparse_variable" and axis.unique
    if not fits or axis.parent.kind != "dense_fixed":
        cut.refuse(
            "expected a loop over a sparse_variable axis under a root axis, whose coordinates "
            f"differ, got '{cut.loop.name}'"
        )
    for name, value in (("tile", tile), ("cost", cost)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**15:
            cut.refuse(f"argument '{name}': expected a positive integer, got {value!r}")
    cut.check_count("parts", parts, or_name=True)
    if not isinstance(default, dict):
        cut.check_count("default", default)
    if isinstance(parts, str):
        how_many = default if isinstance(default, dict) else {"recipe": "number", "value": default}
        count = cut.number(parts, how_many, exactly=True)
        parts = cut.named(count)
    else:
        count = as_dtype(parts, cut.idtype)
    how: dict[str, Any] = {
        "ptr": cut.named(axis.indptr), "rows": cut.named(axis.indices),
        "m": cut.named(axis.length), "parts": parts, "cost": cost, "size": tile,
    }  # fmt: skip
    below = [a for node in [it, *inside(it)] for a in flat_axes(node.axes) if a.is_variable]
    children = [a for a in below if a.parent.name == axis.name]
    if children:
        how["indptr"] = cut.named(children[0].indptr)
    ids = cut.array("ids", {
        "recipe": "part_numbers", "rows": cut.named(axis.parent.length), "parts": parts,
    })  # fmt: skip
    by_range = cut.axis(
        "ranges", kind="sparse_fixed", length=count, parent=axis.parent, nnz_cols=count, indices=ids
    )
    ptr = cut.array("tile_ptr", {"recipe": recipes.range_tile_ptr.__name__, **how})
    size = cut.number("count", {"recipe": last_of.__name__, "offsets": cut.named(ptr)})
    tiles = cut.axis(
        "tiles", kind="dense_variable", length=size, parent=by_range, nnz=size, indptr=ptr
    )
    starts = cut.array("starts", {"recipe": recipes.range_tile_starts.__name__, **how})
    part = cut.axis(
        "part", kind="dense_variable", length=axis.length, parent=tiles, nnz=axis.nnz, indptr=starts
    )
    kind, name = cut.loop.kinds, cut.loop.vars[0].name
    loops = [
        Loop(by_range, [tirx.Var(f"{name}_range", cut.idtype)], kind),
        Loop(tiles, [tirx.Var(f"{name}_tile", cut.idtype)], kind),
        Loop(PartAxis(axis=axis, by=part), cut.loop.vars, kind),
    ]
    said = [*it.annotations.get(RANGES, []), by_range.name]
    return cut.done(loops, annotations={**without_choice(it, cut.loop), RANGES: said})
