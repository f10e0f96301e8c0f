"""Loops over the elements of rows, and row numbers, in forms that nvcc compiles well."""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.nests import bound_in, with_block, with_fresh, with_loop
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

AS_IT_IS = {"disable_unroll": True}  # printed by TVM as a pragma


def opaque_row_index(func: tirx.PrimFunc, *names: str) -> tirx.PrimFunc:
    """A stage-II function in which iterators of the named blocks are opaque sums.

    TVM expands `int64(blockIdx.x * 4 + threadIdx.y) * 128` to a sum of casts. In an address with
    such a sum nvcc often does not recognise a multiple of 16 bytes, and splits a vector store into
    four. Before, at the block "spmm0"::

        vi = T.axis.spatial(m, i_0 * 4 + i_1)

    After `opaque_row_index(func, "spmm0")`, which TVM cannot expand::

        vi = T.axis.spatial(m, i_0 * 4 + i_1 | 0)

    64-bit values are cast to 32, which must hold them: `T.int64(T.int32(i_0 * 4 + i_1) | 0)`.
    TVM's schedule cannot analyse such blocks: this pass must come last.

    Iterators that are a loop variable, or constant, are unchanged. So are indices, except for
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
    """The function with a block's body under the condition that an iteration has visits.

    Adding a sum without terms to a result changes nothing, but still costs a load and a store of
    each element, or an atomic addition. Before::

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
    block : the block's name
    iteration : its reference or name; the outermost loop of its innermost block has an extent that
        is known at the start of `block`

    Raises ScheduleError if there is no such loop or block.
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

    return with_block(
        func, block, lambda x: block_with(x, body=tirx.IfThenElse(some, x.body, None))
    )


def unroll_with_remainder(func: tirx.PrimFunc, iteration: Any, count: int) -> tirx.PrimFunc:
    """Unroll the outermost loop of an iteration's innermost block, with a remainder loop.

    The visits of a step are unrolled, so that their loads overlap. For a loop of variable length
    TVM's `split` guards each visit, and nvcc unrolls a small loop four times. Before::

        for e in range(n):
            with T.sblock("reduce1"): ...

    After `unroll_with_remainder(func, "reduce", 4)`::

        for e_0 in range(n // 4):
            for e_1 in T.unroll(4):
                with T.sblock("reduce1"): ...  # with e_0 * 4 + e_1 for e
        for e_2 in range(n % 4):
            with T.sblock("reduce1"): ...  # with n // 4 * 4 + e_2 for e

    Both variable loops get `#pragma unroll 1`; with steps of one, the loop itself does.

    func : a stage-II function; a late step, since two inner blocks get the same name
    iteration : its reference or name
    count : visits per step

    Raises ScheduleError if there is no such loop.
    """
    caller = "unroll_with_remainder"
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ScheduleError(
            f"{caller}: argument 'count': expected a positive integer, got {count!r}"
        )
    sch = s_tir.Schedule(func)
    block = innermost_block(sch, iteration, caller)
    loops = sch.get_loops(block)
    if not loops:
        raise ScheduleError(f"{caller}: argument 'iteration': expected a block in a loop, got none")
    loop = sch.get(loops[0])
    if count == 1:
        parts = [loop_with(loop, annotations={**loop.annotations, **AS_IT_IS})]
    else:
        parts = _parts(loop, count)
    return with_loop(func, loop.loop_var, lambda _: as_one(parts))


def _parts(loop: Any, count: int) -> list[Any]:
    """The loop over whole steps, and the loop over the remainder."""
    var = loop.loop_var
    dtype = str(var.ty.dtype)
    step, visit, left = (tirx.Var(f"{var.name}_{n}", dtype) for n in range(3))
    size, extent = as_dtype(count, dtype), as_dtype(loop.extent, dtype)
    whole = tirx.floordiv(extent, size)

    def at(place: Any) -> Any:
        return with_fresh(loop.body, {var: place}, blocks=True)

    inside = loop_over(visit, size, at(step * size + visit), tirx.ForKind.UNROLLED)
    rest = tirx.floormod(extent, size)
    return [
        loop_over(step, whole, inside, annotations=AS_IT_IS),
        loop_over(left, rest, at(whole * size + left), annotations=AS_IT_IS),
    ]
