"""Search blocks: for the position of a coordinate, and for the rows of a joint position.

TIR has no expression for a search, so each one is a small block that leaves its result in a
one-element local buffer (SparseTIR, equation 4: `find`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.nodes import buffer_var
from sparsetir.sparse_ir.tir import as_dtype, as_one, dtype_of, loop_over


def scalar_buffer(name: str, dtype: str) -> Any:
    """A one-element local buffer."""
    return buffer_var([1], dtype, name, "local")


def load_one(buf: Any) -> Any:
    """The value of a one-element buffer."""
    return tirx.BufferLoad(buf, [tirx.IntImm("int32", 0)])


def store_one(buf: Any, value: Any) -> tirx.Stmt:
    """A store to a one-element buffer."""
    return tirx.BufferStore(buf, value, [tirx.IntImm("int32", 0)])


def _point(buf: Any) -> Any:
    zero = tirx.IntImm("int32", 0)
    return tirx.BufferRegion(buf, [ir.Range(zero, 1)])


def _block(
    name: str, reads: list[Any], locals_: list[Any], body: list[tirx.Stmt]
) -> tuple[tirx.Stmt, list[Any]]:
    """The search block and the locals that it writes, the result first.

    The locals are allocated outside it: some checks of TVM's schedule refuse a block with a
    reduction if a block nested in it allocates.
    """
    touched = [_point(v) for v in locals_]
    stmt = as_one(body)
    block = s_tir.SBlock([], [*reads, *touched], touched, name, stmt)
    return s_tir.SBlockRealize([], True, block), locals_


def _row_region(buf: Any, parents: list[Any], extent: Any) -> Any:
    ranges = [ir.Range.from_min_extent(p, as_dtype(1, dtype_of(p))) for p in parents]
    return tirx.BufferRegion(
        buf, [*ranges, ir.Range.from_min_extent(as_dtype(0, dtype_of(extent)), extent)]
    )


def lower_bound(lo: Any, hi: Any, extent: Any, before: Callable[[Any], Any]) -> list[Any]:
    """Statements that set lo[0] to the number of positions in [0, extent) that are before a target.

    before : the predicate that a position is before it; true for a prefix of the positions
    """
    dtype = dtype_of(extent)
    mid = load_one(lo) + ((load_one(hi) - load_one(lo)) >> as_dtype(1, dtype))
    step = tirx.IfThenElse(before(mid), store_one(lo, mid + as_dtype(1, dtype)), store_one(hi, mid))
    return [
        store_one(lo, as_dtype(0, dtype)),
        store_one(hi, extent),
        tirx.While(load_one(lo) < load_one(hi), step),
    ]


def find(
    name: str, result: Any, indices: Any, parents: list[Any], extent: Any, target: Any,
    reads: list[Any], in_order: bool,
) -> tuple[tirx.Stmt, list[Any]]:  # fmt: skip
    """result[0] = the first position of `target` in indices[parents, 0:extent], or -1.

    in_order : whether these indices increase
    """
    dtype = dtype_of(extent)

    def there(at: Any) -> Any:
        return tirx.BufferLoad(indices, [*parents, at])

    if in_order:
        lo, hi = (scalar_buffer(f"{result.name}_{end}", dtype) for end in ("lo", "hi"))
        here, no = load_one(lo), tirx.const(False, "bool")
        hit = tirx.if_then_else(here < extent, there(here) == target, no)
        body = lower_bound(lo, hi, extent, lambda mid: there(mid) < target)
        body.append(store_one(result, tirx.Select(hit, here, as_dtype(-1, dtype))))
        written = [result, lo, hi]
    else:
        at = tirx.Var("at", dtype)
        hit = tirx.all(load_one(result) < 0, there(at) == target, target >= 0)
        scan = loop_over(at, extent, tirx.IfThenElse(hit, store_one(result, at), None))
        body, written = [store_one(result, as_dtype(-1, dtype)), scan], [result]
    return _block(name, [*reads, _row_region(indices, parents, extent)], written, body)


def find_last_start(
    name: str, result: Any, start_of: Any, rows: tuple[Any, Any], position: Any, reads: list[Any]
) -> tuple[tirx.Stmt, list[Any]]:
    """result[0] = the last x in [begin, end) with start_of(x) <= position.

    rows : begin, for which that holds, and end

    Empty rows share their start with the next: the last row of a start is the one that holds it.
    """
    begin, end = rows
    dtype = dtype_of(end)
    lo, hi = (scalar_buffer(f"{result.name}_{end}", dtype) for end in ("lo", "hi"))
    one = as_dtype(1, dtype)
    mid = load_one(lo) + ((load_one(hi) - load_one(lo)) >> one)
    step = tirx.IfThenElse(start_of(mid) <= position, store_one(lo, mid), store_one(hi, mid))
    body = [
        store_one(lo, begin),
        store_one(hi, end),
        tirx.While(load_one(lo) + one < load_one(hi), step),
        store_one(result, load_one(lo)),
    ]
    return _block(name, reads, [result, lo, hi], body)


def restart(name: str, held: Any, first: Any) -> tuple[tirx.Stmt, list[Any]]:
    """held[0] = first, a load of a one-element buffer."""
    return _block(name, [_point(first.source)], [held], [store_one(held, first)])


def carry(
    name: str, result: Any, held: Any, starts: Any, rows: Any, position: Any, reads: list[Any]
) -> tuple[tirx.Stmt, list[Any]]:
    """result[0] = the last x < rows with starts[x] <= position, searched for from held[0] upwards.

    held : the previous row, updated; allocated where it is initialised
    """
    following = load_one(held) + as_dtype(1, dtype_of(rows))
    # Even if both operands are evaluated there is an offset after that of the last row.
    more = tirx.all(following < rows, tirx.BufferLoad(starts, [following]) <= position)
    body = [tirx.While(more, store_one(held, following)), store_one(result, load_one(held))]
    stmt, _ = _block(name, reads, [result, held], body)
    return stmt, [result]


def whole(buf: Any) -> Any:
    """The region of a whole buffer."""
    return tirx.BufferRegion(
        buf, [ir.Range.from_min_extent(as_dtype(0, dtype_of(n)), n) for n in buf.ty.shape]
    )
