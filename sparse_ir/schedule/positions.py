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

from tvm import tirx

from sparsetir.sparse_ir.computed import in_order, order_by_column_parts, row_of_position
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    flat_axes,
)
from sparsetir.sparse_ir.schedule.cuts import Cut
from sparsetir.sparse_ir.schedule.elements import Elements
from sparsetir.sparse_ir.schedule.handles import SpIter
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    changed,
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


class _Positions(Elements):
    def __init__(self, func: SparseFunc, it: SparseIteration, place: int) -> None:
        self.place, self.old = place, loops_of(it)[place]
        row, column = _path(Cut(WHO, func, it, self.old), self.old)
        super().__init__(WHO, func, it, self.old, row, column, self.old.vars)
        self.var = tirx.Var("".join(v.name for v in self.old.vars), self.idtype)

    def run(self, parts: int | str | None, default: Any) -> tuple[SparseFunc, SpIter]:
        """The rewritten function and the handle of the loop."""
        row, column, it = self.row, self.column, self.it
        rows: dict[str, Any] = {"indptr": f"${column.indptr.name}"}
        at: Any = self.var
        if parts is None:
            held = (
                self._coordinates(row, "at", row_of_position, **rows),
                self.bound(f"{column.name}_at", [self.positions], column.indices),
            )
        else:
            order = self._order(self._parts(parts, default))
            given = f"${order.handle.name}"
            values = f"${column.indices.name}"
            held = (
                self._coordinates(row, "at", row_of_position, **rows, order=given),
                self._coordinates(column, "at", in_order, values=values, order=given),
            )
            at = tirx.BufferLoad(order.var, [self.var])
        coordinates = [tirx.BufferLoad(b.var, [self.var]) for b in held]
        new = Loop(self.positions, [self.var], self.old.kinds[0])
        loops = loops_of(it)
        iteration = changed(
            it,
            [*loops[: self.place], new, *loops[self.place + 1 :]],
            init=None if it.init is None else self.rewritten(it.init, at, coordinates),
            body=self.rewritten(it.body, at, coordinates),
        )
        out = replaced(
            WHO, self.moved_function(), it, iteration, axes=self.axes, buffers=self.buffers,
            params=self.params, trusted=False,
        )  # fmt: skip
        return out, handle_of(it, new)

    def _order(self, parts: Any) -> SparseBuffer:
        """The position that is visited at each place of the order."""
        column = self.column
        return self._coordinates(
            self.positions, "order", order_by_column_parts,
            indices=f"${column.indices.name}", n=self.named(column.length), parts=parts,
        )  # fmt: skip

    def _parts(self, parts: int | str, default: Any) -> Any:
        """The number of parts as a recipe takes it."""
        if isinstance(parts, str) and parts.isidentifier():
            how = {"recipe": "number", "value": default} if isinstance(default, int) else default
            made = self.number(parts, how, exactly=True)
            return self.named(made)
        if isinstance(parts, bool) or not isinstance(parts, int) or not 0 < parts < 2**31:
            self.refuse(f"argument 'parts': expected a positive integer or a name, got {parts!r}")
        return parts

    def _coordinates(self, of: Axis, what: str, recipe: Any, **how: Any) -> SparseBuffer:
        """A computed array over the positions."""
        return self.table(f"{of.name}_{what}", [self.positions], recipe.__name__, **how)


def _path(cut: Cut, loop: Loop) -> tuple[Axis, Axis]:
    """The axes of a loop: rows and columns."""
    axes, node = flat_axes([loop.node]), loop.node
    fits = (
        isinstance(node, FusedAxis)
        and len(axes) == 2
        and axes[0].kind == "dense_fixed"
        and axes[1].kind == "sparse_variable"
        and axes[1].parent.name == axes[0].name
    )
    if not fits:
        cut.refuse(
            "expected a loop over a dense axis fused with a sparse_variable axis under it, got "
            f"'{loop.name}'; sparse_fuse makes such a loop"
        )
    if len(set(loop.kinds)) > 1:
        cut.refuse(
            f"expected axes of one kind, got '{loop.kinds}' for '{loop.name}'; divide cuts such a "
            "loop at rows, or at positions"
        )
    return axes[0], axes[1]
