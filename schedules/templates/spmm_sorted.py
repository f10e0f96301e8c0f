"""Sparse times dense on a CPU, of matrices with many short rows and few features: graphs.

Rows go in the order of their lengths (:mod:`sparsetir.sparse_ir.schedule.sort_rows_by_length`):
where a processor has not foreseen the end of a row, it loses as much time as some elements take.
For other matrices :class:`sparsetir.schedules.templates.spmm.RowBlocks` has less to read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparsetir.schedules.arguments import number
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, InOrder, Spmm, accumulator
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.targets import l2_bytes
from sparsetir.schedules.template import Asked, Template, Tried, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.sparse_ir.schedule import Schedule

# Rows from which on no processor knows their lengths by heart, and elements of one up to which its
# end takes a good part of its time.
ROWS, LENGTH = 8192, 6
# Times the L2 cache that B may take: beyond it, gathering and writing far and wide takes longer.
CACHES = 4
VECTORS = 2
WINDOWS = (512, 4096)  # that a search tries


@dataclass(frozen=True)
class SortedRows(register_tile.RegisterTile):
    """How a CPU kernel is made.

    window : rows that are sorted together
    others : as of :class:`RegisterTile`
    """

    tile: int = number(32, most=register_tile.MAX_TILE)
    lanes: int = 16
    feat: int | None = None
    window: int = number(4096)
    blocks: int = number(1, compiled=1)
    parallel: bool = True
    packed: bool = True
    ahead: int = number(0, least=0, compiled=0)

    @property
    def unpacked(self) -> SortedRows:
        """For values that come with each run, in the order of the matrix."""
        return replace(self, packed=False)


def apply(sch: Schedule, config: SortedRows) -> None:
    """Schedule a program that reduces over what rows store, by primitives of both stages.

    Before (stage I), and after::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([I_sorted, K0], "SS", "spmm") as [i_sorted, k0]:
            ...  # spmm_start, spmm_reduce over I_elements, spmm_write, over vectors of a tile
    """
    found = row_reduction(sch, "SortedRows")
    values = register_tile.packed_values(sch, found) if config.packed else ()
    rows, columns = sch.sort_rows_by_length(found.rows, found.columns[0], config.window)
    blocks, rows = register_tile.in_blocks(sch, rows, config, ahead="ahead")
    steps = register_tile.in_registers(
        sch, found, config, [rows], [columns], shared=[*found.heads, *blocks],
        dtype=accumulator(found.dtype), hoist=True,
    )  # fmt: skip
    for name in values:
        sch.pack(name, steps[1][0])
    register_tile.straight_code(sch, steps)


def arrange(matrix: CsrPattern, problem: Spmm, config: SortedRows) -> Arranged:
    """CSR as it is, in as many blocks of rows."""
    del problem
    blocks = max(1, min(config.blocks, matrix.shape[0]))
    numbers = {"blocks": blocks, "ahead": config.ahead}
    return Arranged(InOrder(matrix, not config.packed), matrix.arguments(), numbers)


def sorting_pays(m: int, n: int, nnz: int, feat: int, bytes: int, lanes: int) -> bool:
    """Whether rows by length are faster than rows as they are: many short ones, few features.

    Measured on Zen 5 (AVX-512, one thread, float32), PubMed and generated graphs of 20,000 rows
    with 2 to 8 elements on average, calls in a row: 1.9 to 3.1 times as fast with 8 features, 1.8
    to 2.4 with 16, 1.4 to 1.9 with 32, of values that are packed; 1.3 to 2.9 of those that are
    not. In turns with other matrices 1.0 to 1.3 with 32. With 64 features and more, or 16 elements
    to a row, it gains nothing; up to 4,000 rows it takes up to a tenth longer, as the processor
    foresees the ends of rows that it has seen some times; and so it does on 325,729 rows, whose
    B is larger than the caches.
    """
    fits = n * feat * bytes <= CACHES * l2_bytes()
    return m >= ROWS and fits and 0 < nnz <= LENGTH * m and feat <= VECTORS * lanes


def sorted_rows(tiled: Any, given: Any, parallel: bool) -> SortedRows:
    """The config for a pattern.

    tiled : row blocks for these features
    given : :class:`sparsetir.schedules.search.choose.Statistics`
    """
    blocks, ahead = (given.threads, given.ahead) if parallel else (1, 0)
    return SortedRows(
        tiled.tile, tiled.lanes, tiled.feat, blocks=blocks, parallel=parallel, ahead=ahead
    )


def choices(asked: Asked) -> Tried | None:
    """Windows and threads around the candidate, if there is one."""
    own, given = asked.own(SortedRows), asked.given
    if not own:
        return None

    def make(window: int, parallel: bool) -> SortedRows:
        return replace(sorted_rows(own[0], given, parallel), window=window)

    return {"window": WINDOWS, "parallel": (False, True)[: min(2, given.threads)]}, make


register(Template(SortedRows, Spmm, program, apply, arrange, choices=choices, turn=3))
