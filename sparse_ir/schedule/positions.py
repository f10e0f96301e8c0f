"""Go through the stored elements of fused axes by their positions (Senanayake's thesis, chapter 5).

Before, where the row of each non-zero is searched for::

    with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]:
        Out[i, j] = Out[i, j] + X[i, k] * Y[j, k]

After `positions(i_j)`, a loop over a dense axis, with coordinates from arrays::

    T.func_attr({"computed": {"i_at": {"recipe": "row_of_position", "indptr": "$indptr"}}})
    I_J = T.dense_fixed(nnz)
    I_at = T.match_sparse_buffer(i_at, [I_J], "int32")
    J_at = T.match_sparse_buffer(indices, [I_J], "int32")
    Out = T.match_sparse_buffer(out, [I_J], "float32")
    with T.sp_iter([I_J, K], "SR", "sddmm") as [ij, k]:
        Out[ij] = Out[ij] + X[I_at[ij], k] * Y[J_at[ij], k]

Values are the arrays that they were: buffers over these axes lie over the positions. The row of
each element is a computed parameter, so kernels are called as before.

With `parts` the columns are cut into as many ranges, and all elements of a range are visited before
those of the next, so that what is read by columns stays in cache. The order is a computed parameter
too, and so are both coordinates in this order: `Out[I_J_order[ij]]`.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    accesses_of,
    buffer_var,
    flat_axes,
    map_expr,
    same_indices,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.schedule.cuts import Cut
from sparsetir.sparse_ir.schedule.handles import SpIter
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    changed,
    fresh_name,
    handle_of,
    iteration_of,
    loops_of,
    place_of,
    replaced,
)

__all__ = ["positions"]

WHO = "positions"


def positions(
    func: SparseFunc,
    loop: SpIter,
    *,
    parts: int | str | None = None,
    default: int | dict[str, Any] = 16,
) -> tuple[SparseFunc, SpIter]:
    """The function with a loop over the positions of fused axes, and its handle.

    loop : over a dense axis fused with a sparse_variable axis under it, both spatial or both
        reductions, which no other iteration visits
    parts : ranges of columns that are gone through one after the other; None for the order of
        storage. A name makes their number a computed parameter, as in `divide`
    default : the number of parts where whoever makes a plan does not say another, or the recipe of
        one, as in the function attribute "computed"
    """
    it = iteration_of(WHO, func, loop)
    place = place_of(WHO, func, it, loop)
    return _Positions(func, it, place).run(parts, default)


class _Positions(Cut):
    def __init__(self, func: SparseFunc, it: SparseIteration, place: int) -> None:
        super().__init__(WHO, func, it, loops_of(it)[place])
        self.place, self.old = place, self.loop
        self.arrays: list[SparseBuffer] = []
        self.row, self.column = self._path()
        name = fresh_name(func, self.old.name)
        column = self.column
        self.positions = Axis(
            name=name, kind="dense_fixed", length=column.nnz, idtype=column.idtype
        )
        self.var = tirx.Var("".join(v.name for v in self.old.vars), self.idtype)

    def run(self, parts: int | str | None, default: Any) -> tuple[SparseFunc, SpIter]:
        """The rewritten function and the handle of the loop."""
        row, column, it = self.row, self.column, self.it
        rows: dict[str, Any] = {"recipe": "row_of_position", "indptr": f"${column.indptr.name}"}
        at: Any = self.var
        if parts is None:
            held = self._coordinates(row, "at", rows), self._bound(column, "at", column.indices)
        else:
            order = self._order(self._parts(parts, default))
            given = f"${order.handle.name}"
            columns = {
                "recipe": "in_order", "values": f"${column.indices.name}", "order": given
            }  # fmt: skip
            held = (
                self._coordinates(row, "at", {**rows, "order": given}),
                self._coordinates(column, "at", columns),
            )
            at = tirx.BufferLoad(order.var, [self.var])
        coordinates = [tirx.BufferLoad(b.var, [self.var]) for b in held]
        moved = self._moved_buffers()
        new = Loop(self.positions, [self.var], self.old.kinds[0])
        loops = loops_of(it)
        iteration = changed(
            it,
            [*loops[: self.place], new, *loops[self.place + 1 :]],
            init=None if it.init is None else self._rewritten(it.init, moved, at, coordinates),
            body=self._rewritten(it.body, moved, at, coordinates),
        )
        buffers = [moved.get(b.var, b) for b in self.func.buffers]
        func = self.func.replace(buffers=buffers).with_attr("computed", self.computed)
        out = replaced(
            WHO, func, it, iteration, axes=[self.positions], buffers=self.arrays,
            params=self.params, trusted=False,
        )  # fmt: skip
        return out, handle_of(it, new)

    def _path(self) -> tuple[Axis, Axis]:
        """The axes of the loop: rows and columns."""
        axes, node = flat_axes([self.old.node]), self.old.node
        fits = (
            isinstance(node, FusedAxis)
            and len(axes) == 2
            and axes[0].kind == "dense_fixed"
            and axes[1].kind == "sparse_variable"
            and axes[1].parent.name == axes[0].name
        )
        if not fits:
            self.refuse(
                "expected a loop over a dense axis fused with a sparse_variable axis under it, got "
                f"'{self.old.name}'; sparse_fuse makes such a loop"
            )
        if len(set(self.old.kinds)) > 1:
            self.refuse(
                f"expected axes of one kind, got '{self.old.kinds}' for '{self.old.name}'; divide "
                "cuts such a loop at rows, or at positions"
            )
        column = axes[1]
        for other in sparse_iterations(self.func):
            if other.name != self.it.name and column.name in {
                a.name for a in flat_axes(other.axes)
            }:
                self.refuse(
                    f"sp_iter '{other.name}' visits '{column.name}' too; expected it to be visited "
                    "here alone"
                )
        return axes[0], column

    def _moved_buffers(self) -> dict[Any, SparseBuffer]:
        """By its variable, each buffer over both axes as one over positions."""
        out: dict[Any, SparseBuffer] = {}
        pair = [self.row.name, self.column.name]
        for b in self.func.buffers:
            names = [a.name for a in b.axes or ()]
            if self.column.name not in names:
                continue
            at = names.index(self.column.name) - 1
            if names[at : at + 2] != pair or any(
                a.parent is not None and a.parent.name == self.column.name for a in b.axes or ()
            ):
                self.refuse(
                    f"buffer '{b.name}' over {names} does not lie over the elements of {pair} alone"
                )
            axes = [*(b.axes or ())[:at], self.positions, *(b.axes or ())[at + 2 :]]
            scope = b.var.ty.storage_scope
            var = buffer_var([a.length for a in axes], b.dtype, b.name, scope)
            out[b.var] = SparseBuffer(var=var, axes=axes, handle=b.handle)
            self._refuse_accesses(b, at)
        return out

    def _refuse_accesses(self, buffer: SparseBuffer, at: int) -> None:
        """Refuse accesses of a buffer over both axes that are not at the element visited."""
        here = [self.it.body, *([] if self.it.init is None else [self.it.init])]
        accesses = [list(x.indices) for part in here for x in accesses_of(part, buffer.var)]
        if len(accesses) != len(accesses_of(self.func.body, buffer.var)):
            self.refuse(f"buffer '{buffer.name}' is accessed outside of this iteration too")
        for indices in accesses:
            if not same_indices(indices[at : at + 2], self.old.vars):
                self.refuse(
                    f"buffer '{buffer.name}' is accessed at {indices}, which is not the element "
                    "visited"
                )

    def _rewritten(self, tree: Any, moved: Any, at: Any, coordinates: list[Any]) -> Any:
        """A statement with accesses by position, and coordinates that are loaded."""

        def indices(node: Any, buffer: Any) -> list[Any]:
            old = next(b for b in self.func.buffers if b.var.same_as(buffer))
            first = [a.name for a in old.axes or ()].index(self.row.name)
            return [*node.indices[:first], at, *node.indices[first + 2 :]]

        def load(node: Any) -> Any:
            if node.source not in moved:
                return node
            return tirx.BufferLoad(moved[node.source].var, indices(node, node.source))

        def store(node: Any) -> Any:
            if node.buffer not in moved:
                return node
            where = indices(node, node.buffer)
            return tirx.BufferStore(moved[node.buffer].var, node.value, where)

        tree = map_expr(tree, [(ir.TensorLoad, load), (tirx.BufferStore, store)])
        return substitute(tree, dict(zip(self.old.vars, coordinates, strict=True)))

    # -- declarations -------------------------------------------------------------------------

    def _order(self, parts: Any) -> SparseBuffer:
        """The position that is visited at each place of the order."""
        how = {
            "recipe": "order_by_column_parts", "indices": f"${self.column.indices.name}",
            "n": self.named(self.column.length), "parts": parts,
        }  # fmt: skip
        return self._coordinates(self.positions, "order", how)

    def _parts(self, parts: int | str, default: Any) -> Any:
        """The number of parts as a recipe takes it."""
        if isinstance(parts, str) and parts.isidentifier():
            how = {"recipe": "number", "value": default} if isinstance(default, int) else default
            made = self.number(parts, how, exactly=True)
            return self.named(made)
        if isinstance(parts, bool) or not isinstance(parts, int) or not 0 < parts < 2**31:
            self.refuse(f"argument 'parts': expected a positive integer or a name, got {parts!r}")
        return parts

    def _coordinates(self, of: Axis, what: str, how: dict[str, Any]) -> SparseBuffer:
        """A computed array over the positions."""
        name = fresh_name(self.func, f"{of.name}_{what}".lower())
        handle = ir.Var(name, ir.PointerType(ir.PrimType("void")))
        self.params.append(handle)
        self.computed[name] = how
        return self._bound(of, what, handle)

    def _bound(self, of: Axis, what: str, handle: Any) -> SparseBuffer:
        """A buffer over the positions, of coordinates."""
        name = fresh_name(self.func, f"{of.name}_{what}")
        var = buffer_var([self.positions.length], self.positions.idtype, name)
        self.arrays.append(SparseBuffer(var=var, axes=[self.positions], handle=handle))
        return self.arrays[-1]
