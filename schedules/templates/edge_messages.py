"""Values of edges made of the features of their ends, on GPUs: a thread for each edge."""

from __future__ import annotations

from sparsetir.schedules.operators.edge_messages import EdgeMessages, program
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.message_tiles import Tile, finish
from sparsetir.schedules.templates.shapes import dense_loops
from sparsetir.sparse_ir.schedule import Schedule


def apply(sch: Schedule, config: Tile) -> None:
    """Schedule a program that makes values of features, for each edge or a sum for each.

    Before (stage I), and after::

        with T.sp_iter([E, H, K], "SSS", "gsddmm") as [e, h, k]: ...

        with T.sp_iter([E, H, K0, K1, K2], "SSSSS", "gsddmm") as [e, h, k0, k1, k2]: ...
    """
    found = dense_loops(sch, "edge_messages")
    tiles, (vector, lane) = register_tile.in_tiles(sch, found.features, config)
    if found.reduces:
        first, *heads = found.outer
        first, one = sch.split(first, [None, 1])
        outer = [first, *heads]
        sch.sparse_reorder(found.iteration, [*outer, one, tiles, vector, lane])
        sch.precompute(found.result, outer[-1], [one], lanes=[lane], dtype=accumulator(found.dtype))
    finish(sch, config, [found.iteration], [])


register(Template(Tile, EdgeMessages, program, apply, gpu=True))
