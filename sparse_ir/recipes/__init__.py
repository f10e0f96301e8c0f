"""Recipes: vectorised functions that compute parameters from the caller's arguments.

Importing any module of this package registers all of the library's recipes, so that every program
and every exported kernel finds those that it names. `general` has recipes for any schedule,
`locality` that of the default schedule, the other modules those of single primitives; `registry`
finds recipes, and the facts about their results.
"""

from sparsetir.sparse_ir.recipes import (
    diagonals,
    general,
    locality,
    patterns,
    positions,
    ranges,
    slices,
)

__all__ = ["diagonals", "general", "locality", "patterns", "positions", "ranges", "slices"]
