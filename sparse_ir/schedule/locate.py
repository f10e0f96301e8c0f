"""Find elements of a row in a table instead of by co-iteration or by search.

Before, with a pointer into each of two rows, for each j::

    with T.sp_iter([I, J, T.intersect(T.attach(K2, J), K1)], "SRR", "sums") as [i, j, k]:
        C[i] = C[i] + G[i, j] * A[j, k] * B[i, k]

After `locate(k)` the row of B is in a table, which all j read::

    with T.sp_iter([K1_all], "S", "K1_clear") as [k]:
        K1_at[k] = -1
        B_row[k] = 0.0
    with T.sp_iter([I], "S", "sums") as [i]:
        with T.sp_iter([K1], "S", "K1_fill") as [k]:
            K1_at[k] = i
            B_row[k] = B[i, k]
        with T.sp_iter([J, T.attach(K2, J)], "RR", "sums_rest") as [j, k]:
            C[i] = C[i] + T.Select(K1_at[k] == i, G[i, j] * A[j, k] * B_row[k], 0.0)

The same for rows that are searched, such as that of B in::

    with T.sp_iter([I, J, T.attach(K2, J)], "SRR", "sums") as [i, j, k]:
        C[i] = C[i] + G[i, j] * A[j, k] * B[i, k]

where B[i, k] becomes T.Select(K1_at[k] == i, B_row[k], 0.0).

The table is cleared once: what other rows have left in it has their mark. (Gustavson, "Two fast
algorithms for sparse matrices", whose array of marks serves sums; Kjolstad et al., "Sparse tensor
algebra with workspaces".)
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    flat_axes,
    loads_of,
    nodes_of,
    same_indices,
    stores_of,
    visited_node,
)
from sparsetir.sparse_ir.reduction import add_guards, masked, reduction_of
from sparsetir.sparse_ir.schedule.copies import reading
from sparsetir.sparse_ir.schedule.loops import (
    Change,
    Loop,
    SparseIterationRef,
    SpIter,
    change_of,
    changed,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.steps import Steps
from sparsetir.sparse_ir.tir import as_dtype, as_one, zero
from sparsetir.sparse_ir.traversal import map_expr


@primitive
def locate(
    func: SparseFunc, loop: SpIter, at: SpIter | None = None
) -> tuple[SparseFunc, list[SparseIterationRef]]:
    """Find elements of a row in a table instead of by co-iteration or by search.

    Parameters
    ----------
    loop : SpIter
        A loop over the intersection of two axes, one under a root axis of an outer loop, the other
        under a loop between these. Or one, with a loop between, at whose coordinates the body reads
        a buffer over a root axis of an outer loop and an axis under it that no loop visits.
    at : SpIter, optional
        A loop around that root's, whose visits have tables of their own, as threads need; by
        default there is one before the iteration.

    Returns
    -------
    list of SparseIterationRef
        The iterations that clear the table, that fill it with a row, and that read it.
    """
    located = _Located(change_of("locate", func, loop, *([at] if at is not None else [])))
    return located.run()


class _Located(Steps):
    """A loop whose visits look elements of a row up, with the loops around it.

    place : its place
    around : the number of loops around those whose visits share a table
    row, table : the place of the loop over its parent, and the axis whose elements are found
    probe : the axis that is iterated: the other member of an intersection, or the loop's
    """

    def __init__(self, change: Change) -> None:
        super().__init__(change)
        self.place, *at = self.places
        if nodes_of(SparseIteration, self.it.body):
            self.refuse("expected an iteration without nested ones")
        self.around = at[0] + 1 if at else 0
        node = self.chosen[0].node
        self.searched = not isinstance(node, Axis) or node.kind != "intersect" or len(node.of) != 2
        if self.searched:
            self.row, self.table, self.probe = *self._searched(), node
        else:
            self.row, self.table, self.probe = self._members(list(node.of))

    def _searched(self) -> tuple[int, Axis]:
        """The place of the loop over the rows that the body searches, and the axis under these."""
        names = [getattr(visited_node(x.node), "name", None) for x in self.loops[: self.place]]
        (column,) = flat_axes([self.loops[self.place].node])[:1]
        visited = {name for loop in self.loops for name in loop.axes}
        for buffer in self.func.buffers:
            axes = buffer.axes or ()
            if len(axes) != 2 or not loads_of(self.it.body, buffer.var):
                continue
            root, table = axes
            free = table.parent is not None and table.parent.name == root.name in names
            free = free and root.parent is None and table.unique and table.name not in visited
            same = table.idtype == column.idtype
            same = same and tvm_ffi.structural_equal(table.length, column.length)
            if free and same and self.around <= names.index(root.name) < self.place - 1:
                return names.index(root.name), table
        self.refuse(
            "expected a loop over an intersection of two axes, or one at whose coordinates rows of "
            f"an outer loop are read, with a loop between, got '{self.chosen[0].name}'"
        )

    def _members(self, members: list[Any]) -> tuple[int, Axis, Any]:
        """The place of the loop over the table's parent, the table's axis, and the other one."""
        names = [getattr(visited_node(x.node), "name", None) for x in self.loops[: self.place]]
        for table, probe in (members, members[::-1]):
            parent = table.parent if isinstance(table, Axis) else None
            if isinstance(table, Axis) and table.is_sparse and parent and parent.name in names:
                row = names.index(parent.name)
                below = probe.to if not isinstance(probe, Axis) else probe.parent
                deep = below is not None and below.name in names[row + 1 :]
                unique = table.unique and flat_axes([probe])[0].unique
                if parent.parent is None and deep and self.around <= row and unique:
                    return row, table, probe
        self.refuse(
            "expected one axis of the intersection under a root that an outer loop visits, inside "
            "of 'at', and the other one under a loop between them"
        )

    def _rows(self) -> list[SparseBuffer]:
        """The buffers over the table's rows that the body reads."""
        row, column = self.loops[self.row], self.loops[self.place]
        written = [store.buffer for store in stores_of(self.it.body, self.it.init)]
        out = []
        for buffer in self.func.buffers:
            if self.table.name not in [a.name for a in buffer.axes or ()]:
                continue
            if any(buffer.var.same_as(other) for other in written):
                self.refuse(
                    f"expected '{buffer.name}', which has the rows of the table, to be read"
                )
            loads = loads_of(self.it.body, buffer.var)
            if not loads:
                continue
            if any(not same_indices(x.indices, [row.var, column.var]) for x in loads):
                self.refuse(f"expected '{buffer.name}' to be read at the row and the coordinate")
            out.append(buffer)
        return out

    def run(self) -> tuple[SparseFunc, list[SparseIterationRef]]:
        """The rewritten function and its handles."""
        table, row, column = self.table, self.loops[self.row], self.loops[self.place]
        size = {"length": table.length, "idtype": table.idtype}
        whole = Axis(name=fresh_name(self.func, f"{table.name}_all"), kind="dense_fixed", **size)
        self.axes.append(whole)
        clear, fill = (tirx.Var(column.var.name, table.idtype) for _ in range(2))
        dtype, body = row.var.ty.dtype, self.it.body
        marks = self._array(whole, f"{table.name}_at", dtype)
        none = [tirx.BufferStore(marks, as_dtype(-1, dtype), [clear])]
        stores = [tirx.BufferStore(marks, row.var, [fill])]
        rows: list[Any] = []
        for buffer in self._rows():
            held = self._array(whole, f"{buffer.name}_row", buffer.dtype)
            rows.append(held)
            # Cleared, too, so that threads may be proven to read what they have written.
            none.append(tirx.BufferStore(held, tirx.const(0, buffer.dtype), [clear]))
            value = tirx.BufferLoad(buffer.var, [row.var, fill])
            stores.append(tirx.BufferStore(held, value, [fill]))
            body = reading(body, buffer, held, [column.var])
        clearing = self._over(whole, clear, f"{table.name}_clear", none)
        filling = self._over(table, fill, f"{table.name}_fill", stores)
        present = tirx.EQ(tirx.BufferLoad(marks, [column.var]), row.var)
        reduction = reduction_of(body)
        if self.searched:
            body = _or_zero(body, present, rows)
        elif reduction is not None and not reduction.conditions:
            body = masked(reduction, present)
        else:
            body = add_guards([present], body)
        inner = [*self.loops[self.row + 1 :]]
        inner[self.place - self.row - 1] = Loop(self.probe, column.vars, column.kinds)
        rest = changed(self.it, inner, name=self.name("rest"), init=None, body=body)
        outer, shared = self.loops[: self.around], self.loops[self.around : self.row + 1]
        name = self.name("rows") if outer else str(self.it.name)
        visit = changed(self.it, shared, name=name, init=None, body=tirx.SeqStmt([filling, rest]))
        before = self.split_init() if self.it.init is not None else []
        out = self.put_steps(outer, [clearing, visit], before)
        return out, [SparseIterationRef(x.name) for x in (clearing, filling, rest)]

    def _array(self, axis: Axis, name: str, dtype: str) -> Any:
        var = buffer_var([axis.length], dtype, fresh_name(self.func, name))
        self.buffers.append(SparseBuffer(var=var, axes=[axis], handle=None))
        return var

    def _over(self, axis: Axis, var: Any, name: str, stores: list[Any]) -> SparseIteration:
        return SparseIteration(
            span=self.it.span, axes=[axis], kinds="S", name=fresh_name(self.func, name), vars=[var],
            init=None, body=as_one(stores), annotations={},
        )  # fmt: skip


def _or_zero(stmt: Any, present: Any, rows: list[Any]) -> Any:
    """A statement that reads zeros from rows where a condition does not hold."""

    def load(node: Any) -> Any:
        held = any(node.source.same_as(row) for row in rows)
        return tirx.Select(present, node, zero(str(node.ty.dtype))) if held else node

    return map_expr(stmt, [(ir.TensorLoad, load)])
