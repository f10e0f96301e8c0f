"""Messages of edges and their reduction at the targets, on CPUs and GPUs.

As in :mod:`sparsetir.schedules.templates.spmm`, a tile of features of a row is reduced in
registers, and threads get rows with equal numbers of elements.
"""

from __future__ import annotations

from sparsetir.schedules.operators.messages import Messages, program
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.message_tiles import Tile, arrange, finish
from sparsetir.schedules.templates.shapes import row_results
from sparsetir.sparse_ir.schedule import Schedule


def apply(sch: Schedule, config: Tile) -> None:
    """Schedule a program that reduces over what rows store, for one or more results.

    Before (stage I), and after for threads of a CPU::

        with T.sp_iter([I, H, J, K], "SSRS", "gspmm") as [i, h, j, k]: ...

        with T.sp_iter([I_parts, T.part(I, I_part), H, K0], "SSSS", "gspmm") as [..]:
            ...  # gspmm_start, gspmm_reduce, gspmm_write over vectors of a tile
    """
    results = row_results(sch, "messages")
    steps: register_tile.Straight = []
    for found in results:
        blocks, rows = register_tile.in_blocks(sch, found.rows, config, config.blocks)
        wide = accumulator(found.dtype) if found.reduces else None
        steps += register_tile.in_registers(
            sch, found, config, [rows, *found.heads], found.columns, shared=blocks,
            dtype=wide, hoist=found.reduces,
        )  # fmt: skip
    finish(sch, config, [found.iteration for found in results], steps)


register(Template(Tile, Messages, program, apply, arrange, gpu=None))
