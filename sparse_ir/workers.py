"""The loops of stage II that stage I has divided among workers (`parallelize`)."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.atomics import ATOMIC
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import SparseIteration, flat_axes, substitute
from sparsetir.sparse_ir.position_space import as_dtype, dtype_of
from sparsetir.sparse_ir.units import Unit

__all__ = ["CUT", "STAGE_ONE", "WORKERS", "divided", "loops_around", "workers_of"]

# Annotation of an iteration: [{"loops": [names], "unit": "cpu", "race": ...}, ...]
WORKERS = "parallel"
# Annotation of an iteration: {loop: what a later cut of it cuts}
CUT = "cut"
STAGE_ONE = (WORKERS, CUT, ATOMIC)  # what blocks do not carry on


def divided(it: SparseIteration) -> list[list[str]]:
    """The names of the loops that are one parallel loop each, by the annotation."""
    return [[str(name) for name in entry["loops"]] for entry in it.annotations.get(WORKERS, [])]


def workers_of(it: SparseIteration, levels: list[list[Unit]]) -> list[list[Unit]]:
    """The groups of loops that are one parallel loop each, outermost first.

    Raises LoweringError for names that are none, and a group whose loops depend on each other.
    """
    by_name = {_name(unit): unit for units in levels for unit in units}
    groups: list[list[Unit]] = []
    for names in divided(it):
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise LoweringError(
                f"sp_iter '{it.name}': annotation '{WORKERS}': expected names of its loops, "
                f"{list(by_name)}, got {unknown}"
            )
        group = [by_name[name] for name in names]
        if not any(all(any(u is v for v in units) for u in group) for units in levels):
            raise LoweringError(
                f"sp_iter '{it.name}': the parallel loops {names} cannot be one loop, as the "
                "extent of one of them depends on another"
            )
        groups.append(group)
    return groups


def loops_around(stmt: tirx.Stmt, units: list[Unit], workers: list[list[Unit]]) -> tirx.Stmt:
    """The loops of a level around its block."""
    done: set[int] = set()
    for unit in reversed(units):
        group = next((g for g in workers if any(u is unit for u in g)), [unit])
        if id(unit) in done:
            continue
        done |= {id(u) for u in group}
        parallel = any(g is group for g in workers)
        kind = tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL
        if len(group) > 1:
            stmt = _fused(stmt, group, kind)
        else:
            zero = as_dtype(0, dtype_of(unit.loop))
            stmt = tirx.For(unit.loop, zero, unit.extent, kind, stmt)
    return stmt


def _fused(stmt: tirx.Stmt, group: list[Unit], kind: Any) -> tirx.Stmt:
    """One loop for several, over the product of their extents."""
    dtype = "int64" if any(dtype_of(u.loop) == "int64" for u in group) else "int32"
    fused = tirx.Var("_".join(str(u.loop.name) for u in group), dtype)
    rest: Any = fused
    places: dict[Any, Any] = {}
    extent: Any = as_dtype(1, dtype)
    for number, unit in enumerate(reversed(group)):
        size = as_dtype(unit.extent, dtype)
        last = number + 1 == len(group)
        place = rest if last else tirx.floormod(rest, size)
        places[unit.loop] = as_dtype(place, dtype_of(unit.loop))
        rest = rest if last else tirx.floordiv(rest, size)
        extent = size if number == 0 else extent * size
    return tirx.For(fused, as_dtype(0, dtype), extent, kind, substitute(stmt, places))


def _name(unit: Unit) -> str:
    return "_".join(a.name for a in flat_axes([unit.node]))
