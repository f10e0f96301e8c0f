"""Attention over blocks on a CPU, and its gradients: products of register tiles, rows in lanes.

All steps of a program have the rows of one block as lanes, so that per-row values, such as the
greatest score, are vectors, and no step reduces lanes. A product, over features or keys,
accumulates a tile of its result in registers: each element of an operand is multiplied by vectors
of rows. The intermediate results of a block's visit stay in the L1 cache. (The default schedule,
with other tiles, takes 1.06 to 4.8 times as long with 32 to 128 features.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.arguments import Config, number
from sparsetir.schedules.operators.block_attention import BlockAttention, program
from sparsetir.schedules.operators.block_attention_backward import BlockAttentionBackward
from sparsetir.schedules.operators.block_attention_backward import program as gradient_program
from sparsetir.schedules.passes.inline_exponentials import inline_exponentials
from sparsetir.schedules.registers import most_sum_vectors
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.register_tile import Straight, greatest_divisor
from sparsetir.schedules.templates.shapes import Nest, refuse_shape
from sparsetir.sparse_ir.nodes import SparseIteration, nodes_of, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef

NAME = "block_attention"


@dataclass(frozen=True)
class BlockTiles(Config):
    """Schedule of a CPU kernel.

    lanes : per vector, a power of two that divides the rows of a block
    vectors : of rows per tile, whose product with `lanes` divides the rows of a block
    tile : the most features or keys per tile; a divisor of their number is used
    parallel : whether to use all threads
    """

    lanes: int = number(16, power=True)
    vectors: int = number(4)
    tile: int = number(4)
    parallel: bool = True

    @staticmethod
    def for_block(
        block: int, size: tuple[int, int], accumulator: str = "float32", parallel: bool = True
    ) -> BlockTiles:
        """Good tiles for a block size; size : bits and number of vector registers."""
        bits, registers = size
        lanes = min(block, bits // (64 if accumulator == "float64" else 32))
        vectors = greatest_divisor(block // lanes, 4)
        return BlockTiles(lanes, vectors, most_sum_vectors(registers) // vectors, parallel)


def apply(sch: Schedule, config: BlockTiles) -> None:
    """Schedule a program whose steps run for each block that a row of blocks stores.

    Before (stage I), and after::

        with T.sp_iter([H, IO], "SS", "rows") as [h, io]:
            with T.sp_iter([JO], "R", "keys") as [jo]:
                with T.sp_iter([JI, II, F], "SSR", "score") as [ji, ii, f]: ...
                with T.sp_iter([JI, II], "SS", "powers") as [ji, ii]: ...

        with T.sp_iter([H, IO], "SS", "rows") as [h, io]:  # parallel
            with T.sp_iter([JO], "R", "keys") as [jo]:
                with T.sp_iter([JI0, II0], "SS", "score") as [ji0, ii0]:
                    ...  # score_start, score_reduce, score_write of (JI1, II1, II2)
                with T.sp_iter([JI, II0, II1, II2], "SSSS", "powers") as [ji, ii0, ii1, ii2]: ...
    """
    main, lanes = visits_of_blocks(sch, NAME)
    straight: Straight = []
    for it in sparse_iterations(sch.func):
        if not nodes_of(SparseIteration, it.body):
            straight += _in_tiles(sch, it, lanes, config)
    if config.parallel:
        sch.parallelize(sch.get_sp_iters(main))
    sch.lower()
    sch.rewrite(inline_exponentials)
    register_tile.straight_code(sch, straight)


def visits_of_blocks(sch: Schedule, caller: str) -> tuple[SparseIterationRef, str]:
    """The iteration over rows of blocks, and the axis of a block's rows; caller : for messages."""
    main = sch.func.body
    ends = {b.axes[-1].name for b in sch.func.buffers if b.handle is None and b.axes}
    if not isinstance(main, SparseIteration) or len(ends) != 1:
        refuse_shape(
            caller, sch.func, "one iteration, and local buffers that end with the same axis"
        )
    return sch.get_sparse_iteration(main.name), ends.pop()


def _in_tiles(sch: Schedule, it: SparseIteration, lanes: str, config: BlockTiles) -> Straight:
    """Cut a step into vectors, a sum into register tiles: iterations, and unrolled loops."""
    nest = Nest(sch, NAME, it)
    ref, handles = nest.handles()
    summed = [handles.pop(x.axes) for x in nest.loops_of_kind("R")]
    rows = handles.pop((lanes,), None)
    if rows is None or len(summed) > 1 or len(handles) > 1:
        nest.refuse(f"to visit '{lanes}', at most one other axis, and to reduce over at most one")
    tiles, *vectors = sch.split(rows, [None, config.vectors, config.lanes], tail="exact")
    others = list(handles.values())
    if not summed:
        sch.sparse_reorder(ref, [*others, tiles, *vectors])
        return [(ref, 2)]
    sub: list[Any] = []
    for other in others:
        length = int(sch.func.axis(other.name).length)
        outer, inner = sch.split(other, [None, greatest_divisor(length, config.tile)], tail="exact")
        others, sub = [outer], [inner]
    return register_tile.sums_of(sch, ref, nest.result, [*others, tiles], summed, [*sub, *vectors])


register(Template(BlockTiles, BlockAttention, program, apply))
register(Template(BlockTiles, BlockAttentionBackward, gradient_program, apply))
