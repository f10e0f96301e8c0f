"""Stage-II nests around products of tiles: operands, configuration, and stores of sums.

See :mod:`sparsetir.schedules.passes.tile_isas` for the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.tirx.buffer import buffer_data

from sparsetir.schedules.passes.nests import (
    Nest,
    find_nest,
    redirected,
    replaced,
    with_block,
    without_buffers,
)
from sparsetir.schedules.passes.tile_isas import TileShape, begin, end, store, with_tiles
from sparsetir.schedules.targets import NEEDS
from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, loads_of, nodes_of, substitute
from sparsetir.sparse_ir.reduction import split_guards
from sparsetir.sparse_ir.tile_marks import is_likely
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    block_with,
    dtype_of,
    free_vars,
    loop_over,
    loop_with,
)
from sparsetir.sparse_ir.traversal import map_expr

LANES = 16  # of vectors that round sums


def restrict_reads(func: tirx.PrimFunc, block: str, buffers: Sequence[str]) -> tirx.PrimFunc:
    """Restrict a block's read regions to some buffers, at the accessed elements.

    Tensor intrinsics only match such blocks. Before::

        T.reads(JO_indptr[..], JO_indices[..], C_ws[vi, vk], B_tiles[vk0, 0:n, ..])

    After, for "C_ws" and "B_tiles"::

        T.reads(C_ws[vi, vk], B_tiles[vk0, JO_indices[..], ..])

    The omitted arrays are only read in the function.
    """

    def restricted(node: Any) -> Any:
        loads = [x for x in nodes_of(ir.TensorLoad, node.body) if x.source.name in buffers]
        regions = [
            tirx.BufferRegion(
                x.source, [ir.Range.from_min_extent(i, as_dtype(1, dtype_of(i))) for i in x.indices]
            )
            for x in loads
        ]
        return block_with(node, reads=regions)

    return with_block(func, block, restricted)


def write_groups(func: tirx.PrimFunc, block: str) -> tirx.PrimFunc:
    """Write adjacent elements of a copy together, unconditionally where possible.

    func : a stage-II function, which is not modified
    block : stores zero for elements beyond its operand; its innermost loop is over a few elements
        that come from different rows

    Before::

        for k1, n2 in T.grid(32, 2):
            with T.sblock("B_tiles_copy0"):
                B_tiles[.., vk1, vn2] = T.if_then_else(
                    vn1 * 2 + vn2 < n and vk0 * 32 + vk1 < feat, B[vn1 * 2 + vn2, vk0 * 32 + vk1], 0
                )

    After::

        if vn1 * 2 + 1 < n and vk0 * 32 + 31 < feat:
            for k1 in range(32):
                B_tiles[.., k1, 0] = B[vn1 * 2, vk0 * 32 + k1]
                B_tiles[.., k1, 1] = B[vn1 * 2 + 1, vk0 * 32 + k1]
        else:
            ...  # as before
    """

    nest = _innermost("write_groups", func, block)
    body, (across, group) = nest.body, nest.loops
    value = body.value
    if not isinstance(value, ir.Call) or not value.op.name.endswith("if_then_else"):
        raise ScheduleError(
            f"write_groups: argument 'block': expected '{block}' to store an element or "
            f"zero, got {value}"
        )
    condition, element, _ = value.args
    last = {x.loop_var: x.extent - as_dtype(1, dtype_of(x.loop_var)) for x in nest.loops}
    plain, dtype = tirx.BufferStore(body.buffer, element, body.indices), dtype_of(group.loop_var)
    numbers = (as_dtype(n, dtype) for n in range(int(group.extent)))
    stores = [substitute(plain, {group.loop_var: n}) for n in numbers]
    var = tirx.Var(across.loop_var.name, dtype_of(across.loop_var))
    each = substitute(tirx.SeqStmt(stores), {across.loop_var: var})
    whole = loop_over(var, across.extent, each)
    return replaced(func, nest, tirx.IfThenElse(substitute(condition, last), whole, across))


def keep_narrow(func: tirx.PrimFunc, buffer: str) -> tirx.PrimFunc:
    """Keep an array of 16-bit floats that the function allocates in that type.

    TVM widens its own arrays of bfloat16 to float32, except those whose data pointer escapes, which
    it decides by whether `.data` occurs in an expression; addresses of elements do not count.
    Before, and after::

        B_tiles = T.alloc_buffer((..), "bfloat16")
        ...

        B_tiles = T.alloc_buffer((..), "bfloat16")
        T.evaluate(B_tiles.data)
        ...
    """
    root = func.body.block
    arrays = [v for v in root.alloc_buffers if v.name == buffer]
    if not arrays:
        raise ScheduleError(f"keep_narrow: argument 'buffer': no array '{buffer}' is made here")
    body = tirx.SeqStmt([tirx.Evaluate(buffer_data(arrays[0])), root.body])
    return func.with_body(s_tir.SBlockRealize([], True, block_with(root, body=body)))


def sums_in_tiles(func: tirx.PrimFunc, block: str, shape: TileShape) -> tirx.PrimFunc:
    """Write the sums of products from tiles, and configure the tiles where a worker begins.

    func : a stage-II function, not modified, whose products are already tensor intrinsics
    block : writes the sums from their workspace, element by element, in two loops of its own

    Before::

        for io_parts in T.parallel(blocks):
            with T.sblock("spmm0"):
                ...
                    for i, k in T.grid(32, 32):
                        with T.sblock("write0"):
                            if vio * 32 + vi < m and vk0 * 32 + vk < feat:
                                C[vio * 32 + vi, vk0 * 32 + vk] = C_ws[vi, vk]

    After; sums of a block that exceeds the result, or that need rounding, are stored to memory
    first::

        for io_parts in T.parallel(blocks):
            config[0:8] = ...
            ldtilecfg(config)
            ...
                    if vio * 32 + 31 < m and vk0 * 32 + 31 < feat:
                        tilestored(0, address of C[vio * 32, vk0 * 32], stride of C)  # and 1, 2, 3
                    else:
                        tilestored(0, address of sums[0, 0], 128)  # and 1, 2, 3
                        for i, k in T.grid(32, 32): ...  # as before, from sums
            tilerelease()

    Raises ScheduleError for a block of another form.
    """
    caller = "sums_in_tiles"
    memory = buffer_var([shape.rows, shape.features], shape.isa.types[1], "tile_sums")
    nest = _innermost(caller, func, block)
    conditions, written = split_guards(nest.body)
    loads = nodes_of(ir.TensorLoad, written.value)
    if len(loads) != 1 or nest.extents(caller) != [shape.rows, shape.features]:
        raise ScheduleError(f"{caller}: argument 'block': expected '{block}' to write {shape}")
    workspace = loads[0].source
    func = replaced(func, nest, _written(shape, memory, nest, conditions, written))

    rule = (s_tir.SBlock, lambda node: without_buffers(node, {workspace}))
    func = func.with_body(map_expr(func.body, [rule]))
    func = func.with_attr(NEEDS, [*shape.isa.features])
    return _configured(func, shape, memory)


def _written(
    shape: TileShape, memory: Any, nest: Nest, conditions: list[Any], written: Any
) -> tirx.Stmt:
    """Statements that write all sums of a product."""
    variables = [x.loop_var for x in nest.loops]
    types = [dtype_of(v) for v in variables]
    (load,) = nodes_of(ir.TensorLoad, written.value)

    def visit(node: Any, *place: Any) -> Any:
        at = zip(variables, place, types, strict=True)
        return substitute(node, {v: as_dtype(n, t) for v, n, t in at})

    def from_memory(stmt: Any) -> Any:
        def place(buffer: Any, indices: list[Any]) -> Any:
            return (memory, indices) if buffer.same_as(load.source) else None

        return redirected(stmt, place)

    def stored(element: Any, pitch: Any) -> list[tirx.Stmt]:
        return [store(shape, t, visit(element, *at), pitch) for at, t in shape.sums.items()]

    pitch = tirx.IntImm("int64", shape.features * 4)
    through = stored(tirx.BufferLoad(memory, variables), pitch)
    row, column = (tirx.Var(v.name, t) for v, t in zip(variables, types, strict=True))
    one_by_one = visit(from_memory(nest.body), row, column)
    slow = loop_over(row, shape.rows, loop_over(column, shape.features, one_by_one))
    if not all(_is_monotone(c, variables) for c in conditions):
        return tirx.SeqStmt([*through, slow])
    if written.value.same_as(load) and _is_row_major(written, variables):
        stride = as_dtype(written.buffer.ty.shape[-1], "int64") * tirx.IntImm("int64", 4)
        steps = stored(tirx.BufferLoad(written.buffer, written.indices), stride)
    else:
        row, plain = tirx.Var(row.name, types[0]), from_memory(written)
        vectors: list[tirx.Stmt] = []
        for c in range(0, shape.features, LANES):
            lane = tirx.Var("lane", types[1])
            element = visit(plain, row, lane + as_dtype(c, types[1]))
            lanes = min(LANES, shape.features)
            vectors.append(loop_over(lane, lanes, element, tirx.ForKind.VECTORIZED))
        steps = [*through, loop_over(row, shape.rows, as_one(vectors))]
    if not conditions:
        return as_one(steps)
    whole = [visit(c, shape.rows - 1, shape.features - 1) for c in conditions]
    return tirx.IfThenElse(tirx.all(*whole), as_one(steps), tirx.SeqStmt([*through, slow]))


def _is_monotone(condition: Any, variables: list[Any]) -> bool:
    """Whether a condition holds for all visits of two loops if it holds for the last one."""
    if is_likely(condition):
        condition = condition.args[0]
    if isinstance(condition, tirx.And):
        return all(_is_monotone(c, variables) for c in (condition.a, condition.b))
    if not isinstance(condition, tirx.LT):
        return False
    steps = [affine(condition.a).step(v) for v in variables]
    within = all(n is not None and n >= 0 for n in steps)
    return within and not free_vars(condition.b) & set(variables)


def _is_row_major(written: Any, variables: list[Any]) -> bool:
    """Whether the first loop is over rows, and the second one over a row's elements in order."""
    sums = map(affine, written.indices)
    return [[each.step(v) for v in variables] for each in sums] == [[1, 0], [0, 1]]


def _configured(func: tirx.PrimFunc, shape: TileShape, memory: Any) -> tirx.PrimFunc:
    """The function with tiles configured at the start of each worker that stores them."""
    count, dtype = shape.memory
    tiles = buffer_var([count], dtype, "tile_memory")
    workers = [x for x in nodes_of(tirx.For, func.body) if x.kind == tirx.ForKind.PARALLEL]
    workers = [x for x in workers if loads_of(x, memory)]

    def around(stmt: Any) -> tirx.Stmt:
        stmt = map_expr(stmt, [(ir.Call, lambda call: with_tiles(shape, tiles, call))])
        body = as_one([*begin(shape, tiles), stmt, *end(shape)])
        block = s_tir.SBlock([], [], [], "tiles", body, alloc_buffers=[tiles, memory])
        return s_tir.SBlockRealize([], True, block)

    def visit(loop: Any) -> Any:
        known = any(loop.loop_var.same_as(x.loop_var) for x in workers)
        return loop_with(loop, body=around(loop.body)) if known else loop

    root = func.body.block
    if workers:
        body = map_expr(root.body, [(tirx.For, visit)])
    else:  # everything runs on one thread
        body = around(root.body)
    if shape.isa.code:
        body = tirx.AttrStmt(0, "pragma_import_llvm", ir.StringImm(shape.isa.code), body)
    return func.with_body(s_tir.SBlockRealize([], True, block_with(root, body=body)))


def _innermost(caller: str, func: tirx.PrimFunc, block: str) -> Nest:
    """The two innermost loops around a block."""
    nest = find_nest(caller, func, block)
    return nest._replace(loops=nest.loops[-2:])
