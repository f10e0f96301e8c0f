"""Levels of loops, each around one block, into which an iteration is lowered.

A level ends, with a block boundary, before a loop whose extent depends on a position of that level,
after the loop that completes the inputs of a search, and around the loop of a merged axis.
(SparseTIR, section 3.3.1, step 3.) For an iteration over I, J and K, where J is variable::

    for i in range(m):  # the first level
        with T.sblock("spmm0"):
            for j, k in T.grid(J_indptr[vi + 1] - J_indptr[vi], feat):  # the second
                with T.sblock("spmm1"):
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.merge_loops import MergeLoop
from sparsetir.sparse_ir.nodes import substitute
from sparsetir.sparse_ir.position_loop import PositionLoop
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars
from sparsetir.sparse_ir.translate import Scope, Search


@dataclass
class Level:
    """Loops around one block, and the searches at the start of its body."""

    units: list[PositionLoop] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)


def levels_of(units: list[PositionLoop], scope: Scope) -> tuple[list[Level], list[Search]]:
    """Divide an iteration's loops into levels; also return the searches outside of all loops."""
    defined_by: dict[Any, int] = {}
    at: dict[int, list[Search]] = {}
    for number, unit in enumerate(units):
        defined_by |= dict.fromkeys(
            unit.state if isinstance(unit, MergeLoop) else [unit.var], number
        )
        for search in unit.searches:
            defined_by[search.result] = number
            at.setdefault(number, []).append(search)
    prelude: list[Search] = []
    for _, search in scope.searches:
        if isinstance(search.stmt, tirx.Evaluate):  # it is made in the body, in place
            continue
        number = max((defined_by.get(v, -1) for v in search.uses), default=-1)
        defined_by[search.result] = number
        (prelude if number < 0 else at.setdefault(number, [])).append(search)
    levels = [Level()]
    for number, unit in enumerate(units):
        here = {u.var for u in levels[-1].units}
        merges = [isinstance(u, MergeLoop) for u in (unit, *levels[-1].units)]
        alone = len(merges) > 1 and any(merges)
        if levels[-1].searches or alone or free_vars(unit.extent) & here:
            levels.append(Level())
        levels[-1].units.append(unit)
        levels[-1].searches.extend(at.get(number, []))
    if levels[-1].searches:
        levels.append(Level())
    return levels, prelude


def init_loops(init: tirx.Stmt, inner: list[PositionLoop]) -> tirx.Stmt:
    """Loops around an init for the spatial loops that lie inside the reduction's level."""
    used = free_vars(init)
    for unit in reversed(inner):
        if set(unit.kinds) == {"S"} and unit.var in used:
            loop = tirx.Var(unit.loop.name, dtype_of(unit.loop))
            init = substitute(init, {unit.var: loop})
            zero = as_dtype(0, dtype_of(loop))
            init = tirx.For(loop, zero, unit.extent, tirx.ForKind.SERIAL, init)
    return init
