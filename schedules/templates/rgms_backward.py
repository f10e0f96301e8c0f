"""Gradients of relational gather-matmul-scatter for weights, on a CPU: tiles in registers.

dW[r, k, l] = sum over i, j of A[r, i, j] * X[j, k] * dY[i, l]
dA[r, i, j] = sum over k, l of X[j, k] * W[r, k, l] * dY[i, l]

Rows of a relation come in tiles. The values that a tile shares, sums of rows of X or rows of dY
times W[r], are in a workspace that stays in the L1 cache, so that no intermediate has a row of
features per element, or per row of each relation. Registers hold a tile of a relation's sums during
the loop over a tile of rows. The default schedule multiplies per element: with 16 features it takes
33 times as long. (SparseTIR, section 4.4.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import Config, number
from sparsetir.schedules.operators.rgms import RgmsGradient, gradient
from sparsetir.schedules.passes.add_lanes import add_lanes
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.register_tile import Straight, greatest_divisor
from sparsetir.schedules.templates.shapes import Nest, only_nest
from sparsetir.sparse_ir.nodes import SparseIteration, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule

NAME = "rgms_backward"
# Accumulator vectors that fit the registers, besides operands.
REGISTERS = 24
MOST_VECTORS = 8  # of features per row


@dataclass(frozen=True)
class ChunkTiles(Config):
    """Schedule of a CPU kernel.

    feat_in, feat : the supported features of X and of Y, per block
    rows : rows of a relation at a time
    lanes : per vector, a power of two that divides both numbers of features
    tile : the most rows of a relation's matrix per tile; a divisor of their number is used
    blocks : of relations, of about equal work; 0 for one thread
    vectors : the most per row of a tile; a divisor of their number is used
    """

    feat_in: int = number()
    feat: int = number()
    rows: int = number(32)
    lanes: int = number(16, power=True)
    tile: int = number(6)
    blocks: int = number(0, least=0)
    vectors: int = number(2)


def apply(sch: Schedule, config: ChunkTiles) -> None:
    """Schedule a gradient of relational gather-matmul-scatter.

    Before (stage I), and after; for the weights of edges loops over B are inside those over tiles,
    and the sums are over L::

        with T.sp_iter([R, I, B, J, K, L], "SRSRSS", "rgms_grad_w") as [r, i, b, j, k, l]: ...

        with T.sp_iter([R_parts, T.part(R, R_part), B], "SSS", "rgms_grad_w") as [..]:  # parallel
            with T.sp_iter([K, L0, L1, L2], "SSSS", "rgms_grad_w_init") as [k, l0, l1, l2]: ...
            with T.sp_iter([I_tiles], "R", "rgms_grad_w_tiles") as [i_tile]:
                with T.sp_iter([T.part(I, I_part), K0], "SS", "rgms_grad_w_sums") as [i, k0]:
                    ...  # rgms_grad_w_sums_start, _reduce and _write of (K1, K2)
                with T.sp_iter([K0, L0], "SS", "rgms_grad_w_product") as [k0, l0]:
                    ...  # rgms_grad_w_product_start, _reduce and _write of (K1, L1, L2)
    """
    nest = only_nest(sch, NAME)
    sparse = [x for x in nest.loops if nest.plain and x.node.is_sparse]
    if len(sparse) != 2 or len(nest.loops) != 6:
        nest.refuse("to visit relations, their rows, what these store, blocks and features")
    ref, handles = nest.handles()
    rows, columns = (handles.pop(x.axes) for x in sparse)
    relations, blocks, features_in, features = handles.values()
    sch.bound(features_in, config.feat_in, "exact")
    sch.bound(features, config.feat, "exact")
    tiles, rows = sch.split(rows, [None, config.rows])
    around, summed = [blocks, tiles], columns
    if sparse[1].kinds == "S":
        around, summed = [tiles, blocks], features
    sch.sparse_reorder(ref, [relations, *around, rows, columns, features_in, features])
    steps = {x.name for x in sch.aggregate(nest.result, around[-1], rows, [summed])}
    straight: Straight = []
    sums: list[str] = []
    for it in sparse_iterations(sch.func):
        if it.name in steps:
            straight += _in_tiles(sch, it, config, sums)
    if config.blocks:
        parts, *_ = sch.divide(sch.get_sp_iters(ref)[0], config.blocks, by="work")
        sch.parallelize(parts)
    register_tile.straight_code(sch, straight)
    for block in sums:
        sch.rewrite(add_lanes, block)


def _in_tiles(sch: Schedule, it: SparseIteration, config: ChunkTiles, sums: list[str]) -> Straight:
    """Cut a step into vectors and tiles: iterations, and the number of loops of each to unroll.

    sums : collects the names of blocks that reduce lanes
    """
    nest = Nest(sch, NAME, it)
    ref, handles = nest.handles()
    summed = [handles.pop(x.axes) for x in nest.loops_of_kind("R")]
    dense = [x for x in nest.loops if getattr(x.node, "kind", "") == "dense_fixed"]
    lengths = {x.axes: int(x.node.length) for x in dense}
    features = [h for axes, h in handles.items() if axes in lengths]
    rows = [h for axes, h in handles.items() if axes not in lengths]
    if not features and not summed:
        return []
    if not features:  # of each element, a sum over features
        steps, lanes = sch.split(summed[0], [None, config.lanes], tail="exact")
        start, reduce, total, _ = sch.precompute(nest.result, rows[-1], [], lanes=[lanes])
        sums.append(total.block)
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


register(Template(ChunkTiles, RgmsGradient, gradient, apply))
