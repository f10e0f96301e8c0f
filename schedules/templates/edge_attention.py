"""Attention over the elements of each row in one kernel, on CPUs and GPUs.

All steps of a row follow each other while it is in cache. Sums over features are kept by the lanes
of one vector, which are added up together; weighted sums by registers, for a tile of features.
"""

from __future__ import annotations

from typing import Any

from sparsetir.schedules.operators.edge_attention import EdgeAttention, program
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.message_tiles import AttentionTiles, Tile, arrange, finish
from sparsetir.schedules.templates.row_shapes import RowStep, row_steps
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef


def apply(sch: Schedule, config: AttentionTiles) -> None:
    """Schedule a program of steps over what rows store, with features in some of them.

    Before (stage I), and after for threads of a CPU::

        with T.sp_iter([I, H], "SS", "rows") as [i, h]:
            with T.sp_iter([J, F], "SR", "score") as [j, f]: ...
            with T.sp_iter([W, J], "SR", "weigh") as [w, j]: ...

        with T.sp_iter([I_parts, T.part(I, I_part), H], "SSS", "rows") as [i_parts, i, h]:
            with T.sp_iter([J], "S", "score") as [j]: ...  # score_start, score_reduce, ..
            with T.sp_iter([W0], "S", "weigh") as [w0]: ...  # weigh_start, weigh_reduce, ..
    """
    found, keys = row_steps(sch, "edge_attention"), config.keys
    vectors: register_tile.Straight = []
    sums: list[SparseIterationRef] = []
    for step in found.steps:
        if step.reduces == "features":
            start, reduce, add, _ = _in_lanes(sch, step, keys)
            vectors += [(start, 2), (reduce, 2)]
            sums.append(add)
        elif step.reduces == "columns" and step.features is not None:
            tiles, held = register_tile.in_tiles(sch, step.features, config.values)
            vectors += register_tile.sums_of(
                sch, step.iteration, step.result, [tiles], [step.columns], held,
                dtype=accumulator(step.dtype), hoist=True,
            )  # fmt: skip
    if keys.parallel:
        blocks, rows = register_tile.in_blocks(sch, found.rows, keys, keys.blocks)
        sch.sparse_reorder(found.iteration, [*blocks, rows, *found.others])
        sch.parallelize(blocks)
    finish(sch, keys, [found.iteration], vectors, sums)


def _in_lanes(sch: Schedule, step: RowStep, tile: Tile) -> list[SparseIterationRef]:
    """Sum over features in the lanes of a vector for each element; the steps of it."""
    features: Any = step.features
    outer, (vectors, lanes) = register_tile.in_tiles(sch, features, tile)
    sch.sparse_reorder(step.iteration, [step.columns, outer, vectors, lanes])
    return sch.precompute(
        step.result, step.columns, [], lanes=[lanes], dtype=accumulator(step.dtype), hoist=True
    )


register(Template(AttentionTiles, EdgeAttention, program, apply, arrange, gpu=None))
