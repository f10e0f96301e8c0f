"""Relational gather-matmul-scatter on a CPU: rows gather, and tiles of them are multiplied.

Y[i, l] = sum over r, j, k of A[r, i, j] * X[j, k] * W[r, k, l]. For some rows of a relation at a
time, their gathered rows of X are summed in a small workspace, which is multiplied by W[r] with
accumulators in registers, and added to the rows of Y: no intermediate has the size of edges x
features. Threads have ranges of rows, for all relations, so that they do not race; the rows of Y
of a range stay in cache from one relation to the next. The default schedule multiplies per element:
with 16 features it takes 16 times as long. (SparseTIR, section 4.4.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.formats import Pattern
from sparsetir.schedules.arguments import choice, expect, is_power_of_two, number
from sparsetir.schedules.operators.problems import Arranged, Stored, accumulator
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms, program
from sparsetir.schedules.passes.parallel_loops import run_in_parallel
from sparsetir.schedules.passes.prefetch import prefetch_gathered
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.register_tile import Straight, greatest_divisor
from sparsetir.schedules.templates.shapes import Nest, gathered_operand, only_nest
from sparsetir.sparse_ir.computed import keyword
from sparsetir.sparse_ir.names import block_name
from sparsetir.sparse_ir.recipes.ranges import row_ranges
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import find_iteration

MOST_ROWS = 12  # per tile: for relations with few rows much of a larger one would be empty
STRAIGHT = 8  # vectors that are loaded, stored or added by straight-line code
MOST_DEEP = 1024  # features of X at a time


@dataclass(frozen=True)
class TiledRelations(register_tile.Tiled):
    """Schedule of a CPU kernel.

    feat_in, feat : the supported feature sizes, those of a block if features are in blocks
    rows : of a relation at a time
    tile : features of Y accumulated in registers at a time, each of `rows`; a divisor of `feat`
    lanes : per vector, a power of two that divides `tile`
    lanes_in : per vector of X's features, a power of two that divides `feat_in`
    depth : features of X at a time, a divisor of `feat_in`
    cost : of a row of a relation, in elements
    ranges : of rows, of about equal work, which are divided among the threads; by default as many
        as keep their rows of Y in half of a cache of 'cache' bytes
    threads : of the CPU, which have some ranges each
    prefetch : elements by which rows of X are prefetched; 0 for never
    ahead : rows by which those of Y are prefetched; 0 for never
    packed : for each range and relation, pack W[r] into panels as wide as a tile, which products
        read sequentially: pays for matrices larger than the first caches, of relations with many
        rows
    parallel : whether to use all threads; waking them takes as long as a small product
    blocks : of features, if these are in blocks
    """

    feat_in: int = number()
    feat: int = number()
    rows: int = number(8, tries=(4, 6, 8, 12, 16))
    tile: int = number(32)
    lanes: int = 16
    lanes_in: int = 16
    depth: int = number(32)
    cost: int = number(8, tries=(4, 8, 16, 32))
    ranges: int | None = number(None, optional=True)
    cache: int = number(1 << 20)
    threads: int = number(1)
    prefetch: int = number(16, least=0, tries=(0, 8, 16, 32))
    ahead: int = number(0, least=0, tries=(0, 6, 12, 24))
    packed: bool = choice(False, True)
    parallel: bool = True
    blocks: int = number(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        apart = not (self.packed and self.blocks > 1)
        expect(self, "packed", apart, "False for features in blocks")
        for name, whole in (("tile", self.feat), ("depth", self.feat_in)):
            expect(self, name, whole % getattr(self, name) == 0, f"a divisor of {whole}")
        for name, whole in (("lanes", self.tile), ("lanes_in", self.depth)):
            lanes = getattr(self, name)
            fits = is_power_of_two(lanes) and whole % lanes == 0
            expect(self, name, fits, f"a power of two that divides {whole}")

    @staticmethod
    def for_sizes(
        feat_in: int, feat: int, lanes: int = 16, sums: int = 24, **options: Any
    ) -> TiledRelations:
        """The config whose accumulators fill the vector registers, for these feature sizes.

        lanes : per vector register
        sums : vector registers for accumulators
        """
        out, inside = _lanes(feat, lanes), _lanes(feat_in, lanes)
        vectors = greatest_divisor(feat // out, 4)
        options.setdefault("rows", max(1, min(MOST_ROWS, sums // vectors)))
        depth = inside * greatest_divisor(feat_in // inside, MOST_DEEP // inside)
        return TiledRelations(
            feat_in, feat, tile=vectors * out, lanes=out, lanes_in=inside, depth=depth, **options
        )


def _lanes(feat: int, most: int) -> int:
    """The widest vectors that divide a feature size."""
    while feat % most:
        most //= 2
    return most


def _found(sch: Schedule) -> tuple[Nest, list[SpIter], list[SpIter], str, str]:
    """The iteration of a program that sums products over the elements of relations' rows.

    And its loops over relations, rows, columns, and features of X and of Y; the one over blocks of
    features, if there is one; and the names of X and W.
    """
    nest = only_nest(sch, "TiledRelations")
    if not nest.plain or nest.reduction is None or len(nest.loops) not in (5, 6):
        nest.refuse("to be a sum over relations, columns and features")
    loops = {x.name: x for x in nest.loops}
    sparse = [x for x in nest.loops if x.node.kind == "sparse_variable"]
    columns = [x for x in sparse if x.node.parent.name in {y.name for y in sparse}]
    rows = loops.get(columns[0].node.parent.name) if len(columns) == 1 else None
    relations = None if rows is None else loops.get(rows.node.parent.name)
    features = nest.along()
    ends = [x for x in (relations, rows) if x is not None]
    inside = [x for x in nest.loops if x not in (*ends, *columns, *features)]
    blocks = [x for x in inside if x.kinds == "S" and x.node.kind == "dense_fixed"]
    inside = [x for x in inside if x not in blocks]
    fits = len(ends) == 2 and len(blocks) < 2 and len(columns) == len(inside) == len(features) == 1
    if not fits or [x.kinds for x in (*ends, *columns, *inside, *features)] != [*"RSRRS"]:
        nest.refuse("to visit relations, their rows, what these store, and features")
    gathered, _ = gathered_operand(nest, inside[0].var, {columns[0].var})
    if gathered is None:
        nest.refuse("to gather rows of a dense operand by columns")
    matrices, _ = gathered_operand(nest, inside[0].var, {ends[0].var})
    if matrices is None:
        nest.refuse("to multiply by a dense matrix of each relation")
    _, handles = nest.handles()
    in_order = [handles[x.axes] for x in (*ends, *columns, *inside, *features)]
    return nest, in_order, [handles[x.axes] for x in blocks], gathered, matrices


def apply(sch: Schedule, config: TiledRelations) -> None:
    """Schedule a program that multiplies the gathered rows of relations by a matrix for each.

    Before (stage I), and after::

        with T.sp_iter([R, I, J, K, L], "RSRRS", "rgms") as [r, i, j, k, l]: ...

        ...                              # rgms_init
        with T.sp_iter([R, I_ranges, I_tiles], "SSS", "rgms") as [r, i_range, i_tile]:
            ...                          # rgms_start
            ...                          # rgms_sums, vectors of X's features in registers
            with T.sp_iter([L0], ..) as [l0]:
                ...                      # rgms_product, rows by vectors of features in registers
            ...                          # rgms_write

    and in stage II the loop over ranges comes first. With features in blocks, sums and products are
    over blocks, too, each with its own matrix. With `packed`::

        with T.sp_iter([R, I_ranges], "SS", "rgms") as [r, i_range]:
            with T.sp_iter([L0, K, L1, L2], "SSSS", "W_ws_copy") as [l0, k, l1, l2]:
                W_ws[l0, k, l1, l2] = W[r, k, l0 * 64 + l1 * 16 + l2]
            with T.sp_iter([I_tiles], "S", "rgms_rest") as [i_tile]: ...
    """
    nest, loops, over_blocks, gathered, matrices = _found(sch)
    relations, rows, columns, features_in, features = loops
    sch.bound(features_in, config.feat_in, "exact")
    sch.bound(features, config.feat, "exact")
    ranges, tiles, rows = sch.ranges(
        rows, "ranges", config.rows, cost=config.cost,
        default=_ranges(sch, rows, nest.dtype, config) if config.ranges is None else config.ranges,
    )  # fmt: skip
    for blocks in over_blocks:
        sch.bound(blocks, config.blocks, "exact")
    inside, outer = [*over_blocks, features_in], [relations, ranges, tiles]
    if config.depth < config.feat_in:
        deep, inside[-1] = sch.split(features_in, [None, config.depth])
        outer.append(deep)
    order = [*outer, rows, columns, *inside, features]
    sch.sparse_reorder(SparseIterationRef(nest.it.name), order)
    total = accumulator(nest.dtype)
    start, sums, product, write = sch.aggregate(
        nest.result, outer[-1], rows, [columns], dtype=total
    )
    added_to = _written(sch, write)
    name = nest.it.name
    vectors = []
    if nest.it.init is not None:
        vectors.append((sch.get_sparse_iteration(f"{name}_init"), config.lanes))
    if total != nest.dtype:
        vectors.append((sch.get_sparse_iteration(f"{name}_round"), config.lanes))
    apart = [ref for ref, _ in vectors]
    vectors += [(start, config.lanes_in), (write, config.lanes)]
    straight = [(ref, _in_lanes(sch, ref, lanes)) for ref, lanes in vectors]
    gathering = _summed(sch, sums, config)
    straight += [*gathering, *_multiplied(sch, product, config)]
    if config.packed:
        straight.append((_packed(sch, matrices, ranges, outer[3:], product, total), 2))
    if config.parallel:
        for ref in apart:
            sch.parallelize(sch.get_sp_iters(ref)[0])
    stage_two = sch.lower()
    relation, by_range = stage_two.get_loops(stage_two.get_sblock(block_name(name)))
    stage_two.reorder(by_range, relation)
    if config.parallel:
        run_in_parallel(stage_two, by_range, "parallel")
    register_tile.straight_code(sch, straight)
    if config.prefetch:
        span = min(STRAIGHT * config.lanes_in, config.depth)
        sch.rewrite(prefetch_gathered, gathering[1][0], gathered, config.prefetch, span)
    if config.ahead:
        sch.rewrite(prefetch_gathered, write, added_to, config.ahead, config.feat)


def arrange(pattern: Pattern | RelationPattern, problem: Rgms, config: TiledRelations) -> Arranged:
    """CSF by relation of a pattern of relations by rows by columns; CSF itself is unchanged."""
    del config
    stored = RelationPattern.of_pattern(pattern, problem.idtype)
    return Arranged(Stored(stored.values, stored.keeps_order), stored.arguments())


def _ranges(sch: Schedule, loop: SpIter, dtype: str, config: TiledRelations) -> dict[str, Any]:
    """The recipe of the number of ranges."""
    rows = sch.func.axis(loop.name)
    size = 8 if accumulator(dtype) == "float64" else 4
    return {
        "recipe": row_ranges.__name__, "m": keyword(rows.length), "rows": keyword(rows.nnz),
        "parents": keyword(rows.parent.length), "tile": config.rows,
        "row_bytes": config.blocks * config.feat * size, "cache": config.cache // 2,
        "threads": config.threads, "parent_bytes": config.feat_in * config.feat * size,
    }  # fmt: skip


def _in_lanes(sch: Schedule, ref: SparseIterationRef, lanes: int) -> int:
    """Cut the last loop of an iteration into vectors; returns the number of loops to unroll."""
    *_, last = sch.get_sp_iters(ref)
    length = int(sch.func.axis(last.name).length)
    sch.split(last, [None, greatest_divisor(length // lanes, STRAIGHT), lanes])
    return 2


def _summed(sch: Schedule, ref: SparseIterationRef, config: TiledRelations) -> Straight:
    """Sums of gathered rows, in registers."""
    rows, columns, *blocks, features = sch.get_sp_iters(ref)
    wide = greatest_divisor(config.depth // config.lanes_in, STRAIGHT)
    tiles, *held = sch.split(features, [None, wide, config.lanes_in])
    outer = [rows]
    for loop in blocks:
        around, inside = sch.split(loop, [None, greatest_divisor(config.blocks, STRAIGHT // wide)])
        outer, held = [*outer, around], [inside, *held]
    return register_tile.sums_of(sch, ref, _written(sch, ref), [*outer, tiles], [columns], held)


def _multiplied(sch: Schedule, ref: SparseIterationRef, config: TiledRelations) -> Straight:
    """The product of a tile, with accumulators in registers."""
    places, *blocks, inside, features = sch.get_sp_iters(ref)
    tiles, *vectors = sch.split(features, [None, config.tile // config.lanes, config.lanes])
    held = [places, *vectors]
    return register_tile.sums_of(sch, ref, _written(sch, ref), [*blocks, tiles], [inside], held)


def _packed(
    sch: Schedule, matrices: str, above: SpIter, deep: list[SpIter], product: SparseIterationRef,
    dtype: str,
) -> SparseIterationRef:  # fmt: skip
    """The copy of a relation's matrix by tiles, rows and vectors of a tile.

    deep : the loop over parts of X's features, if there is one
    """
    (tiles,) = sch.get_sp_iters(product)
    reduce = sch.get_sparse_iteration(f"{product.name}_reduce")
    inside, _, vectors, lanes = sch.get_sp_iters(reduce)
    axes = [*deep, tiles, inside, vectors, lanes]
    return sch.precompute(matrices, above, axes, scope="global", dtype=dtype)[0]


def _written(sch: Schedule, ref: SparseIterationRef) -> str:
    """The name of the buffer that an iteration writes."""
    return Nest(sch, "TiledRelations", find_iteration(sch.func, ref.name)).result


register(Template(TiledRelations, Rgms, program, apply, arrange))
