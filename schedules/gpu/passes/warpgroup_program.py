"""Tiles of a thread block, in its warps' registers, multiplied by `wgmma` (sm_90a).

The code is that of :mod:`sparsetir.schedules.gpu.passes.warp_mma_program` with 16 rows for each
warp, but for products: the four warps of a warpgroup multiply 64 rows by a factor that they read
from shared memory together, where each warp by itself would load all of it to registers. Before::

    for ii, ji, f in T.grid(64, 64, 64):
        SCORE[ii, ji] += Q[io * 64 + ii, f] * K[J[io, jo] * 64 + ji, f]

After, for each thread, with Q in registers::

    fence
    for s in T.unroll(4):
        SCORE_tile[0:32] = wgmma(Q's registers[s], descriptor of K's, SCORE_tile[0:32])
    commit; wait
    SCORE_tile[0:32] are read

Sums are in the order of `mma`'s (PTX manual, "Register Fragments for wgmma.mma_async.m64nNk16").
Factors in shared memory are in panels of 64 columns, or 128 bytes, in which the 16-byte chunk c of
row r is at chunk c ^ (r % 8): the manual's canonical layouts with 128-byte swizzles, whose patterns
begin at multiples of 1024 bytes. The stride offset is that of 8 rows; if neighbours in memory are
not along the sum ("MN-major"), as of V, the leading offset is that of a panel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import tirx

from sparsetir.schedules.gpu.passes.fragments import LEFT, SUMS, left_of_sums
from sparsetir.schedules.gpu.passes.ptx import (
    in_order,
    matrix_descriptor,
    show_copies,
    warpgroup_product,
)
from sparsetir.schedules.gpu.passes.tile_parts import PANEL, VECTOR, Nest, Side
from sparsetir.schedules.gpu.passes.tile_programs import COLUMNS, ROWS, TileProgram
from sparsetir.schedules.gpu.passes.warp_mma_program import HALF_BYTES, Code, mapped, some
from sparsetir.schedules.passes.nests import is_zero, unrolled
from sparsetir.schedules.targets import NEEDS
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var
from sparsetir.sparse_ir.tir import as_dtype

WARPS, MOST_WARPS = 4, 32  # of a warpgroup, and of a thread block
MOST_COLUMNS = 256  # of an instruction
CHUNK, PATTERN = VECTOR * HALF_BYTES, 8 * PANEL * HALF_BYTES  # bytes


def warpgroup_program(
    func: tirx.PrimFunc, block: str, owner: str, stages: int = 2
) -> tirx.PrimFunc:
    """Map the tiles of a thread block to its warpgroups.

    Arguments are those of :func:`sparsetir.schedules.gpu.passes.warp_mma_program.warp_mma_program`;
    `owner` has 64 coordinates or a multiple, and factors have a multiple of 64 columns in memory.

    Raises ScheduleError for other programs.
    """
    program = TileProgram(func, block, owner, MOST_WARPS, swizzled=True)
    if program.rows != ROWS or program.warps % WARPS:
        raise ScheduleError(
            f"warpgroup_program: argument 'owner': expected an axis of a multiple of 64 "
            f"coordinates, got '{owner}' ({program.rows * program.warps})"
        )
    for tile in program.tiles.values():
        if tile.columns > MOST_COLUMNS:
            raise ScheduleError(
                f"warpgroup_program: expected tiles of at most {MOST_COLUMNS} columns, got "
                f"{tile.columns} of '{tile.buffer.name}'"
            )
    return mapped(func, block, _Code(program, stages)).with_attr(NEEDS, ["sm_90a"])


class _Code(Code):
    """The code of threads whose warpgroups multiply."""

    shown = (show_copies(),)
    align = PATTERN

    def multiplied(self, nest: Nest) -> Iterator[Any]:
        """Products of 64 x 16 by 16 x all columns of a tile, and the wait for them."""
        left, right = self.program.sides[id(nest)]
        _, store = nest.stores[0]
        tile = self.program.tiles[store.buffer]
        between = not right.along and tile.columns % PANEL and PANEL % tile.columns  # panels
        if between or nest.init is not None and not is_zero(nest.init.value):
            self.program.refuse(store)
        (k,) = nest.reduced
        depth, begin = nest.extents[k] // COLUMNS, nest.first(k)
        across = nest.first(store.indices[1 - tile.owner])
        sums = some(tile.registers, 0, int(tile.registers.ty.shape[0]))
        held = self.program.held.get(left) if isinstance(left, Side) else None
        code: list[Any] = []
        if not isinstance(left, Side):
            held = buffer_var([depth * LEFT], "uint32", self.program.name("left"), "local")

            def rounded(s: Any) -> Any:
                low, high = (some(left.registers, s * 2 * SUMS + n, SUMS) for n in (0, SUMS))
                return left_of_sums(some(held, s * LEFT, LEFT), low, high, self.dtype)

            code = [tirx.AllocBuffer(held), unrolled([depth], rounded)]

        def product(s: Any) -> Any:
            at, turned = begin + s * COLUMNS, [not right.along]
            if isinstance(left, Side) and held is None:
                factors = [_matrix(left, self.warp // WARPS * WARPS * ROWS, at)]
                turned = [not left.along, *turned]
            else:
                factors = some(held, s * LEFT, LEFT)
            adds = s > 0 if nest.init is not None else tirx.const(True)
            return warpgroup_product(
                self.dtype, sums, factors, _matrix(right, across, at), turned, adds
            )

        yield tirx.SeqStmt([*code, in_order(tile.registers, unrolled([depth], product))])


def _matrix(side: Side, place: Any, along: Any) -> Any:
    """The descriptor of part of a factor.

    place, along : the first row or column, a multiple of 8 or 64, and the first term of the sum
    """
    f, k_major = side
    row, column = (place, along) if k_major else (along, place)
    panel = f.rows * PANEL
    lead = CHUNK if k_major else panel * HALF_BYTES  # unused if K-major, "assumed to be 1"
    whole = matrix_descriptor(tirx.BufferLoad(f.shared, [0]), lead, PATTERN)
    first = column // PANEL * panel + row * PANEL + column % PANEL
    return whole + as_dtype(as_dtype(first, "int32") // VECTOR, "uint64")
