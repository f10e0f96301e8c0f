"""The register tile of CPU kernels: rows by vectors of features, with accumulators in registers.

All CPU templates use it. Before (stage I), and after in stage II for a tile of two
vectors of 16 features, where each element is loaded once for the tile::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

    for blocks in T.parallel(...):         # :func:`in_blocks`: rows of about equal work each
        for i, k0 in ...:
            C_ws[0:2, 0:16] = 0.0          # start
            for j in ...:                  # reduce: vectors are unrolled
                C_ws[0, 0:16] += A[i, j] * B[j, k0 * 32 : k0 * 32 + 16]
                C_ws[1, 0:16] += A[i, j] * B[j, k0 * 32 + 16 : k0 * 32 + 32]
            C[i, k0 * 32 : k0 * 32 + 32] = C_ws[0:2, 0:16]    # write
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tvm
from tvm import s_tir

from sparsetir.schedules.arguments import Config, expect, is_power_of_two
from sparsetir.schedules.passes.equal_work import ROW_COST
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.templates.shapes import RowReduction
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter

MAX_TILE = 256
STRAIGHT = 4  # columns of a block that are unrolled
# Stage-I iterations, and the number of innermost loops of each that become straight-line vector
# code.
Straight = list[tuple[SparseIterationRef, int]]


class Tiled(Config):
    """A config for tiles of features.

    feat : the one feature size it supports, or None: every multiple of `tile`
    tile : features per tile
    """

    feat: Any
    tile: Any

    @property
    def tail(self) -> Any:
        """The treatment of the last tile, as an argument of `split`."""
        return "exact" if self.feat is None or self.feat % self.tile == 0 else "shift"

    def tiles(self, feat: int) -> int:
        """The tiles of a feature size; raises ScheduleError if the config does not support it.

        The argument `tiles` of kernels that have one.
        """
        if self.feat != feat and (self.feat is not None or feat % self.tile):
            serves = self.feat or f"multiples of {self.tile}"
            raise ScheduleError(
                f"{type(self).__name__}.tiles: argument 'feat': the config serves {serves} "
                f"features, got {feat}"
            )
        return -(-feat // self.tile)


class RegisterTile(Tiled):
    """A config of accumulators in vector registers, with further fields.

    tile : features of a row that are accumulated in registers at a time, 1 to 256
    lanes : per vector, a power of two, at most `tile`
    feat : None for a kernel that supports every multiple of `tile`; else the one feature size it
        supports, at least `tile`: the last tile, and the last vector of each, then begin earlier
        if they would exceed it
    pack : whether to pack the tile's features of B before they are gathered, in the type of the
        sums
    packed : values are stored in the order of visits, in a separate array; else each is read by its
        position in the matrix, which needs no preparation
    blocks : of rows, or panels; they and the tiles are divided among the threads; not compiled in
    parallel : whether to use all threads; waking them takes as long as a small product
    ahead : additional elements of the first block: the calling thread processes them while others
        wake; not compiled in
    """

    lanes: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        tile, lanes, feat = self.tile, self.lanes, self.feat
        fits = is_power_of_two(lanes) and lanes <= tile
        expect(self, "lanes", fits, f"a power of two up to tile = {tile}")
        wanted = f"a multiple of lanes = {lanes} where 'feat' is not given"
        expect(self, "tile", feat is not None or tile % lanes == 0, wanted)
        expect(self, "feat", feat is None or feat >= tile, f"at least tile = {tile}")


def in_tiles(sch: Schedule, features: SpIter, config: Any) -> tuple[SpIter, list[SpIter]]:
    """Cut a loop over features: the loop over tiles, and those within a tile, lanes last.

    config : an object with `tile`, `lanes`, `feat` and `tail`, such as a :class:`RegisterTile`
    """
    tile, lanes, tail = config.tile, config.lanes, config.tail
    if config.feat is not None:
        sch.bound(features, config.feat, "exact")
    if tile % lanes == 0:
        tiles, *vectors = sch.split(features, [None, tile // lanes, lanes], tail=tail)
        return tiles, vectors
    tiles, within = sch.split(features, [None, tile], tail=tail)
    return tiles, sch.split(within, [None, lanes], tail="shift")


def in_blocks(
    sch: Schedule, rows: SpIter, config: Any, blocks: int | str = "blocks", **how: Any
) -> tuple[list[SpIter], SpIter]:
    """The loops over blocks of rows, none on one thread, and the loop over the rows of a block.

    config : an object with `parallel`
    blocks : their number; a name if the kernel takes it as a parameter
    how : arguments of `divide`; by default rows of about equal work
    """
    if not config.parallel:
        return [], rows
    how = {"by": "work", "cost": ROW_COST} | how if "by" not in how else how
    how |= {"default": 1} if isinstance(blocks, str) else {}
    first, rows = sch.divide(rows, blocks, **how)
    return [first], rows


def sums_of(
    sch: Schedule, iteration: SparseIterationRef, result: str, around: Sequence[SpIter],
    summed: Sequence[SpIter], held: Sequence[SpIter], **how: Any,
) -> Straight:  # fmt: skip
    """Accumulate the elements of `held` in registers over `summed`: start, reduce, write.

    result : the buffer that is accumulated
    around : the loops around both; sums are written in the innermost
    how : arguments of `precompute`, such as `dtype` and `hoist`
    """
    sch.sparse_reorder(iteration, [*around, *summed, *held])
    steps = sch.precompute(result, around[-1], [*held], **how)
    return [(step, len(held)) for step in steps]


def in_registers(
    sch: Schedule, shape: Any, config: Any, rows: Sequence[SpIter], columns: Sequence[SpIter], *,
    shared: Sequence[SpIter] = (), held: Sequence[SpIter] = (), tiles_at: int | None = None,
    pack: bool = False, **how: Any,
) -> Straight:  # fmt: skip
    """The register tile of a nest: tiles of features, sums, B's copy and threads, in this order.

    shape : the nest: its iteration, features, result and gathered operand
    rows, columns : loops around tiles, and reductions
    shared : loops outside of rows, which threads share
    held : loops kept in registers besides the vectors, such as over rows of a block
    tiles_at : place among `shared` of the loop over tiles; None: inside of rows
    pack : whether to pack the gathered operand for a task before
    how : as for :func:`sums_of`
    """
    tiles, vectors = in_tiles(sch, shape.features, config)
    shared, rows = [*shared], [*rows]
    if tiles_at is None:
        rows.append(tiles)
    else:
        shared.insert(tiles_at, tiles)
    around, held = [*shared, *rows], [*held, *vectors]
    steps = sums_of(sch, shape.iteration, shape.result, around, columns, held, **how)
    if pack and shape.gathered is not None:
        whole = [shape.gathered_axis, *vectors]
        where = shared[-1] if shared else shape.iteration
        copies = sch.precompute(shape.gathered, where, whole, scope="global", dtype=how["dtype"])
        steps += [(copy, len(vectors)) for copy in copies]
    if shared and config.parallel:
        sch.parallelize(shared)
    return steps


# (loops around, reductions, loops held in registers) -> start, reduce, write and others.
Sums = Callable[[list[SpIter], list[SpIter], list[SpIter]], Straight]


def of_blocks(
    sch: Schedule, nest: RowReduction, rows: int, dtype: str, sums: Sums, around: Sequence[SpIter]
) -> Straight:
    """The register tile of sums over blocks: some rows of a block share what they gather.

    Columns of a block are visited by straight-line code. Values of a narrower type are cast
    together, before the loops of a block.

    rows : of a block that are held at a time, a divisor of its rows
    dtype : type of the sums
    sums : for loops around those over rows, and all reductions
    around : loops around the rows of a block
    """
    high, bits = nest.block[-1], tvm.DataType(dtype).bits
    over = [b for b in sch.func.buffers if high.axes[0] in [a.name for a in b.axes or ()]]
    narrow = [b.name for b in over if "float" in b.dtype and tvm.DataType(b.dtype).bits < bits]
    *columns, last = nest.columns
    width = constant_length(sch.func.axis(last.name)) if columns else None
    straight = 1 if width is None else greatest_divisor(width, STRAIGHT)
    above, held = sch.split(high, [None, rows])
    inside = sch.split(last, [None, straight]) if straight > 1 else [last]
    start, (adds, loops), *others = sums([*around, above], [*columns, *inside], [held])
    for name in narrow if width is not None else ():
        casts, adds = cast_before(sch, adds, name, columns[-1], [held, *inside], dtype)
        others += casts
    return [start, *others, (adds, loops + len(inside) - 1)]


def cast_before(
    sch: Schedule, adds: SparseIterationRef, values: str, at: SpIter, over: Sequence[SpIter],
    dtype: str,
) -> tuple[Straight, SparseIterationRef]:  # fmt: skip
    """Cast values of a narrower type together, before the loops of a reduction that reads them.

    at : the reduction's loop in which they are cast
    over : loops inside it that index them

    Returns the casts, and the rest of the reduction `adds`.
    """
    mine = {loop.axes: loop for loop in sch.get_sp_iters(adds)}
    over = [mine[loop.axes] for loop in over]
    casts = sch.precompute(values, mine[at.axes], over, dtype=dtype)
    return [(cast, len(over)) for cast in casts], sch.get_sparse_iteration(f"{adds.name}_rest")


def block_around(sch: Any, name: str) -> str:
    """The name of the block around a stage-II block."""
    ref = sch.get_sref(sch.get_sblock(name)).parent
    while not isinstance(ref.stmt, s_tir.SBlock):
        ref = ref.parent
    return str(ref.stmt.name_hint)


def packed_values(sch: Schedule, reduction: RowReduction) -> list[str]:
    """Names of the buffers over the elements of rows whose values are worth reordering."""
    axes = [reduction.rows.axes[0], reduction.columns[0].axes[0]]
    return [b.name for b in sch.func.buffers if [a.name for a in b.axes or ()] == axes]


def straight_code(sch: Schedule, steps: Iterable[tuple[Any, int]]) -> Any:
    """Lower to stage II, where the steps become straight-line vector code; returns its schedule."""
    stage_two = sch.lower()
    for step, loops in steps:
        in_vectors(stage_two, step, loops)
    return stage_two


def greatest_divisor(number: int, most: int) -> int:
    """The greatest divisor of a number up to `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
