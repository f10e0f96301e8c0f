"""What primitives need that visit stored elements by their positions: buffers over positions."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    accesses_of,
    buffer_var,
    flat_axes,
    map_expr,
    nodes_of,
    same_indices,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.recipes import in_order
from sparsetir.sparse_ir.schedule.cuts import Cut
from sparsetir.sparse_ir.schedule.loops import Loop, loops_of

__all__ = ["Elements", "check_alone", "other_loops", "rows_and_columns"]


def rows_and_columns(
    cut: Cut, rows: Loop, columns: Loop, unique: bool = False
) -> tuple[Axis, Axis]:
    """The axes of two loops: spatial over a dense one, a reduction over what its rows store.

    unique : whether a column may be stored once only in a row

    Others are refused.
    """
    row, column = rows.node, columns.node
    if (
        isinstance(row, Axis)
        and row.kind == "dense_fixed"
        and isinstance(column, Axis)
        and column.kind == "sparse_variable"
        and (column.unique or not unique)
        and column.parent.name == row.name
        and (rows.kinds, columns.kinds) == ("S", "R")
    ):
        return row, column
    cut.refuse(
        "expected a spatial loop over a dense axis and a reduction over a sparse_variable "
        f"axis under it, got '{rows.name}' and '{columns.name}'"
    )


def check_alone(cut: Cut, it: SparseIteration) -> None:
    """Refuse iterations that have others in them, and those with annotations."""
    if nodes_of(SparseIteration, it.body) or it.annotations:
        cut.refuse("expected an iteration without nested ones and annotations")


def other_loops(cut: Cut, it: SparseIteration, rows: Loop, columns: Loop) -> list[Loop]:
    """The loops beside two, over dense axes, of an iteration that stands alone."""
    check_alone(cut, it)
    rest = [x for x in loops_of(it) if x.axes not in (rows.axes, columns.axes)]
    for loop in rest:
        if not isinstance(loop.node, Axis) or loop.node.kind != "dense_fixed":
            cut.refuse(f"expected other loops over dense axes, got '{loop.name}'")
    return rest


class Elements(Cut):
    """An iteration over rows and what they store, whose elements are visited in another way.

    loop : names what is declared
    path : a dense axis, and sparse_variable axes, each under the one before; or these alone
    over : the coordinates of these
    positions : an axis of all elements, which buffers over the path lie over from now on: a dense
        one, or where the path has no dense axis one under the parent of its first
    below : by name, axes that hang under the last one of the path as axes under `positions`; only
        where elements are visited in the order of storage
    buffers : those that the primitive declares
    """

    def __init__(
        self, who: str, func: SparseFunc, it: SparseIteration, loop: Loop,
        path: list[Axis], over: list[Any], below: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(who, func, it, loop)
        self.path, self.over = path, over
        self.row, self.column = path[0], path[-1]
        column = self.column
        for other in sparse_iterations(func):
            if other.name != it.name and column.name in {a.name for a in flat_axes(other.axes)}:
                self.refuse(
                    f"sp_iter '{other.name}' visits '{column.name}' too; expected it to be visited "
                    "here alone"
                )
        self.axes.extend(self._all_elements())
        self.positions = self.axes[-1]
        self.buffers: list[SparseBuffer] = []
        self.below = self._under_positions() if below else {}
        self.moved = self._moved_buffers()

    def _all_elements(self) -> list[Axis]:
        """The axis of all elements, or that of each parent's, after those of the levels above."""
        names = [a.name for a in self.path]
        if self.row.parent is None:
            name = fresh_name(self.func, "_".join(names))
            nnz, idtype = self.column.nnz, self.idtype
            return [Axis(name=name, kind="dense_fixed", length=nnz, idtype=idtype)]
        out: list[Axis] = []
        ptr = self.row.indptr
        for count, axis in enumerate(self.path[1:], 2):
            how = {"recipe": in_order.__name__, "values": f"${axis.indptr.name}"}
            ptr = self.array("ptr", {**how, "order": f"${ptr.name}"})
            name = fresh_name(self.func, "_".join(names[:count]))
            out.append(
                Axis(name=name, kind="dense_variable", parent=self.row.parent, length=axis.nnz,
                     nnz=axis.nnz, indptr=ptr, idtype=self.idtype)
            )  # fmt: skip
        return out

    def _under_positions(self) -> dict[str, Axis]:
        out: dict[str, Axis] = {}
        above = {self.column.name: self.positions}
        for axis in [a for a in self.func.axes if a.parent is not None]:
            if axis.parent.name in above:
                names = ("kind", "length", "nnz", "nnz_cols", "indptr", "indices", "unique")
                fields = {name: getattr(axis, name) for name in names}
                out[axis.name] = self.axis(axis.name, parent=above[axis.parent.name], **fields)
                above[axis.name] = out[axis.name]
        return out

    def bound(self, name: str, axes: list[Axis], handle: Any) -> SparseBuffer:
        """A buffer of integers over some axes."""
        var = buffer_var([a.length for a in axes], self.idtype, self._buffer_name(name))
        self.buffers.append(SparseBuffer(var=var, axes=axes, handle=handle))
        return self.buffers[-1]

    def table(self, name: str, axes: list[Axis], recipe: str, **how: Any) -> SparseBuffer:
        """A buffer over some axes of what a recipe makes, a new parameter."""
        lower = fresh_name(self.func, name.lower())
        handle = ir.Var(lower, ir.PointerType(ir.PrimType("void")))
        self.params.append(handle)
        self.computed[lower] = {"recipe": recipe, **how}
        return self.bound(name, axes, handle)

    def rewritten(self, tree: Any, at: Any, coordinates: list[Any]) -> Any:
        """A statement at another position, and at the coordinates of its element."""

        def indices(node: Any, buffer: Any) -> list[Any]:
            old = next(b for b in self.func.buffers if b.var.same_as(buffer))
            first = [a.name for a in old.axes or ()].index(self.row.name)
            return [*node.indices[:first], at, *node.indices[first + len(self.path) :]]

        def load(node: Any) -> Any:
            if node.source not in self.moved:
                return node
            return tirx.BufferLoad(self.moved[node.source].var, indices(node, node.source))

        def store(node: Any) -> Any:
            if node.buffer not in self.moved:
                return node
            where = indices(node, node.buffer)
            return tirx.BufferStore(self.moved[node.buffer].var, node.value, where)

        tree = map_expr(tree, [(ir.TensorLoad, load), (tirx.BufferStore, store)])
        return substitute(tree, dict(zip(self.over, coordinates, strict=True)))

    def moved_function(self) -> SparseFunc:
        """The function with its buffers over positions, and what is computed."""
        buffers = [self.moved.get(b.var, b) for b in self.func.buffers]
        axes = [a for a in self.func.axes if a.name not in self.below]
        return self.func.replace(axes=axes, buffers=buffers).with_attr("computed", self.computed)

    def _buffer_name(self, wish: str) -> str:
        name, taken = fresh_name(self.func, wish), {b.name for b in self.buffers}
        return name if name not in taken else self._name(wish, [*taken])

    def _moved_buffers(self) -> dict[Any, SparseBuffer]:
        """By its variable, each buffer over all axes as one over positions."""
        out: dict[Any, SparseBuffer] = {}
        path = [a.name for a in self.path]
        below = len(path) - 1
        for b in self.func.buffers:
            names = [a.name for a in b.axes or ()]
            if self.column.name not in names:
                continue
            at = names.index(self.column.name) - below
            if names[max(at, 0) : at + len(path)] != path or any(
                a.parent is not None and a.parent.name == self.column.name
                for a in b.axes or ()
                if a.name not in self.below
            ):
                self.refuse(
                    f"buffer '{b.name}' over {names} does not lie over the elements of {path} alone"
                )
            rest = [self.below.get(a.name, a) for a in (b.axes or ())[at + len(path) :]]
            axes = [*(b.axes or ())[:at], self.positions, *rest]
            scope = b.var.ty.storage_scope
            var = buffer_var([a.length for a in axes], b.dtype, b.name, scope)
            out[b.var] = SparseBuffer(var=var, axes=axes, handle=b.handle)
            self._refuse_accesses(b, at)
        return out

    def _refuse_accesses(self, buffer: SparseBuffer, at: int) -> None:
        """Refuse accesses of a buffer over all axes that are not at the element visited."""
        here = [self.it.body, *([] if self.it.init is None else [self.it.init])]
        accesses = [list(x.indices) for part in here for x in accesses_of(part, buffer.var)]
        if len(accesses) != len(accesses_of(self.func.body, buffer.var)):
            self.refuse(f"buffer '{buffer.name}' is accessed outside of this iteration too")
        for indices in accesses:
            if not same_indices(indices[at : at + len(self.path)], self.over):
                self.refuse(
                    f"buffer '{buffer.name}' is accessed at {indices}, which is not the element "
                    "visited"
                )
