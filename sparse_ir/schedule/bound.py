"""Promise something about the extent of a loop (Senanayake's thesis, section 5.2, `bound`).

Kernels check promises whenever they are called. Before::

    K = T.dense_fixed(feat)
    B = T.match_sparse_buffer(b, (J_, K), "float32")

After `bound(k, 64, "exact")`, where the extent is a constant from here on::

    T.func_attr({"promises": [{"param": "feat", "kind": "exact", "value": 64}]})
    K = T.dense_fixed(64)
    B = T.match_sparse_buffer(b, (J_, K), "float32")

The parameter remains, so that the function is called as before. "max", "min" and "multiple" add
the promise alone: they save conditions where something is cut.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.errors import IllFormedError, ScheduleError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    map_expr,
    substitute,
)
from sparsetir.sparse_ir.schedule.handles import SpIter
from sparsetir.sparse_ir.schedule.loops import changed, iteration_of, loops_of, place_of, show
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.promise import promised
from sparsetir.sparse_ir.verify import verify

__all__ = ["KINDS", "bound"]

WHO = "bound"
LEGAL = {"exact": "exactly", "max": "at most", "min": "at least", "multiple": "a multiple of"}
KINDS = tuple(LEGAL)


@primitive
def bound(func: SparseFunc, loop: SpIter, n: int, kind: str) -> tuple[SparseFunc, None]:
    """Promise something about the extent of a loop, which kernels check in every call.

    Parameters
    ----------
    loop : SpIter
        Over one axis whose length is a parameter.
    n : int
        At least 1.
    kind : {"exact", "max", "min", "multiple"}
        The length is n ("exact"), at most n ("max"), at least n ("min"), a multiple of n.
    """
    it = iteration_of(WHO, func, loop)
    node = loops_of(it)[place_of(WHO, func, it, loop)].node
    if not isinstance(node, Axis):
        raise ScheduleError(
            f"{WHO}: expected a loop over one axis, got '{loop.name}', whose extent is no length"
            f"\n{show(it)}"
        )
    if isinstance(n, bool) or not isinstance(n, int) or not 0 < n < 2**31:
        raise ScheduleError(
            f"{WHO}: argument 'n': expected a positive integer, got {n!r}\n{show(it)}"
        )
    if kind not in KINDS:
        raise ScheduleError(
            f"{WHO}: argument 'kind': expected one of {', '.join(KINDS)}, got {kind!r}\n{show(it)}"
        )
    if isinstance(node.length, tirx.IntImm):
        _check_number(it, node, n, kind)
        return func, None
    out = promised(WHO, func, it, node.length, kind, n)
    return (_with_constant(out, node.length, n) if kind == "exact" else out), None


def _check_number(it: SparseIteration, axis: Axis, n: int, kind: str) -> None:
    length = int(axis.length)
    holds = {
        "exact": length == n, "max": length <= n, "min": length >= n, "multiple": length % n == 0,
    }  # fmt: skip
    if not holds[kind]:
        raise ScheduleError(
            f"{WHO}: axis '{axis.name}' has {length} coordinates, which is not {LEGAL[kind]} {n}"
            f"\n{show(it)}"
        )


def _with_constant(func: SparseFunc, param: Any, value: int) -> SparseFunc:
    """The function with a number wherever it uses a parameter."""
    number = tirx.IntImm(str(param.ty.dtype), value)

    def put(expr: Any) -> Any:
        return expr if expr is None or isinstance(expr, int) else substitute(expr, {param: number})

    axes: dict[str, Axis] = {}
    for a in func.axes:
        axes[a.name] = Axis(
            name=a.name, kind=a.kind, length=put(a.length), nnz=put(a.nnz),
            parent=None if a.parent is None else axes[a.parent.name], nnz_cols=put(a.nnz_cols),
            indptr=a.indptr, indices=a.indices, idtype=a.idtype, unique=a.unique,
        )  # fmt: skip
    buffers: list[SparseBuffer] = []
    renamed: dict[Any, Any] = {}
    for b in func.buffers:
        ty = b.var.ty
        var = buffer_var([put(s) for s in ty.shape], b.dtype, b.name, ty.storage_scope)
        renamed[b.var] = var
        over = None if b.axes is None else [axes[a.name] for a in b.axes]
        buffers.append(SparseBuffer(var=var, axes=over, handle=b.handle))

    def node(entry: Any) -> Any:
        if isinstance(entry, Axis):
            return axes[entry.name]
        if isinstance(entry, FusedAxis):
            return FusedAxis(axes=[axes[a.name] for a in entry.axes])
        if isinstance(entry, PartAxis):
            return PartAxis(axis=node(entry.axis), by=axes[entry.by.name])
        assert isinstance(entry, AttachedAxis)
        return AttachedAxis(axis=axes[entry.axis.name], to=axes[entry.to.name])

    def iteration(it: Any) -> Any:
        return changed(it, axes=[node(a) for a in it.axes])

    body = map_expr(func.body, [(SparseIteration, iteration)])
    body = substitute(body, {param: number, **renamed})
    out = func.replace(axes=list(axes.values()), buffers=buffers, body=body)
    try:
        verify(out)
    except IllFormedError as error:  # such as an axis that no longer fits its parent
        raise ScheduleError(f"{WHO}: {error}") from None
    return out
