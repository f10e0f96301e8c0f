"""Loops over the elements of rows, and row numbers, in forms that nvcc compiles well."""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.nests import bound_in, renewed
from sparsetir.schedules.passes.parallel_loops import innermost_block
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import nodes_of
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

AS_IT_IS = {"disable_unroll": True}  # which TVM prints as a pragma


def opaque_row_index(func: tirx.PrimFunc, *names: str) -> tirx.PrimFunc:
    """A stage-II function whose blocks of these names have iterators that are opaque sums.

    TVM turns `int64(blockIdx.x * 4 + threadIdx.y) * 128` into a sum of casts. In an address with
    such a sum nvcc often does not see a multiple of 16 bytes, and splits a vector store into four.
    Before, at the block "spmm0"::

        vi = T.axis.spatial(m, i_0 * 4 + i_1)

    After `opaque_row_index(func, "spmm0")`, which leaves TVM nothing to multiply out::

        vi = T.axis.spatial(m, i_0 * 4 + i_1 | 0)

    Numbers of 64 bits are cast to 32, which must hold them: `T.int64(T.int32(i_0 * 4 + i_1) | 0)`.
    TVM's schedule cannot analyse such blocks: this pass comes last.

    Iterators that are a loop's variable, or a constant, stay as they are. So do indices, but for
    numbers of vectors in stores, `(min(p * 32, 118) + x) * 4 + lane`.
    """

    def realize(node: Any) -> Any:
        if str(node.block.name_hint) not in names:
            return node
        values = [_whole(value) for value in node.iter_values]
        body = map_expr(node.block.body, [(tirx.BufferStore, _store)])
        return s_tir.SBlockRealize(values, node.predicate, block_with(node.block, body=body))

    return func.with_body(map_expr(func.body, [(s_tir.SBlockRealize, realize)]))


def _store(store: Any) -> Any:
    if not store.indices:
        return store
    *outer, last = store.indices
    vectors: Any = last.a if isinstance(last, tirx.Add) and isinstance(last.b, ir.Var) else None
    if not isinstance(vectors, tirx.Mul) or not isinstance(vectors.a, tirx.Add):
        return store
    place = _whole(vectors.a) * vectors.b + last.b
    return tirx.BufferStore(store.buffer, store.value, [*outer, place])


def _whole(value: Any) -> Any:
    if isinstance(value, ir.Var | tirx.IntImm):
        return value
    return as_dtype(tirx.bitwise_or(as_dtype(value, "int32"), 0), dtype_of(value))


def skip_if_empty(func: tirx.PrimFunc, block: str, iteration: Any) -> tirx.PrimFunc:
    """The function with the body of a block under the condition that an iteration has visits.

    A sum that is added to a result changes nothing where its loop has no visits, but still takes a
    load and a store of each element, or an atomic addition. Before::

        with T.sblock("spmm0"):
            S[0] = 0.0
            for e in range(n[vp]):
                with T.sblock("reduce0"): ...  # S[0] = S[0] + ..
            C[vp] = C[vp] + S[0]

    After `skip_if_empty(func, "spmm0", "reduce")`, where the caller guarantees that the rest has no
    effect then::

        with T.sblock("spmm0"):
            if n[vp] > 0:
                ...

    func : a stage-II function
    block : its name
    iteration : its reference or name; the outermost loop of its innermost block has an extent that
        is known where the block begins

    Raises ScheduleError where there is no such loop or block.
    """
    sch = s_tir.Schedule(func)
    loops = sch.get_loops(innermost_block(sch, iteration, "skip_if_empty"))
    if not loops:
        raise ScheduleError(
            "skip_if_empty: argument 'iteration': expected one with a loop, got none"
        )
    extent = sch.get(loops[0]).extent
    some = extent > as_dtype(0, dtype_of(extent))
    var = sch.get(loops[0]).loop_var
    around = [
        b.body
        for b in nodes_of(s_tir.SBlock, func.body)
        if str(b.name_hint) == block and var in bound_in(b.body)
    ]
    if len(around) != 1 or free_vars(extent) & bound_in(around[0]):
        name = getattr(iteration, "name", iteration)
        raise ScheduleError(
            f"skip_if_empty: argument 'block': expected one around '{name}' in which the extent of "
            f"its loop is known, got {block!r}"
        )

    def visit(node: Any) -> Any:
        if str(node.name_hint) != block:
            return node
        return block_with(node, body=tirx.IfThenElse(some, node.body, None))

    return func.with_body(map_expr(func.body, [(s_tir.SBlock, visit)]))


def unroll_with_remainder(func: tirx.PrimFunc, iteration: Any, count: int) -> tirx.PrimFunc:
    """The function with the outermost loop of an iteration's innermost block in whole steps.

    The visits of a step are written out, so that what they load is under way at the same time.
    TVM's `split` asks before each visit whether there is one, of a loop whose length is no
    constant; nvcc, left to itself, writes out four visits of a small loop. Before::

        for e in range(n):
            with T.sblock("reduce1"): ...

    After `unroll_with_remainder(func, "reduce", 4)`::

        for e_0 in range(n // 4):
            for e_1 in T.unroll(4):
                with T.sblock("reduce1"): ...  # with e_0 * 4 + e_1 for e
        for e_2 in range(n % 4):
            with T.sblock("reduce1"): ...  # with n // 4 * 4 + e_2 for e

    Both loops over what is not known say `#pragma unroll 1`; for steps of one the loop itself does.

    func : a stage-II function; this is a late step, as two blocks inside get the same name
    iteration : its reference or name
    count : visits of a step

    Raises ScheduleError where there is no such loop.
    """
    who = "unroll_with_remainder"
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ScheduleError(f"{who}: argument 'count': expected a positive integer, got {count!r}")
    sch = s_tir.Schedule(func)
    block = innermost_block(sch, iteration, who)
    loops = sch.get_loops(block)
    if not loops:
        raise ScheduleError(f"{who}: argument 'iteration': expected a block in a loop, got none")
    loop = sch.get(loops[0])
    var = loop.loop_var
    if count == 1:
        parts = [loop_with(loop, annotations={**loop.annotations, **AS_IT_IS})]
    else:
        parts = _parts(loop, count)

    def replace(node: Any) -> Any:
        return as_one(parts) if node.loop_var.same_as(var) else node

    return func.with_body(map_expr(func.body, [(tirx.For, replace)]))


def _parts(loop: Any, count: int) -> list[Any]:
    """The loop over whole steps, and that over what is left."""
    var = loop.loop_var
    dtype = str(var.ty.dtype)
    step, visit, left = (tirx.Var(f"{var.name}_{n}", dtype) for n in range(3))
    size, extent = as_dtype(count, dtype), as_dtype(loop.extent, dtype)
    whole = tirx.floordiv(extent, size)

    def at(place: Any) -> Any:
        return renewed(loop.body, {var: place}, blocks=True)

    inside = loop_over(visit, size, at(step * size + visit), tirx.ForKind.UNROLLED)
    rest = tirx.floormod(extent, size)
    return [
        loop_over(step, whole, inside, annotations=AS_IT_IS),
        loop_over(left, rest, at(whole * size + left), annotations=AS_IT_IS),
    ]
