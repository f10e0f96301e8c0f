"""Recipes: vectorised functions that make computed parameters of what callers give.

All of the library's are registered when any module of this package is imported, so that every
program and every exported kernel finds those that it names. `general` has recipes for schedules of
any kind, `locality` that of the default schedule, the other modules those of single primitives;
`registry` finds them, and what is known of what they make.
"""

from sparsetir.sparse_ir.recipes import general, locality, patterns, positions, ranges, slices

__all__ = ["general", "locality", "patterns", "positions", "ranges", "slices"]
