"""Axes that a program assembles: results whose number of elements is unknown beforehand.

`nnz` is None, and the axis stores the elements that the program writes::

    K = T.sparse_variable(I, (n, None), (c_indptr, c_indices))
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, T.union(J1, J2)], "SS", "add") as [i, j]:
        C[i, j] = A[i, j] + B[i, j]

A result may have several such levels, each under the one before it, as in DCSR and CSF; the first
is under a dense_fixed axis, of length 1 if rows are sparse, too.

:func:`as_dense` is the program that :mod:`sparsetir.sparse_ir.assemble` takes; :func:`closed` has a
given pattern, for the numeric phase and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    attached_axes,
    flat_axes,
    make_func,
    sparse_iterations,
    stores_of,
)
from sparsetir.sparse_ir.verify_sites import Broken, Found


def open_axes(func: SparseFunc) -> list[Axis]:
    """The axes that a program assembles, from the root down."""
    return [a for a in func.axes if is_open(a)]


def open_result(func: SparseFunc) -> SparseBuffer | None:
    """The buffer over the axes that a program assembles, or None."""
    open_names = {a.name for a in open_axes(func)}
    return next((b for b in func.buffers if open_names & {*_names(b)}), None)


def is_open(axis: Axis) -> bool:
    """Whether the program determines how many elements an axis stores."""
    return axis.kind == "sparse_variable" and axis.nnz is None


def refuse_open(caller: str, func: SparseFunc) -> None:
    """Raise ValueError for a program that assembles its result."""
    for axis in open_axes(func):
        raise ValueError(
            f"{caller}: function '{func.name}': expected axes whose nnz is given, got None for "
            f"'{axis.name}', which the program assembles; see build_assembled"
        )


def as_dense(func: SparseFunc) -> SparseFunc:
    """The program with a dense axis in place of the assembled one, whose arrays are dropped."""

    def dense(axis: Axis, _: Axis | None) -> Axis:
        return Axis(axis.name, "dense_fixed", axis.length, idtype=axis.idtype)

    return _with(func, dense)


def closed(func: SparseFunc) -> SparseFunc:
    """The program on a given pattern: each nnz is a parameter, after the indices."""
    nnz: dict[str, Any] = {}
    result = open_result(func)
    for axis in open_axes(func):
        taken = [str(n.name) for n in nnz.values()]
        assert result is not None
        nnz[axis.name] = tirx.Var(fresh_name(func, f"{result.handle.name}_nnz", taken), axis.idtype)

    def given(axis: Axis, parent: Axis | None) -> Axis:
        fields = (axis.kind, axis.length, parent, nnz[axis.name], None, axis.indptr, axis.indices)
        return Axis(axis.name, *fields, idtype=axis.idtype)

    return _with(func, given)


def _with(func: SparseFunc, replacement: Callable[[Axis, Axis | None], Axis]) -> SparseFunc:
    """Replace the open axes, with parameters for the arrays of the new ones, if any.

    replacement : returns the axis that replaces an axis, given its new parent
    """
    axes = open_axes(func)
    if not axes:
        return func
    others: dict[str, Axis] = {}
    changed: dict[Any, list[Any]] = {}
    for axis in axes:
        other = others[axis.name] = replacement(axis, others.get(axis.parent.name, axis.parent))
        stored = other.indptr is not None
        changed[axis.indptr] = [axis.indptr] if stored else []
        changed[axis.indices] = [axis.indices, other.nnz] if stored else []

    def put(axes: Any) -> list[Any]:
        return [others.get(a.name, a) for a in axes]

    buffers = [
        SparseBuffer(b.var, put(b.axes), b.handle) if others.keys() & _names(b) else b
        for b in func.buffers
    ]
    attrs = {k: v for k, v in func.attrs.items() if k != "global_symbol"}
    name = func.name if "global_symbol" in func.attrs else None
    kept = [q for p in func.params for q in changed.get(p, [p])]
    return make_func(name, kept, put(func.axes), buffers, func.body, attrs, func.span)


def _names(buffer: SparseBuffer) -> list[str]:
    return [a.name for a in buffer.axes or ()]


def open_axis_problems(func: SparseFunc, new: list[Axis]) -> Found:
    """Return, for the verifier, why these axes cannot be assembled."""
    chain = [a.name for a in open_axes(func)]
    for axis in filter(is_open, new):
        label = f"axis '{axis.name}': nnz None says that the program assembles it; expected"
        others = [a for a in func.axes if a.name != axis.name]
        visited = [
            a.name
            for it in sparse_iterations(func)
            for a in (*flat_axes(it.axes), *(x.to for x in attached_axes(it.axes)))
        ]
        over = [b for b in func.buffers if axis.name in _names(b)]
        written = {s.buffer for s in stores_of(func.body)}
        arrays = [x for a in others for x in (a.indptr, a.indices) if x is not None]
        arrays += [b.handle for b in func.buffers if b.handle is not None]
        shared = [h for h in (axis.indptr, axis.indices) if h in arrays]
        above = chain[: chain.index(axis.name)]
        parent = axis.parent.name if axis.parent.kind != "dense_fixed" else None
        if [parent] != (above[-1:] or [None]) or not axis.unique:
            yield Broken(
                axis,
                f"{label} it under a dense_fixed axis, or the one such axis before it, with "
                "unique=True",
            )
        elif axis.name in visited or any(
            a.parent is not None and a.parent.name == axis.name and not is_open(a) or axis.name in
            [m.name for m in a.members] for a in others
        ):  # fmt: skip
            yield Broken(axis, f"{label} no iteration over it, and no other axis under it or of it")
        elif shared:
            yield Broken(axis, f"{label} '{shared[0].name}' to be of nothing else")
        elif len(over) != 1 or over[0].handle is None or over[0].var not in written:
            yield Broken(
                axis, f"{label} one buffer over it, a result, got {[b.name for b in over]}"
            )
