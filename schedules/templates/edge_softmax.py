"""Softmax over the elements of each row, and its gradient, on CPUs and GPUs.

All steps of a row follow each other while it is in cache, for a tile of heads in vectors; threads
get rows with equal numbers of elements.
"""

from __future__ import annotations

from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax, program
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.message_tiles import Tile, arrange, finish
from sparsetir.schedules.templates.row_shapes import row_steps
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.schedule import Schedule


def apply(sch: Schedule, config: Tile) -> None:
    """Schedule a program of steps over what rows store, for features side by side.

    Before (stage I), and after for threads of a CPU::

        with T.sp_iter([I, B, H], "SSS", "rows") as [i, b, h]:
            with T.sp_iter([J], "R", "top") as [j]: ...

        with T.sp_iter([I_parts, T.part(I, I_part), B, H0], "SSSS", "rows") as [..]:
            with T.sp_iter([J, H1, H2], "RSS", "top") as [j, h1, h2]: ...
    """
    found = row_steps(sch, "edge_softmax")
    if found.features is None:
        raise ScheduleError(
            f"edge_softmax: argument 'sch': expected a loop of '{found.iteration.name}' to be "
            f"contiguous in all results in '{sch.func.name}'"
        )
    tiles, vectors = register_tile.in_tiles(sch, found.features, config)
    blocks, rows = register_tile.in_blocks(sch, found.rows, config, config.blocks)
    others = [x for x in found.others if x != found.features]
    sch.sparse_reorder(found.iteration, [*blocks, rows, *others, tiles, *vectors])
    steps = sch.distribute(vectors)
    if blocks:
        sch.parallelize(blocks)
    finish(sch, config, [found.iteration], [(step, 2) for step in steps])


register(Template(Tile, EdgeSoftmax, program, apply, arrange, gpu=None))
