"""Rows of positions that kernels search for instead of reading them from a table.

`positions(fused, rows="search")` keeps a program that reads the row of each element from a
computed parameter, as the interpreter does, and states in the function attribute "rows" that
kernels search for it::

    T.func_attr({
        "computed": {"i_at": {"recipe": "row_of_position", "indptr": "$indptr"}},
        "rows": {"I_at": {"from": "search"}},
    })

Such a buffer holds rows by position, or the coordinates of these rows, and the arrays that its
recipe reads are buffers too. With rows="blocks" the rows at the start and end of a loop's visits
are known, from another computed parameter::

    "rows": {"I_at": {"from": "blocks", "starts": "I_rows", "loop": "I_J0", "per_block": 1}}

where `per_block` visits of the loop share a row of `starts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tvm import tirx

from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.nodes import SparseBuffer, SparseFunc, declared, variables_of
from sparsetir.sparse_ir.recipes.registry import RECIPES, facts_of
from sparsetir.sparse_ir.tile_marks import is_bound
from sparsetir.sparse_ir.verify_sites import Broken, Found

ROWS = "rows"
# The values that `positions` takes; all but the first are stored in the attribute.
ROWS_FROM = ("table", "search", "blocks")
STARTS = {"from", "starts", "loop", "per_block"}


class Recipe(NamedTuple):
    """The search that computes the values of a buffer.

    searches : whether values are found by a search in `array`, rather than being its elements
    array : the buffer of offsets or of coordinates
    order : the buffer of positions to look up in it; None for the position itself
    """

    searches: bool
    array: SparseBuffer
    order: SparseBuffer | None


def found_rows(func: SparseFunc) -> dict[str, dict[str, Any]]:
    """The search for each buffer whose values kernels compute, by name, as plain Python."""
    said = func.attrs.get(ROWS, {})
    return {
        str(name): {str(k): v if isinstance(v, int) else str(v) for k, v in how.items()}
        for name, how in said.items()
    }


def recipe_of_rows(func: SparseFunc, buffer: SparseBuffer) -> Recipe | None:
    """The search for a buffer's values; None if it is an argument or computed otherwise."""
    if buffer.handle is None:
        return None
    how = computed_parameters(func).get(str(buffer.handle.name), {})
    search = facts_of(how.get("recipe")).found_in
    if search is None:
        return None
    by_handle = {str(b.handle.name): b for b in func.buffers if b.handle is not None}
    array = by_handle.get(str(how[search.array])[1:])
    order = by_handle.get(str(how["order"])[1:]) if "order" in how else None
    if array is None or "order" in how and order is None:
        return None
    return Recipe(search.by_search, array, order)


def row_problems(func: SparseFunc) -> Found:
    """The verifier's rule: rows that are searched for have a table, and starts that exist."""
    if ROWS not in func.attrs:
        return
    said = func.attrs[ROWS]
    if not isinstance(said, Mapping) or not all(isinstance(how, Mapping) for how in said.values()):
        yield Broken(func.span, f"attribute '{ROWS}': expected a dict by buffer, got {said!r}")
        return
    buffers = declared(func).buffers
    for name, how in said.items():
        place = f"rows of '{name}'"
        buffer = buffers.get(str(name))
        if buffer is None:
            yield Broken(func.span, f"{place}: no such buffer; there are {[*buffers]}")
        elif recipe_of_rows(func, buffer) is None:
            some = [name for name in RECIPES if facts_of(name).found_in is not None]
            yield Broken(
                buffer.var.span,
                f"{place}: expected a buffer that recipe {' or '.join(some)} makes of arrays that "
                "are bound to buffers",
            )
        elif set(how) != {"from"} and (set(how) != STARTS or str(how["starts"]) not in buffers):
            yield Broken(
                buffer.var.span,
                f"{place}: expected 'from', or {sorted(STARTS)} with a buffer of starts, got "
                f"{sorted(map(str, how))}",
            )
        elif str(how["from"]) not in ROWS_FROM[1:]:
            yield Broken(
                buffer.var.span,
                f"{place}: expected 'from' to be among {[*ROWS_FROM[1:]]}, got "
                f"{str(how['from'])!r}",
            )


def unbounded(position: Any, var: Any) -> Any:
    """A position without a loop-invariant bound, which does not change its order."""
    if is_bound(position):
        value, bound = position.args
    elif isinstance(position, tirx.Min):
        value, bound = position.a, position.b
    else:
        return position
    return position if any(v.same_as(var) for v in variables_of(bound)) else value


def step_of(position: Any, var: Any) -> int | None:
    """The change of a position per visit of a loop, bounds aside; None if it is not constant."""
    return affine(unbounded(position, var)).step(var)
