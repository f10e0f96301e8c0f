"""Statements by a schedule's author: `bound`, `assume`, `annotate`.

Promises about extents, which kernels check in every call (Senanayake's thesis, section 5.2,
`bound`). Before::

    K = T.dense_fixed(feat)
    B = T.match_sparse_buffer(b, (J_, K), "float32")

After `bound(k, 64, "exact")`, which makes the extent a constant::

    T.func_attr({"promises": [{"param": "feat", "kind": "exact", "value": 64}]})
    K = T.dense_fixed(64)
    B = T.match_sparse_buffer(b, (J_, K), "float32")

The parameter remains, so that the function is called as before. "max", "min" and "multiple" only
add the promise: it saves guards where the loop is cut.

Facts about arrays, which remove guards. Before, where `etype` may hold any value, so that stage II
checks each::

    H[i, f] = H[i, f] + if_then_else(0 <= ETYPE[e] and ETYPE[e] < r, W[ETYPE[e], f], 0)

After `assume("coordinates", buffer="ETYPE", axis="R")`, and in stage II::

    T.func_attr({"assumed": [{"fact": "coordinates", "buffer": "ETYPE", "axis": "R"}]})

    H[i, f] = H[i, f] + W[ETYPE[e], f]

A wrong assumption makes kernels access memory out of bounds. Kernels check "filled" with the
structure; for "coordinates" and "inside" the caller vouches. Facts that follow from the structure,
or from the recipe of a computed parameter, need not be assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.annotations import reserved_problem
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
    declared,
    substitute,
)
from sparsetir.sparse_ir.promises import FACTS, PROMISES, promises_of, with_fact
from sparsetir.sparse_ir.schedule.loops import (
    SparseIterationRef,
    SpIter,
    changed,
    find_iteration,
    iteration_of,
    loops_of,
    name_of,
    place_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.tir import size_text
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.verify import verify

LEGAL = {"exact": "exactly", "max": "at most", "min": "at least", "multiple": "a multiple of"}
KINDS = tuple(LEGAL)


@primitive
def bound(func: SparseFunc, loop: SpIter, n: int, kind: str) -> tuple[SparseFunc, None]:
    """Promise a property of a loop's extent, which kernels check in every call.

    Parameters
    ----------
    loop : SpIter
        A loop over one axis whose length is a parameter.
    n : int
        At least 1.
    kind : {"exact", "max", "min", "multiple"}
        The length is n ("exact"), at most n ("max"), at least n ("min"), a multiple of n.
    """
    it = iteration_of("bound", func, loop)
    node = loops_of(it)[place_of("bound", func, it, loop)].node
    if not isinstance(node, Axis):
        raise ScheduleError(
            f"bound: expected a loop over one axis, got '{loop.name}', whose extent is no length"
            f"\n{show(it)}"
        )
    if isinstance(n, bool) or not isinstance(n, int) or not 0 < n < 2**31:
        raise ScheduleError(
            f"bound: argument 'n': expected a positive integer, got {n!r}\n{show(it)}"
        )
    if kind not in KINDS:
        raise ScheduleError(
            f"bound: argument 'kind': expected one of {', '.join(KINDS)}, got {kind!r}\n{show(it)}"
        )
    if isinstance(node.length, tirx.IntImm):
        _check_number(it, node, n, kind)
        return func, None
    out = promised("bound", func, it, node.length, kind, n)
    return (_with_constant(out, node.length, n) if kind == "exact" else out), None


def _check_number(it: SparseIteration, axis: Axis, n: int, kind: str) -> None:
    length = int(axis.length)
    holds = {
        "exact": length == n, "max": length <= n, "min": length >= n, "multiple": length % n == 0,
    }  # fmt: skip
    if not holds[kind]:
        raise ScheduleError(
            f"bound: axis '{axis.name}' has {length} coordinates, which is not {LEGAL[kind]} {n}"
            f"\n{show(it)}"
        )


def _with_constant(func: SparseFunc, param: Any, value: int) -> SparseFunc:
    """The function with a number substituted for a parameter."""
    number = tirx.IntImm(str(param.ty.dtype), value)

    def put(expr: Any) -> Any:
        return expr if expr is None or isinstance(expr, int) else substitute(expr, {param: number})

    axes: dict[str, Axis] = {}
    for a in func.axes:
        axes[a.name] = Axis(
            name=a.name, kind=a.kind, length=put(a.length), nnz=put(a.nnz),
            parent=None if a.parent is None else axes[a.parent.name], nnz_cols=put(a.nnz_cols),
            indptr=a.indptr, indices=a.indices, idtype=a.idtype, unique=a.unique,
            of=None if a.of is None else [
                AttachedAxis(axis=axes[x.name], to=axes[x.to.name])
                if isinstance(x, AttachedAxis) else axes[x.name] for x in a.of
            ],
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
    except IllFormedError as error:  # e.g. an axis that no longer fits its parent
        raise ScheduleError(f"bound: {error}") from None
    return out


def promised(
    caller: str, func: SparseFunc, it: SparseIteration, extent: Any, kind: str, value: int
) -> SparseFunc:
    """The function with one more promise in its attribute "promises".

    extent : an integer parameter of the function
    kind : "exact", "max", "min" or "multiple", of `value`
    """
    if not isinstance(extent, ir.Var) or not declared(func).has_param(extent):
        raise ScheduleError(
            f"{caller}: expected the length of the axis to be a parameter of '{func.name}' or a "
            f"number, for a promise that kernels can check, got {size_text(extent)}\n{show(it)}"
        )
    new = {"param": str(extent.name), "kind": kind, "value": value}
    old = promises_of(func)
    return func if new in old else func.with_attr(PROMISES, [*old, new])


@primitive
def assume(
    func: SparseFunc, fact: str, *, axis: str, buffer: str | None = None
) -> tuple[SparseFunc, None]:
    """State a fact that the program does not imply; the schedule's author vouches for it.

    Parameters
    ----------
    fact : {"coordinates", "filled"}
        "coordinates": the values of `buffer` are coordinates of `axis`; "filled": no slot of the
        sparse_fixed `axis` is padding; "inside": `buffer` is only accessed at coordinates of its
        `axis`.
    axis : str
        Name of the axis.
    buffer : str, optional
        Name of the buffer.
    """
    if fact not in FACTS:
        raise ScheduleError(
            f"assume: argument 'fact': expected one of {', '.join(FACTS)}, got {fact!r}"
        )
    if (buffer is not None) != ("buffer" in FACTS[fact]):
        wanted = "a name" if "buffer" in FACTS[fact] else "None"
        raise ScheduleError(
            f"assume: argument 'buffer': expected {wanted} for {fact!r}, got {buffer!r}"
        )
    about = {"axis": axis} if buffer is None else {"buffer": buffer, "axis": axis}
    out = with_fact(func, fact, **about)
    try:
        verify(out)
    except IllFormedError as error:
        raise ScheduleError(f"assume: {error}") from None
    return out, None


@primitive
def annotate(
    func: SparseFunc, iteration: SparseIterationRef, key: str, value: Any
) -> tuple[SparseFunc, None]:
    """Set an annotation of the iteration, which its stage-II blocks inherit.

    Parameters
    ----------
    iteration : SparseIterationRef
        The iteration.
    key : str
        Key of the annotation.
    value : Any
        None, a string, a number, or lists and dicts of these with strings as keys.
    """
    it = find_iteration(func, name_of("annotate", iteration), "annotate")
    if not isinstance(key, str) or not key:
        raise ScheduleError(f"annotate: argument 'key': expected a name, got {key!r}\n{show(it)}")
    problem = reserved_problem(key)
    if problem:
        raise ScheduleError(f"annotate: argument 'key': {problem}\n{show(it)}")
    if not _prints(value):
        raise ScheduleError(
            "annotate: argument 'value': expected None, a string, a number of 64 bits, or lists "
            f"and dicts of these, got {value!r}\n{show(it)}"
        )
    new = changed(it, annotations={**dict(it.annotations.items()), key: value})
    return replaced("annotate", func, it, new), None


def _prints(value: Any) -> bool:
    """Whether it can be written as text that parses back."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _prints(v) for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(_prints(v) for v in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, str | float)
