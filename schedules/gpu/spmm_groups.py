"""SpMM over CSR on a GPU: fixed amounts of rows or nonzeros per thread, and cooperating groups.

Sgap (sections 3 to 7) writes {A per thread, columns, threads that reduce together}:

    {x row, c col, 1}      split="rows", work=x : x whole rows
    {1/g row, c col, r}    split="rows", lanes=g, group=r : every g-th element of a row. Every r
                           of its threads reduce by shuffles; with r < g these then add atomically
    {g nnz, c col, 1}      split="non-zeros", work=g : g elements, of any rows. Rows in several
                           chunks are updated atomically, other rows are written. If rows are
                           searched for in the kernel, each run of a row is added atomically
    {1 nnz, c col, r}      split="non-zeros", group=r : one element. Every r neighbours reduce their
                           runs of equal rows by shuffles; the first of a run adds atomically

The c columns of a thread are `coarsen` vectors of `vector` neighbouring ones. In a block, threads
that share a row, or are a group, are neighbours (`threadIdx.x`), if there are such; then come those
over the columns of a tile, then rows, chunks or groups, as many as fill a block. Of the parameters
of section 7.2 blockSz is `block`, groupSz `group`, workerSz `lanes`, tileSz `tile`, threadRw `work`
and coarsenSz `vector`.

    blockIdx.x    rows, or elements
    blockIdx.y    tiles of columns
    blockIdx.z    heads of a batch

Groups of a whole warp suit columns of one thread, as in SpMV. With more, each warp reads half a
sector of 32 bytes of a gathered row and all offsets and indices again, and shuffles and writes each
sum alone, for 32 threads, however short the row: counted on rows of 5 elements with 32 columns,
{1/32 row, 4 col, 8} has 23 times the instructions of {1 row, 4 col, 1} and 6 times its sectors;
on rows of 300, 3.5 times and 2.4 times. So searches leave these out.

Atomics add in any order, so that their results differ in the last bits between calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparsetir.reductions import EXTREMA
from sparsetir.schedules.arguments import expect, expect_one_of, number
from sparsetir.schedules.gpu.features import (
    MAX_OCCUPANCY,
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
from sparsetir.schedules.gpu.passes.row_loops import opaque_row_index
from sparsetir.schedules.operators.problems import Spmm, accumulator
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.passes.nests import WARP
from sparsetir.schedules.template import SearchInput, Template, Tried, register
from sparsetir.schedules.templates.shapes import RowReduction, refuse_shape, row_reduction
from sparsetir.sparse_ir.atomics import has_atomics
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.rows import ROWS_FROM
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter

SPLITS = ("rows", "non-zeros")


@dataclass(frozen=True)
class Groups(GpuTiled):
    """The distribution of rows or nonzeros, and of columns, over threads.

    split : "rows" or "non-zeros": threads have a fixed number of these
    work : rows per thread, or per group of threads that share rows; nonzeros per thread
    lanes : threads that share a row, a power of two; 1 if nonzeros are split
    group : threads that reduce their sums by shuffles, a power of two up to 32: among those that
        share a row, or among those with one nonzero each of neighbours
    rows : source of the rows of a thread's nonzeros: "table" for each, or for the pieces of rows
        in chunks; "search" in the offsets of rows; "blocks" there between the rows of two blocks,
        which a table holds (as in TACO)
    block : threads per block
    Other fields as in :class:`sparsetir.schedules.gpu.features.GpuTiled`.
    """

    split: str = "rows"
    work: int = number(1)
    lanes: int = number(1, power=True)
    group: int = number(1, most=WARP, power=True)
    threads: int = number(8)
    vector: int = number(4)
    coarsen: int = number(1)
    block: int = number(256)
    feat: int | None = number(None, optional=True)
    occupancy: int | None = number(1024, most=MAX_OCCUPANCY, optional=True)
    rows: str = "table"

    def __post_init__(self) -> None:
        expect_one_of(self, split=SPLITS, rows=ROWS_FROM)
        super().__post_init__()
        if self.split == "rows":
            wanted = f"at most lanes = {self.lanes}, the threads that share a row"
            expect(self, "group", self.group <= self.lanes, wanted)
        else:
            wanted = "1 for split = 'non-zeros', of which no two threads have the same"
            expect(self, "lanes", self.lanes == 1, wanted)
            wanted = f"1 for work = {self.work}, as non-zeros of a thread are of several rows"
            expect(self, "group", 1 in (self.group, self.work), wanted)
        if self.split == "rows":
            expect(self, "rows", self.rows == "table", "\"table\" for split = 'rows'")
        side = self.threads * self.side_by_side
        fits = self.block <= MAX_THREADS and self.block % side == 0
        wanted = f"a multiple of {side} threads that work together, at most {MAX_THREADS}"
        expect(self, "block", fits, wanted)
        self.check_product("coarsen", MAX_SUMS, "coarsen", "vector")

    @classmethod
    def for_features(cls, feat: int, dtype: str = "float32", **fields: Any) -> Groups:
        """A configuration for a feature size, which is a constant of the kernel.

        fields : fields of the configuration. By default the number of threads is a power of two,
            which fills a block, up to 32 and as many as there are columns for
        """
        vector = fields.pop("vector", vector_width(feat, dtype))
        alone = cls(threads=1, vector=vector, feat=feat, **fields)
        vectors = -(-feat // (vector * alone.coarsen))
        most = min(WARP, alone.block // alone.side_by_side)
        whole = max(t for t in (1, 2, 4, 8, 16, 32) if t <= most and vectors % t == 0)
        enough = min(most, 1 << (vectors - 1).bit_length())
        return replace(alone, threads=whole if whole >= 8 else enough)

    @property
    def side_by_side(self) -> int:
        """Threads that share a row, or have neighbouring nonzeros and are a group."""
        return max(self.lanes, self.group)

    @property
    def workers(self) -> int:
        """Rows, chunks or groups per block at a time."""
        return self.block // (self.threads * self.side_by_side)

    @property
    def is_atomic(self) -> bool:
        """Whether several threads update a row."""
        return self.split == "non-zeros" or self.group < self.lanes

    def serves(self, problem: Spmm) -> bool:
        """Whether the updates that the kernel needs exist as atomics.

        Maxima and minima have none if a thread's nonzeros belong to several rows: a row that one
        thread computes alone is overwritten, and empty rows have another initial value than others.
        """
        if not self.is_atomic:
            return True
        if problem.reduce in EXTREMA:
            in_rows = self.split == "rows" or self.work == 1
            return in_rows and has_atomics(problem.reduce, problem.dtype)
        return has_atomics("sum", problem.dtype)


# Iterations whose loops over a thread's columns are unrolled, and those where they are vectorised.
_Steps = tuple[list[SparseIterationRef], list[SparseIterationRef]]


def apply(sch: Schedule, config: Groups) -> None:
    """Schedule a reduction over the elements of rows, by primitives of both stages.

    Before (stage I); see :func:`_rows`, :func:`_elements` and :func:`_chunks` for the programs
    after::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

    The elements of a row may be stored in several levels, as in CSF, then without lanes and with
    one nonzero per thread. Raises ScheduleError for a program of another form, for vectors above
    16 bytes, and for results that are updated atomically if their type has
    no atomics.
    """
    reduction = row_reduction(sch, "Groups")
    config.check_vector(reduction.dtype)
    if config.is_atomic and not has_atomics("sum", reduction.dtype):
        raise ScheduleError(
            f"Groups: argument 'config': expected rows in one group, as split='rows' and "
            f"group=lanes, for {reduction.dtype}, which atomics do not add, got split="
            f"{config.split!r}, lanes={config.lanes}, group={config.group}"
        )
    features = feature_loops(sch, reduction.features, config, tail="repeat")
    if config.split == "rows":
        bound_rows(sch, reduction)
        scalars, vectors = _rows(sch, reduction, config, features)
    elif config.work > 1 and config.rows == "table":
        scalars, vectors = _chunks(sch, reduction, config, features)
    else:
        scalars, vectors = _elements(sch, reduction, config, features)
    if config.is_atomic:
        vectors.append(set_before(sch, reduction, config, features, config.block))
    loops = sch.lower()
    for step in scalars + vectors:
        in_registers(loops, loops.get_sblock(step.block), vectors=step in vectors)
    if config.split == "rows":
        sch.rewrite(opaque_row_index, reduction.iteration.block)
    occupy(sch, config, config.block)


def _rows(sch: Schedule, rows: RowReduction, config: Groups, features: list[SpIter]) -> _Steps:
    """{x row, c col, 1} and {1/g row, c col, r}.

    After, with lanes (otherwise there is no loop over them, and J itself instead of steps)::

        with T.sp_iter([K0, I_tiles, K2, T.part(I, ..), J_lanes], "SSSSR", "spmm"):
            ...  # spmm_start
            with T.sp_iter([J_steps], "R", "spmm_reduce") as [j_step]:
                ...  # B_ws_copy, spmm_reduce_rest
            ...  # spmm_write, of a group
    """
    tiles, w, threads, lane = features
    workers, each, shared = rows.rows, [], []
    *outer, column = rows.columns
    if config.work > 1:
        sch.pos(workers)
        workers, *each = sch.split(workers, [None, config.work])
    if config.lanes > 1:
        column, *shared = sch.strip_mine_rows(column, config.lanes)
    loops = [workers, threads, *each, *shared]
    sch.sparse_reorder(rows.iteration, [*rows.heads, tiles, *loops, *outer, column, w, lane])
    start, reduce, write = _in_workspace(sch, rows, loops[-1], [w, lane])
    over_blocks(sch, rows.heads, tiles)
    sch.parallelize(workers, "thread", per_block=config.workers)
    sch.parallelize(threads, "thread")
    for loop in shared:
        sch.parallelize(loop, "thread", race=f"group({config.group})")
    copies, rest = gathered_vectors(sch, rows, reduce, sch.get_sp_iters(reduce)[-3])
    if shared:
        return [start, rest, write], copies
    return [start, rest], [*copies, write]


def _elements(sch: Schedule, rows: RowReduction, config: Groups, features: list[SpIter]) -> _Steps:
    """{1 nnz, c col, r}, and {g nnz, c col, 1} with rows that threads search for and carry.

    After, with one nonzero::

        ...  # spmm_init, of all rows
        with T.sp_iter([K0, I_J0, I_J1, K2, I_J2], "SSSSS", "spmm"):  # I_J2, over a group
            ...  # spmm_start, B_ws_copy, spmm_reduce; spmm_write, of the runs of a group

    and with several, whose first row is searched for where a thread begins::

        with T.sp_iter([K0, I_J0, I_J1, K2], "SSSS", "spmm"):  # blocks, chunks
            ...  # spmm_start
            with T.sp_iter([I_J2], "S", "spmm_each"):  # elements of a chunk
                ...  # B_ws_copy, spmm_reduce; spmm_write and spmm_again, where the row changes
    """
    tiles, w, threads, lane = features
    fused = sch.sparse_fuse(rows.iteration, [rows.rows, *rows.columns])
    factors = [None, config.workers, max(config.group, config.work)]
    blocks, workers, element = sch.split(
        sch.positions(fused, rows=config.rows), factors, tail="repeat"
    )
    loops = [blocks, workers, threads, element]
    sch.sparse_reorder(rows.iteration, [*rows.heads, tiles, *loops, w, lane])
    if config.work > 1:
        start, reduce, *writes = sch.segment_accumulate(element, dtype=accumulator(rows.dtype))
    else:
        start, reduce, *writes = _in_workspace(sch, rows, element, [w, lane])
    over_blocks(sch, rows.heads, tiles)
    sch.parallelize(blocks, "block", race="atomics")
    sch.parallelize(workers, "thread", race="atomics")
    sch.parallelize(threads, "thread")
    if config.work == 1:
        race = f"segment({config.group})" if config.group > 1 else "atomics"
        sch.parallelize(element, "thread", race=race)
    copies, rest = gathered_vectors(sch, rows, reduce, reduce)
    return [start, rest, *writes], copies


def _chunks(sch: Schedule, rows: RowReduction, config: Groups, features: list[SpIter]) -> _Steps:
    """{g nnz, c col, 1}.

    After::

        ...  # spmm_init, of all rows
        with T.sp_iter([K0, I_J_parts, K2, I_J_piece], "SSSS", "spmm"):
            ...  # spmm_start
            with T.sp_iter([T.part(..)], "R", "spmm_reduce"):  # elements of a row in the chunk
                ...  # B_ws_copy, spmm_reduce_rest
            ...  # spmm_write, of rows in one chunk; spmm_write_add, of others
    """
    if len(rows.columns) > 1:
        refuse_shape(
            "Groups", sch.func, "one loop over what rows store, of which threads have some"
        )
    tiles, w, threads, lane = features
    fused = sch.sparse_fuse(rows.iteration, [rows.rows, *rows.columns])
    chunks, pieces, element = sch.split(fused, [None, config.work])
    loops = [chunks, threads, pieces, element]
    sch.sparse_reorder(rows.iteration, [*rows.heads, tiles, *loops, w, lane])
    start, reduce, _ = _in_workspace(sch, rows, pieces, [w, lane])
    over_blocks(sch, rows.heads, tiles)
    sch.parallelize(threads, "thread")
    met = sch.parallelize(chunks, "thread", race="atomics", per_block=config.workers)
    write, add = met or []
    copies, rest = gathered_vectors(sch, rows, reduce, sch.get_sp_iters(reduce)[-3])
    return [start, rest, add], [*copies, write]


def _in_workspace(
    sch: Schedule, rows: RowReduction, loop: SpIter, lanes: list[SpIter]
) -> list[SparseIterationRef]:
    """The iterations of a thread's accumulators: start, reduce and write."""
    return sch.precompute(rows.result, loop, lanes, dtype=accumulator(rows.dtype))


def choices(search: SearchInput) -> Tried:
    """Configs of Sgap's algorithms (whose x and g are `work`, and g of {1/g row} is `lanes`).

    Without those for which there are no atomics, threads of a row that each add separately, and
    groups of a whole warp for more columns than a thread's.
    """
    problem, feat = search.problem, search.given.feat
    wide = vector_width(feat, problem.dtype)

    def make(**fields: Any) -> Groups | None:
        if fields["rows"] != "table" and fields["split"] == "rows":
            return None
        config = Groups.for_features(feat, problem.dtype, **fields)
        alone = config.split == "rows" and config.group == 1 < config.lanes
        halves = config.side_by_side >= WARP and feat > config.vector  # of sectors
        fits = config.coarsen == 1 or config.coarsen * config.vector <= feat
        return config if fits and not (alone or halves) and config.serves(problem) else None

    return {
        "split": SPLITS,
        "work": (1, 2, 4, 16),
        "lanes": (1, 4, 8, 32),
        "group": (1, 4, 8, 32),
        "vector": tuple(sorted({wide, max(1, wide // 2)})),
        "coarsen": (1, 2),
        "block": (128, 256),
        "rows": ROWS_FROM,
    }, make


register(Template(Groups, Spmm, program, apply, gpu=True, choices=choices, turn=3))
