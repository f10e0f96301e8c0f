"""The loops of stage II that `parallelize` has divided among workers."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from tvm import tirx

from sparsetir.sparse_ir.annotations import GPU_UNITS, THREAD_UNITS, WORKERS
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import (
    SparseFunc,
    SparseIteration,
    entry_name,
    flat_axes,
    iteration_with,
    nodes_of,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.position_loop import PositionLoop
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, loop_over, loop_with, type_of_product
from sparsetir.sparse_ir.traversal import map_expr

# Annotation of a stage-II loop: the kind that it gets at the end.
KIND = "sparsetir.kind"
DIMENSIONS = "xyz"
MAX_THREADS = 1024  # per block
WARP = 32


class Workers(NamedTuple):
    """A group of loops that become one parallel loop.

    kinds : "parallel", "vectorized", or the thread dimension that it is bound to; two for a loop
        over blocks and threads
    """

    units: list[PositionLoop]
    kinds: list[str]
    per_block: int


class Entry(NamedTuple):
    """An entry of an iteration's annotation: loops that `parallelize` divides as one.

    per_block : visits per thread block of a loop over blocks and threads, else 0
    """

    loops: list[str]
    unit: str
    race: str
    per_block: int


def entries_of(it: SparseIteration) -> list[Entry]:
    """The entries of an iteration's annotation."""
    # As dicts: look-ups in TVM's maps are slow.
    said = (dict(entry.items()) for entry in it.annotations.get(WORKERS, []))
    return [
        Entry([*map(str, e["loops"])], str(e["unit"]), str(e["race"]), int(e.get("per_block") or 0))
        for e in said
    ]


def divided(it: SparseIteration) -> list[list[str]]:
    """The names of the loops in each group that becomes one parallel loop, by the annotation."""
    return [entry.loops for entry in entries_of(it)]


def units_of(it: SparseIteration) -> set[str]:
    """The units among which the loops of an iteration are divided."""
    return {entry.unit for entry in entries_of(it)}


def with_spatial_workers(func: SparseFunc) -> SparseFunc:
    """The function in which loops over blocks and threads are spatial, even if they are reductions.

    Their race strategy has been applied already (:mod:`sparsetir.sparse_ir.schedule.gpu_races`).
    """

    def visit(it: Any) -> Any:
        names = {name for e in entries_of(it) if e.unit in GPU_UNITS for name in e.loops}
        kinds = [
            "S" * len(flat_axes([node])) if entry_name(node) in names else it.kinds[at:end]
            for node, at, end in it.entries()
        ]
        if "".join(kinds) == it.kinds:
            return it
        return iteration_with(it, kinds="".join(kinds))

    return func.replace(body=map_expr(func.body, [(SparseIteration, visit)]))


def thread_tags(func: SparseFunc) -> dict[tuple[str, ...], list[str]]:
    """The kinds of the loops of a function, by (iteration, names of loops).

    Of the loops over threads, and of those over blocks, the innermost is x, the one around it y.
    Raises LoweringError if CUDA has no dimension left, if a block has too many threads, and if
    loops over threads inside one over warps do not make up warps.
    """
    nested = {n.name for it in sparse_iterations(func) for n in nodes_of(SparseIteration, it.body)}
    out: dict[tuple[str, ...], list[str]] = {}
    for it in sparse_iterations(func):
        if it.name not in nested:
            sizes: dict[str, int] = {}
            _tag(it, out, sizes)
            _refuse_threads(it, prod(sizes.values()) <= MAX_THREADS, "at most 1024 threads", sizes)
    return out


def _tag(
    it: SparseIteration, out: dict[tuple[str, ...], list[str]], sizes: dict[str, int]
) -> tuple[int, int]:
    """Tag the loops of a nest; returns the numbers of block and thread dimensions that it uses.

    sizes : of thread dimensions, updated
    """
    below = [_tag(n, out, sizes) for n in nodes_of(SparseIteration, it.body, nested=False)]
    blocks, threads = (max((b[n] for b in below), default=0) for n in (0, 1))
    lengths = {axis.name: axis.length for axis, _, _ in it.axis_of()}
    place = {entry_name(node): n for n, node in enumerate(it.axes)}
    entries = sorted(entries_of(it), key=lambda e: -place.get(e.loops[0], 0))
    for entry in entries:
        unit, kinds = entry.unit, []
        if unit == "block" or entry.per_block:
            kinds.append(f"blockIdx.{_dimension(it, blocks)}")
            blocks += 1
        if unit in THREAD_UNITS:
            tag = f"threadIdx.{_dimension(it, threads)}"
            kinds.append(tag)
            inside = prod(sizes.get(f"threadIdx.{d}", 1) for d in DIMENSIONS[:threads])
            size = entry.per_block or int(lengths[entry.loops[0]])
            same = sizes.setdefault(tag, size) == size
            _refuse_threads(it, same, f"{size} threads as {tag} in all loops", sizes)
            whole = unit == "thread" or inside == WARP
            wanted = f"{WARP} threads inside of the loop over warps {entry.loops}"
            _refuse_threads(it, whole, wanted, sizes)
            threads += 1
        if unit in ("cpu", "vector"):
            kinds = ["parallel" if unit == "cpu" else "vectorized"]
        out[(it.name, *entry.loops)] = kinds
    return blocks, threads


def _refuse_threads(it: SparseIteration, fits: bool, wanted: str, sizes: dict[str, int]) -> None:
    if not fits:
        raise LoweringError(
            f"sp_iter '{it.name}': annotation '{WORKERS}': expected {wanted}, got {sizes}"
        )


def _dimension(it: SparseIteration, number: int) -> str:
    if number >= len(DIMENSIONS):
        raise LoweringError(
            f"sp_iter '{it.name}': annotation '{WORKERS}': expected at most three loops over "
            "blocks and three over threads, as CUDA has, got more; parallelize neighbouring loops "
            "as one"
        )
    return DIMENSIONS[number]


def workers_of(
    it: SparseIteration, levels: list[list[PositionLoop]], tags: dict[tuple[str, ...], list[str]]
) -> list[Workers]:
    """The groups of loops that become one parallel loop each, outermost first.

    Raises LoweringError for unknown names, and for a group whose loops depend on each other.
    """
    by_name = {entry_name(unit.node): unit for units in levels for unit in units}
    groups: list[Workers] = []
    for entry in entries_of(it):
        names = entry.loops
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
        kinds = tags.get((it.name, *names), ["parallel"])
        groups.append(Workers(group, kinds, entry.per_block))
    return groups


def loops_around(stmt: Any, units: list[PositionLoop], workers: list[Workers]) -> tirx.Stmt:
    """The loops of a level around its block."""
    done: set[int] = set()
    for unit in reversed(units):
        worker = next((w for w in workers if any(u is unit for u in w.units)), None)
        group = [unit] if worker is None else worker.units
        if id(unit) in done:
            continue
        done |= {id(u) for u in group}
        if worker is None:
            zero = as_dtype(0, dtype_of(unit.loop))
            stmt = tirx.For(unit.loop, zero, unit.extent, tirx.ForKind.SERIAL, stmt)
            continue
        var, extent, stmt = _fused(stmt, group)
        if worker.per_block:
            stmt = _over_blocks(stmt, var, extent, worker)
        elif worker.kinds == ["parallel"]:
            stmt = loop_over(var, extent, stmt, tirx.ForKind.PARALLEL)
        else:
            stmt = loop_over(var, extent, stmt, annotations={KIND: worker.kinds[0]})
    return stmt


def _over_blocks(stmt: Any, var: Any, extent: Any, workers: Workers) -> tirx.Stmt:
    """Loops over blocks and over the threads of a block, guarded in the last block."""
    dtype = dtype_of(var)
    size = as_dtype(workers.per_block, dtype)
    outer, inner = (tirx.Var(f"{var.name}_{n}", dtype) for n in range(2))
    place = outer * size + inner
    stmt = substitute(_guarded(stmt, var < as_dtype(extent, dtype)), {var: place})
    blocks = tirx.floordiv(extent + as_dtype(workers.per_block - 1, dtype), size)
    block, thread = workers.kinds
    stmt = loop_over(inner, size, stmt, annotations={KIND: thread})
    return loop_over(outer, blocks, stmt, annotations={KIND: block})


def _guarded(stmt: Any, condition: Any) -> Any:
    """A nest whose block is guarded by a condition."""
    if isinstance(stmt, tirx.For):
        return loop_with(stmt, body=_guarded(stmt.body, condition))
    predicate = tirx.all(stmt.predicate, condition)
    return type(stmt)(stmt.iter_values, predicate, stmt.block, stmt.span)


def _fused(stmt: Any, group: list[PositionLoop]) -> tuple[Any, Any, Any]:
    """(variable, extent, body) of one loop in place of several, over the product of extents."""
    if len(group) == 1:
        return group[0].loop, group[0].extent, stmt
    dtype = type_of_product([u.extent for u in group], [dtype_of(u.loop) for u in group])
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
    return fused, extent, substitute(stmt, places)
