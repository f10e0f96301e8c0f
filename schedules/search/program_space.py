"""The schedules that a search tries for programs without a template.

Message passing, products of sparse matrices and of sparse tensors share a form: a loop nest that
sums over sparse axes for each element of a dense row. Before::

    with T.sp_iter([I, J, K, F], "SRRS", "mttkrp") as [i, j, k, f]:
        with T.init():
            Y[i, f] = 0.0
        Y[i, f] = Y[i, f] + A[i, j, k] * B[j, f] * C[k, f]

With `{"mttkrp.vectors": 2, "mttkrp.lanes": 16, "mttkrp.inner": "J", ...}` sums of 32 features stay
in registers, those over k are multiplied by B once, and all of it is straight-line vector code::

    with T.sp_iter([I, F0], "SS", "mttkrp") as [i, f0]:
        Y_ws[f1, f2] = 0.0
        with T.sp_iter([J], "R", "mttkrp_reduce") as [j]:
            Y_ws_ws[f1, f2] = 0.0
            with T.sp_iter([K, F1, F2], "RSS", ...) as [k, f1, f2]:
                Y_ws_ws[f1, f2] = Y_ws_ws[f1, f2] + A[i, j, k] * C[k, f0 * 32 + f1 * 16 + f2]
            Y_ws[f1, f2] = Y_ws[f1, f2] + B[j, f0 * 32 + f1 * 16 + f2] * Y_ws_ws[f1, f2]
        Y[i, f0 * 32 + f1 * 16 + f2] = Y_ws[f1, f2]

Other programs get constant lengths of innermost loops. Sums over features for each stored element
are visited by position, in parts of the columns: `{"sddmm.size": 64, "sddmm.parts": 4}`. Small work
runs on one thread: `{"threads": 1}`, with any of these except the tiles above. GPU threads
accumulate in registers: `{"registers": 1}`.

It uses public primitives only. If one of them refuses a combination, its ScheduleError is the
result of that trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir.schedules.operators.problems import summed
from sparsetir.schedules.passes.inline_exponentials import EXPONENTIAL, INLINED
from sparsetir.schedules.passes.prefetch import prefetch_gathered
from sparsetir.schedules.passes.vectorize_innermost import vectorize_innermost
from sparsetir.schedules.search.visit_orders import LENGTH, ROWS, WINDOW
from sparsetir.schedules.targets import l2_bytes, pool
from sparsetir.schedules.template import Choices
from sparsetir.schedules.templates import element_tile, row_tile
from sparsetir.schedules.templates.register_tile import MAX_TILE, straight_code
from sparsetir.schedules.templates.row_tile import LEAST, VECTORS, Half, RowTile
from sparsetir.schedules.templates.shapes import (
    ElementReduction,
    Nest,
    RowReduction,
    element_reduction,
)
from sparsetir.sparse_ir.annotations import THREADS
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    iterations_around,
    loads_of,
    nodes_of,
    sparse_iterations,
    trip_counts,
)
from sparsetir.sparse_ir.reduction import reduction_of, split_guards
from sparsetir.sparse_ir.schedule import Schedule, SpIter
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    SparseIterationRef,
    find_iteration,
    inside,
    loops_of,
)
from sparsetir.sparse_ir.tir import free_vars

CHOICES = ("vectors", "lanes", "order", "size", "inner", "blocks", "parallel", "ahead")
ROWS_IN_TURN = "rows"
FIELDS = {"parts": "parts", "sorted": "window", "panels": "rows"}  # by a visit's first word
PARTS, PANELS = (4,), (3, 4)  # of the columns; rows per panel
AHEAD = (0, 4, 16)  # elements by which gathered rows are prefetched
BLOCKS = (4, 16)  # of equal work, per thread
OF_PATTERN = ("m", "n", "nnz")


def space_of(
    func: SparseFunc, sizes: Mapping[str, int], bits: int, threads: int
) -> dict[str, tuple[Any, ...]]:
    """The choices of :func:`apply` for a function, by name; empty if nothing can be tiled.

    sizes : the known sizes among the function's parameters
    bits : per vector register; threads : of the CPU

    For each top-level iteration, with its name before the choice's:

    vectors, lanes : the vectors of a tile, and their lanes
    order : "rows", all tiles of a row, then the next row; "tiles", all rows for a tile; "packed",
        the same with the tile's features of the gathered operand packed
    size : the length of a row as a constant, which kernels check in each call; 0 for any length
        of at least a tile, where the last tile begins earlier
    inner : the reduction whose partial results have separate registers, "" for none
    blocks : blocks of equal work per thread; 0 for single rows, or, if these are in another order
        or packed, one block per thread
    parallel : whether to use all threads
    ahead : elements by which gathered rows are prefetched, 0 for never

    visit : "rows", or, if elements are stored singly, "parts 4", "sorted 4096" and "panels 3":
        `parts`, `window` and `rows` of :class:`sparsetir.schedules.templates.row_tile.RowTile`

    For other programs `size`, of the innermost loops over dense axes; threads, 1 for a single one,
    0 for all; and if only elements are visited, as in SDDMM, parts : of the columns, one after the
    other; 1 for the order of storage, 0 for the number that suits the sizes. The first values are a
    good default.
    """
    tried: dict[str, tuple[Any, ...]] = {}
    nests = _nests(Schedule(func))
    for nest in nests:
        choices = _choices(func, nest, sizes, bits, threads, alone=len(nests) == 1)
        name = nest.iteration.name
        tried |= {f"{name}.{choice}": tuple(values) for choice, values in choices.items()}
    if tried:
        return tried
    tried = {**_parts(func, sizes), **_sizes(func, sizes)}
    return {**tried, "threads": (0, 1)} if tried and threads > 1 else tried


def config_of(**chosen: Any) -> Choices | None:
    """The config of some choices; None if they are incompatible."""
    for name in (x.removesuffix("visit") for x in chosen if x.endswith(".visit")):
        visit, size = chosen[f"{name}visit"], chosen[f"{name}size"]
        tile = chosen[f"{name}vectors"] * chosen[f"{name}lanes"]
        if visit.startswith("parts") and (not size or size % tile):
            return None  # results of tiles that overlap cannot be updated
        if visit.startswith("panels") and chosen[f"{name}ahead"]:
            return None
    return Choices(chosen)


def _known(size: Any, sizes: Mapping[str, int]) -> int | None:
    """The value of a size, given the parameters' values; None if it is unknown."""
    if isinstance(size, ir.Var):
        return sizes.get(str(size.name))
    return int(size) if isinstance(size, tirx.IntImm) else None


def default_of(func: SparseFunc, sizes: Mapping[str, Any], gpu: bool = False) -> dict[str, Any]:
    """The choices for known sizes, on all threads; sizes of patterns are not compiled in.

    None if the default schedule is as good.
    """
    own = {name: size for name, size in sizes.items() if name not in OF_PATTERN}
    tried = (
        _sizes(func, own, everywhere=True) if gpu else {**_parts(func, sizes), **_sizes(func, own)}
    )
    chosen = {name: values[0] for name, values in tried.items() if values[0]}
    return {**chosen, "registers": 1} if gpu else chosen


def work_of(func: SparseFunc, sizes: Mapping[str, int]) -> float:
    """About how many multiplications a call takes; infinity if sizes are unknown."""
    total = 0.0
    for it in (x for x in sparse_iterations(func) if not inside(x)):
        loops = (it, *iterations_around(func, it))
        visited = {axis.name: axis for x in loops for axis, _, _ in x.axis_of()}
        lengths = [_known(size, sizes) for size in trip_counts([*visited.values()])]
        called = [getattr(x.op, "name", "") for x in nodes_of(ir.Call, it.body)]
        each = 1 + EXPONENTIAL * sum(name in INLINED for name in called)
        total += each * math.prod(math.inf if size is None else size for size in lengths)
    return total


def _sizes(
    func: SparseFunc, sizes: Mapping[str, int], everywhere: bool = False
) -> dict[str, tuple[int, ...]]:
    """The choices of constants for sizes, each with the first loop over it.

    everywhere : also for loops that visit no contiguous elements
    """
    lengths = {
        name: _known(loop.node.length, sizes)
        for name, loop in _sized(func)
        if everywhere or _is_contiguous(find_iteration(func, name), loop)
    }
    return {f"{n}.size": (size, 0)[:size] for n, size in lengths.items() if size}


def _sized(func: SparseFunc) -> Iterator[tuple[str, Loop]]:
    """Iterations with an innermost of several loops over a dense axis, by name; one per size."""
    names: set[str] = set()
    above = {axis.parent.name for axis in func.axes if axis.parent is not None}
    for it in sparse_iterations(func):
        loops = loops_of(it)
        dense = [x for x in loops if isinstance(x.node, Axis) and x.node.kind == "dense_fixed"]
        dense = [x for x in dense if x.name not in above and isinstance(x.node.length, ir.Var)]
        if len(loops) > 1 and dense and dense[-1].node.length.name not in names:
            names.add(dense[-1].node.length.name)
            yield it.name, dense[-1]


def _is_contiguous(it: SparseIteration, loop: Loop) -> bool:
    """Whether a loop visits contiguous elements of an array."""
    accesses = [*nodes_of(ir.TensorLoad, it.body), *nodes_of(tirx.BufferStore, it.body)]
    return any(x.indices and loop.var in free_vars(x.indices[-1]) for x in accesses)


def _parts(func: SparseFunc, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The choices of parts for sums over features for each stored element; empty for others."""
    shape = _elements(func)
    if shape is None:
        return {}
    sums, of = shape
    values = {name: value for name in of if (value := _known(of[name], sizes)) is not None}
    parts = [0, 1]
    if len(values) == len(of):
        best = element_tile.parts_for(sums, values)
        parts = [int(best == 1), 1, max(1, best // 2), 2 * best, 4 * best]
    return {f"{sums.iteration.name}.parts": tuple(dict.fromkeys(parts))}


@lru_cache(64)  # by identity
def _elements(func: SparseFunc) -> tuple[ElementReduction, dict[str, Any]] | None:
    """The sums over features for each stored element that a function computes, and their sizes."""
    sch = Schedule(func)
    try:
        sums = element_reduction(sch, "space_of")
        sizes = element_tile.sizes_of(sch, sums)
        element_tile.by_positions(sch, sums)
    except ScheduleError:
        return None
    return sums, sizes


def apply(sch: Schedule, config: Mapping[str, Any]) -> None:
    """Schedule a function by choices of its :func:`space_of`; without any it is unchanged.

    Raises ScheduleError if choices are incompatible, KeyError for a missing one.
    """
    if not config:
        return
    func = sch.func
    nests = [x for x in _nests(sch) if f"{x.iteration.name}.vectors" in config]
    if not nests:
        for name, loop in _sized(func):
            if size := config.get(f"{name}.size"):
                sch.bound(SpIter(name, loop.axes), size, "exact")
        if parts := next((x for name, x in config.items() if name.endswith(".parts")), 0):
            element_tile.by_positions(sch, element_reduction(sch, "program_space"), parts)
        for it in sparse_iterations(func) if config.get("registers") else ():
            _in_register(sch, it)
        for it in sparse_iterations(sch.func) if config.get("threads") else ():
            sch.annotate(SparseIterationRef(it.name), THREADS, 1)
        return
    halves = [_in_tiles(sch, nest, config) for nest in nests]
    stage_two = straight_code(sch, [step for steps, _ in halves for step in steps])
    for _, finish in halves:
        finish(stage_two)
    bits, vectors = (max(size(x, config) for x in nests) for size in (_bits, _vectors))
    sch.rewrite(vectorize_innermost, bits, l2_bytes(), vectors)


def _bits(nest: RowReduction, config: Mapping[str, Any]) -> int:
    """The size of a vector in bits."""
    return config[f"{nest.iteration.name}.lanes"] * tvm.DataType(nest.dtype).bits


def _vectors(nest: RowReduction, config: Mapping[str, Any]) -> int:
    """The number of vectors per tile."""
    return config[f"{nest.iteration.name}.vectors"]


def _in_register(sch: Schedule, it: SparseIteration) -> None:
    """Keep the sum of each element in a register of at least 32 bits; others are unchanged."""
    reduction, loops = reduction_of(it.body), loops_of(it)
    spatial = [SpIter(it.name, x.axes) for x in loops if set(x.kinds) == {"S"}]
    sums = [SpIter(it.name, x.axes) for x in loops if set(x.kinds) == {"R"}]
    if reduction is None or not spatial or len(spatial) + len(sums) < len(loops) or not sums:
        return
    result, dtype = reduction.store.buffer, str(reduction.store.buffer.ty.dtype)
    ref = SparseIterationRef(it.name)
    try:
        sch.sparse_reorder(ref, [*spatial, *sums])
        sch.precompute(str(result.name), spatial[-1], [], dtype=summed(dtype), hoist=True)
    except ScheduleError:
        return


@dataclass(frozen=True)
class RowTileOfAnySize(RowTile):
    """Tiles whose last one begins earlier if the number of features is not compiled in."""

    @property
    def tail(self) -> str:
        return "shift" if self.feat is None else super().tail


def _tile_of(nest: RowReduction, config: Mapping[str, Any]) -> RowTile:
    """The tile that the choices of an iteration describe."""
    of = nest.iteration.name
    chosen = {name: config[f"{of}.{name}"] for name in CHOICES}
    visit, _, number = config.get(f"{of}.visit", ROWS_IN_TURN).partition(" ")
    vectors, lanes, order = chosen["vectors"], chosen["lanes"], chosen["order"]
    apart = order == "packed" or visit != ROWS_IN_TURN
    tile = RowTileOfAnySize(
        vectors * lanes, lanes, chosen["size"] or None, order == "packed",
        order != "rows" or visit == "panels" or nest.rows is None, parallel=chosen["parallel"],
        blocks=chosen["blocks"] or int(apart) * pool(), packed=False,
    )  # fmt: skip
    return replace(tile, **{FIELDS[visit]: int(number)}) if number else tile


def _in_tiles(sch: Schedule, nest: RowReduction, config: Mapping[str, Any]) -> Half:
    """An iteration in tiles, scheduled in stage I, and the remaining step for stage II."""
    name = nest.iteration.name
    tile, inner, ahead = _tile_of(nest, config), config[f"{name}.inner"], config[f"{name}.ahead"]
    gathered = _gathered(sch.func, find_iteration(sch.func, name)) if ahead else []
    if tile.feat:
        sch.bound(nest.features, tile.feat, "exact")
    steps, finish = row_tile.in_tiles(sch, nest, tile)
    if inner:
        # Partial results of an inner sum, in separate registers.
        *sums, vector, lane = sch.get_sp_iters(steps[1][0])
        inner_sum = next(handle for handle in sums if handle.name == inner)
        reduction = reduction_of(find_iteration(sch.func, steps[1][0].name).body)
        assert reduction is not None
        buffer = reduction.store.buffer.name
        parts = sch.precompute(buffer, inner_sum, [vector, lane], hoist=True)
        steps[1:2] = [(step, 2) for step in parts]
    innermost = steps[2 if inner else 1][0]

    def finish_stage_two(stage_two: Any) -> None:
        finish(stage_two)
        for buffer, _ in gathered:
            copied = tile.pack and buffer == nest.gathered
            read = f"{buffer}_ws" if copied else buffer
            sch.rewrite(prefetch_gathered, innermost, read, ahead, tile.tile)

    return steps, finish_stage_two


def _nests(sch: Schedule) -> list[RowReduction]:
    """The top-level iterations that can be tiled, in the form that row tiles take."""
    body = sch.func.body
    top = body.seq if hasattr(body, "seq") else [body]
    nests = (_nest(sch, it) for it in top if isinstance(it, SparseIteration))
    return [nest for nest in nests if nest is not None]


def _nest(sch: Schedule, it: SparseIteration) -> RowReduction | None:
    """The loops of an iteration that can be tiled; None if it has another form.

    Loops are outside of rows, these, and inside of them: rows store elements, and only dense axes
    are around them; without such, the first loop.
    """
    nest = Nest(sch, "program_space", it)
    loops, reduction = nest.loops, nest.reduction
    if reduction is None or nest.store is None or split_guards(it.body)[0]:
        return None
    along = [x for x in nest.along() if getattr(x.node, "kind", "") == "dense_fixed"]
    sums = [x for x in loops if x.kinds == "R" * len(x.kinds)]
    if not sums or [x.kinds for x in along] != ["S"]:
        return None
    features, visited = along[0], {var for x in sums for var in x.vars}
    mixed = any(set(x.kinds) == {"S", "R"} for x in loops)
    if mixed or any(_is_under(x, features.node) for x in loops):
        return None
    loads = [x.indices for x in nodes_of(ir.TensorLoad, reduction.term) if x.indices]
    last = (x for x in loads if any(visited & free_vars(i) for i in x))
    if not any(x[-1].same_as(features.var) for x in last):
        return None  # no operand is contiguous
    outer = [x for x in loops if x is not features and "R" not in x.kinds]
    # Sums come after everything spatial, which must not depend on them.
    if any(_is_under(x, y.node) for x in outer for y in sums):
        return None
    dense = takewhile(lambda x: getattr(x.node, "kind", "") == "dense_fixed", outer)
    rows = (x for x in dense if any(_is_under(y, x.node) and y.node.is_variable for y in loops))
    place = outer.index(next(rows, outer[0])) if outer else 0
    ref, handles = nest.handles()
    around, columns = ([handles[x.axes] for x in some] for some in (outer, sums))
    operand, axis = next(iter(_gathered(sch.func, it)), (None, None))
    return RowReduction(
        ref, around[:place], around[place] if around else None, columns, handles[features.axes],
        nest.result, operand, axis, nest.dtype, nest.dtype, False, around[place + 1 :],
    )  # fmt: skip


def _is_under(loop: Loop, axis: Any) -> bool:
    parent = getattr(loop.node, "parent", None)
    return parent is not None and isinstance(axis, Axis) and parent.name == axis.name


def _choices(
    func: SparseFunc, nest: RowReduction, sizes: Mapping[str, int], bits: int, threads: int,
    alone: bool,
) -> dict[str, Any]:  # fmt: skip
    """The choices of one iteration; fewer if several iterations are tiled."""
    length = func.axis(nest.features.name).length
    size = _known(length, sizes)
    lanes = max(1, bits // tvm.DataType(nest.dtype).bits)
    while size is not None and 1 < lanes and lanes > size:
        lanes //= 2
    most = min(MAX_TILE, size or MAX_TILE)
    fixed = isinstance(length, ir.Var) and size
    several = nest.rows is not None and (size is None or size > lanes)
    in_blocks = threads > 1 and _stored_by(func, nest)
    packed = nest.gathered and alone and (in_blocks or threads == 1)
    orders = ("rows", "tiles", *(["packed"] if packed else []))
    return {
        "vectors": [v for v in VECTORS if v * lanes <= max(most, lanes)],
        "lanes": (lanes,),
        "order": orders if several else ("rows",),
        "size": (size, 0) if fixed else (0,),
        "inner": ("", *(x.name for x in nest.columns[:-1])),
        "blocks": (0, *(n * threads for n in BLOCKS)) if in_blocks else (0,),
        "parallel": (True, False) if threads > 1 else (False,),
        "ahead": AHEAD if nest.gathered else (0,),
        "visit": tuple(_visits(func, nest, sizes)) if alone else (ROWS_IN_TURN,),
    }  # fmt: skip


def _visits(func: SparseFunc, nest: RowReduction, sizes: Mapping[str, int]) -> Iterator[str]:
    """Other orders of rows and of their columns, if columns are stored singly."""
    yield ROWS_IN_TURN
    stored = [a for a in _stored_by(func, nest) if [a.name] == [x.name for x in nest.columns]]
    if not stored or stored[0].kind != "sparse_variable":
        return
    (column,) = stored
    m, n, nnz = (_known(x, sizes) for x in (column.parent.length, column.length, column.nnz))
    if m and n and nnz:
        yield from (f"parts {parts}" for parts in PARTS)
        yield from (f"sorted {WINDOW}",) if m >= ROWS and nnz <= LENGTH * m else ()
        yield from (f"panels {rows}" for rows in PANELS if nnz >= LEAST * m * n)


def _stored_by(func: SparseFunc, nest: RowReduction) -> list[Axis]:
    """The axes of varying lengths right under rows of a dense axis, which each have results."""
    if nest.rows is None:
        return []
    it = find_iteration(func, nest.iteration.name)
    reduction = reduction_of(it.body)
    rows = next(loop for loop in loops_of(it) if loop.axes == nest.rows.axes)
    if reduction is None or not set(rows.vars) <= free_vars(reduction.store.indices):
        return []
    axes = [axis for axis, _, _ in it.axis_of()]
    under = [a for a in axes if a.is_variable and a.parent.name == nest.rows.name]
    return [a for a in under if a.parent.kind == "dense_fixed"]


def _gathered(func: SparseFunc, it: SparseIteration) -> list[tuple[str, str]]:
    """Buffers whose rows the innermost sum gathers by indices of a sparse axis.

    Each with the axis that is indexed.
    """
    inner = [x for x in loops_of(it) if x.kinds == "R" * len(x.kinds)][-1]
    visited = getattr(inner.node, "axis", inner.node)
    if not isinstance(visited, Axis) or not visited.is_sparse or len(inner.vars) != 1:
        return []
    axis_of: dict[str, str] = {}
    for buffer in func.buffers:
        for load in loads_of(it.body, buffer.var):
            for axis, index in zip(buffer.axes or [], load.indices, strict=False):
                dense = axis.kind == "dense_fixed"
                if dense and isinstance(index, ir.Var) and index.same_as(inner.vars[0]):
                    axis_of.setdefault(buffer.name, axis.name)
    return list(axis_of.items())
