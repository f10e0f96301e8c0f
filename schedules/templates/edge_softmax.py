"""Softmax over the elements of each row, and its gradient, on CPUs and GPUs.

All steps of a row follow each other while it is in cache, for a tile of heads in vectors; threads
get rows with equal numbers of elements.
"""

from __future__ import annotations

from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax, program
from sparsetir.schedules.passes.exponential import inline_exponentials
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.templates.message_tiles import ROW_COST, Tile, bind_threads
from sparsetir.schedules.templates.row_shapes import row_steps
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.schedule import Schedule

__all__ = ["EdgeSoftmax", "apply", "program"]


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
    tiles, *vectors = sch.split(found.features, [None, config.vectors, config.lanes], tail="shift")
    outer, rows = [], found.rows
    if config.parallel:
        block, rows = sch.divide(rows, config.blocks, by="work", cost=ROW_COST)
        outer.append(block)
    others = [x for x in found.others if x != found.features]
    sch.sparse_reorder(found.iteration, [*outer, rows, *others, tiles, *vectors])
    steps = sch.distribute(vectors)
    if config.parallel:
        sch.parallelize(outer)
    stage_two = sch.lower()
    if config.gpu:
        bind_threads(stage_two, f"{found.iteration.name}0")
        return
    stage_two = sch.rewrite(inline_exponentials)
    for step in steps:
        in_vectors(stage_two, step)
