"""Tiles of a length whose number is known write themselves out.

`unroll_known_tiles(func, feat, 16, 3)`, on the word of who calls it that `feat` features take three
tiles of 16, of which the last begins earlier (`split` with tail="shift"). Before::

    for t in range((feat + 15) // 16):
        for l in T.vectorized(16):
            k = T.min(t * 16, feat - 16) + l
            S[l] = S[l] + T.Select(k >= t * 16, X[i, k] * Y[j, k], 0.0)

After, where a condition is left in the last tile alone::

    for t in T.unroll(3):
        for l in T.vectorized(16):
            k = T.Select(t < 2, t * 16, T.min(t * 16, feat - 16)) + l
            S[l] = S[l] + T.Select(k >= t * 16, X[i, k] * Y[j, k], 0.0)
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import nodes_of, substitute
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars, loop_with, values_of, with_body
from sparsetir.sparse_ir.traversal import map_expr


def unroll_known_tiles(func: tirx.PrimFunc, length: Any, tile: int, count: int) -> tirx.PrimFunc:
    """The function with its loops over the tiles of a length unrolled.

    func : of stage II; the one given is left as it is
    length : of the stage-I function that `func` was lowered from
    count : tiles that `length` takes, the last one not always whole; of one tile it is, since tiles
        are no longer than `length`

    Raises ScheduleError where there is no such loop.
    """
    func = s_tir.renew_defs(func)
    params = {p.name: p for p in func.params}
    length = substitute(length, {v: params[v.name] for v in free_vars(length)})
    dtype = dtype_of(length)
    size = as_dtype(tile, dtype)
    number = tirx.floordiv(length + as_dtype(tile - 1, dtype), size)
    loops = nodes_of(tirx.For, func.body)
    found = [x.loop_var for x in loops if tvm_ffi.structural_equal(x.extent, number)]
    realizes = nodes_of(s_tir.SBlockRealize, func.body)
    bound = [pair for r in realizes for pair in values_of(r).items()]
    tiles = {*found, *(var for var, value in bound if any(value.same_as(f) for f in found))}

    def loop(node: Any) -> Any:
        if not tvm_ffi.structural_equal(node.extent, number):
            return node
        extent = as_dtype(count, dtype_of(node.loop_var))
        return loop_with(node, extent=extent, kind=tirx.ForKind.UNROLLED)

    def start(node: Any) -> Any:
        of_tile = isinstance(node.a, tirx.Mul) and node.a.a in tiles
        if not of_tile or not tvm_ffi.structural_equal(node.b, length - size):
            return node  # among them minima of the program's own
        if count == 1:
            return node.a
        # The minimum stays where it is the last: `i * feat + feat - 16` would be turned into
        # `(i + 1) * feat - 16`, a second product for each row.
        return tirx.Select(node.a < as_dtype((count - 1) * tile, dtype), node.a, node)

    def domain(node: Any) -> Any:
        known = tvm_ffi.structural_equal(node, number)
        return as_dtype(count, dtype_of(node)) if known else node

    body = map_expr(func.body, [(tirx.For, loop), (tirx.Min, start)])
    if not found:
        raise ScheduleError(
            f"unroll_known_tiles: argument 'tile': expected a loop over tiles of {tile} of "
            f"{length}, got none"
        )
    return with_body(func, map_expr(body, [(tirx.FloorDiv, domain)]))
