"""Store a dense operand in tiles of constant extents, as matrix engines load them.

Before, where a step of the product reads 32 rows of B at 32 features::

    C_ws[ii, k1] = C_ws[ii, k1] + A[io, jo, ii, p * 2 + q] * B[jo * 32 + (p * 2 + q), k0 * 32 + k1]

After `tiles("B", iteration, {"N": [16, 2], "K": [32]}, order=["K0", "N0", "N1", "K1", "N2"])`,
with neighbouring rows side by side::

    B_tiles = T.alloc_sparse_buffer((B_K0, B_N0, B_N1, B_K1, B_N2), "bfloat16")
    with T.sp_iter([B_K0, B_N0, B_N1, B_K1, B_N2], "SSSSS", "B_tiles_copy") as [k0, n0, n1, k1, n2]:
        B_tiles[k0, n0, n1, k1, n2] = B[n0 * 32 + n1 * 2 + n2, k0 * 32 + k1]

    C_ws[ii, k1] = C_ws[ii, k1] + A[io, jo, ii, p * 2 + q] * B_tiles[k0, jo, p, k1, q]

Tiles are whole: places beyond the operand are zero, as reads there are. With `given=True` there is
no copy; the parameter takes the tiles in place of the operand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    loads_of,
    nodes_of,
    same_indices,
    stores_of,
)
from sparsetir.sparse_ir.schedule.loops import (
    SparseIterationRef,
    find_iteration,
    name_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.visit_order import MOST
from sparsetir.sparse_ir.tir import as_dtype
from sparsetir.sparse_ir.traversal import map_expr

NAME = "tiles"


@primitive
def tiles(
    func: SparseFunc,
    buffer: str,
    iteration: SparseIterationRef,
    sizes: Mapping[str, Sequence[int]],
    *,
    order: Sequence[str],
    given: bool = False,
) -> tuple[SparseFunc, SparseIterationRef | None]:
    """Store a dense operand in tiles of constant extents.

    Parameters
    ----------
    buffer : str
        Name of a parameter's buffer over dense axes, which the iteration, and those inside it, only
        read, all with the same indices.
    iteration : SparseIterationRef
        An iteration without an init, whose precomputed parts have none either.
    sizes : dict of str to sequence of int
        By axis name, the extents of its loops within a tile, outermost first.
    order : list of str
        The order of the tiles' axes: those of a cut axis are named by it and a number, 0 for the
        loop over tiles; axes that are not cut keep their names.
    given : bool
        Whether callers pass the tiles, in place of the operand; there is no handle then.

    Returns
    -------
    SparseIterationRef or None
        The iteration that copies the operand; None if tiles are given.
    """
    it = find_iteration(func, name_of(NAME, iteration), NAME)

    def refuse(message: str) -> NoReturn:
        raise ScheduleError(f"{NAME}: {message}\n{show(it)}")

    dense = [b for b in func.buffers if b.handle is not None and _is_dense(b)]
    named = [b for b in dense if b.name == buffer]
    if not named:
        names = [b.name for b in dense]
        refuse(
            f"argument 'buffer': expected a parameter over dense axes, of {names}, got {buffer!r}"
        )
    operand = named[0]
    loads = loads_of(it, operand.var)
    if not loads or any(s.buffer.same_as(operand.var) for s in stores_of(func.body)):
        refuse(f"argument 'buffer': expected '{buffer}' to be read here, and nowhere written")
    if not all(same_indices(x.indices, loads[0].indices) for x in loads):
        refuse(f"'{buffer}' is read at more than one place, so that no tile serves all")
    if it.init is not None:
        refuse("expected an iteration without an init, which a copy would part from it")
    axes = {a.name: a for a in operand.axes or []}
    cut = {name: [int(n) for n in extents] for name, extents in sizes.items()}
    if not cut or any(
        name not in axes or not all(n > 0 for n in e) or math.prod(e) >= MOST
        for name, e in cut.items()
    ):
        refuse(f"argument 'sizes': expected positive extents by axes of {list(axes)}, got {sizes}")
    analyzer = _extent_analyzer(it)
    parts: dict[str, Any] = {}  # for each axis of the tiles, its axis node and a reader's index
    source: dict[str, list[tuple[str, int]]] = {}  # the tiles' axes that form a coordinate
    for (name, axis), index in zip(axes.items(), loads[0].indices, strict=True):
        extents, number = cut.get(name, []), axis.idtype
        if not extents:
            parts[name], source[name] = (axis.length, index), [(name, 1)]
            continue
        whole = math.prod(extents)
        count = tirx.floordiv(
            as_dtype(axis.length, number) + as_dtype(whole - 1, number), as_dtype(whole, number)
        )
        source[name] = []
        for level, extent in enumerate([count, *(as_dtype(n, number) for n in extents)]):
            inner = math.prod(extents[level:])
            place = tirx.floordiv(index, as_dtype(inner, number))
            if level:
                place = tirx.floormod(place, extent)
            label = f"{name}{level}"
            parts[label] = (analyzer.simplify(extent), analyzer.simplify(place))
            source[name].append((label, inner))
    if sorted(order) != sorted(parts):
        refuse(f"argument 'order': expected {sorted(parts)} in some order, got {list(order)}")
    axis_of: dict[str, Axis] = {}
    for label in order:
        idtype = next(axes[n].idtype for n, of in source.items() if label in dict(of))
        name = fresh_name(func, f"{buffer}_{label}")
        axis_of[label] = Axis(name=name, kind="dense_fixed", length=parts[label][0], idtype=idtype)
    lengths = [axis_of[label].length for label in order]
    var = buffer_var(lengths, operand.dtype, fresh_name(func, f"{buffer}_tiles"))
    body = _reading(it, operand, var, [parts[label][1] for label in order])
    held = SparseBuffer(
        var=var, axes=list(axis_of.values()), handle=operand.handle if given else None
    )
    if given:
        others = [b for b in func.buffers if b.name != buffer]
        if len(loads_of(func.body, operand.var)) > len(loads):
            refuse(f"'{buffer}' is read elsewhere, too, which needs it as it is")
        func = func.replace(buffers=others)
        return replaced(NAME, func, it, body, axes=list(axis_of.values()), buffers=[held]), None
    at = {label: tirx.Var(label.lower(), axis_of[label].idtype) for label in order}
    where = [_sum(source[name], at) for name in axes]
    copy = SparseIteration(
        span=it.span, axes=list(axis_of.values()), kinds="S" * len(axis_of),
        name=fresh_name(func, f"{var.name}_copy"), vars=list(at.values()), init=None,
        body=tirx.BufferStore(var, tirx.BufferLoad(operand.var, where), list(at.values())),
        annotations={},
    )  # fmt: skip
    both = tirx.SeqStmt([copy, body])
    out = replaced(NAME, func, it, both, axes=list(axis_of.values()), buffers=[held])
    return out, SparseIterationRef(copy.name)


def _is_dense(buffer: SparseBuffer) -> bool:
    return bool(buffer.axes) and all(a.kind == "dense_fixed" for a in buffer.axes or [])


def _extent_analyzer(it: SparseIteration) -> Any:
    """An analyzer with the ranges of loops of constant extents, also of nested ones."""
    analyzer = Analyzer()
    for node in nodes_of(SparseIteration, it):
        for axis, var, _ in node.axis_of():
            if axis.kind == "dense_fixed" and isinstance(axis.length, tirx.IntImm):
                analyzer.bind(var, ir.Range(0, axis.length))
    return analyzer


def _reading(it: SparseIteration, operand: SparseBuffer, var: Any, places: list[Any]) -> Any:
    """The iteration with reads of tiles."""

    def load(node: Any) -> Any:
        return tirx.BufferLoad(var, places) if node.source.same_as(operand.var) else node

    return map_expr(it, [(ir.TensorLoad, load)])


def _sum(terms: list[tuple[str, int]], at: dict[str, Any]) -> Any:
    """The coordinate that loops of these strides form."""
    out: Any = None
    for label, stride in terms:
        var = at[label]
        term = var if stride == 1 else var * as_dtype(stride, str(var.ty.dtype))
        out = term if out is None else out + term
    return out
