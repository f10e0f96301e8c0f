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
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    axis_with,
    buffer_var,
    declared,
    entry_with,
    substitute,
)
from sparsetir.sparse_ir.promises import FACTS, PROMISES, keeps, promises_of, with_fact
from sparsetir.sparse_ir.schedule.loops import (
    Change,
    SparseIterationRef,
    SpIter,
    change_in,
    change_of,
    changed,
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
    change = change_of("bound", func, loop)
    node = change.chosen[0].node
    if not isinstance(node, Axis):
        change.refuse(
            f"expected a loop over one axis, got '{loop.name}', whose extent is no length"
        )
    if isinstance(n, bool) or not isinstance(n, int) or not 0 < n < 2**31:
        change.refuse(f"argument 'n': expected a positive integer, got {n!r}")
    change.check_word("kind", kind, KINDS)
    if isinstance(node.length, tirx.IntImm):
        length = int(node.length)
        if not keeps({"kind": kind, "value": n}, length):
            change.refuse(
                f"axis '{node.name}' has {length} coordinates, which is not {LEGAL[kind]} {n}"
            )
        return func, None
    out = promised(change, func, node.length, kind, n)
    return (_with_constant(out, node.length, n) if kind == "exact" else out), None


def _with_constant(func: SparseFunc, param: Any, value: int) -> SparseFunc:
    """The function with a number substituted for a parameter."""
    number = tirx.IntImm(str(param.ty.dtype), value)

    def put(expr: Any) -> Any:
        return expr if expr is None or isinstance(expr, int) else substitute(expr, {param: number})

    axes: dict[str, Axis] = {}
    for a in func.axes:
        sizes = {n: put(getattr(a, n)) for n in ("length", "nnz", "nnz_cols")}
        parent = None if a.parent is None else axes[a.parent.name]
        of = None if a.of is None else [entry_with(x, axes) for x in a.of]
        axes[a.name] = axis_with(a, **sizes, parent=parent, of=of)
    buffers: list[SparseBuffer] = []
    renamed: dict[Any, Any] = {}
    for b in func.buffers:
        ty = b.var.ty
        var = buffer_var([put(s) for s in ty.shape], b.dtype, b.name, ty.storage_scope)
        renamed[b.var] = var
        over = None if b.axes is None else [axes[a.name] for a in b.axes]
        buffers.append(SparseBuffer(var=var, axes=over, handle=b.handle))

    def iteration(it: Any) -> Any:
        return changed(it, axes=[entry_with(a, axes) for a in it.axes])

    body = map_expr(func.body, [(SparseIteration, iteration)])
    body = substitute(body, {param: number, **renamed})
    out = func.replace(axes=list(axes.values()), buffers=buffers, body=body)
    try:
        verify(out)
    except IllFormedError as error:  # e.g. an axis that no longer fits its parent
        raise ScheduleError(f"bound: {error}") from None
    return out


def promised(change: Change, func: SparseFunc, extent: Any, kind: str, value: int) -> SparseFunc:
    """The function with one more promise in its attribute "promises".

    change : the change that needs it, for refusals
    extent : an integer parameter of the function
    kind : "exact", "max", "min" or "multiple", of `value`
    """
    if not isinstance(extent, ir.Var) or not declared(func).has_param(extent):
        change.refuse(
            f"expected the length of the axis to be a parameter of '{func.name}' or a number, for "
            f"a promise that kernels can check, got {size_text(extent)}"
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
    change = change_in("annotate", func, iteration)
    if not isinstance(key, str) or not key:
        change.refuse(f"argument 'key': expected a name, got {key!r}")
    if problem := reserved_problem(key):
        change.refuse(f"argument 'key': {problem}")
    if not _prints(value):
        change.refuse(
            "argument 'value': expected None, a string, a number of 64 bits, or lists and dicts of "
            f"these, got {value!r}"
        )
    annotations = {**dict(change.it.annotations.items()), key: value}
    return change.put(changed(change.it, annotations=annotations)), None


def _prints(value: Any) -> bool:
    """Whether it can be written as text that parses back."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _prints(v) for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(_prints(v) for v in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, str | float)
