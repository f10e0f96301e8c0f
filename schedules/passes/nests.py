"""Loop nests of stage II by block name, and their replacement by code for threads.

Passes that generate the code of each thread replace the nest of a block by loops over threads
around a block of the same name, so that the next pass finds it. These blocks declare no read and
write regions: such passes come last, when TVM's schedule is no longer used.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from tvm import DataType, ir, s_tir, tirx
from tvm.tirx.buffer import buffer_data

from sparsetir.schedules.passes.parallel_loops import thread_axis
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.tir import (
    as_dtype,
    block_with,
    dtype_of,
    free_vars,
    is_one,
    loop_over,
    nest_of,
    values_of,
)
from sparsetir.sparse_ir.traversal import map_expr

WARP = 32


class Nest(NamedTuple):
    """Perfectly nested loops around one block.

    loops : outermost first
    body : the block's body, in terms of the loop variables
    """

    name: str
    loops: list[Any]
    body: Any

    def extents(self, caller: str) -> list[int]:
        """The extents of the loops; raises ScheduleError if one is not constant."""
        for loop in self.loops:
            if not isinstance(loop.extent, tirx.IntImm):
                raise ScheduleError(
                    f"{caller}: expected constant extents of the loops around block '{self.name}', "
                    f"got {loop.extent} of '{loop.loop_var.name}'"
                )
        return [int(loop.extent) for loop in self.loops]


def find_nest(caller: str, func: tirx.PrimFunc, name: str) -> Nest:
    """The nest of a block; raises ScheduleError if there is no such block."""
    for loop in nodes_of(tirx.For, func.body):
        chain, inner = nest_of(loop)
        if isinstance(inner, s_tir.SBlockRealize) and str(inner.block.name_hint) == name:
            block = inner.block
            places = {v: as_dtype(x, dtype_of(v)) for v, x in values_of(inner).items()}
            return Nest(name, chain, substitute(block.body, places))
    names = sorted({str(b.name_hint) for b in nodes_of(s_tir.SBlock, func.body)} - {"root"})
    raise ScheduleError(f"{caller}: expected a block in loops, among {names}, got '{name}'")


def replaced(func: tirx.PrimFunc, nest: Nest, new: Any) -> tirx.PrimFunc:
    """The function with a nest replaced by a statement."""
    return with_loop(func, nest.loops[0].loop_var, lambda _: new)


def with_loop(func: tirx.PrimFunc, var: Any, change: Callable[[Any], Any]) -> tirx.PrimFunc:
    """The function with the loop over a variable changed."""
    rule = (tirx.For, lambda x: change(x) if x.loop_var.same_as(var) else x)
    return func.with_body(map_expr(func.body, [rule]))


def with_block(func: tirx.PrimFunc, name: str, change: Callable[[Any], Any]) -> tirx.PrimFunc:
    """The function with the blocks of a name changed."""
    rule = (s_tir.SBlock, lambda x: change(x) if str(x.name_hint) == name else x)
    return func.with_body(map_expr(func.body, [rule]))


def block_of(name: str, body: Any, buffers: Sequence[Any] = ()) -> Any:
    """A block without iterators. buffers : the buffers that it allocates"""
    block = s_tir.SBlock([], [], [], name, body, alloc_buffers=list(buffers))
    return s_tir.SBlockRealize([], tirx.const(True, "bool"), block)


def plain_nest(name: str, loops: Sequence[tuple[Any, Any]], body: Any) -> Any:
    """Loops around a block that stores an element, in the form that TVM's primitives take.

    loops : (variable, extent), outermost first; each becomes a coordinate of the block
    body : the store, in terms of the variables
    """

    def point(access: Any, buffer: Any) -> Any:
        ranges = [ir.Range.from_min_extent(i, as_dtype(1, dtype_of(i))) for i in access.indices]
        return tirx.BufferRegion(buffer, ranges)

    fresh = {v: tirx.Var(f"v{v.name}", dtype_of(v)) for v, _ in loops}
    placed, stmt = {fresh[i] for i in body.indices if i in fresh}, substitute(body, fresh)
    iters = [
        tirx.IterVar(
            ir.Range(as_dtype(0, dtype_of(v)), as_dtype(n, dtype_of(v))),
            fresh[v],
            tirx.IterVar.DataPar if fresh[v] in placed else tirx.IterVar.CommReduce,
        )
        for v, n in loops
    ]
    reads = [point(x, x.source) for x in nodes_of(ir.TensorLoad, stmt)]
    block = s_tir.SBlock(iters, reads, [point(stmt, stmt.buffer)], name, stmt)
    nest: Any = s_tir.SBlockRealize([v for v, _ in loops], True, block)
    for var, extent in reversed(loops):
        nest = loop_over(var, extent, nest)
    return nest


def element_bytes(buffer: Any) -> int:
    """Offset of an element in the flat buffer."""
    return DataType(str(buffer.ty.dtype)).itemsize


def for_threads(name: str, warps: int, code: Callable[[Any, Any], Any]) -> Any:
    """The code of each thread of a block of warps, as a stage-II block.

    code : (warp, lane) -> statement
    """
    warp, lane = (tirx.Var(n, "int32") for n in ("warp", "lane"))
    body: Any = block_of(name, code(warp, lane))
    for var, count, tag in ((lane, WARP, "threadIdx.x"), (warp, warps, "threadIdx.y")):
        body = loop_over(var, count, body, tirx.ForKind.THREAD_BINDING, thread_axis(tag))
    return body


def guarded(value: Any) -> tuple[Any, Any]:
    """A guarded expression's condition, or None, and its value; without it the value is zero."""
    name = getattr(value.op, "name", "") if isinstance(value, ir.Call) else ""
    if not name.endswith(".if_then_else") or not is_zero(value.args[2]):
        return None, value
    return value.args[0], value.args[1]


def wide_indices(buffer: Any, indices: Any) -> list[Any]:
    """Indices of the dimensions of a buffer that are not known to have size 1."""
    sizes = zip(indices, buffer.ty.shape, strict=True)
    return [index for index, size in sizes if not is_one(size)]


def is_offset_of(index: Any, var: Any) -> bool:
    """Whether an index is a variable plus an offset."""
    parts = [index.a, index.b] if isinstance(index, tirx.Add) else [index]
    mine = [p for p in parts if var in free_vars(p)]
    return len(mine) == 1 and mine[0].same_as(var)


def is_zero(value: Any) -> bool:
    """Whether an expression is the constant zero."""
    return isinstance(value, tirx.IntImm | tirx.FloatImm) and float(value.value) == 0


def of_params(func: tirx.PrimFunc, size: Any) -> Any:
    """A size from another version of a function, in terms of the parameters of the same names.

    Attributes keep the variables of the original function, for example.
    """
    named = {p.name: p for p in func.params}
    return substitute(size, {v: named[v.name] for v in free_vars(size)})


def unrolled(extents: Sequence[int], code: Callable[..., Any]) -> Any:
    """Unrolled loops around `code(*variables)`."""
    variables = [tirx.Var(f"u{n}", "int32") for n in range(len(extents))]
    # A loop of one iteration is omitted, and its variable becomes a constant.
    index = [as_dtype(0, "int32") if n == 1 else v for v, n in zip(variables, extents, strict=True)]
    body = code(*index)
    for var, extent in reversed([*zip(variables, extents, strict=True)]):
        if extent != 1:
            body = loop_over(var, extent, body, tirx.ForKind.UNROLLED)
    return body


def bound_in(stmt: Any) -> set[Any]:
    """The variables of loops, and coordinates of blocks, in a statement."""
    coordinates = {v.var for b in nodes_of(s_tir.SBlock, stmt) for v in b.iter_vars}
    return coordinates | {x.loop_var for x in nodes_of(tirx.For, stmt)}


def with_fresh(stmt: Any, places: dict[Any, Any], blocks: bool = False) -> Any:
    """A copy of a statement with fresh loop variables, and with others substituted.

    blocks : whether coordinates and buffers of its blocks become fresh, too
    """
    loops = nodes_of(tirx.For, stmt)
    fresh = {x.loop_var: tirx.Var(x.loop_var.name, dtype_of(x.loop_var)) for x in loops}
    for block in nodes_of(s_tir.SBlock, stmt) if blocks else ():
        fresh |= {v.var: tirx.Var(v.var.name, dtype_of(v.var)) for v in block.iter_vars}
        for old in block.alloc_buffers:
            shape, scope = list(old.ty.shape), old.ty.storage_scope
            fresh[old] = buffer_var(shape, str(old.ty.dtype), old.name, scope)
    return substitute(stmt, {**places, **fresh})


def redirected(tree: Any, place: Callable[[Any, list[Any]], tuple[Any, list[Any]] | None]) -> Any:
    """A statement or expression with buffer accesses redirected, possibly to another type.

    place : (buffer, indices) -> buffer and indices; None to keep an access
    """

    def load(node: Any) -> Any:
        to = place(node.source, list(node.indices))
        return node if to is None else as_dtype(tirx.BufferLoad(*to), dtype_of(node))

    def store(node: Any) -> Any:
        to = place(node.buffer, list(node.indices))
        if to is None:
            return node
        return tirx.BufferStore(to[0], as_dtype(node.value, dtype_of(to[0])), to[1])

    return map_expr(tree, [(ir.TensorLoad, load), (tirx.BufferStore, store)])


def with_buffer(
    func: tirx.PrimFunc, old: Any, new: Any, index: Callable[[list[Any]], list[Any]]
) -> tirx.PrimFunc:
    """The function with a buffer replaced that a block allocates.

    new : possibly of another type, to and from which elements are cast
    index : indices of the old -> indices of the new

    The new buffer is allocated at the start of a visit of the outermost block.
    """

    def allocation(node: Any) -> Any:
        return tirx.AllocBuffer(new) if node.buffer.same_as(old) else node

    has = any(n.buffer.same_as(old) for n in nodes_of(tirx.AllocBuffer, func.body))
    body = redirected(func.body, lambda b, idx: (new, index(idx)) if b.same_as(old) else None)
    rules = [(s_tir.SBlock, lambda x: without_buffers(x, {old})), (tirx.AllocBuffer, allocation)]
    body = map_expr(body, rules)
    out = func.with_body(substitute(body, {old: new} if has else {}))
    return out if has else allocated(out, new)


def without_buffers(block: Any, gone: Container[Any]) -> Any:
    """A block that does not declare some buffers."""
    return block_with(
        block,
        reads=[r for r in block.reads if r.source not in gone],
        writes=[r for r in block.writes if r.source not in gone],
        alloc_buffers=[b for b in block.alloc_buffers if b not in gone],
        match_buffers=[m for m in block.match_buffers if m.source.source not in gone],
    )


def allocated(func: tirx.PrimFunc, buffer: Any) -> tirx.PrimFunc:
    """The function with a buffer allocated at the start of visits of the outermost block around it.

    TVM shrinks buffers to the elements whose use it sees, and it sees one where an instruction
    takes the address of several. A buffer whose own address is taken keeps all of its elements.
    """
    uses = [
        b
        for b in nodes_of(s_tir.SBlock, func.body)
        if str(b.name_hint) != "root" and buffer in set(nodes_of(type(buffer), b.body))
    ]
    outermost = uses[0].body

    def block(node: Any) -> Any:
        if not node.body.same_as(outermost):
            return node
        whole = tirx.Evaluate(buffer_data(buffer))
        return block_with(node, body=tirx.SeqStmt([tirx.AllocBuffer(buffer), whole, node.body]))

    return func.with_body(map_expr(func.body, [(s_tir.SBlock, block)]))
