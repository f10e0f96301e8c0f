"""Extensions of the default schedule for some shapes of programs on CPUs.

If rows are gathered often, packing some of their features, as many as the L2 cache holds, pays (see
:mod:`sparsetir.schedules.templates.row_tile`). With few features, waking worker threads takes as
long as all rows::

    if nnz >= 28 * n and feat > 64 and (feat + 31) // 32 % threads == 0:
        for k0 in T.parallel((feat + 31) // 32):        # 32 features at a time, or 64;
            ...                                         # the last tile begins earlier
            B_32[j, k] = B[j, k0 * 32 + k]
            for i in range(m): ...                      # C_32[k] += A[i, j] * B_32[j, k]
    elif nnz * feat < 1048576 and feat <= 64:
        ...                                              # the default schedule, in one thread
    else:
        ...                                             # the default schedule

Sums over features for each nonzero are computed by position, equally many per thread, in column
parts whose rows stay in cache; with one part, in the order of storage. Steps of rows for
neighbouring features, such as a softmax of heads, vectorise over these. Operands with strided
features are copied first, sums over all rows are computed in parts, intersections of a row with
many others look its elements up in a table, and threads own parts of what a scatter updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.schedules.default import default_schedule, versions_by_size
from sparsetir.schedules.panels import (
    LENGTH,
    MISSED,
    NEARLY_ALL,
    PACK_DEGREE,
    every,
    is_false,
    no,
    panel_bytes,
    panels,
    some,
)
from sparsetir.schedules.passes.drop_identity_order import drop_identity_order
from sparsetir.schedules.passes.features_last import features_last, result_last
from sparsetir.schedules.passes.fused_rows import FEW
from sparsetir.schedules.passes.inline_exponentials import inline_exponentials
from sparsetir.schedules.passes.lookups import Lookups, lookups
from sparsetir.schedules.passes.nests import of_params
from sparsetir.schedules.passes.owner_computes import MOST_PARTS, owner_computes, with_cuts
from sparsetir.schedules.passes.partial_sums import partial_sums
from sparsetir.schedules.passes.prefetch import REUSE, with_reuse_distances
from sparsetir.schedules.passes.versions import Versions, either, joined
from sparsetir.schedules.registers import sum_vectors
from sparsetir.schedules.targets import l1_bytes, l2_bytes, pool, vector_bits, vector_registers
from sparsetir.schedules.templates.element_tile import by_positions
from sparsetir.schedules.templates.register_tile import (
    Straight,
    greatest_divisor,
    of_blocks,
    straight_code,
    sums_of,
)
from sparsetir.schedules.templates.row_shapes import row_steps
from sparsetir.schedules.templates.shapes import (
    RowReduction,
    ShapeError,
    element_reduction,
    row_reduction,
)
from sparsetir.sparse_ir.annotations import THREADS
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    flat_axes,
    sparse_iterations,
    trip_counts,
)
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.schedule import Schedule, SpIter
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, loop_with
from sparsetir.sparse_ir.traversal import map_expr

T = TypeVar("T")

# Multiplications that take about as long as waking the other threads.
WORK_OF_THREADS = 1 << 20
# The least visits per row of a result with strided features for which a copy pays; one is enough if
# features are a multiple of so many elements apart, which the L1 cache has few places for.
RESULT_VISITS, SAME_SET = 4, 256
# Elements that are put in a table in the time of a search in a row.
SEARCH = 4
# The most vectors of features whose steps of a row are computed together, if their number is known.
STEP_VECTORS = 8


def multiversion(
    func: SparseFunc, target: Any, work: int = WORK_OF_THREADS, few: SparseFunc | None = None
) -> dict[str, Any]:
    """The default schedule for CPUs, with versions if the program has a suitable shape.

    func : a stage-I function
    work : the least multiplications for which other threads are used
    few : the function in another form, for at most :data:`FEW` features

    Returns stages "I", "II" and "II scheduled". "I" is `func`, or what the versions share.
    """
    stages = _versions(func, target, work)
    steps = None if few is None else _shape(row_steps, Schedule(few))
    if few is None or steps is None:
        return stages
    many, other = (x["II scheduled"] for x in (stages, _versions(few, target, work)))
    if [str(p.name) for p in many.params] != [str(p.name) for p in other.params]:
        return stages
    lengths = [few.axis(loop.name).length for loop in steps.others]
    size = prod(_lowered_sizes(lengths, many), start=_int64(1))
    done = either(size <= _int64(FEW), other, many, ("few", "many"))
    return {**stages, "II scheduled": done}


def _versions(func: SparseFunc, target: Any, work: int) -> dict[str, Any]:
    """The stages of :func:`multiversion` for one form of a program."""
    # Loops that the author has scheduled keep their mapping, and the default covers the rest.
    begun = any({*map(str, it.annotations)} - {THREADS} for it in sparse_iterations(func))
    if not begun:
        stages = _by_copies(func, target) or _by_elements(func, target)
        if stages is not None:
            return _inlined(stages)
        searches = lookups(func, pool())
        if searches is not None:
            return _inlined(_by_lookups(searches, target, work))
        parts = partial_sums(func) if pool() > 1 else None
        if parts is not None:
            return _inlined(_by_parts(*parts, target, work))
        func = with_cuts(func, owners()) if owners() > 1 else func
    func = with_reuse_distances(func)
    lowered = lower_sparse_iter(func)
    versions = versions_by_size(s_tir.renew_defs(lowered), target)
    scheduled = joined(versions)
    if not begun:
        scheduled = _by_rows(func, versions, target, work)
        scheduled = _by_steps(func, scheduled, target)
        scheduled = _by_owners(func, scheduled, work)
    return _inlined({"I": func, "II": lowered, "II scheduled": scheduled})


def _inlined(stages: dict[str, Any]) -> dict[str, Any]:
    """Inline exponentials as the default schedule does, in the versions, too."""
    return {**stages, "II scheduled": inline_exponentials(stages["II scheduled"])}


def _shape(ask: Callable[[Schedule, str], T], sch: Schedule) -> T | None:
    """The loops of a program of the requested shape; None for another shape.

    Only here a ShapeError is an answer: elsewhere it is a bug of a version, and propagates.
    """
    try:
        return ask(sch, "multiversion")
    except ShapeError:
        return None


def _by_copies(func: SparseFunc, target: Any) -> dict[str, Any] | None:
    """A version that copies what has strided features, for more visits than copies.

    None for a program without such arrays, or with visits that no parameter counts.
    """
    if not isinstance(func.body, SparseIteration):
        return None
    result = result_last(func)
    operands = features_last(func if result is None else result.func)
    copied = operands or result
    if copied is None:
        return None
    above = {x.name for axis in copied.visited for x in axis.ancestors()[:-1]}
    counts = _counts([axis for axis in copied.visited if axis.name not in above])
    if not counts:
        return None
    lowered = lower_sparse_iter(func)
    in_place = default_schedule(lowered, target)

    def count(sizes: list[Any]) -> Any:
        return prod(_lowered_sizes(sizes, in_place), start=_int64(1))

    least = sum(map(count, copied.rows), start=_int64(0))
    if operands is None:
        apart = tirx.floormod(count(copied.stride), _int64(SAME_SET))
        same_set = tirx.EQ(apart, _int64(0))
        least *= tirx.Select(same_set, _int64(1), _int64(RESULT_VISITS))
    scheduled = default_schedule(lower_sparse_iter(copied.func), target)
    done = either(count(counts) >= least, scheduled, in_place, ("copied", "strided"))
    return {"I": func, "II": lowered, "II scheduled": done}


def _by_parts(func: SparseFunc, visited: list[Axis], target: Any, work: int) -> dict[str, Any]:
    """Sums of parts of the rows, on threads for enough visits.

    visited : the axes of the loops
    """
    func = with_reuse_distances(func)
    lowered = lower_sparse_iter(func)
    scheduled = default_schedule(lowered, target)
    counts = _counts(visited) or [visited[0].length]
    visits = prod(_lowered_sizes(counts, scheduled))
    return {"I": func, "II": lowered, "II scheduled": _on_threads(visits, scheduled, work)}


def _by_owners(func: SparseFunc, scheduled: tirx.PrimFunc, work: int) -> tirx.PrimFunc:
    """Scatters in parts, for more visits than waking threads and finding their elements take.

    scheduled : for fewer visits; the result for a program that does not scatter
    """
    owned = owner_computes(scheduled, owners()) if owners() > 1 else None
    if owned is None:
        return scheduled
    by_owner, least = owned
    counts = (trip_counts(flat_axes(it.axes)) for it in sparse_iterations(func))
    factors = (_lowered_sizes(of_one, scheduled) for of_one in counts)
    visits = sum((prod(of_one, start=_int64(1)) for of_one in factors), start=_int64(0))
    many = tirx.all(*(visits >= x for x in (_int64(work), *_lowered_sizes(least, scheduled))))
    return either(many, by_owner, scheduled, ("owners", "one_thread"))


def owners() -> int:
    """The number of parts of scatters."""
    return min(pool(), MOST_PARTS)


def _by_lookups(found: Lookups, target: Any, work: int) -> dict[str, Any]:
    """Rows looked up in a table, unless clearing or filling it would take longer than it saves."""
    lowered = lower_sparse_iter(found.merged)
    located = default_schedule(lower_sparse_iter(found.located), target)
    probe, outside = found.probe, _counts(found.outside) or [found.outside[0].length]
    stored, rows = (probe.nnz_cols, 1) if probe.nnz is None else (probe.nnz, probe.parent.length)
    sizes = [probe.length, stored, as_dtype(rows, "int64"), *outside]

    def visits(func: tirx.PrimFunc) -> tuple[Any, Any, Any]:
        """The length of the table, the visits of the probe's rows, and of its elements."""
        size, stored, rows, *others = _lowered_sizes(sizes, func)
        return size, prod(others), prod(others) * tirx.floordiv(stored, tirx.max(rows, _int64(1)))

    located = _on_threads(visits(located)[-1], located, work)
    size, of_rows, of_elements = visits(located)
    pays = of_rows >= size
    if found.searched is not None:
        filled = prod(_lowered_sizes(_counts(found.searched.ancestors()), located))
        pays = tirx.all(pays, (of_rows + of_elements) * _int64(SEARCH) >= filled)
    merged = default_schedule(lowered, target)
    done = either(pays, located, merged, ("located", "merged"))
    return {"I": found.merged, "II": lowered, "II scheduled": done}


def _on_threads(visits: Any, scheduled: tirx.PrimFunc, work: int) -> tirx.PrimFunc:
    """A function that runs on one thread for few visits, an expression of its parameters."""
    if pool() < 2:
        return scheduled
    many = visits >= _int64(work)
    return either(many, scheduled, _on_one_thread(scheduled), ("more", "small"))


def _by_elements(func: SparseFunc, target: Any) -> dict[str, Any] | None:
    """Sums over features for each element, by position in parts.

    None for a program of another shape.
    """
    sch = Schedule(func)
    reduction = _shape(element_reduction, sch)
    if reduction is None:
        return None
    try:
        by_positions(sch, reduction)
    except ScheduleError:  # raised by `positions`, e.g. for a loop below the elements
        return None
    func = with_reuse_distances(sch.func)
    lowered = lower_sparse_iter(func)
    scheduled = default_schedule(lowered, target, any_order=True)
    parts, order = _parts_and_order(func, scheduled)
    one = tirx.EQ(parts, as_dtype(1, dtype_of(parts)))
    stored = drop_identity_order(scheduled, order)
    done = either(one, stored, scheduled, ("one_part", "in_parts"))
    return {"I": func, "II": lowered, "II scheduled": done}


def _parts_and_order(func: SparseFunc, lowered: tirx.PrimFunc) -> tuple[Any, str]:
    """The lowered parameter that holds the number of parts, and the name of their order."""
    (order,) = [b for b in func.buffers if b.var in known(func).permutations]
    how = known(func).computed[str(order.handle.name)]
    (parts,) = [p for p in lowered.params if f"${p.name}" == how["parts"]]
    return parts, order.name


def _stage_two(sch: Schedule) -> tirx.PrimFunc:
    """The current stage-II function of a schedule."""
    (func,) = sch.lower().mod.functions.values()
    return func


def _by_rows(func: SparseFunc, versions: Versions, target: Any, work: int) -> tirx.PrimFunc:
    """Reductions over the elements of rows: versions by work, and by how often rows are gathered.

    versions : of the default schedule; these are the result for a program of another shape, for
        booleans, and if rows may write the same elements
    """
    sch, rows = Schedule(func), joined(versions)
    reduction = _shape(row_reduction, sch)
    if reduction is None or not reduction.free or reduction.dtype == "bool":
        return rows
    axis = func.axis(reduction.features.name)
    if axis.kind != "dense_fixed" or not isinstance(axis.length, tirx.IntImm | ir.Var):
        return rows  # no promise about its length is possible
    sizes = _sizes(func, reduction, rows)
    nnz, _, n, feat, _ = sizes
    if nnz is not None and pool() > 1 and versions.index is not None:
        *narrow, _ = versions.of
        _, most, _ = narrow[-1]
        small = _on_one_thread(joined(Versions(versions.index, narrow)))
        few = tirx.all(nnz * feat < _int64(work), feat <= _int64(most))
        rows = either(few, small, rows, ("small", "more"))
    if reduction.gathered is None or reduction.heads != reduction.block or n is None:
        return rows
    return _with_panels(func, reduction, sizes, rows, target)


def _with_panels(
    func: SparseFunc, reduction: RowReduction, sizes: Sequence[Any], rows: Any, target: Any
) -> tirx.PrimFunc:
    """Versions that gather from panels, wide or narrow, or else use `rows`.

    sizes : the result of :func:`_sizes`
    """
    nnz, m, n, feat, distance = sizes
    bits, threads = tvm.DataType(reduction.total).bits, pool()
    gathered = func.buffer(str(reduction.gathered))
    casts = bool(reduction.block) or tvm.DataType(gathered.dtype).bits < bits
    tiles = panel_bytes(vector_bits(target), casts)
    narrow, wide = (size * 8 // bits for size in tiles)
    least = narrow + (not reduction.block) if casts else wide + 1
    if isinstance(feat, tirx.IntImm) and feat < least:
        return rows
    used_again = n if distance is None else tirx.min(n, distance)

    def misses(row: Any, cache: int, share: float) -> Any:
        """Whether a third of the uses, or more, miss: the distance tells nothing of most uses."""
        return share < NEARLY_ALL and used_again * row > _int64(cache)

    size = tvm.DataType(gathered.dtype).bits // 8
    pay, use_wide = panels(m, n, nnz, feat, size, misses, tiles, converts=casts)
    often = nnz >= n * PACK_DEGREE
    if reduction.block:
        pay, use_wide = often, False
    else:  # Whole rows have tiles for any number of features: in the L1 cache panels pay, too.
        pay = some(pay, every(often, feat > wide, some(casts, nnz >= m * LENGTH)))
    count = tirx.floordiv(feat + _int64(narrow - 1), _int64(narrow))
    whole = tirx.EQ(tirx.floormod(count, _int64(threads)), _int64(0))
    pay = every(pay, feat >= least if casts else True, whole)
    if is_false(pay):
        return rows
    try:
        version = _panels(func, reduction, narrow, target)
    except ScheduleError:
        return rows  # the gathered operand cannot be copied: it depends on the row, too
    count_of_wide = tirx.floormod(count, _int64(2 * threads))
    # Nothing is prefetched from panels, so that a cache has to hold wide ones, unless the L2 cache
    # does not hold much of narrow ones either.
    held = some(
        no(misses(tiles[1], l1_bytes(), MISSED)),
        n * tiles[1] <= l2_bytes(), n * tiles[0] > 2 * l2_bytes(),
    )  # fmt: skip
    use_wide = every(use_wide, feat >= wide, tirx.EQ(count_of_wide, _int64(0)), held)
    use_wide = use_wide if narrow < wide else False
    if not is_false(use_wide):
        wide_version = _panels(func, reduction, wide, target)
        version = either(use_wide, wide_version, version, ("wide", "narrow"))
    return either(pay, version, rows, ("panels", "rows"))


def _by_steps(func: SparseFunc, rest: tirx.PrimFunc, target: Any) -> tirx.PrimFunc:
    """Steps of rows for neighbouring features: versions that vectorise over these.

    rest : the default schedule, for fewer features; the result for a program of another shape
    """
    steps = _shape(row_steps, Schedule(func))
    if steps is None or steps.features not in steps.others:
        return rest
    axis = func.axis(steps.features.name)
    (size,) = _lowered_sizes([axis.length], rest)
    known = int(size) if isinstance(size, tirx.IntImm) else None
    bits = max((tvm.DataType(dtype).bits for dtype in steps.dtypes), default=64)
    vector = vector_bits(target) // bits
    most = vector if known is None else STEP_VECTORS * vector
    for tile in (1 << n for n in range(1, most.bit_length())):
        if known is not None and known < tile:
            continue
        sch = Schedule(func)
        try:
            parts = [tile // vector, vector] if tile > vector else [tile]
            tiles, *lanes = sch.split(steps.features, [None, *parts], tail="shift")
            others = [x for x in steps.others if x != steps.features]
            sch.sparse_reorder(steps.iteration, [steps.rows, *others, tiles, *lanes])
            straight_code(sch, [(step, len(lanes)) for step in sch.distribute(lanes)])
        except ScheduleError:
            return rest  # not only steps, or the row reads results of its other features
        version = default_schedule(_stage_two(sch), target)
        names = (f"from_{tile}", f"below_{tile}")
        rest = version if known else either(size >= _int64(tile), version, rest, names)
    return rest


def _on_one_thread(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with its parallel loops made serial."""

    def visit(loop: Any) -> Any:
        parallel = loop.kind == tirx.ForKind.PARALLEL
        return loop_with(loop, kind=tirx.ForKind.SERIAL) if parallel else loop

    return s_tir.renew_defs(func.with_body(map_expr(func.body, [(tirx.For, visit)])))


def _panels(func: SparseFunc, reduction: RowReduction, tile: int, target: Any) -> Any:
    """The version that gathers from panels of `tile` features, scheduled.

    The last panel begins earlier if it would exceed the features. For blocks, as many rows as
    registers hold are accumulated at a time; values of a narrower type are cast together before.
    """
    sch, total = Schedule(func), reduction.total
    bits, registers = vector_registers(target)
    lanes = bits // tvm.DataType(total).bits
    panels, *vectors = sch.split(reduction.features, [None, tile // lanes, lanes], tail="shift")
    rows = [panels, reduction.rows, *reduction.block]

    def sums(around: list[SpIter], columns: list[SpIter], held: list[SpIter]) -> Straight:
        steps = sums_of(
            sch, reduction.iteration, reduction.result, around, columns, [*held, *vectors],
            hoist=True, dtype=total, name=f"{reduction.result}_{tile}",
        )  # fmt: skip
        rows_of_b = [axis.name for axis in _rows_of(func, reduction)]
        copies = sch.precompute(
            str(reduction.gathered), panels, [*rows_of_b, *vectors], scope="global", dtype=total,
            name=f"{reduction.gathered}_{tile}",
        )  # fmt: skip
        return [*steps, *((copy, len(vectors)) for copy in copies)]

    if reduction.block:
        high = constant_length(func.axis(reduction.block[-1].name)) or 1
        most = max(1, sum_vectors(registers) * lanes // tile)
        steps = of_blocks(sch, reduction, greatest_divisor(high, most), total, sums, rows[:-1])
    else:
        steps = sums(rows, reduction.columns, [])
    straight_code(sch, steps)
    return default_schedule(_stage_two(sch), target, max(tile // lanes // 2, 1))


def _sizes(func: SparseFunc, reduction: RowReduction, lowered: tirx.PrimFunc) -> list[Any]:
    """Elements of the rows, rows, rows of the gathered operand, features, and the reuse distance of
    its rows, as lowered parameters.

    None if they do not determine how often a row is gathered.
    """
    axes = {axis.name: axis for axis in func.axes}
    loops = [reduction.rows, *reduction.block, *reduction.columns]
    counts = _counts([axes[name] for loop in loops for name in loop.axes])
    gathered = [axis.length for axis in _rows_of(func, reduction)]
    reuse = (p for p in func.params if p.name == f"{reduction.columns[0].name}_indices{REUSE}")
    rows = [axes[name].length for name in reduction.rows.axes]
    sizes = [axes[reduction.features.name].length, next(reuse, None)]
    feat, distance = _lowered_sizes(sizes, lowered)
    if not gathered or not counts:
        return [None, None, None, feat, distance]
    each = (_lowered_sizes(factors, lowered) for factors in (counts, rows, gathered))
    return [*(prod(x[1:], start=x[0]) for x in each), feat, distance]


def _rows_of(func: SparseFunc, reduction: RowReduction) -> list[Axis]:
    """The axes of the gathered operand without its features; () if one is not dense."""
    if reduction.gathered_axis is None:
        return []
    axes = func.buffer(str(reduction.gathered)).axes or ()
    rows = [axis for axis in axes if axis.name != reduction.features.name]
    return rows if all(axis.kind == "dense_fixed" for axis in rows) else []


def _counts(axes: Sequence[Axis]) -> list[Any]:
    """Factors of the trip count of loops over axes; () if two have varying lengths."""
    variable = [axis for axis in axes if axis.is_variable]
    if not any(axis.is_sparse for axis in axes) or len(variable) > 1:
        return []
    return trip_counts(axes)


def _lowered_sizes(sizes: list[Any], lowered: tirx.PrimFunc) -> list[Any]:
    """Sizes of a stage-I function as parameters of its stage II, in int64; None stays None."""
    return [None if x is None else as_dtype(of_params(lowered, x), "int64") for x in sizes]


def _int64(value: int) -> Any:
    return as_dtype(value, "int64")
