"""Values of edges made of the features of their ends, on CPUs and GPUs.

Threads get equal numbers of edges; a tile of features is in vectors. Sums over features are kept
by the lanes of one vector, which are added up together (see `lane_sums`).
"""

from __future__ import annotations

from sparsetir.schedules.operators.edge_messages import OPS, EdgeMessages, program
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.passes.lane_sums import add_lanes
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.templates.message_tiles import Tile, bind_threads
from sparsetir.schedules.templates.shapes import DenseLoops, dense_loops
from sparsetir.sparse_ir.schedule import Schedule, SpIter

__all__ = ["OPS", "EdgeMessages", "apply", "program"]


def apply(sch: Schedule, config: Tile) -> None:
    """Schedule a program that makes values of features, for each edge or a sum for each.

    Before (stage I), and after for values of each feature::

        with T.sp_iter([E, H, K], "SSS", "gsddmm") as [e, h, k]: ...

        with T.sp_iter([E, H, K0, K1, K2], "SSSSS", "gsddmm") as [e, h, k0, k1, k2]: ...
    """
    found = dense_loops(sch, "edge_messages")
    tiles = sch.split(found.features, [None, config.vectors, config.lanes], tail="shift")
    if found.reduces:
        _sums(sch, found, config, tiles)
        return
    if config.parallel:
        sch.parallelize(found.outer[0])
    stage_two = sch.lower()
    if config.gpu:
        bind_threads(stage_two, f"{found.iteration.name}0")
    else:
        in_vectors(stage_two, found.iteration)


def _sums(sch: Schedule, found: DenseLoops, config: Tile, tiles: list[SpIter]) -> None:
    """Sums over features in the lanes of one vector for each edge."""
    edges, *heads = found.outer
    edges, one = sch.split(edges, [None, 1])
    outer = [edges, *heads]
    sch.sparse_reorder(found.iteration, [*outer, one, *tiles])
    steps = sch.precompute(
        found.result, outer[-1], [one], lanes=tiles[-1:], dtype=accumulator(found.dtype)
    )
    if config.parallel:
        sch.parallelize(edges)
    stage_two = sch.lower()
    if config.gpu:
        bind_threads(stage_two, f"{found.iteration.name}0")
        return
    start, reduce, sums, _ = steps
    for step in (start, reduce):
        in_vectors(stage_two, step)
    if config.lanes > 1:
        sch.rewrite(add_lanes, f"{sums.name}0")
