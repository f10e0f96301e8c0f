"""Position space: the buffers of stage II, and the storage of each axis's elements.

Step 1 of sparse iteration lowering (SparseTIR, section 3.3.1): the arrays that axes point to
become buffers, `J_indptr` over the ancestors of J and `J_indices` over the ancestors and J, and
every sparse buffer gets the shape of its positions.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm_ffi import Object
from tvm_ffi.dataclasses import py_class

from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.nodes import Axis, SparseBuffer, SparseFunc, buffer_var
from sparsetir.sparse_ir.tir import as_dtype, dtype_of

# How each buffer over axes is stored, by buffer name.
LAYOUTS = "sparsetir.layouts"
# The stage-I function without its body: the signature for callers.
SIGNATURE = "sparsetir.runtime.signature"
# Buffers as callers see them, by name, where a pass has made one axis of several.
DECLARED = "sparsetir.declared"
STAGE_TWO_ATTRS = (LAYOUTS, SIGNATURE)


@py_class("sparsetir.Layout", frozen=True, structural_eq="tree")
class Layout(Object):
    """The storage of a stage-II buffer.

    axes : one axis per dimension
    ends : 1 for an indptr, whose last dimension has one more element; else 0
    indptr : names of the indptr buffers of `axes`, "" for axes without one
    """

    axes: list[Axis]
    ends: int
    indptr: list[str]


def in_one_row(axis: Axis) -> bool:
    """Whether a variable axis has a single parent, so that its positions are 0 .. nnz - 1."""
    above = axis.parent
    return (
        axis.is_variable
        and above is not None
        and above.kind == "dense_fixed"
        and isinstance(above.length, tirx.IntImm)
        and int(above.length) == 1
    )


def positional_size(axis: Axis) -> Any:
    """Largest number of positions under one parent."""
    if axis.kind == "sparse_fixed":
        return axis.nnz_cols
    return axis.length if axis.unique and not in_one_row(axis) else axis.nnz


class PositionSpace:
    """The stage-II buffers of one function.

    buffers : the stage-II variable of each stage-I buffer, by name
    params : the parameters of the stage-II function, in the order of stage I
    layouts : how each buffer over axes is stored, by the buffer's name
    """

    def __init__(self, func: SparseFunc) -> None:
        self.func = func
        self.buffers: dict[str, Any] = {}
        self.layouts: dict[str, Layout] = {}
        self._known = known(func)
        self._aux: dict[tuple[str, str], Any] = {}
        self._taken = {b.name for b in func.buffers} | {p.name for p in func.params}
        by_handle: dict[Any, Any] = {}
        # Coordinates and offsets of unvisited axes that the body loads (`positions`, `steps`).
        self._as_values = {b.handle for b in func.buffers if b.handle is not None}
        for axis in func.axes:
            self._materialise(axis, by_handle)
        for buf in func.buffers:
            var = self._declare_values(buf)
            if buf.handle is not None:
                by_handle[buf.handle] = var
        self.params = [by_handle.get(p, p) for p in func.params]

    def indptr(self, axis: Axis) -> Any:
        """The buffer of an axis's offsets."""
        return self._aux[axis.name, "indptr"]

    def indices(self, axis: Axis) -> Any:
        """The buffer of an axis's coordinates."""
        return self._aux[axis.name, "indices"]

    def all_buffers(self) -> list[Any]:
        """Every buffer variable that stage II may use, the allocated ones included."""
        return [*self.buffers.values(), *self._aux.values()]

    def allocated(self) -> list[Any]:
        """The buffers that the function allocates."""
        return [self.buffers[b.name] for b in self.func.buffers if b.handle is None]

    def start(self, axis: Axis, parents: list[Any], shift: int = 0) -> Any:
        """indptr[parents] of a variable axis; `shift` 1 gives the end of that parent's range."""
        index = list(parents)
        index[-1] = index[-1] + as_dtype(shift, dtype_of(index[-1])) if shift else index[-1]
        return tirx.BufferLoad(self.indptr(axis), index)

    def extent(self, axis: Axis, parents: list[Any]) -> Any:
        """Number of positions of `axis` under the parent at these positions."""
        if in_one_row(axis):
            return as_dtype(axis.nnz, axis.idtype)
        if axis.is_variable:
            return self.start(axis, parents, 1) - self.start(axis, parents)
        size = axis.length if axis.kind == "dense_fixed" else axis.nnz_cols
        return as_dtype(size, axis.idtype)

    def coordinate(self, axis: Axis, positions: list[Any]) -> Any:
        """Coordinate at the positions of the axis's ancestors and its own (equation 3)."""
        if axis.is_sparse and axis.name not in self._known.counted:
            return tirx.BufferLoad(self.indices(axis), positions)
        return positions[-1]

    def has_padding(self, axis: Axis) -> bool:
        """Whether slots of an axis may be empty."""
        return axis.kind == "sparse_fixed" and axis.name not in self._known.filled

    def _materialise(self, axis: Axis, by_handle: dict[Any, Any]) -> None:
        levels = axis.ancestors()
        for what, over in (("indptr", levels[:-1]), ("indices", levels)):
            handle = getattr(axis, what)
            if handle is None or handle in self._as_values:
                continue
            if handle not in by_handle:
                dims, ends = [positional_size(a) for a in over], int(what == "indptr")
                dims[-1] = dims[-1] + 1 if ends else dims[-1]
                name = self._fresh(f"{axis.name}_{what}")
                by_handle[handle] = buffer_var(dims, axis.idtype, name)
                self._add_layout(name, over, ends)
            self._aux[axis.name, what] = by_handle[handle]

    def _declare_values(self, buf: SparseBuffer) -> Any:
        scope = buf.var.ty.storage_scope
        if buf.axes is None:
            shape = buf.var.ty.shape
        else:
            shape = [positional_size(a) for a in buf.axes]
        var = buffer_var(shape, buf.dtype, buf.name, scope)
        self.buffers[buf.name] = var
        if buf.axes is not None:
            self._add_layout(buf.name, list(buf.axes), ends=0)
        return var

    def _add_layout(self, name: str, axes: list[Axis], ends: int) -> None:
        indptr = [self.indptr(a).name if a.indptr is not None else "" for a in axes]
        self.layouts[name] = Layout(axes=axes, ends=ends, indptr=indptr)

    def _fresh(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name
