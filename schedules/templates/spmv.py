"""Sparse times a vector on a CPU: y[i] = sum over the stored j of A[i, j] * x[j].

Rows of a few elements are too short for a loop of their own: their trip counts are mispredicted. So
short rows are side by side in slices, as many as a vector has lanes, one element of each at
a time; long rows are summed in vectors along themselves
(:mod:`sparsetir.sparse_ir.schedule.sell_slices`). The default schedule has vectors along each row:
it takes 1.1 to 3.8 times as long on 20 matrices of 2 to 100 elements a row (AVX-512, one thread).

Consecutive rows of finite elements, stencils and bands are in slices of diagonals: vectors of x are
loaded, not gathered. (Zen 5, one thread, float32: stencils of 5 to 27 elements a row 0.3 to 0.42 of
the time, finite elements whose diagonals are filled by 60 % 0.5, by 35 % 0.9; values in the order
of the matrix 0.6 where they are filled by 80 %.)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sparsetir.schedules.arguments import Config, choice, expect_at_least, number
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    Spmm,
    Stored,
    accumulator,
    as_given,
    vector_lanes,
)
from sparsetir.schedules.operators.spmv import program
from sparsetir.schedules.passes.add_lanes import add_lanes
from sparsetir.schedules.passes.one_launch import one_launch
from sparsetir.schedules.passes.prefetch import prefetch_streams
from sparsetir.schedules.template import SearchInput, Template, Tried, around, register
from sparsetir.schedules.templates.register_tile import packed_values, straight_code
from sparsetir.schedules.templates.shapes import row_sum
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.recipes.diagonals import first_rows, slice_diagonals
from sparsetir.sparse_ir.recipes.slices import row_order, rows_of_slices, slice_count, slice_ptr
from sparsetir.sparse_ir.schedule import Schedule

# The cost of starting and writing a slice or a long row, in steps.
STORE_COST = 3
# Multiplications of products with many features that take as long as an element here.
MULTIPLICATIONS = 8
# The least percentage of slots with an element in a slice of long rows. (Zen 5, one thread, rows of
# 80 to 1000 elements: without such slices 1.02 to 2 times as long.)
FILLED = 90
# The least percentage of slots with an element in a slice of diagonals, of values in the order of
# the slots, and of gathered ones.
DIAGONAL, DIAGONAL_GATHERED = 30, 80
# The least elements for which a row is best summed along itself if slices gather their values.
UNPACKED_LONG = 32


@dataclass(frozen=True)
class SlicedRows(Config):
    """Schedule of a CPU kernel.

    lanes : rows per slice, a power of two
    long : the least elements for which a row is summed along itself, with `packed` unless it fits a
        slice of rows of similar length; at least `lanes`; not compiled in
    window : rows that are sorted by length together; not compiled in
    blocks : of slices, and of long rows, which are divided among the threads; one runs on the
        caller's thread only. Not compiled in, except for one
    ahead : additional elements of the first block of slices: the calling thread processes them
        while others wake; not compiled in
    prefetch : steps of a slice by which its values and columns are prefetched; 0 for never
    packed : values of the slices are stored in the order of the slots, in a separate array; else
        they are gathered from those of the matrix, which takes longer and needs no preparation
    diagonals : consecutive rows are in slices of diagonals if these hold enough elements
    """

    lanes: int = number(16, power=True)
    long: int = number(128, least=None, tries=(64, 128, 256, 1024))
    window: int = number(4096, compiled=1, tries=(512, 4096, 32768))
    blocks: int = number(1, compiled=2)
    ahead: int = number(0, least=0, compiled=0, tries=(0,))
    prefetch: int = number(32, least=0, tries=(0, 32))
    packed: bool = True
    diagonals: bool = choice(False, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_at_least(self, long=self.lanes)

    @staticmethod
    def for_pattern(
        problem: Spmm, m: int, nnz: int, *, threads: int = 1, work_of_threads: int = 0,
        vector_bits: int = 512, cache: int = 0, diagonals: bool = False,
    ) -> SlicedRows:  # fmt: skip
        """A good config for a pattern of `nnz` elements in `m` rows.

        work_of_threads : the least multiplications for which waking the other threads pays
        cache : bytes; operands that fit are not prefetched
        diagonals : whether many elements are in slices of diagonals, which take half of the time
        """
        element = MULTIPLICATIONS // 2 if diagonals else MULTIPLICATIONS
        lanes, work = vector_lanes(problem, vector_bits), element * (nnz + STORE_COST * m)
        each = sum(np.dtype(kind).itemsize for kind in (problem.dtype, problem.idtype))
        config = SlicedRows(lanes, diagonals=diagonals)
        if nnz * each <= cache:
            config = replace(config, prefetch=0)
        if threads < 2 or work < work_of_threads:
            return config
        ahead = int(work_of_threads * (1 - 1 / threads) / MULTIPLICATIONS)
        return replace(config, blocks=threads, ahead=ahead)

    def tiles(self, feat: int) -> int:
        """Tiles of a feature size; raises ScheduleError for any but 1."""
        if feat != 1:
            raise ScheduleError(
                f"SlicedRows.tiles: argument 'feat': the config serves 1 feature, got {feat}"
            )
        return 1

    @property
    def unpacked(self) -> SlicedRows:
        """The config for values passed in each call, in the order of the matrix.

        Slices gather them, so more rows are summed along themselves.
        """
        return replace(self, packed=False, long=max(UNPACKED_LONG, self.lanes))

    @property
    def compiled(self) -> SlicedRows:
        """The config that a kernel depends on: the same for each `long`."""
        return replace(super().compiled, long=self.lanes)


def apply(sch: Schedule, config: SlicedRows) -> None:
    """Schedule a program that sums over the elements of rows, without features.

    Before (stage I), and after::

        with T.sp_iter([I, J], "SR", "spmv") as [i, j]: ...

        with T.sp_iter([I_bands], "S", "spmv_diagonals") as [i_band]: ...  # with config.diagonals
        with T.sp_iter([I_slices], "S", "spmv") as [i_slice]:
            ...  # spmv_start, spmv_reduce, spmv_write over the rows of a slice
        with T.sp_iter([I_long], "S", "spmv_long") as [i_long]: ...
        with T.sp_iter([I_left], "S", "spmv_left") as [i_left]: ...
    """
    sums = row_sum(sch, "SlicedRows")
    values = packed_values(sch, sums) if config.packed else ()
    slices, _, lane, long, _, vector_lane, left, _, *bands = sch.sell_slices(
        sums.rows, sums.columns[0], config.lanes, longest="long", window="window",
        filled=_filled(config), diagonals=_diagonal(config),
    )  # fmt: skip
    if config.blocks > 1:
        if bands:
            blocks, bands[0] = sch.divide(
                bands[0], "band_blocks", by="work", cost=STORE_COST, default=1
            )
            sch.parallelize(blocks)
        blocks, slices = sch.divide(
            slices, "blocks", by="work", cost=STORE_COST, default=1, ahead="ahead"
        )
        sch.parallelize(blocks)
        blocks, long = sch.divide(long, "long_blocks", by="work", cost=STORE_COST, default=1)
        sch.parallelize(blocks)
    total = accumulator(sums.dtype)
    by_lanes = [sch.precompute(sums.result, slices, [lane], dtype=total)]
    vectors = sch.precompute(sums.result, long, [], lanes=[vector_lane], dtype=total)
    sch.precompute(sums.result, left, [], dtype=total)
    if bands:
        by_lanes.append(sch.precompute(sums.result, bands[0], [bands[2]], dtype=total))
    for name, (_, reduce, _) in itertools.product(values, by_lanes):
        sch.pack(name, reduce)
    starts_and_sums = [step for steps in (*by_lanes, vectors) for step in steps[:2]]
    stage_two = straight_code(sch, [(step, 1) for step in starts_and_sums])
    for _, _, write in by_lanes:
        stage_two.unroll(stage_two.get_loops(stage_two.get_sblock(write.block))[-1])
    if config.lanes > 1:
        sch.rewrite(add_lanes, vectors[2].block)
    if config.prefetch:
        for _, reduce, _ in by_lanes:
            sch.rewrite(prefetch_streams, reduce, config.prefetch)
    if config.blocks > 1:  # a row is in a slice, or is a long one
        loops = [*bands[:1], slices, long]
        sch.rewrite(one_launch, [loop.iteration for loop in loops], race="ignore")


def _padding(matrix: CsrPattern, config: SlicedRows) -> float:
    """The share of slots, and of elements in no slot, without an element."""
    indptr, lanes, dense = matrix.indptr, config.lanes, _diagonal(config)
    how: dict[str, Any] = {"lanes": lanes, "longest": config.long, "filled": _filled(config)}
    held = np.zeros(0, indptr.dtype)
    if dense is not None:
        held = slice_diagonals(indptr, matrix.indices, matrix.shape[1], lanes, dense)
        how["taken"] = first_rows(held, indptr, lanes)
    order = row_order(indptr, window=config.window, **how)
    rows = rows_of_slices(order, slice_count(indptr, **how), lanes)
    lengths = indptr[rows + 1] - indptr[rows]
    unused = int(slice_ptr(lengths, lanes)[-1]) * lanes - int(lengths.sum())
    unused += np.count_nonzero(held < 0)
    places = matrix.nnz + unused
    return unused / places if places else 0.0


def arrange(matrix: CsrPattern, problem: Spmm, config: SlicedRows) -> Arranged:
    """CSR unchanged, with the numbers that the kernel leaves open."""
    del problem
    stored = Stored(as_given, not config.packed, partial(_padding, matrix, config))
    return Arranged(stored, matrix.arguments(), numbers(config, matrix.shape[0]))


def numbers(config: SlicedRows, rows: int | None = None) -> dict[str, int]:
    """The numbers that a kernel leaves open; rows : of the matrix, if known."""
    blocks = config.blocks if rows is None else max(1, min(config.blocks, rows))
    loops = ["blocks", "long_blocks", *["band_blocks"] * config.diagonals]
    several = dict.fromkeys(loops, blocks) | {"ahead": config.ahead // config.lanes}
    return {"long": config.long, "window": config.window, **(several if config.blocks > 1 else {})}


def _filled(config: SlicedRows) -> int:
    """Minimum fill, in percent, of padded slices of long rows; never met if values are gathered."""
    return FILLED if config.packed else 101


def _diagonal(config: SlicedRows) -> int | None:
    """Minimum fill, in percent, of slices of diagonals, if there are any."""
    percent = DIAGONAL if config.packed else DIAGONAL_GATHERED
    return percent if config.diagonals else None


def choices(search: SearchInput) -> Tried | None:
    """Choices around the candidate, which only sums of one feature have."""
    configs, threads = search.own(SlicedRows), search.given.threads
    if not configs:
        return None
    lanes = configs[0].lanes
    return around(configs, lanes=(max(1, lanes // 2), 2 * lanes), blocks=(1, threads, 4 * threads))


register(Template(SlicedRows, Spmm, program, apply, arrange, choices=choices, turn=0))
