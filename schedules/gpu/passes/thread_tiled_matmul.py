"""Products of tiles in shared memory by threads that each keep a tile of the sums in registers.

For any type; see :mod:`sparsetir.schedules.gpu.passes.tile_products`. Before::

    for it, l1 in T.grid(32, 64):
        with T.sblock("start0"): Y_ws[it, l1] = 0.0
    ...
        for it, l1, k1 in T.grid(32, 64, 16):
            with T.sblock("product0"):
                Y_ws[it, l1] = Y_ws[it, l1] + G[it, k1] * W_ws[k1, l1]
    for it, l1 in T.grid(32, 64):
        with T.sblock("write0"): atomicAdd(Y[I[rt, it], l], Y_ws[it, l1])

After `thread_tiled_matmul(func, "product0", ["start0", "write0"], warps=4, shape=(4, 4))`, where
thread t of 128 has the rows from t // 16 * 4 on and the columns from t % 16 * 4 on::

    for u0, u1 in T.grid(4, 4):                            # unrolled, as all others
        Y_ws[u0, u1] = 0.0
    ...
        for k in range(4):                                 # 4 of the 16 terms
            for u0 in range(4): left[u0, 0:4] = G[t // 16 * 4 + u0, k * 4:k * 4 + 4]
            for n in range(4):
                right[0:4] = W_ws[k * 4 + n, t % 16 * 4:t % 16 * 4 + 4]
                for u0, u1 in T.grid(4, 4):
                    Y_ws[u0, u1] = Y_ws[u0, u1] + left[u0, n] * right[u1]
    ...                                                    # lanes exchange columns of Y_ws
    for u0, u1 in T.grid(4, 4):
        atomicAdd(Y[I[rt, t // 16 * 4 + u0], ...], held[u0, u1])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx

from sparsetir.schedules.gpu.passes.cooperative_sums import VECTOR_BYTES, in_vector
from sparsetir.schedules.gpu.passes.fragments import Tile
from sparsetir.schedules.gpu.passes.tile_products import Division, Exchanged, divided_product
from sparsetir.schedules.passes.nests import WARP, element_bytes, for_threads, unrolled
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var
from sparsetir.sparse_ir.tir import as_one, cast, dtype_of, loop_over

NAME = "thread_tiled_matmul"


def thread_tiled_matmul(
    func: tirx.PrimFunc, reduce: str, steps: Sequence[str], *, warps: int, shape: tuple[int, int]
) -> tirx.PrimFunc:
    """A stage-II function with a product of tiles by threads, and its sums in their registers.

    warps : warps per thread block
    shape : rows and columns of a thread's sums; those of all threads form the tile

    Other arguments as for :func:`sparsetir.schedules.gpu.passes.tile_products.divided_product`.
    Raises ScheduleError for blocks of another form, and threads that do not form the tile.
    """

    def made(rows: int, columns: int, dtypes: list[str], sums: str) -> Division:
        del dtypes, sums
        return _Threads(rows, columns, warps, shape)

    return divided_product(NAME, func, reduce, steps, made)


class _Threads(Division):
    """Sums divided among threads, each with a tile of neighbours."""

    caller = NAME

    def __init__(self, rows: int, columns: int, warps: int, shape: tuple[int, int]) -> None:
        self.sizes, self.warps, self.own = (rows, columns), warps, list(shape)
        self.name = f"sparsetir.register_tiles_{rows}_{columns}_{shape[0]}_{shape[1]}"
        self.across = columns // shape[1]
        exact = rows % shape[0] == 0 == columns % shape[1]
        if not exact or rows // shape[0] * self.across != warps * WARP:
            raise ScheduleError(
                f"{NAME}: argument 'shape': expected {warps * WARP} tiles that make {rows} by "
                f"{columns} sums, got {shape}"
            )

    def place(self, warp: Any, lane: Any, index: Sequence[Any]) -> Sequence[Any]:
        thread = warp * WARP + lane
        begins = thread // self.across * self.own[0], thread % self.across * self.own[1]
        return [b + i for b, i in zip(begins, index, strict=True)]

    def when_added(self) -> Division:
        """Of the columns of each thread, neighbouring threads of a row have the same one."""
        division: Division = self
        apart = math.gcd(self.across, WARP)
        while division.own[-1] % 2 == 0 == apart % 2:
            apart //= 2
            division = Exchanged(division, len(division.own) - 1, apart)
        return division

    def multiply(self, sums: Any, left: Tile, right: Tile, terms: int) -> Any:
        wide, tiles = dtype_of(sums), (left, right)
        size = element_bytes(left.element(0, 0).source)
        step = math.gcd(terms, VECTOR_BYTES // size)
        # Several terms for each of a thread's places, or one.
        registers = [
            buffer_var([n, step] if x.along_sum else [n], x.dtype, name, "local")
            for n, x, name in zip(self.own, tiles, ("left", "right"), strict=True)
        ]

        def code(warp: Any, lane: Any) -> Any:
            sides = [*zip(tiles, registers, self.place(warp, lane, (0, 0)), self.own, strict=True)]

            def loaded(side: Any, k: Any, n: Any, i: Any) -> Any:
                """Neighbours of a factor: terms from n on of place i, or all places of term n."""
                tile, held, begin, count = side

                def one(e: Any) -> Any:
                    place, term = (i, e) if tile.along_sum else (e, n)
                    value = tile.element(begin + place, k * step + term)
                    return tirx.BufferStore(held, value, [i, e] if tile.along_sum else [e])

                return in_vector(step if tile.along_sum else count, element_bytes(held), one)

            def add(i: Any, j: Any, n: Any) -> Any:
                a, b = (
                    tirx.BufferLoad(held, [place, n] if tile.along_sum else [place])
                    for tile, held, place in zip(tiles, registers, (i, j), strict=True)
                )
                place = self.held((i, j))
                value = tirx.BufferLoad(sums, place) + cast(a, wide) * cast(b, wide)
                return tirx.BufferStore(sums, value, place)

            def add_term(k: Any, n: Any) -> Any:
                loads = [loaded(x, k, n, 0) for x in sides if not x[0].along_sum]
                return as_one([*loads, unrolled(self.own, lambda i, j: add(i, j, n))])

            def load_places(k: Any, side: Any) -> Any:
                return unrolled([side[3]], lambda i: loaded(side, k, 0, i))

            k = tirx.Var("k", "int32")
            parts = [
                *(load_places(k, x) for x in sides if x[0].along_sum),
                unrolled([step], lambda n: add_term(k, n)),
            ]
            allocs = [tirx.AllocBuffer(b) for b in registers]
            return tirx.SeqStmt([*allocs, loop_over(k, terms // step, as_one(parts))])

        return for_threads(NAME, self.warps, code)
