"""Keep blocks that a schedule added within the rows of ragged buffers.

Stage II declares a ragged buffer as rectangular, and TVM's primitives rely on that: a `cache_write`
of it copies whole rectangles, and `compute_at` drops the predicate of a block that `rfactor` made.
Past the end of a row lies the next one, so each such block gets a predicate.
Before::

    for ax0, ax1 in T.grid(m, n):
        with T.sblock("OUT_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            OUT[v0, v1] = OUT_global[v0, v1]

After::

    for ax0, ax1 in T.grid(m, n):
        with T.sblock("OUT_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            T.where(ax1 < J_indptr[ax0 + 1] - J_indptr[ax0])
            OUT[v0, v1] = OUT_global[v0, v1]

Blocks of the lowering prove their own bounds, by the domains of their iterators, and are not
changed; nor are accesses under a condition.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.nodes import distinct, substitute
from sparsetir.sparse_ir.position_space import Layout, in_one_row
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars
from sparsetir.sparse_ir.traversal import ADVANCE, SKIP, map_expr, visit_nodes


def keep_in_rows(body: tirx.Stmt, layouts: dict[Any, Layout], indptr: dict[str, Any]) -> tirx.Stmt:
    """Add the predicates that blocks need.

    layouts : how each buffer over axes is stored, by its variable
    indptr : the variables of the indptr buffers, by name
    """

    def realize(node: Any) -> Any:
        missing = _missing(node, layouts, indptr)
        if not missing:
            return node
        predicate = tirx.all(node.predicate, *missing)
        return s_tir.SBlockRealize(node.iter_values, predicate, node.block, node.span)

    return map_expr(body, [(s_tir.SBlockRealize, realize)])


def _missing(realize: Any, layouts: dict[Any, Layout], indptr: dict[str, Any]) -> list[Any]:
    """The bounds of the block's accesses that neither its iterators nor its predicate imply."""
    block = realize.block
    domains = {iv.var: iv.dom for iv in block.iter_vars}
    values = dict(zip(domains, realize.iter_values, strict=True))
    analyzer = Analyzer()
    for var, domain in domains.items():
        if isinstance(domain.extent, tirx.IntImm):
            analyzer.bind(var, domain)
    out: list[Any] = []
    for buf, index in _unconditional(block.body, layouts):
        for pos, length in _ragged(index, layouts[buf], indptr):
            used = free_vars(pos)
            if not used & set(domains) or any(tirx.is_buffer_var(v) for v in used):
                continue
            domain = domains.get(pos) if isinstance(pos, ir.Var) else None
            if domain is not None and analyzer.can_prove_equal(domain.extent, length):
                continue
            bound = substitute(pos < length, values)
            with analyzer.constraint_scope(realize.predicate):
                if analyzer.can_prove(bound):
                    continue
            out.append(bound)
    return distinct(out)


def _unconditional(body: tirx.Stmt, layouts: dict[Any, Layout]) -> list[tuple[Any, list[Any]]]:
    """The accesses that every instance of a block makes, without those of nested blocks."""
    accesses: list[tuple[Any, list[Any]]] = []

    def stop(_: Any) -> Any:
        return SKIP

    def call(node: Any) -> Any:
        conditional = getattr(node.op, "name", "").endswith(".if_then_else")
        return SKIP if conditional else ADVANCE

    def access(buf: Any, index: Any) -> Any:
        if buf in layouts:
            accesses.append((buf, list(index)))
        return ADVANCE

    visit_nodes(
        body,
        [
            (s_tir.SBlockRealize, stop),
            (tirx.IfThenElse, stop),
            (tirx.While, stop),
            (tirx.For, stop),
            (tirx.Select, stop),
            (ir.Call, call),
            (ir.TensorLoad, lambda n: access(n.source, n.indices)),
            (tirx.BufferStore, lambda n: access(n.buffer, n.indices)),
        ],
    )
    return accesses


def _ragged(index: list[Any], layout: Layout, indptr: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(position, length of its row) for each ragged dimension of an access."""
    at = {axis.name: pos for axis, pos in zip(layout.axes, index, strict=True)}
    out: list[tuple[Any, Any]] = []
    for n, (axis, name) in enumerate(zip(layout.axes, layout.indptr, strict=True)):
        if not name or in_one_row(axis) or (layout.ends and n == len(index) - 1):
            continue
        *outer, row = [at[a.name] for a in axis.ancestors()[:-1]]
        start = tirx.BufferLoad(indptr[name], [*outer, row])
        end = tirx.BufferLoad(indptr[name], [*outer, row + as_dtype(1, dtype_of(row))])
        out.append((index[n], as_dtype(end - start, dtype_of(index[n]))))
    return out
