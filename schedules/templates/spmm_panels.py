"""Sparse times dense on a CPU, of matrices of which a fifth and more is stored: pruned weights.

Rows go in panels of a few, in each the columns that hold the same of its rows together
(:mod:`sparsetir.sparse_ir.schedule.group_columns_by_pattern`): each pattern has a loop of its own,
in which a row of B is loaded once for all its rows. The sums of a panel, its rows by some vectors
of features, stay in registers over all patterns. (Albakri and Cheshmi,
enumerate-and-sparse-coarsen, section 3: `rows` is their UFi, the vectors of a tile their WarpTile.
A panel is one worker's: no atomics.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, InOrder, Spmm, accumulator
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.passes.opaque_step_loop import opaque_step_loop
from sparsetir.schedules.passes.specialize_on_value import specialize_on_value
from sparsetir.schedules.registers import feature_tile, served, tasks
from sparsetir.schedules.targets import l2_bytes
from sparsetir.schedules.template import Asked, Template, Tried, register
from sparsetir.schedules.templates import decomposed, register_tile
from sparsetir.schedules.templates.shapes import RowReduction, row_reduction
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.sparse_ir.computed import buffers_made_by, parameters_made_by
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.recipes.general import constant
from sparsetir.sparse_ir.recipes.patterns import pattern_counts
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef

MOST_ROWS = 6  # of a panel: 63 loops
MOST_COMPACT = 8
ROWS_UNPACKED = 4  # from which on values are read by their places

# Elements of a row from which on panels have four rows, five and six, else three: on CPUs by their
# name that were measured with larger panels, and on others.
ELEMENTS = {"znver5": (64, 100, 200)}
ELEMENTS_ELSEWHERE = (64, 400)
# Vectors of a tile, from which on CPUs that are named have larger panels than others.
VECTORS = 4
# Bytes of an element and its column.
PLACE = 8
# Times that each row of B is read, from which on its copy takes no part of the time.
USES = 8
# Share of the places that store something, from which on a search tries panels.
LEAST = 0.05
# Sums of a panel, in vectors, that are tried: more are in memory.
MOST_SUMS = 30


@dataclass(frozen=True)
class PanelRows(register_tile.RegisterTile):
    """How a CPU kernel is made.

    rows : of a panel, 2 to 6, or with `compact` to 8; the code has 2**rows - 1 loops
    compact : code by the number of a pattern's rows, `rows` loops instead of 2**rows - 1 (section
        3.5), which compile sooner. Sums are in registers for a pattern at a time and added to the
        result, so that tiles must be whole, and results no narrower than sums
    others : as of :class:`RegisterTile`
    """

    rows: int = number(4, least=None)
    tile: int = number(64, most=register_tile.MAX_TILE)
    lanes: int = 16
    feat: int | None = None
    pack: bool = False
    blocks: int = number(1, compiled=1)
    parallel: bool = True
    packed: bool = True
    compact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MOST_COMPACT if self.compact else MOST_ROWS
        wanted = f"2 to {most}" + ("" if self.compact else f", or with compact=True {MOST_COMPACT}")
        expect(self, "rows", 2 <= self.rows <= most, wanted)
        whole = self.feat is None or self.feat % self.tile == 0
        wanted = f"a divisor of feat = {self.feat}, as results of overlapping tiles cannot be added"
        expect(self, "tile", whole or not self.compact, wanted)
        expect(self, "packed", self.packed or not self.compact, "True with 'compact'")

    @property
    def unpacked(self) -> PanelRows | RowBlocks:
        """For values that come with each run, in the order of the matrix.

        To read the place of a value takes less than the sums that follow, and what is left of the
        gain pays where panels have four rows and more (see :func:`panels_pay`).
        """
        by_places = self.rows >= ROWS_UNPACKED and not self.compact
        return replace(self, packed=False) if by_places else self.by_rows

    @property
    def by_rows(self) -> RowBlocks:
        """For patterns whose columns are not in order, or there more than once: rows alone."""
        return RowBlocks(
            self.tile, self.lanes, self.feat, self.pack, self.pack, 0, 1, self.blocks, self.parallel
        )  # fmt: skip


def apply(sch: Schedule, config: PanelRows) -> None:
    """Schedule a program that reduces over what rows store, by primitives of both stages.

    Before (stage I), and after::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([K0, I_panels], "SS", "spmm") as [k0, i_panel]:
            with T.sp_iter([I_rows, K1, K2], "SSS", "spmm_start") as [i_row, k1, k2]: ...
            ...  # spmm_reduce over [I_patterns, I_entries, I_rows, K1, K2], "RRSSS": loops over
                 # patterns, rows of a panel and vectors are unrolled
            with T.sp_iter([I_rows, K1, K2], "SSS", "spmm_write") as [i_row, k1, k2]: ...
    """
    found = row_reduction(sch, "PanelRows")
    total = accumulator(found.dtype)
    if config.compact and total != found.dtype:
        raise ScheduleError(
            f"PanelRows: argument 'config': expected compact=False for {found.dtype}, which would "
            "be rounded with each pattern that is added, got compact=True"
        )
    values = register_tile.packed_values(sch, found) if config.packed else ()
    by = "count" if config.compact else "pattern"
    panels, patterns, entries, rows = sch.group_columns_by_pattern(
        found.rows, found.columns[0], config.rows, by=by
    )
    tables = buffers_made_by(sch.func, pattern_counts)
    blocks, panels = register_tile.in_blocks(sch, panels, config, by="positions")
    # Of a panel are its own rows, also where a table says which of them.
    steps = register_tile.in_registers(
        sch, found, config, [panels], [patterns, entries], shared=[*found.heads, *blocks],
        held=[rows], tiles_at=len(found.heads), at=patterns if config.compact else panels,
        pack=config.pack, race="ignore" if config.compact else "none", dtype=total,
    )  # fmt: skip
    (start, _), (reduce, _), *_ = steps
    for name in values:
        sch.pack(name, reduce)
    if config.compact:
        steps.append((_set_before(sch, found, config), 2))
    stage_two = register_tile.straight_code(sch, steps)
    if not config.compact:
        loops = stage_two.get_loops(stage_two.get_sblock(f"{reduce.name}0"))
        stage_two.unroll(loops[-1])
    (step,) = parameters_made_by(sch.func, constant)
    sch.rewrite(opaque_step_loop, reduce, step)
    if config.compact:
        block = register_tile.block_around(stage_two, f"{start.name}0")
        sch.rewrite(specialize_on_value, block, tables[0], range(1, config.rows + 1))


def _set_before(sch: Schedule, found: RowReduction, config: PanelRows) -> SparseIterationRef:
    """The init of all rows before they are added to, in vectors."""
    init = sch.get_sparse_iteration(f"{found.iteration.name}_init")
    *outer, features = sch.get_sp_iters(init)
    tiles, vectors = register_tile.in_tiles(sch, features, config)
    sch.sparse_reorder(init, [*outer, tiles, *vectors])
    if config.parallel:
        sch.parallelize(outer)
    return init


def arrange(matrix: CsrPattern, problem: Spmm, config: PanelRows) -> Arranged:
    """CSR as it is, in as many blocks of panels."""
    del problem
    blocks = max(1, min(config.blocks, -(-matrix.shape[0] // config.rows)))
    return Arranged(InOrder(matrix, not config.packed), matrix.arguments(), {"blocks": blocks})


def panels_pay(m: int, n: int, nnz: int, feat: int, lanes: int, cpu: str = "") -> bool:
    """Whether panels are faster than rows by themselves: where patterns have enough entries.

    Measured on Cascade Lake (AVX-512, one thread, float32), 64 x 256 to 2048 x 512 and 512 x 2048
    with 50 to 90 % zeros, 32, 128 and 512 features, against row blocks:

    - a quarter stored and more: 1.1 to 1.6 times as fast from rows of 16 elements on
    - 15 %: 1.1 to 1.3 times from 40 elements on with few features; with many from 64 on, or 128
      where the matrix, read once for each tile, is larger than the L2 cache
    - 8 %: 1.15 times from 128 elements on; with few features and fewer elements 0.91 to 0.92 times
      on Zen 5, where row blocks know the number of features
    - less: up to 1.25 times as slow, as nearly all patterns hold a single row

    Values of a run, which are read by their places (`packed=False`), against rows with values as
    they are, on Zen 5 (AVX-512, one thread, float32), DLMC's layers, 32, 128 and 512 features: 1.2
    to 2.5 times as fast with 50 and 60 % zeros, 1.33 with 70 %, 1.09 with 80 %; panels of three
    rows 0.86 to 0.97 times. To bring values into order in each call takes 0.4 ns an element,
    where the product takes 0.5 with 32 features; to read places 0.07.

    On Zen 5 a matrix larger than the L2 cache gains with 20 % stored from 100 elements on.

    cpu : its name, as LLVM has it
    """
    if min(m, n, nnz) <= 0 or feat < 2 * lanes or nnz < USES * n:
        return False
    stored, length, few = nnz / (m * n), nnz / m, feat <= 4 * lanes
    many = 64 if nnz * PLACE <= l2_bytes() else 100 if cpu in ELEMENTS else 128
    for share, least in ((0.25, 16), (0.15, 40 if few else many), (0.08, 128)):
        if stored >= share:
            return length >= least
    return False


def panel_rows(
    given: Any, lanes: int, sums: int, summed: int, parallel: bool, cpu: str = ""
) -> PanelRows:
    """Panels for a pattern, with as many vectors of sums as there are registers for.

    given : :class:`sparsetir.schedules.search.choose.Statistics`
    sums : vectors of sums that registers hold
    summed : bytes of a sum
    cpu : its name, as LLVM has it

    More rows are more loops, 15 for four, 31 for five and 63 for six, of fewer visits each. Zen 5
    takes 1.05 to 1.2 times less time for five or six than for four where a tile has four vectors
    (one thread, float32, 50 to 80 % zeros, panels of 512 and 2048 columns). B is always copied,
    a panel that stays in the L2 cache: one tile alone takes at most 4 % longer for it where vectors
    of B begin with cache lines, and 20 to 50 % less where they do not, as in most arrays of NumPy.

    Where there are 16 registers, three rows: with two vectors for four rows the matrix is gone
    through twice as often, which takes 1.2 to 1.3 times as long. (AVX2 on Zen 5, one thread, DLMC's
    layers with 50 to 80 % zeros, 32 to 512 features: 1.09 to 1.24 times as fast as row blocks.)
    """
    vectors = VECTORS
    if given.n * vectors * lanes * summed > l2_bytes():
        vectors = max(1, vectors // 2)
    tile = feature_tile(given.feat, lanes, vectors)
    wide = tile.tile >= VECTORS * tile.lanes
    elements = ELEMENTS.get(cpu, ELEMENTS_ELSEWHERE) if wide else ELEMENTS_ELSEWHERE
    rows = 3 + sum(given.nnz >= given.m * least for least in elements)
    rows = min(rows, 3) if sums < 4 * VECTORS else rows
    tiles = -(-given.feat // tile.tile)
    blocks = tasks(given.threads, tiles) if parallel else 1
    return PanelRows(rows, *tile, True, blocks, parallel)


def choices(asked: Asked) -> Tried | None:
    """Rows, tile, copy, compaction and blocks of panels; None where these do not serve.

    Compacted are panels of at least as many rows as by pattern are the most: smaller ones compile
    sooner by pattern.

    (Enumerate-and-sparse-coarsen, sections 3.4 and 3.5: UFi, WarpTile and compaction.)
    """
    problem, given, lanes = asked.problem, asked.given, asked.own(RowBlocks)[0].lanes
    few = given.nnz < LEAST * given.m * given.n
    if few or lanes > given.feat or decomposed.serves(problem) is not None:
        return None
    # Results of compacted panels are added to.
    exact = (problem.out or problem.dtype) == problem.accumulator

    def make(rows: int, tile: int, pack: bool, compact: bool, parallel: bool) -> PanelRows | None:
        if rows * -(-tile // lanes) > MOST_SUMS:
            return None
        if compact and (rows < MOST_ROWS or not exact or given.feat % tile):
            return None
        if rows > MOST_ROWS and not compact:
            return None
        parts = tasks(given.threads, -(-given.feat // tile)) if parallel else 1
        feat = served(given.feat, tile, lanes)
        return PanelRows(rows, tile, lanes, feat, pack, parts, parallel, compact=compact)

    tiles = {min(given.feat, v * lanes) for v in (2, 4, 6)} | {c.tile for c in asked.own(PanelRows)}
    tried = {
        "rows": tuple(range(2, MOST_COMPACT + 1)),
        "tile": tuple(sorted(tiles)),
        "pack": (False, True),
        "compact": (False, True),
        "parallel": (False, True)[: min(2, given.threads)],
    }
    return tried, make


register(Template(PanelRows, Spmm, program, apply, arrange, choices=choices, turn=4))
