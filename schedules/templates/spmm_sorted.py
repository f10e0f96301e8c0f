"""Sparse times dense on a CPU, of matrices with many short rows and few features: graphs.

Rows go in the order of their lengths (:mod:`sparsetir.sparse_ir.schedule.by_length`): where a
processor has not foreseen the end of a row, it loses as much time as some elements take. For other
matrices :class:`sparsetir.schedules.templates.spmm.RowBlocks` has less to read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsetir.schedules.arguments import number
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    InOrder,
    Spmm,
    accumulator,
)
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.sparse_ir.schedule import Schedule


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
    rows, columns = sch.by_length(found.rows, found.columns[0], config.window)
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


register(Template(SortedRows, Spmm, program, apply, arrange))
