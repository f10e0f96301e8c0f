"""One kernel for all sizes: a dispatch over specialisations of programs like a template's (CPU).

A plain program leaves sizes open, and the fast schedule depends on them, so its kernel dispatches
on them at run time. Where rows are gathered often, packing some of their features, as much as the
L2 cache holds, pays (see :mod:`sparsetir.schedules.templates.spmm`). With few features, the checks
before a row cost as much as the row, and starting worker threads as much as all rows::

    if nnz >= 28 * n and feat > 64 and feat // 32 % threads == 0:
        for k0 in T.parallel(feat // 32):               # of B, 32 features at a time
            B_ws[j, k] = B[j, k0 * 32 + k]
            for i in range(m): ...                      # C_ws[k] += A[i, j] * B_ws[j, k]
        ...                                             # the rest of the features, by rows
    else:
        if feat < 128:
            if nnz * feat < 1048576:                    # all that follows in one thread
                ...
            else:
                if feat >= 64: ...                      # tiles of 64 features, the last shifted
                elif feat >= 32: ...                    # tiles of 32 features
                elif feat > 16: ...                     # two vectors of 16, the last shifted
                elif feat > 8: ...                      # two vectors of 8, and so on
        else:
            for i in T.parallel(m): ...                 # tiles of 128 features and less

Sums over features for each nonzero are specialisations of
:class:`sparsetir.schedules.templates.sddmm.SddmmGroups` on the number of feature vectors: straight
code takes half as many instructions as a loop over so few. A partial last vector begins earlier,
and so does the last group of nonzeros, so that each specialisation has one body. Up to one vector,
two are built: column-blocked and in storage order; the choice is made at run time, since the
blocking costs about as much as the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.schedules.default import default_schedule
from sparsetir.schedules.operators.problems import Sddmm
from sparsetir.schedules.passes.drop_identity_order import drop_identity_order
from sparsetir.schedules.passes.inline_exponentials import inline_exponentials
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds
from sparsetir.schedules.passes.unroll_known_tiles import unroll_known_tiles
from sparsetir.schedules.targets import pool, vector_bits
from sparsetir.schedules.templates.register_tile import in_registers, straight_code, sums_of
from sparsetir.schedules.templates.sddmm import GROUP, SddmmGroups, apply, by_positions
from sparsetir.schedules.templates.shapes import (
    RowReduction,
    ShapeError,
    element_reduction,
    row_reduction,
)
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations, substitute
from sparsetir.sparse_ir.position_space import LAYOUTS
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.tir import as_dtype, block_with, dtype_of, free_vars, loop_with
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.value_domains import permutations

T = TypeVar("T")

# Non-zeros per row of B, and features, from which on a copy of it, or of a part, pays.
PACK_DEGREE = 28
PACK_FEATURES = 64
# Multiplications that take about as long as to wake the other threads.
WORK_OF_THREADS = 1 << 20
VECTORS = 2  # of a panel
TILES = (2, 4)  # vectors of tiles where there are few features
LEAST = 2  # lanes of the shortest vectors
# Of sums for elements: vectors of a row that are written out; where they are more, vectors of a
# tile and elements that take turns in it, whose two addresses each stay in registers.
STRAIGHT = 7
# Vectors of rows that are common, and short enough for a condition on the last to take a third.
EXACT = 2
TILE = 2
TURNS = 4


def multiversion(func: SparseFunc, target: Any, work: int = WORK_OF_THREADS) -> dict[str, Any]:
    """The default schedule for CPUs, with versions where the program has the shape for them.

    func : of stage I
    work : multiplications from which on other threads are started

    Returns stages "I", "II" and "II scheduled". "I" is `func`, or what the versions have in common.
    """
    # What its author has said of a loop stays, and the default schedule does the rest.
    begun = any(it.annotations for it in sparse_iterations(func))
    if not begun:
        stages = _by_elements(func, target)
        if stages is not None:
            return _inlined(stages)
    lowered = lower_sparse_iter(func)
    scheduled = default_schedule(lowered, target)
    if not begun:
        scheduled = _by_rows(func, scheduled, target, work)
    return _inlined({"I": func, "II": lowered, "II scheduled": scheduled})


def _inlined(stages: dict[str, Any]) -> dict[str, Any]:
    """With exponentials as the default schedule has them, in the versions, too."""
    return {**stages, "II scheduled": inline_exponentials(stages["II scheduled"])}


def _shape(ask: Callable[[Schedule, str], T], sch: Schedule) -> T | None:
    """The loops of a program of the shape that is asked for; None for another shape.

    The one place where a ShapeError is an answer: later it is a mistake of a version, and shows.
    """
    try:
        return ask(sch, "multiversion")
    except ShapeError:
        return None


def _by_elements(func: SparseFunc, target: Any) -> dict[str, Any] | None:
    """Sums over features for each element: versions by features, all by positions in parts.

    None for a program of another shape, and for types that sums are not kept in.
    """
    sch = Schedule(func)
    found = _shape(element_reduction, sch)
    if found is None or found.dtype not in ("float32", "float64"):
        return None
    feat = func.axis(found.features.name).length
    try:
        by_positions(sch, found, in_parts=True)
    except ScheduleError:  # positions themselves say so, such as of a loop under the elements
        return None
    lowered = lower_sparse_iter(sch.func)
    bits = vector_bits(target)
    lanes = bits // tvm.DataType(found.dtype).bits
    if not isinstance(feat, tirx.IntImm):
        scheduled = default_schedule(lowered, target)
        if lanes > 1 and isinstance(feat, ir.Var):
            (nnz,) = _of_lowered([func.axis(found.elements.axes[1]).nnz], scheduled)
            scheduled = _by_vectors(func, sch.func, feat, nnz, lanes, scheduled)
    elif int(feat) > 1 < lanes:
        config = SddmmGroups.for_features(Sddmm(found.dtype), int(feat), bits)
        scheduled = _in_groups(func, replace(config, parts=2))
    else:
        scheduled = default_schedule(lowered, target)
    return {"I": sch.func, "II": lowered, "II scheduled": scheduled}


def _by_vectors(
    func: SparseFunc, positions: SparseFunc, feat: Any, nnz: Any, lanes: int, scalar: tirx.PrimFunc
) -> tirx.PrimFunc:
    """Versions by how many vectors the features fill, of shorter vectors where they fill none.

    The code for so many vectors is straight; above `STRAIGHT` it goes by tiles.

    positions : `func`, by positions in parts

    feat : of the stage-I function
    nnz : as a parameter of `scalar`
    scalar : what is left for fewer features or elements than a version takes
    """
    (size,) = _of_lowered([feat], scalar)
    widths = [w for w in (lanes // 4, lanes // 2) if w >= LEAST]
    straight = [x for w in widths for x in ((w, 1, w), (w, 2, 2 * w - 1))]
    straight += [(lanes, count, lanes * count) for count in range(1, STRAIGHT + 1)]
    parts, order = _parts_and_order(positions, scalar)
    made: dict[int, tirx.PrimFunc] = {}
    versions: list[tuple[str, int, tirx.PrimFunc]] = []
    for width, count, most in straight:
        if width not in made:
            config = SddmmGroups(width, min(GROUP, width), 1, parts=2, any_size=True)
            made[width] = _in_groups(func, config)
        version = unroll_known_tiles(made[width], feat, width, count)
        if (width, count) == (lanes, EXACT):
            whole = SddmmGroups(lanes, min(GROUP, lanes), EXACT, lanes * EXACT, parts=2)
            holds = size == _int64(lanes * EXACT)
            version = _either(holds, _in_groups(func, whole), version, ("whole", "begun_earlier"))
        if most <= lanes:
            holds, stored = (
                parts == as_dtype(1, dtype_of(parts)),
                drop_identity_order(version, order),
            )
            version = _either(holds, stored, version, ("one_part", "in_parts"))
        versions.append((f"vectors_{width}x{count}", most, version))
    tiles = SddmmGroups(lanes, min(GROUP, lanes), parts=2)
    shifted = SddmmGroups(lanes, min(TURNS, lanes), TILE, parts=2, any_size=True)
    whole = tirx.floormod(size, _int64(tiles.tile)) == _int64(0)
    wide = _either(whole, _in_groups(func, tiles), _in_groups(func, shifted), ("tiles", "shifted"))
    versions.append(("wide", 0, wide))
    least = straight[0][0]
    fits = tirx.all(nnz >= _int64(GROUP), size >= _int64(least))
    _, groups = _up_to(size, versions)
    return _either(fits, groups, scalar, ("groups", "scalar"))


def _parts_and_order(func: SparseFunc, lowered: tirx.PrimFunc) -> tuple[Any, str]:
    """The lowered parameter that holds the number of parts, and the name of their order."""
    orders = permutations(func)
    (order,) = [b for b in func.buffers if b.var in orders]
    how = computed_parameters(func)[str(order.handle.name)]
    (parts,) = [p for p in lowered.params if f"${p.name}" == how["parts"]]
    return parts, order.name


def _up_to(size: Any, versions: list[tuple[str, int, tirx.PrimFunc]]) -> tuple[str, tirx.PrimFunc]:
    """One function of versions by the largest size of each, the last for all above; and a name.

    Which one is found by halving.
    """
    if len(versions) == 1:
        ((name, _, version),) = versions
        return name, version
    middle = len(versions) // 2
    _, most, _ = versions[middle - 1]
    (few, yes), (many, no) = (_up_to(size, part) for part in (versions[:middle], versions[middle:]))
    return f"around_{most}", _either(size <= _int64(most), yes, no, (few, many))


def _in_groups(func: SparseFunc, config: SddmmGroups) -> tirx.PrimFunc:
    sch = Schedule(func)
    apply(sch, config)
    return materialize_loop_kinds(_stage_two(sch))


def _stage_two(sch: Schedule) -> tirx.PrimFunc:
    """The function that a schedule has come to in stage II."""
    (func,) = sch.lower().mod.functions.values()
    return func


def _by_rows(func: SparseFunc, rows: tirx.PrimFunc, target: Any, work: int) -> tirx.PrimFunc:
    """Reductions over what rows store: versions by features, and by how often rows are gathered.

    rows : the same of stage II, with the default schedule; the result for a program of another
        shape, of booleans, and where rows may write the same elements
    """
    sch = Schedule(func)
    found = _shape(row_reduction, sch)
    if found is None or not found.free or found.dtype == "bool":
        return rows
    axis = func.axis(found.features.name)
    if axis.kind != "dense_fixed" or not isinstance(axis.length, tirx.IntImm | ir.Var):
        return rows  # nothing can be promised about its length
    nnz, n, feat = _sizes(func, found, rows)
    threads = pool()
    lanes = vector_bits(target) // tvm.DataType(found.dtype).bits
    if not isinstance(feat, tirx.IntImm):
        narrow = _narrow(func, lanes)
        if nnz is not None and threads > 1:
            small = _on_one_thread(narrow)
            narrow = _either(nnz * feat < _int64(work), small, narrow, ("small", "more"))
        rows = _either(feat < _int64(8 * lanes), narrow, rows, ("narrow", "wide"))
    elif int(feat) <= PACK_FEATURES:
        return rows
    if found.gathered is None or found.heads or n is None:
        return rows
    try:
        panels = _panels(sch, found, feat, lanes, target)
    except ScheduleError:
        return rows  # what is gathered cannot be copied: it depends on the row, too
    tiles = tirx.floordiv(feat, _int64(VECTORS * lanes))
    pays = tirx.all(
        nnz >= n * _int64(PACK_DEGREE),
        feat > _int64(PACK_FEATURES),
        tirx.floormod(tiles, _int64(threads)) == _int64(0),
    )
    return _either(pays, panels, rows, ("panels", "rows"))


def _narrow(func: SparseFunc, lanes: int) -> tirx.PrimFunc:
    """Versions for few features: two vectors, or tiles, of which the last begins earlier."""
    done = _in_tiles(func, None, [1, 1])
    *_, feat = _sizes(func, row_reduction(Schedule(func), "multiversion"), done)
    width = LEAST
    while width <= lanes:
        two = _in_tiles(func, 2, [width])
        done = _either(feat > _int64(width), two, done, (f"vectors_of_{width}", "fewer"))
        width *= 2
    for vectors in TILES:
        version = _in_tiles(func, None, [vectors, lanes])
        wide = feat >= _int64(vectors * lanes)
        done = _either(wide, version, done, (f"tiles_of_{vectors}", "less"))
    return done


def _on_one_thread(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function whose parallel loops are not."""

    def visit(loop: Any) -> Any:
        parallel = loop.kind == tirx.ForKind.PARALLEL
        return loop_with(loop, kind=tirx.ForKind.SERIAL) if parallel else loop

    return s_tir.renew_defs(func.with_body(map_expr(func.body, [(tirx.For, visit)])))


def _in_tiles(func: SparseFunc, count: int | None, tile: list[int]) -> tirx.PrimFunc:
    """Rows by tiles of features, which are summed up in registers.

    count : tiles, all summed up at once, where it is known
    tile : its vectors, if it has more than one, and their lanes
    """
    sch = Schedule(func)
    found = row_reduction(sch, "multiversion")
    loops = sch.split(found.features, [count, *tile], tail="shift")
    order = [loop.axes for loop in sch.get_sp_iters(found.iteration)]
    rows = sorted([*found.heads, found.rows], key=lambda loop: order.index(loop.axes))
    around, held = [*rows, *loops[:-2]], loops[-2:]
    steps = sums_of(
        sch, found.iteration, found.result, around, found.columns, held, hoist=found.reduces
    )
    sch.parallelize(around[0])
    straight_code(sch, steps)
    return materialize_loop_kinds(_stage_two(sch))


def _panels(sch: Schedule, found: RowReduction, feat: Any, lanes: int, target: Any) -> Any:
    """The version that gathers from panels, scheduled."""
    tile = VECTORS * lanes
    features = found.features
    if not isinstance(feat, tirx.IntImm) or int(feat) % tile:
        features, _ = sch.peel(features, tile)
    steps = in_registers(
        sch, replace(found, features=features), RowBlocks(tile, lanes, parallel=False),
        [found.rows], found.columns, tiles_at=0, pack=True, hoist=True, dtype=found.dtype,
    )  # fmt: skip
    straight_code(sch, steps)
    return default_schedule(_stage_two(sch), target, VECTORS // 2)


def _sizes(func: SparseFunc, found: RowReduction, lowered: tirx.PrimFunc) -> list[Any]:
    """Elements of the rows, rows that are gathered from, features, by lowered parameters.

    The first two are None where they do not say how often a row is gathered.
    """
    axes = {axis.name: axis for axis in func.axes}
    column, gathered = axes[found.columns[0].name], axes.get(str(found.gathered_axis))
    stored = len(found.columns) == 1 and column.kind == "sparse_variable"
    sizes = [
        column.nnz if stored else None,
        gathered.length if stored and gathered is not None else None,
        axes[found.features.name].length,
    ]

    return _of_lowered(sizes, lowered)


def _of_lowered(sizes: list[Any], lowered: tirx.PrimFunc) -> list[Any]:
    """Sizes of a stage-I function by the parameters of its stage II, in int64; None stays None."""
    named = {p.name: p for p in lowered.params}

    def of_lowered(size: Any) -> Any:
        return as_dtype(substitute(size, {v: named[v.name] for v in free_vars(size)}), "int64")

    return [None if size is None else of_lowered(size) for size in sizes]


def _either(condition: Any, yes: tirx.PrimFunc, no: tirx.PrimFunc, names: Any) -> tirx.PrimFunc:
    """One function that does as one of two of the same parameters; its own are those of `no`."""
    same = dict(zip(yes.params, no.params, strict=True))
    condition = substitute(condition, same)
    bodies = substitute(yes.body, same), no.body
    parts = [
        s_tir.SBlockRealize([], True, block_with(body.block, name_hint=name))
        for body, name in zip(bodies, names, strict=True)
    ]
    root = s_tir.SBlock([], [], [], "root", tirx.IfThenElse(condition, *parts))
    layouts = {**dict(yes.attrs[LAYOUTS].items()), **dict(no.attrs[LAYOUTS].items())}
    return no.with_body(s_tir.SBlockRealize([], True, root)).with_attr(LAYOUTS, layouts)


def _int64(value: int) -> Any:
    return as_dtype(value, "int64")
