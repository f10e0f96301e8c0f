"""Gradients of relational gather-matmul-scatter for weights, on a CPU: tiles in registers.

Rows of a chunk are summed up, or multiplied by their relation's matrix, in a workspace that stays
in the first cache. Registers hold a tile of a relation's sums during the loop over a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import Config, number
from sparsetir.schedules.operators.rgms_backward import RgmsBackward, program
from sparsetir.schedules.passes.add_lanes import add_lanes
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.register_tile import Straight, greatest_divisor
from sparsetir.schedules.templates.shapes import Nest, refuse_shape
from sparsetir.sparse_ir.nodes import SparseIteration, nodes_of, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule

WHO = "rgms_backward"
# Accumulator vectors that fit the registers, beside operands.
REGISTERS = 24
MOST_VECTORS = 8  # of features in a row


@dataclass(frozen=True)
class ChunkTiles(Config):
    """Schedule of a CPU kernel.

    lanes : of a vector, a power of two that divides both numbers of features
    tile : rows of a relation's matrix in a tile, at most; a divisor of theirs is taken
    blocks : of relations, with about as much work each; 0 for one thread
    vectors : of a row in a tile, at most; a divisor of theirs is taken
    """

    lanes: int = number(16, power=True)
    tile: int = number(6)
    blocks: int = number(0, least=0)
    vectors: int = number(2)


def apply(sch: Schedule, config: ChunkTiles) -> None:
    """Schedule a program of steps for each chunk of rows.

    Before (stage I), and after::

        with T.sp_iter([P], "S", "pieces") as [p]:
            with T.sp_iter([K, L], "SS", "clear") as [k, l]: ...
            with T.sp_iter([C], "R", "chunks") as [c]:
                with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, k]: ...
                with T.sp_iter([K, L, I], "SSR", "products") as [k, l, i]: ...

        with T.sp_iter([P_parts, T.part(P, P_part)], "SS", "pieces") as [p_parts, p]:  # parallel
            with T.sp_iter([K, L0, L1, L2], "SSSS", "clear") as [k, l0, l1, l2]: ...
            with T.sp_iter([C], "R", "chunks") as [c]:
                with T.sp_iter([I, K0], "SS", "sums") as [i, k0]:
                    ...  # sums_start, sums_reduce, sums_write of (K1, K2)
                with T.sp_iter([K0, L0], "SS", "products") as [k0, l0]:
                    ...  # products_start, products_reduce, products_write of (K1, L1, L2)
    """
    main = sch.func.body
    if not isinstance(main, SparseIteration) or not nodes_of(SparseIteration, main.body):
        refuse_shape(WHO, sch.func, "one iteration of several steps")
    straight: Straight = []
    sums: list[str] = []
    for it in sparse_iterations(sch.func):
        if not nodes_of(SparseIteration, it.body):
            straight += _in_tiles(sch, it, config, sums)
    if config.blocks:
        ref = sch.get_sparse_iteration(main.name)
        first = sch.get_sp_iters(ref)[0]
        parts, *_ = sch.divide(first, config.blocks, by="work")
        sch.parallelize(parts)
    register_tile.straight_code(sch, straight)
    for block in sums:
        sch.rewrite(add_lanes, block)


def _in_tiles(sch: Schedule, it: SparseIteration, config: ChunkTiles, sums: list[str]) -> Straight:
    """Cut a step into vectors and tiles: iterations, and how many straight loops each has.

    sums : takes the names of blocks that add up lanes
    """
    nest = Nest(sch, WHO, it)
    ref, handles = nest.handles()
    summed = [handles.pop(x.axes) for x in nest.of_kind("R")]
    lengths = {x.axes: int(x.node.length) for x in nest.loops if x.node.kind == "dense_fixed"}
    features = [h for axes, h in handles.items() if axes in lengths]
    rows = [h for axes, h in handles.items() if axes not in lengths]
    if not features and not summed:
        return []
    if not features:  # of each element, a sum over features
        steps, lanes = sch.split(summed[0], [None, config.lanes], tail="exact")
        start, reduce, total, _ = sch.precompute(nest.result, rows[-1], [], lanes=[lanes])
        sums.append(f"{total.name}0")
        return [(start, 1), (reduce, 1)]
    vectors = lengths[features[-1].axes] // config.lanes
    wide = greatest_divisor(vectors, MOST_VECTORS if len(features) == 1 else config.vectors)
    outer, *held = sch.split(features[-1], [None, wide, config.lanes], tail="exact")
    if not summed:
        sch.sparse_reorder(ref, [*rows, *features[:-1], outer, *held])
        return [(ref, 2)]
    tiles = [*rows, outer]
    if len(features) > 1:
        tile = greatest_divisor(lengths[features[0].axes], min(config.tile, REGISTERS // wide))
        first, inner = sch.split(features[0], [None, tile], tail="exact")
        tiles, held = [*rows, first, outer], [inner, *held]
    return register_tile.sums_of(sch, ref, nest.result, tiles, summed, held)


register(Template(ChunkTiles, RgmsBackward, program, apply))
