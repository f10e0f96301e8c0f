"""Scatters on several threads: each thread updates the elements of the result that it owns.

Before, on one thread, as visits may update the same element::

    for j in range(n):
        for i in range(I_indptr[j + 1] - I_indptr[j]):
            Y[I_indices[j, i]] = Y[I_indices[j, i]] + A[j, i] * X[j]

After `owner_computes(with_cuts(func, 2), 2)`, where the rows of Y are cut into two ranges of equal
work, and `I_indices_cuts` says where each column's elements pass from one range to the next::

    for part in T.parallel(2):
        for j in range(n):
            first = I_indices_cuts[j, part]
            for i in range(I_indices_cuts[j, part + 1] - first):
                Y[I_indices[j, first + i]] = Y[I_indices[j, first + i]] + A[j, first + i] * X[j]

Other elements, such as edges in any order, are tested by each thread, some hundred at a time; those
of its rows go to a list, which has no branches to predict::

    for part in T.parallel(2):
        for e0 in range((nnz + 255) // 256):
            count = 0
            for e1 in range(min(256, nnz - e0 * 256)):
                mine[count] = e0 * 256 + e1
                count = count + (ROW[e0 * 256 + e1] // 16 % 2 == part)
            for q in range(count):
                Y[ROW[mine[q]], ...] = ...

Every element is updated by one thread, in the order of the program: results do not depend on the
number of threads.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from tvm import ir, s_tir, tirx
from tvm_ffi import structural_equal

from sparsetir.schedules.passes.consecutive_parts import CONSECUTIVE
from sparsetir.schedules.passes.nests import block_of, is_zero, of_params, with_fresh
from sparsetir.schedules.passes.prefetch import PREFETCH
from sparsetir.sparse_ir import legal
from sparsetir.sparse_ir.annotations import THREADS
from sparsetir.sparse_ir.computed import COMPUTED, keyword
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    fresh_definitions,
    nodes_of,
    sparse_iterations,
    stores_of,
    substitute,
)
from sparsetir.sparse_ir.parallel import is_one_visit, written_accesses
from sparsetir.sparse_ir.position_space import LAYOUTS
from sparsetir.sparse_ir.races import FREE
from sparsetir.sparse_ir.recipes.ranges import range_cuts
from sparsetir.sparse_ir.search import load_one, scalar_buffer, store_one
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    block_with,
    dtype_of,
    free_vars,
    is_one,
    loop_over,
    loop_with,
    map_parts,
    uncast,
    values_of,
)
from sparsetir.sparse_ir.traversal import map_expr

CUTS = "_cuts"  # suffix of the buffer's name, after that of an array of indices
MOST_PARTS = 16  # cuts of a column take as many numbers
# Visits that take as long as the cuts of a column, and as the test of an element.
CUT_COST, TEST_COST = 8, 48
TESTED = 256  # elements at a time
ROWS_TOGETHER = 16  # with the same owner, so that threads do not share cache lines


def with_cuts(func: SparseFunc, parts: int) -> SparseFunc:
    """A stage-I function with a parameter for each array of coordinates that scatters.

    parts : the number of ranges of coordinates
    """
    computed = dict(func.attrs.get(COMPUTED, {}).items())
    params, axes, buffers = list(func.params), list(func.axes), list(func.buffers)
    scattered = {a.name: a for it in sparse_iterations(func) for a in _scattered(func, it)}
    for axis in scattered.values():
        name, length = f"{axis.name}_indices{CUTS}", keyword(axis.length)
        names = [name, name.lower(), f"{name}_parts"]
        if length is None or any(fresh_name(func, x) != x for x in names):
            continue
        how = {"indptr": f"${axis.indptr.name}", "indices": f"${axis.indices.name}"}
        computed[names[1]] = {"recipe": range_cuts.__name__, **how, "n": length, "parts": parts}
        params.append(ir.Var(names[1], ir.PointerType(ir.PrimType("void"))))
        ends = as_dtype(parts + 1, axis.idtype)
        axes.append(Axis(name=names[2], kind="dense_fixed", length=ends, idtype=axis.idtype))
        over = [*axis.parent.ancestors(), axes[-1]]
        var = buffer_var([a.length for a in over], axis.idtype, name)
        buffers.append(SparseBuffer(var=var, axes=over, handle=params[-1]))
    if len(params) == len(func.params):
        return func
    func = func.with_attr(COMPUTED, computed)
    return func.replace(params=params, axes=axes, buffers=buffers)


def _scattered(func: SparseFunc, it: SparseIteration) -> list[Axis]:
    """The axes whose coordinate indexes all that an iteration writes, below a racy loop."""
    facts, accesses = legal.parallelizable(func, it), written_accesses(it).values()
    outer = [f for f, (node, *_) in zip(facts, it.entries(), strict=True)
             if not (isinstance(node, Axis) and is_one_visit(node))]  # fmt: skip
    if not outer or outer[0] == FREE:
        return []
    return [
        axis
        for axis, var, kind in it.axis_of()
        if axis.kind == "sparse_variable" and kind == "S" and accesses
        and all(
            any(all(index.same_as(var) for index in dimension)
                for dimension in zip(*(x.indices for x in of_one), strict=True))
            for of_one in accesses
        )
    ]  # fmt: skip


def owner_computes(func: tirx.PrimFunc, parts: int) -> tuple[tirx.PrimFunc, list[Any]] | None:
    """The function with its scatters in parts, and numbers of visits that each have to exceed.

    func : a scheduled stage-II function, which is not modified
    parts : the number of parts, with which :func:`with_cuts` was called

    None if no nest is a scatter: one that has no parallel loop, and whose written buffers are
    accessed at the same loaded index each.
    """
    func = s_tir.renew_defs(func)
    owners = _Owners(func, parts)
    func = func.with_body(owners.visit(func.body))
    return (func, owners.least) if owners.least else None


class _Scatter(NamedTuple):
    """A nest without block variables, its loop over elements, and their destination."""

    nest: Any
    loop: Any
    index: Any


class _Owners:
    """least : visits that the parts have to exceed, for each nest"""

    def __init__(self, func: tirx.PrimFunc, parts: int) -> None:
        self.func, self.parts, self.least = func, parts, list[Any]()
        self.buffers = {p.name: p for p in func.params if tirx.is_buffer_var(p)}
        self.layouts = {str(k): v for k, v in func.attrs[LAYOUTS].items()}

    def visit(self, stmt: Any) -> Any:
        """A statement outside of loops with its nests in parts."""
        if isinstance(stmt, s_tir.SBlockRealize) and not stmt.iter_values:
            block = block_with(stmt.block, body=self.visit(stmt.block.body))
            return s_tir.SBlockRealize([], stmt.predicate, block)
        if not isinstance(stmt, tirx.For):
            return map_parts(stmt, self.visit)
        scatter = _scatter(stmt)
        if scatter is None:
            return stmt
        first, last = (scalar_buffer(f"part_{end}", "int32") for end in ("first", "last"))
        mine = load_one(first), load_one(last)
        cut = self._between_cuts(scatter, *mine)
        loop = cut or self._listed(scatter, *mine)
        if loop is None:
            return stmt
        var, part = scatter.loop.loop_var, tirx.Var("part", "int32")
        rule = (tirx.For, lambda x: loop if x.loop_var.same_as(var) else x)
        nest = map_expr(scatter.nest, [rule])
        if cut is None:  # one thread needs no lists
            body = as_one(_loaded_once(scatter.loop, scatter.loop.body))
            whole = loop_with(scatter.loop, body=body)
            rule = (tirx.For, lambda x: whole if x.loop_var.same_as(var) else x)
            whole_nest = map_expr(scatter.nest, [rule])
            whole_nest = with_fresh(whole_nest, fresh_definitions(whole_nest), blocks=True)
            all_parts = tirx.all(mine[0] < 1, mine[1] >= as_dtype(self.parts, "int32"))
            nest = tirx.IfThenElse(all_parts, whole_nest, nest)
        steps = [store_one(first, part), store_one(last, part + as_dtype(1, "int32")), nest]
        body, kind = block_of("parts", tirx.SeqStmt(steps), [first, last]), tirx.ForKind.PARALLEL
        return loop_over(part, self.parts, body, kind, annotations={CONSECUTIVE: True})

    def _between_cuts(self, scatter: _Scatter, begin: Any, end: Any) -> Any:
        """The loop over the elements between two cuts; None without cuts."""
        loop, index = scatter.loop, scatter.index
        cuts = self.buffers.get(f"{getattr(getattr(index, 'source', None), 'name', '')}{CUTS}")
        extent = uncast(loop.extent)
        ends = [uncast(x) for x in (extent.a, extent.b)] if isinstance(extent, tirx.Sub) else []
        whole = len(ends) == 2 and all(isinstance(x, ir.TensorLoad) for x in ends)
        if cuts is None or not whole or not index.indices[-1].same_as(loop.loop_var):
            return None
        *above, parent, _ = self.layouts[index.source.name].axes[: len(index.indices)]
        count = of_params(self.func, parent.length if parent.nnz is None else parent.nnz)
        self.least.append(as_dtype(count, "int64") * as_dtype(CUT_COST, "int64"))
        first, last = (tirx.BufferLoad(cuts, [*index.indices[:-1], end]) for end in (begin, end))
        var = loop.loop_var
        place = as_dtype(first, dtype_of(var)) + var - as_dtype(ends[1], dtype_of(var))
        body = substitute(loop.body, {var: place})
        return loop_with(loop, extent=as_dtype(last - first, dtype_of(var)), body=body)

    def _listed(self, scatter: _Scatter, first: Any, last: Any) -> Any:
        """The loop over lists of a part's elements; None if no parameter counts the elements."""
        loop, var, kind = scatter.loop, scatter.loop.loop_var, dtype_of(scatter.loop.loop_var)
        around = [x for x in nodes_of(tirx.For, scatter.nest)
                  if any(y.same_as(loop) for y in nodes_of(tirx.For, x))]  # fmt: skip
        extents = [x.extent for x in around]
        if any(
            nodes_of(ir.TensorLoad, x) or not free_vars(x) <= set(self.func.params) for x in extents
        ):
            return None
        count = prod(as_dtype(x, "int64") for x in extents)
        self.least.append(count * as_dtype(TEST_COST, "int64"))
        size = as_dtype(TESTED, kind)
        begin, within, place = (tirx.Var(f"{var.name}{n}", kind) for n in range(3))
        mine = buffer_var([TESTED], kind, f"{var.name}_mine", "local")
        listed = scalar_buffer(f"{var.name}_count", kind)
        element = begin * size + within
        rows = tirx.floordiv(scatter.index, as_dtype(ROWS_TOGETHER, dtype_of(scatter.index)))
        owner = tirx.floormod(rows, as_dtype(self.parts, dtype_of(rows)))
        owner = as_dtype(substitute(owner, {var: element}), "int32")
        is_mine = tirx.all(owner >= first, owner < last)
        # Prefetches are for the list's next elements.
        later, by = tirx.Var(f"{var.name}_later", kind), as_dtype(PREFETCH, kind)
        next_one = tirx.min(place + by, load_one(listed) - as_dtype(1, kind))
        rule = (tirx.Evaluate, lambda x: substitute(x, {var: later}) if _is_prefetch(x) else x)
        binds = [
            tirx.Bind(var, tirx.BufferLoad(mine, [place])),
            tirx.Bind(later, tirx.BufferLoad(mine, [next_one]) - by),
        ]
        body = _loaded_once(loop, map_expr(loop.body, [rule]))
        steps = [
            store_one(listed, as_dtype(0, kind)),
            loop_over(within, tirx.min(size, loop.extent - begin * size), tirx.SeqStmt([
                tirx.BufferStore(mine, element, [load_one(listed)]),
                store_one(listed, load_one(listed) + as_dtype(is_mine, kind)),
            ])),
            loop_over(place, load_one(listed), tirx.SeqStmt([*binds, *body])),
        ]  # fmt: skip
        tested = tirx.floordiv(loop.extent + size - as_dtype(1, kind), size)
        owned = block_of(f"{var.name}_owned", tirx.SeqStmt(steps), [mine, listed])
        return loop_over(begin, tested, owned)


def _loaded_once(loop: Any, body: Any) -> list[Any]:
    """A body of a loop over elements with loads from arrays of elements, such as `A[e]`, first.

    LLVM would load them again in inner loops: it does not know that a thread's arrays differ.
    """
    inner = {x.loop_var for x in nodes_of(tirx.For, body)}
    written = {x.buffer for x in stores_of(body)}
    held: list[tuple[Any, Any]] = []

    def once(load: Any) -> Any:
        whole = len(load.indices) == 1 and structural_equal(load.source.ty.shape[0], loop.extent)
        if not whole or load.source in written or free_vars(load) & inner:
            return load
        if not any(structural_equal(x, load) for _, x in held):
            name = f"{load.source.name}_at{len(held)}"
            held.append((tirx.Var(name, dtype_of(load)), load))
        return next(v for v, x in held if structural_equal(x, load))

    def here(load: Any) -> Any:  # others may have conditions, other than those of prefetches
        return once(load) if any(i.same_as(loop.loop_var) for i in load.indices) else load

    def ahead(call: Any) -> Any:
        return map_expr(call, [(ir.TensorLoad, once)]) if _is_prefetch(call) else call

    body = map_expr(body, [(tirx.Evaluate, ahead), (ir.TensorLoad, here)])
    return [*(tirx.Bind(v, load) for v, load in held), body]


def _scatter(nest: Any) -> _Scatter | None:
    """The scatter of a nest, or None."""
    nest = map_expr(nest, [(s_tir.SBlockRealize, _without_variables)])
    blocks, loops = nodes_of(s_tir.SBlock, nest), nodes_of(tirx.For, nest)
    if any(b.init is not None or THREADS in b.annotations for b in blocks):
        return None
    if any(x.kind == tirx.ForKind.PARALLEL for x in loops) or nodes_of(tirx.AllocBuffer, nest):
        return None
    private = {v for b in blocks for v in b.alloc_buffers}
    nothing = tirx.Evaluate(0)
    accesses = map_expr(nest, [(tirx.Evaluate, lambda x: nothing if _is_prefetch(x) else x)])
    calls = [x for x in nodes_of(tirx.Evaluate, accesses) if not isinstance(x.value, tirx.IntImm)]
    stores = [x for x in stores_of(accesses) if x.buffer not in private]
    read = {x.source for x in nodes_of(ir.TensorLoad, accesses)} - private
    if calls or not stores or any(v.ty.storage_scope == "local" for v in read):
        return None
    written = {x.buffer for x in stores}
    moving = private | written | {x.var for x in nodes_of((tirx.Bind, tirx.Let), nest)}
    loads = [x for x in nodes_of(ir.TensorLoad, accesses) if x.source in written]
    every = [[x for x in stores if x.buffer.same_as(b)] + [x for x in loads if x.source.same_as(b)]
             for b in written]  # fmt: skip
    for index in stores[0].indices:
        if not nodes_of(ir.TensorLoad, index) or free_vars(index) & moving:
            continue
        along = [x for x in loops if x.loop_var in free_vars(index)]
        if along and _is_plain(along[-1]) and all(
            any(all(structural_equal(i, index) for i in dimension)
                for dimension in zip(*(x.indices for x in of_one), strict=True))
            for of_one in every
        ):  # fmt: skip
            return _Scatter(nest, along[-1], index)
    return None


def _is_plain(loop: Any) -> bool:
    steps = loop.step is None or is_one(loop.step)
    return steps and is_zero(loop.min) and loop.kind == tirx.ForKind.SERIAL


def _without_variables(realize: Any) -> Any:
    """A block whose statements use the variables of the loops around it."""
    block, values = realize.block, values_of(realize)
    values = {v: as_dtype(x, dtype_of(v)) for v, x in values.items()}
    block = block_with(
        block, iter_vars=[], reads=[], writes=[], body=substitute(block.body, values)
    )
    return s_tir.SBlockRealize([], realize.predicate, block)


def _is_prefetch(call: Any) -> bool:
    return "llvm.prefetch" in str(call.value)
