"""Offsets of the elements of a buffer over axes (SparseTIR, equations 6 to 8).

The offset of an element sums, over the axis trees of the buffer, the offset within the tree times
the sizes of the trees after it; trees are ordered by their roots.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.nodes import Axis
from sparsetir.sparse_ir.position_space import Layout, in_one_row
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, is_one

INT32_MAX = 2**31 - 1


def elements_of(axis: Axis, rename: Any = lambda size: size) -> Any:
    """The number of elements of an axis under its whole tree: nnz(Tree(axis))."""
    if not axis.kind == "sparse_fixed":
        return rename(axis.nnz if axis.is_variable else axis.length)
    return product([elements_of(axis.parent, rename), rename(axis.nnz_cols)])


def product(sizes: list[Any]) -> Any:
    """The product of sizes, in int64 if there are several."""
    out = sizes[0]
    for size in sizes[1:]:
        if isinstance(out, tirx.IntImm) and isinstance(size, tirx.IntImm):
            out = as_dtype(int(out) * int(size), "int64")
        else:
            out = as_dtype(out, "int64") * as_dtype(size, "int64")
    return out


class Storage:
    """Offsets and sizes of one buffer over axes.

    flat : the flat buffers that hold the elements, by name
    rename : replaces sizes by the function's own parameters
    steps : the power of two that divides each parameter, by name
    """

    def __init__(
        self, layout: Layout, flat: dict[str, Any], rename: Any, steps: Mapping[str, int] = {}
    ) -> None:
        self.axes = list(layout.axes)
        self.ends = int(layout.ends)
        self._flat = flat
        self._indptr = {a.name: n for a, n in zip(self.axes, layout.indptr, strict=True) if n}
        self._rename = rename
        parents = {a.parent.name for a in self.axes if a.parent is not None}
        self.leaves = [a for a in self.axes if a.name not in parents]
        roots = [a.root.name for a in self.axes if a.parent is None]
        self.leaves.sort(key=lambda a: roots.index(a.root.name))
        sizes = [self._size(a) for a in self.leaves]
        self.dtype = self._offset_dtype(sizes)
        self.sizes = [as_dtype(s, self.dtype) for s in sizes]
        self._steps = steps
        self._simplify = Analyzer().simplify

    def _size(self, axis: Axis) -> Any:
        return elements_of(axis, self._rename)

    def _offset_dtype(self, sizes: list[Any]) -> str:
        if all(isinstance(s, tirx.IntImm) for s in sizes):
            total = 1
            for s in sizes:
                total *= int(s)
            wide = total + self.ends > INT32_MAX or any(a.idtype == "int64" for a in self.leaves)
            return "int64" if wide else "int32"
        return dtype_of(sizes[0]) if len(sizes) == 1 else "int64"

    def size(self) -> Any:
        """Number of elements."""
        total = as_dtype(1, self.dtype)
        for n, size in enumerate(self.sizes):
            total = size if n == 0 else total * size
        return total + as_dtype(1, self.dtype) if self.ends else total

    def natural_shape(self) -> list[Any]:
        """The shape of the values as kernels take them: one dimension per tree.

        The trees before a ragged one share its dimension.
        """
        sizes = self.by_trees()
        ragged = [n for n, leaf in enumerate(self.leaves, 1) if leaf.kind == "dense_variable"]
        if self.ends or not ragged:
            return sizes
        return [product(sizes[: ragged[-1]]), *sizes[ragged[-1] :]]

    def by_trees(self) -> list[Any]:
        """The number of elements of each tree."""
        return [self.size()] if self.ends else [self._extent(leaf) for leaf in self.leaves]

    def _extent(self, leaf: Axis) -> Any:
        dense = leaf.kind == "dense_fixed"
        return as_dtype(self._rename(leaf.length), leaf.idtype) if dense else self._size(leaf)

    @cached_property
    def strides(self) -> list[Any]:
        """The distance of neighbours on each leaf, in elements, in the order of `leaves`."""
        out: list[Any] = []
        stride: Any = as_dtype(1, self.dtype)
        for n, size in enumerate(reversed(self.sizes)):
            out.insert(0, stride)
            size = self._in_steps(size)
            stride = size if n == 0 else size * stride
        return out

    def _in_steps(self, size: Any) -> Any:
        """A size divisible by a power of two, written so that it shows: `feat // 64 * 64`.

        GPUs load one element at a time from addresses that are not known to be aligned.
        """
        inner = size.value if isinstance(size, tirx.Cast) else size
        step = self._steps.get(inner.name, 1) if isinstance(inner, ir.Var) else 1
        if step == 1:
            return size
        by = as_dtype(step, dtype_of(inner))
        return as_dtype(tirx.floordiv(inner, by) * by, self.dtype)

    def offset(self, index: list[Any]) -> Any:
        """The offset of an element at these positions (equations 6 and 7).

        64-bit if a position is: narrowing it would only be undone for the address.
        """
        pos = {a.name: i for a, i in zip(self.axes, index, strict=True)}
        places = [self._within(leaf, pos) for leaf in self.leaves]
        dtype = "int64" if "int64" in map(dtype_of, places) else self.dtype
        total: Any = None if self.leaves else as_dtype(0, dtype)
        for here, stride in zip(places, self.strides, strict=True):
            here, stride = as_dtype(here, dtype), as_dtype(stride, dtype)
            term = here if is_one(stride) else here * stride
            total = term if total is None else total + term
        return self._simplify(total)

    def _within(self, axis: Axis, pos: dict[str, Any]) -> Any:
        here = pos[axis.name]
        if axis.kind == "dense_fixed" or in_one_row(axis):
            return here
        above = self._within(axis.parent, pos)
        if axis.is_variable:
            start = tirx.BufferLoad(self._flat[self._indptr[axis.name]], [above])
            return self._simplify(start + as_dtype(here, dtype_of(start)))
        cols = as_dtype(self._rename(axis.nnz_cols), self.dtype)
        return as_dtype(above, self.dtype) * cols + as_dtype(here, self.dtype)
