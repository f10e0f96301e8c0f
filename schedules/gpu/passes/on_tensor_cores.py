"""Products of tiles in shared memory on tensor cores, with accumulators in registers.

See :mod:`sparsetir.schedules.gpu.passes.tile_products`. A product of 32 by 128 sums of 32 terms
by four warps, each with 32 rows and 32 columns, where each thread has 2 by 4 tiles of four::

    for u0 in range(2):                                     # 16 of the 32 terms; all is unrolled
        ...                                                 # load 2 left and 4 right factors
        for u1, u2 in T.grid(2, 4):
            T.ptx.mma(C_ws[u1 * 16 + u2 * 4], ...)

The 16 rows of an instruction are those of the result if there are as many; results of 8 rows map to
its columns, with the product transposed, so that no part of the instruction is wasted. Sums over
less than the depth of an instruction are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from sparsetir.schedules.gpu.passes.fragments import (
    LEFT,
    RIGHT,
    Tile,
    load_left,
    load_right,
    registers,
)
from sparsetir.schedules.gpu.passes.ptx import PRODUCTS, multiply
from sparsetir.schedules.gpu.passes.tile_products import (
    Division,
    Exchanged,
    divided_product,
    intrinsic,
)
from sparsetir.schedules.passes.nests import for_threads, unrolled
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.tir import as_dtype

NAME = "on_tensor_cores"
ROWS, COLUMNS = 16, 8  # of an instruction
TERMS = 8  # 16 bytes of 16-bit numbers


def on_tensor_cores(
    func: tirx.PrimFunc,
    reduce: str,
    steps: Sequence[str],
    *,
    warps: tuple[int, int],
    pairs: bool = False,
) -> tirx.PrimFunc:
    """A stage-II function with a product of tiles on tensor cores.

    warps : the numbers of warps among which the rows and the columns of the sums are divided

    Other arguments as for :func:`sparsetir.schedules.gpu.passes.tile_products.divided_product`.
    Raises ScheduleError for blocks of another form, and tiles that instructions do not divide.
    """

    def made(rows: int, columns: int, dtypes: list[str], sums: str) -> Warps:
        _check_types(dtypes, sums)
        return Warps(rows, columns, warps)

    return divided_product(NAME, func, reduce, steps, made, pairs)


def _check_types(dtypes: list[str], sums: str) -> None:
    dtype = dtypes[0] if len(set(dtypes)) == 1 else " and ".join(dtypes)
    if dtype not in PRODUCTS or PRODUCTS[dtype].sums != sums:
        legal = ", ".join(f"{k} and {v.sums}" for k, v in PRODUCTS.items())
        raise ScheduleError(
            f"{NAME}: argument 'reduce': expected factors and sums of {legal}, got {dtype} and "
            f"{sums}"
        )


class Warps(Division):
    """Sums divided among warps, each with tiles of 16 by 8.

    rows, columns : rows and columns of the sums
    warps : the numbers of warps among which these are divided
    """

    caller = NAME

    def __init__(self, rows: int, columns: int, warps: tuple[int, int]) -> None:
        self.sizes, self.shape, self.warps = (rows, columns), warps, warps[0] * warps[1]
        self.name = f"sparsetir.on_tensor_cores_{rows}_{columns}_{warps[0]}_{warps[1]}"
        shares = [rows // warps[0], columns // warps[1]]
        self.turned = bool(shares[0] % ROWS or shares[1] % COLUMNS)
        self.order = -1 if self.turned else 1
        self.shares = shares[:: self.order]
        self.tiles = [self.shares[0] // ROWS, self.shares[1] // COLUMNS]
        fits = not (self.shares[0] % ROWS or self.shares[1] % COLUMNS) and all(shares)
        if not fits or rows % warps[0] or columns % warps[1]:
            self._refuse([rows, columns])
        self.own = [*self.tiles, 2, 2]
        self.rows = (1, 3) if self.turned else (0, 2)

    def intrinsic(self, dtype: str, terms: int, along: tuple[bool, bool] = (True, False)) -> str:
        """Register the product as an intrinsic for TVM's `tensorize`; return its name.

        dtype : type of both factors; sums are in float32, those of int8 in int32
        terms : terms of each sum
        along : for the left and the right factor, whether neighbours in memory are terms
        """
        sums = PRODUCTS[dtype].sums if dtype in PRODUCTS else dtype
        _check_types([dtype, dtype], sums)
        return intrinsic(self, terms, (dtype, dtype), along, sums)

    def _refuse(self, got: Any) -> None:
        raise ScheduleError(
            f"{NAME}: argument 'reduce': expected rows and columns of a warp that {ROWS} and "
            f"{COLUMNS} divide, and terms that {TERMS} does, got {got} for {list(self.shape)} warps"
        )

    def _begins(self, warp: Any) -> tuple[Any, Any]:
        """The offsets of a warp's part in the left and in the right factor."""
        left, right = (warp // self.shape[1], warp % self.shape[1])[:: self.order]
        return left * self.shares[0], right * self.shares[1]

    def place(self, warp: Any, lane: Any, index: Sequence[Any]) -> Sequence[Any]:
        i, j, r, c = index
        left, right = self._begins(warp)
        row, column = lane // 4 + r * 8, lane % 4 * 2 + c
        return (left + i * ROWS + row, right + j * COLUMNS + column)[:: self.order]

    def when_added(self) -> Division:
        """Lanes of two rows exchange columns: eight have all columns of a tile in one row."""
        return self if self.turned else Exchanged(self, 3, 4, (0, 2, 3))

    def when_stored(self, item: int) -> Division:
        """Of 2 bytes each, eight lanes have the columns of two tiles in one row."""
        exact = item == 2 and self.tiles[1] % 2 == 0
        return Exchanged(self, 1, 4, (0, 2, 3)) if exact else self

    def multiply(self, sums: Any, left: Tile, right: Tile, terms: int) -> Any:
        if terms % TERMS:
            self._refuse(f"{terms} terms")
        left, right = (left, right)[:: self.order]
        a = registers([self.tiles[0], LEFT], "left_registers")
        b = registers([self.tiles[1], RIGHT], "right_registers")
        depth = PRODUCTS[left.dtype].depth
        count, rest = divmod(terms, depth)

        def code(warp: Any, lane: Any) -> Any:
            at_left, at_right = self._begins(warp)

            def rights(first: Any, many: int, begin: Any, limit: int | None) -> Any:
                to = [x for n in range(many) for x in _at(b, first + n, RIGHT)]
                return load_right(to, right, at_right + first * COLUMNS, begin, lane, limit)

            def lefts(i: Any, begin: Any, limit: int | None) -> Any:
                return load_left(_at(a, i, LEFT), left, at_left + i * ROWS, begin, lane, limit)

            def one(i: Any, j: Any) -> Any:
                places = [self.held((i, j, r, c)) for r in (0, 1) for c in (0, 1)]
                added = [tirx.BufferLoad(sums, p) for p in places]
                return multiply(left.dtype, added, _at(a, i, LEFT), _at(b, j, RIGHT))

            def step(k: Any, most: int | None) -> Any:
                pairs, odd = divmod(self.tiles[1], 2)
                parts = [unrolled([self.tiles[0]], lambda i: lefts(i, k, most))]
                parts += [unrolled([pairs], lambda u: rights(u * 2, 2, k, most))] if pairs else []
                parts += [rights(as_dtype(2 * pairs, "int32"), 1, k, most)] if odd else []
                return tirx.SeqStmt([*parts, unrolled(self.tiles, one)])

            whole = [unrolled([count], lambda u: step(u * depth, None))] if count else []
            part = [step(as_dtype(count * depth, "int32"), rest)] if rest else []
            return tirx.SeqStmt([tirx.AllocBuffer(a), tirx.AllocBuffer(b), *whole, *part])

        return for_threads(NAME, self.warps, code)


def _at(buffer: Any, row: Any, many: int) -> list[Any]:
    """The first elements of a row."""
    return [tirx.BufferLoad(buffer, [row, n]) for n in range(many)]
