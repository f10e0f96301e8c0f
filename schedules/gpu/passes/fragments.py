"""The layout of a product of tiles in the registers of a warp's 32 threads.

One instruction adds to 16 by 8 sums a product of a left factor, 16 by `depth`, and a right one,
`depth` by 8. The PTX manual ("Matrix Fragments for mma") defines the layout of its 32-bit
registers:

    sums    4: of lane l in rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next, row by row
    left    4: rows l / 4, l / 4 + 8; and these again in the other half of the depth. A register
            has neighbours along the depth: 2 of 16 bits, number l % 4 of such pairs, or 4 of 8 bits
    right   2: column l / 4, in one half of the depth and in the other

A factor is loaded from shared memory in either order (:class:`Tile`), or taken from sums that the
warp holds (:func:`left_of_sums`), as in the second product of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tvm import tirx

from sparsetir.schedules.gpu.passes.ptx import PRODUCTS, load_matrices, pack
from sparsetir.sparse_ir.nodes import buffer_var

SUMS = 4  # per thread and tile
LEFT, RIGHT = 4, 2  # registers per factor


class Tile(NamedTuple):
    """A factor in shared memory.

    element : (index across the sum, index along the sum) -> BufferLoad
    along_sum : whether neighbours in memory are neighbours along the sum
    dtype : type of the elements
    """

    element: Callable[[Any, Any], Any]
    along_sum: bool
    dtype: str


def place_of_sum(lane: Any, e: Any) -> tuple[Any, Any]:
    """Row and column, in the 16 by 8 tile, of a thread's sum number e."""
    return lane // 4 + e // 2 * 8, lane % 4 * 2 + e % 2


def registers(count: Sequence[int], name: str) -> Any:
    """A buffer of registers for factors."""
    return buffer_var(list(count), "uint32", name, "local")


def load_left(
    to: Sequence[Any], tile: Tile, first: Any, depth: Any, lane: Any, terms: int | None = None
) -> Any:
    """Load 16 rows of a left factor.

    to : 4 elements of :func:`registers`
    first, depth : the first of the 16 rows, and of their terms of the sum, in the tile
    terms : terms of the sum, if fewer than the instruction's depth; the others are zeros
    """
    half = _is_half(tile, terms)
    if half is None:
        return _bytes(to, tile, first, depth, lane, terms, (0, 8, 0, 8), (0, 0, 16, 16))
    step = PRODUCTS[tile.dtype].depth // 2
    row = first + lane % 16 if tile.along_sum else first + lane // 8 % 2 * 8
    place = lane // 16 * step + (0 if tile.along_sum else lane % 8)
    if half:
        place = 0 if tile.along_sum else lane % 8
    load = load_matrices(
        to[:2] if half else to, tile.element(row, depth + place), not tile.along_sum
    )
    return _with_zeros(load, to[2:] if half else [])


def load_right(
    to: Sequence[Any], tile: Tile, first: Any, depth: Any, lane: Any, terms: int | None = None
) -> Any:
    """Load 8 columns of a right factor, or 16 into twice the registers.

    to : 2 or 4 elements; other arguments as for :func:`load_left`
    """
    half = _is_half(tile, terms)
    if half is None:
        return _bytes(to, tile, first, depth, lane, terms, (0, 0, 8, 8), (0, 16, 0, 16))
    step = PRODUCTS[tile.dtype].depth // 2
    if half:
        of_tile, in_depth = lane // 8 % 2 * 8, 0
    else:
        of_tile, in_depth = lane // 16 * 8, lane // 8 % 2 * step
    if len(to) == RIGHT:
        of_tile = 0
    row = first + of_tile + (lane % 8 if tile.along_sum else 0)
    place = depth + in_depth + (0 if tile.along_sum else lane % 8)
    load = load_matrices(to[::2] if half else to, tile.element(row, place), not tile.along_sum)
    return _with_zeros(load, to[1::2] if half else [])


def _is_half(tile: Tile, terms: int | None) -> bool | None:
    """Whether a sum has half the depth of an instruction; None if `ldmatrix` cannot load it."""
    product = PRODUCTS[tile.dtype]
    if product.depth == 32 and not tile.along_sum or terms not in (None, product.depth // 2):
        return None
    return terms is not None


def _with_zeros(load: Any, rest: Sequence[Any]) -> Any:
    zero = tirx.const(0, "uint32")
    return tirx.SeqStmt([load, *[_set(r, zero) for r in rest]]) if rest else load


def _set(register: Any, value: Any) -> Any:
    return tirx.BufferStore(register.source, value, list(register.indices))


def _bytes(
    to: Sequence[Any], tile: Tile, first: Any, depth: Any, lane: Any, terms: int | None,
    rows: Sequence[int], depths: Sequence[int],
) -> Any:  # fmt: skip
    """Load 8-bit numbers one by one.

    Needed if their neighbours in memory are not along the sum, since `ldmatrix` transposes pairs of
    them, and if fewer than 16 bytes along the sum exist.

    rows, depths : rows and depths of the registers
    """
    steps: list[Any] = []
    for register, row, further in zip(to, rows, depths, strict=False):
        total: Any = tirx.const(0, "uint32")
        for n in range(4):
            term = further + lane % 4 * 4 + n
            value = tile.element(first + row + lane // 4, depth + term)
            if terms is not None:
                value = tirx.if_then_else(term < terms, value, tirx.const(0, "int8"))
            byte = tirx.Cast("uint32", tirx.reinterpret("uint8", value))
            total = tirx.bitwise_or(total, tirx.shift_left(byte, tirx.const(8 * n, "uint32")))
        steps.append(_set(register, total))
    return tirx.SeqStmt(steps)


def left_of_sums(to: Sequence[Any], first: Sequence[Any], second: Sequence[Any], dtype: str) -> Any:
    """A left factor of 16 by 16 made of the sums of two adjacent tiles, rounded to 16 bits.

    to : 4 elements of :func:`registers`
    first, second : 4 expressions each, of columns 0 to 7 and 8 to 15; no shuffle is needed
    """
    halves = [(first[0], first[1]), (first[2], first[3]), (second[0], second[1]),
              (second[2], second[3])]  # fmt: skip
    return tirx.SeqStmt([pack(dtype, r, *pair) for r, pair in zip(to, halves, strict=True)])
