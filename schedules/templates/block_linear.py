"""Linear maps with blocked weights, on a CPU: some tokens by the rows of a block in registers.

A vector of a block's values serves all tokens of a tile, a value of X all rows of a block. (The
default schedule has one token at a time: with 128 tokens it takes 3 to 12 times as long.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from sparsetir.schedules.arguments import Config, number
from sparsetir.schedules.operators.block_linear import BlockLinear, BlockOuter, program
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.registers import sum_vectors
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.register_tile import greatest_divisor
from sparsetir.schedules.templates.shapes import only_nest
from sparsetir.sparse_ir.schedule import Schedule

STRAIGHT = 4  # columns of a block that are unrolled
MOST_LANES = 16


@dataclass(frozen=True)
class BlockTile(Config):
    """Schedule of a kernel for blocks.

    tile : tokens at a time, at most the number of tokens; for sums over tokens, columns
        of a block at a time, a divisor
    lanes : per vector, a power of two that divides the rows of a block
    parallel : whether to use all threads; waking them takes as long as a small product
    """

    tile: int = number(8)
    lanes: int = number(16, power=True)
    parallel: bool = True

    @staticmethod
    def for_block(problem: BlockLinear, size: tuple[int, int], tokens: int, parallel: bool) -> Any:
        """The config whose accumulators fill the vector registers; size : their bits and number."""
        bits, registers = size
        lanes = min(MOST_LANES, bits // (64 if problem.accumulator == "float64" else 32))
        while problem.rows % lanes:
            lanes //= 2
        most = max(1, sum_vectors(registers) * lanes // problem.rows)
        if isinstance(problem, BlockOuter):
            return BlockTile(greatest_divisor(problem.cols, most), lanes, parallel)
        return BlockTile(most if tokens >= most else 1, lanes, parallel)


def apply(sch: Schedule, config: BlockTile) -> None:
    """Schedule a product with blocks, or sums over tokens for each place of blocks.

    Before (stage I), and after::

        with T.sp_iter([IO, TOKEN, JO, JI, II], "SSRRS", "linear") as [io, t, jo, ji, ii]: ...

        with T.sp_iter([IO, TOKEN0], "SS", "linear") as [io, t0]:
            ...                          # linear_start: Y_ws[t1, i0, i1] = bias
            ...                          # linear_reduce over [JO, JI0, JI1, TOKEN1, II0, II1]
            ...                          # linear_write

    and::

        with T.sp_iter([IO, JO, TOKEN, JI, II], "SSRSS", "linear_grad_w") as [io, jo, ..]: ...

        with T.sp_iter([IO], "S", "linear_grad_w") as [io]:
            GRAD_Y_ws[t, i0, i1] = ...   # a copy of the values of Y for a row of blocks
            with T.sp_iter([JO, JI0], "SS", "linear_grad_w_rest") as [jo, ji0]:
                ...                      # .._start, .._reduce over [TOKEN, JI1, II0, II1]
    """
    nest = only_nest(sch, "BlockTile")
    summed = nest.loops_of_kind("R")
    blocks = [x for x in nest.loops if nest.plain and x.node.is_sparse]
    if nest.reduction is None or len(blocks) != 1 or len(nest.loops) != 5:
        nest.refuse("to be a reduction over blocks or over tokens")
    inside = [x for x in nest.loops if isinstance(x.node.length, tirx.IntImm)]
    rows = next((x for x in nest.loops if x.name == blocks[0].node.parent.name), None)
    rest = [x for x in nest.loops if x not in (*blocks, *inside, rows)]
    if rows is None or len(inside) != 2 or len(rest) != 1 or "R" in rows.kinds:
        nest.refuse("to visit rows of blocks, their blocks, the places of a block and tokens")
    it, handles = nest.handles()
    io, jo, ji, ii, token = (
        handles[x.axes] for x in (rows, blocks[0], *inside, rest[0])
    )  # fmt: skip
    total = accumulator(nest.dtype)
    over_tokens = rest[0] in summed
    cut, whole = (ji, "exact") if over_tokens else (token, "shift")
    outer_cut, inner_cut = sch.split(cut, [None, config.tile], tail=whole)
    vectors = sch.split(ii, [None, config.lanes], tail="exact")
    held = [inner_cut, *vectors]
    straight = 1 if over_tokens else greatest_divisor(int(inside[0].node.length), STRAIGHT)
    if over_tokens:
        around, columns = [io, jo, outer_cut], [token]
    else:
        columns = [jo, *(sch.split(ji, [None, straight]) if straight > 1 else [ji])]
        around = [io, outer_cut]
    steps = register_tile.sums_of(sch, it, nest.result, around, columns, held, dtype=total)
    reduce, loops = steps[1]
    steps[1] = (reduce, loops + (straight > 1))
    if over_tokens:
        mine = {loop.axes: loop for loop in sch.get_sp_iters(reduce)}
        over = [token.axes[0], *(mine[v.axes] for v in vectors)]
        copies = sch.precompute("GRAD_Y", io, over, scope="global")
        steps += [(copy, len(vectors)) for copy in copies]
    if config.parallel:
        sch.parallelize(io)
    register_tile.straight_code(sch, steps)


register(Template(BlockTile, BlockLinear, program, apply))
register(Template(BlockTile, BlockOuter, program, apply))
