"""SpMM over panels of rows by pattern on a GPU: enumerate-and-sparse-coarsen as in its section 3.

Rows form panels of `rows` (UFi); in each, the columns with the same set of its rows are together,
with their values in the order of computation
(:mod:`sparsetir.sparse_ir.schedule.group_columns_by_pattern`). A thread has `coarsen` vectors of
features (WarpTile = coarsen * vector), and loads the row of B for these once for all rows of a
pattern. `unroll` entries (UFk) are in one straight piece of code.

    atomics=False    A panel belongs to one row of threads, and its sums stay in registers over all
                     of its patterns, one loop after the other: no atomics, each result is written
                     once.
    atomics=True     Each pattern of each panel belongs to a row of threads (section 3.2.2): more of
                     them, which add to the result atomically. Code is selected by pattern where a
                     block begins, so that all threads of a warp run the same.
    compact=True     Code is specialised by the number of a pattern's rows, 1 to `rows`,
                     instead of by the 2**rows - 1 patterns (section 3.5); a table holds
                     the rows. Sums are in registers for a pattern at a time: without atomics the
                     panel's row of threads itself adds them to the result.

    blockIdx.x, threadIdx.y    panels, or patterns of panels
    blockIdx.y                 tiles of threads * coarsen * vector features
    blockIdx.z                 heads of a batch
    threadIdx.x                vectors within a tile
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.gpu.features import (
    MAX_OCCUPANCY,
    MAX_ROWS,
    MAX_SUMS,
    MAX_THREADS,
    GpuTiled,
    bound_rows,
    feature_loops,
    gathered_vectors,
    in_registers,
    occupy,
    over_blocks,
    set_before,
    vector_width,
)
from sparsetir.schedules.gpu.passes.row_loops import skip_if_empty, unroll_with_remainder
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm, Stored, accumulator
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.passes.nests import WARP
from sparsetir.schedules.passes.parallel_loops import in_vectors, innermost_block
from sparsetir.schedules.passes.specialize_on_value import specialize_on_value
from sparsetir.schedules.template import SearchInput, Template, Tried, register
from sparsetir.schedules.templates.register_tile import packed_values
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.sparse_ir.atomics import has_atomics
from sparsetir.sparse_ir.computed import buffers_made_by
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.recipes.patterns import pattern_counts
from sparsetir.sparse_ir.schedule import Schedule

MOST_ROWS, MOST_BY_PATTERN = 8, 6  # per panel; 63 loops
MOST_UNROLLED = 16
# The least share of places that store an element for which a search tries panels.
LEAST = 0.05


@dataclass(frozen=True)
class PanelThreads(GpuTiled):
    """The distribution of panels of rows and of features over threads.

    rows : rows per panel (UFi), 2 to 6, or with `compact` to 8
    unroll : entries of a pattern in one straight piece of code (UFk), up to 16
    atomics : whether each pattern of a panel has a row of threads, instead of each panel
    compact : whether code is specialised by the number of a pattern's rows, instead of by pattern
    panels : rows of threads per thread block; if more than one, with atomics, threads are whole
        warps, since other patterns run other code
    packed : values are stored in the order of the panels, in a separate array; else each is read by
        its position in the matrix, which needs no preparation
    Other fields as in :class:`sparsetir.schedules.gpu.features.GpuTiled`.
    """

    rows: int = number(4)
    unroll: int = number(4, most=MOST_UNROLLED)
    atomics: bool = False
    compact: bool = False
    threads: int = number(32)
    vector: int = number(1)
    coarsen: int = number(1)
    panels: int = number(1)
    feat: int | None = number(None, optional=True)
    occupancy: int | None = number(1024, most=MAX_OCCUPANCY, optional=True)
    packed: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MOST_ROWS if self.compact else MOST_BY_PATTERN
        wanted = f"2 to {most}" + ("" if self.compact else f", or with compact=True to {MOST_ROWS}")
        expect(self, "rows", 2 <= self.rows <= most, wanted)
        self.check_product("panels", MAX_THREADS, "threads", "panels")
        alike = not self.atomics or self.panels == 1 or self.threads % WARP == 0
        wanted = f"1 for threads = {self.threads}, as warps have one pattern each"
        expect(self, "panels", alike, wanted)
        self.check_product("coarsen", MAX_SUMS, "rows", "coarsen", "vector")

    @classmethod
    def for_features(
        cls, feat: int, dtype: str = "float32", *, block: int = 128, **fields: Any
    ) -> PanelThreads:
        """A configuration for a feature size, which is a constant of the kernel.

        block : the most threads per block; 32 or more
        fields : fields of the configuration. By default vectors are as wide as they can be while
            whole warps share the features, and a block has as many rows of threads as fit
        """
        rows, coarsen = fields.get("rows", cls.rows), fields.pop("coarsen", 1)
        vector = fields.pop("vector", None)
        if vector is None:
            vector = vector_width(feat, dtype)
            while vector > 1 and feat < WARP * vector * coarsen:
                vector //= 2
        threads = min(WARP, -(-feat // (vector * coarsen)))
        alone = fields.get("atomics", False) and threads != WARP
        panels = 1 if alone else max(1, block // threads)
        # Registers for the sums and for loads: otherwise nvcc uses few, and spills.
        sums = rows * vector * coarsen
        occupancy = 1024 if sums < MAX_SUMS // 2 else 768 if sums == MAX_SUMS // 2 else 512
        return cls(
            **fields, threads=threads, vector=vector, coarsen=coarsen, panels=panels, feat=feat,
            occupancy=occupancy,
        )  # fmt: skip

    in_row_panels = True  # see :class:`sparsetir.schedules.templates.row_tile.RowTile`

    @property
    def unpacked(self) -> PanelThreads:
        """The config for values passed in each run, in the matrix's order: read by position.

        A position takes a register besides each value, so that fewer entries are loaded together.
        """
        return replace(self, packed=False, unroll=min(self.unroll, 2))

    @property
    def by_rows(self) -> RowSplit:
        """The config for patterns with unsorted or repeated columns: by rows, without panels."""
        return RowSplit(
            self.threads, self.panels, self.vector, self.coarsen, self.feat,
            occupancy=self.occupancy,
        )  # fmt: skip

    @property
    def accumulates(self) -> bool:
        """Whether several updates go to an element of the result, sequentially or atomically."""
        return self.atomics or self.compact

    def serves(self, problem: Spmm) -> bool:
        """Whether the result has a type in which it can be updated."""
        return not self.accumulates or has_atomics(
            "max" if problem.reduce == "max" else "sum", problem.out or problem.dtype
        )


def apply(sch: Schedule, config: PanelThreads) -> None:
    """Schedule a program that reduces over the elements of rows, by primitives of both stages.

    Before (stage I), and after::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([K0, I_panels, K2], "SSS", "spmm") as [k0, i_panel, k2]:
            ...  # spmm_start over [I_rows, K1, K3]
            with T.sp_iter([I_patterns, I_entries], "RR", "spmm_reduce"):  # patterns are unrolled
                ...  # B_ws_copy over [K1, K3], spmm_reduce_rest over [I_rows, K1, K3]
            ...  # spmm_write

    With atomics the loop over patterns is around that over threads; without, and compact, it is
    inside it, and the workspace begins after it; the result is set before, by `spmm_init`.

    Raises ScheduleError for a program of another form, for vectors of more than 16 bytes, and for
    results with several updates, of types without atomics.
    """
    shape = row_reduction(sch, "PanelThreads")
    config.check_vector(shape.dtype)
    if config.accumulates and not has_atomics("sum", shape.dtype):
        raise ScheduleError(
            "PanelThreads: argument 'config': expected atomics=False and compact=False for "
            f"{shape.dtype}, which would be rounded with each pattern that is added, got "
            f"atomics={config.atomics}, compact={config.compact}"
        )
    if config.atomics:  # no more blocks than CUDA launches
        sch.bound(shape.rows, MAX_ROWS // ((1 << config.rows) - 1) * config.rows, "max")
    else:
        bound_rows(sch, shape)
    values = packed_values(sch, shape) if config.packed else ()
    by = "count" if config.compact else "pattern"
    panels, patterns, entries, rows = sch.group_columns_by_pattern(
        shape.rows, shape.columns[0], config.rows, by=by
    )
    counts = buffers_made_by(sch.func, pattern_counts)
    features = feature_loops(sch, shape.features, config, tail="repeat")
    tiles, w, threads, lane = features
    order = [panels, patterns, threads] if config.atomics else [panels, threads, patterns]
    above = order[1 if not config.accumulates else 2]
    held = [rows, w, lane]
    sch.sparse_reorder(shape.iteration, [*shape.heads, tiles, *order, entries, *held])
    start, reduce, write = sch.precompute(shape.result, above, held, dtype=accumulator(shape.dtype))
    for name in values:
        sch.pack(name, reduce)
    over_blocks(sch, shape.heads, tiles)
    if config.atomics:
        sch.parallelize(order[:2], "thread", race="atomics", per_block=config.panels)
    else:
        # Rows of panels are disjoint, even if a table lists them.
        race = "ignore" if config.compact else "none"
        sch.parallelize(panels, "thread", race=race, per_block=config.panels)
    sch.parallelize(threads, "thread")
    copies, rest = gathered_vectors(sch, shape, reduce, sch.get_sp_iters(reduce)[-4])
    if config.accumulates:
        copies.append(set_before(sch, shape, config, features, config.threads * config.panels))
    loops = sch.lower()
    for step in copies:
        in_registers(loops, loops.get_sblock(step.block), vectors=True)
    straight = [start, rest, *([write] if config.atomics else [])]
    for step in straight:
        for loop in loops.get_loops(innermost_block(loops, step))[-len(held) :]:
            loops.unroll(loop)
    if not config.atomics:
        in_vectors(loops, write, len(held))
    if not config.accumulates:
        loops.unroll(loops.get_loops(loops.get_sblock(reduce.block))[0])
    block = shape.iteration.block
    if config.accumulates:
        sch.rewrite(skip_if_empty, block, reduce)
    sch.rewrite(unroll_with_remainder, reduce, config.unroll)
    if config.compact:
        sch.rewrite(specialize_on_value, block, counts[0], range(1, config.rows + 1))
    elif config.atomics:
        pattern = loops.get(loops.get_sblock(block)).iter_vars[-2]
        sch.rewrite(
            specialize_on_value, block, str(pattern.var.name), range((1 << config.rows) - 1)
        )
    occupy(sch, config, config.threads * config.panels)


def arrange(matrix: CsrPattern, problem: Spmm, config: PanelThreads) -> Arranged:
    """CSR unchanged."""
    del problem
    return Arranged(Stored(keeps_order=not config.packed), matrix.arguments())


def choices(search: SearchInput) -> Tried | None:
    """UFi, UFk, WarpTile, the block, atomics and compaction; None for unsupported problems.

    Blocks have one warp, as most of the paper's best ones, or four. UFk is up to 8, as in its
    table 2. The default awaits measurements on a GPU (`bench blocks --target cuda`).
    """
    problem, stats = search.problem, search.given
    if stats.nnz < LEAST * stats.m * stats.n or problem.batched:
        return None
    dtype = problem.out or problem.dtype
    widest = vector_width(stats.feat, dtype)

    def make(vector: int, block: int, **fields: Any) -> PanelThreads | None:
        if vector > widest or vector * fields["coarsen"] > stats.feat:
            return None
        config = PanelThreads.for_features(stats.feat, dtype, vector=vector, block=block, **fields)
        return config if config.serves(problem) else None

    tried = {
        "rows": (2, 3, 4, 5, 6, 8),
        "unroll": (2, 4, 8),
        "atomics": (False, True),
        "compact": (False, True),
        "vector": tuple(v for v in (1, 2, 4, 8) if v <= widest)[-3:],
        "coarsen": (1, 2),
        "block": (32, 128),
    }
    return tried, make


register(Template(PanelThreads, Spmm, program, apply, arrange, gpu=True, choices=choices, turn=4))
