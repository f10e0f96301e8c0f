"""Recipes: vectorised functions that make computed parameters of what callers give.

All of the library's are registered when any module of this package is imported, so that every
program and every exported kernel finds those that it names. `general` has recipes for schedules of
any kind, the other modules those of single primitives.
"""

from sparsetir.sparse_ir.recipes import patterns, positions, ranges, slices
from sparsetir.sparse_ir.recipes.general import (
    cache_parts,
    column_parts,
    constant,
    equal_parts,
    equal_work,
    greatest_of_rows,
    in_order,
    inverse_counts,
    least_of_rows,
    number,
    order_by_column_parts,
    packed,
    part_numbers,
    row_of_position,
    shared_rows,
)
from sparsetir.sparse_ir.recipes.registry import (
    RECIPES,
    Below,
    Facts,
    FoundIn,
    LengthOf,
    NonzerosOf,
    RowsOf,
    SameAs,
    TilesOf,
    facts_of,
    recipe,
)

__all__ = [
    "RECIPES",
    "Below",
    "Facts",
    "FoundIn",
    "LengthOf",
    "NonzerosOf",
    "RowsOf",
    "SameAs",
    "TilesOf",
    "cache_parts",
    "column_parts",
    "constant",
    "equal_parts",
    "equal_work",
    "facts_of",
    "greatest_of_rows",
    "in_order",
    "inverse_counts",
    "least_of_rows",
    "number",
    "order_by_column_parts",
    "packed",
    "part_numbers",
    "patterns",
    "positions",
    "ranges",
    "recipe",
    "row_of_position",
    "shared_rows",
    "slices",
]
