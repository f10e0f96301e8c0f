"""Visit the stored elements of fused axes by their positions (Senanayake's thesis, chapter 5).

Before, where the row of each nonzero is searched for::

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

Arrays of values are unchanged: buffers over these axes lie over the positions. The row of each
element is a computed parameter, so kernels are called as before.
If each row reduces its own elements, as in SpMM, visits of the loop update rows that other visits
update as well, and the init is an iteration of its own, since rows without elements need it too::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0.0
    with T.sp_iter([I_J, K], "SS", "spmm") as [ij, k]:
        C[I_at[ij], k] = C[I_at[ij], k] + A[ij] * B[J_at[ij], k]

Axes below the last one are then below the positions. TTM over the fibers of a tensor in CSF,
`sp_iter([I, J, K, L], "SSRS")`, has the form of SpMM after `positions(i_j)`::

    I_J_K = T.sparse_variable(I_J, (p, nnz_k), (k_ptr, k_idx))
    with T.sp_iter([I_J, I_J_K, L], "SRS", "ttm") as [ij, k, l]:
        Y[ij, l] = Y[ij, l] + A[ij, k] * B[k, l]

Axes of more levels, such as those of a tensor in CSF, are visited the same way, with arrays for the
coordinates of each level. Levels below a visited one become one: MTTKRP,
`sp_iter([I, K, L, J], "SRRS")`, has no loop over fibers after `positions(k_l)`::

    K_L = T.dense_variable(I, (nnz_l, nnz_l), K_L_ptr)
    with T.sp_iter([I, K_L, J], "SRS", "mttkrp") as [i, kl, j]:
        A[i, j] = A[i, j] + B[i, kl] * D[L_at[i, kl], j] * C[K_at[i, kl], j]

With rows="search" kernels do not read the rows from a table: at the start of a loop over positions
that runs on one thread, the row is searched for in `indptr`, and then carried. The program is the
same except for an attribute, and the offsets as a buffer::

    T.func_attr({"computed": {..}, "rows": {"I_at": {"from": "search"}}})
    J_ptr = T.match_sparse_buffer(indptr, [I_J_bounds], "int32")

With rows="blocks" the threads of a block search between the rows where it and the next block begin,
a table with a row per block, which `parallelize(.., "block")` adds (TACO's `i_blockStarts`). See
:mod:`sparsetir.sparse_ir.schedule.block_starts`.

Slots of rows of equal width are counted, over all rows or in each row. Rows follow by
division, and slots that may be padding are guarded. Before, with
`J = T.sparse_fixed(I, (n, slots), indices)`::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `positions(j)`, a loop over a dense axis, which `split` cuts with any kind of tail::

    J_slots = T.dense_fixed(slots)
    with T.sp_iter([I, J_slots, K], "SRS", "spmm") as [i, j, k]:
        if J_at[i, j] >= 0:
            C[i, k] = C[i, k] + A[i, j] * B[J_at[i, j], k]

With `parts` the columns are cut into as many ranges, and all elements of a range are visited before
those of the next, so that operands read by column stay in cache. The order is a computed parameter
too, and so are both coordinates in this order: `Out[I_J_order[ij]]`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    SparseBuffer,
    SparseFunc,
    flat_axes,
    sparse_iterations,
)
from sparsetir.sparse_ir.recipes.general import in_order, order_by_column_parts, row_of_position
from sparsetir.sparse_ir.rows import ROWS, ROWS_FROM
from sparsetir.sparse_ir.schedule.loops import Change, Loop, SpIter, change_of
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.visit_order import ElementOrder, load
from sparsetir.sparse_ir.tir import as_dtype, conjunction, free_vars, is_one, slots_of

NAME = "positions"


@primitive(reorders=True)
def positions(
    func: SparseFunc,
    loop: SpIter,
    *,
    parts: int | str | None = None,
    default: int | dict[str, Any] = 16,
    rows: str = "table",
) -> tuple[SparseFunc, SpIter]:
    """Visit the elements of fused axes by position.

    Parameters
    ----------
    loop : SpIter
        A loop over a dense axis fused with sparse_variable axes, each under the one before, all
        spatial, all reductions, or a reduction below the dense one; or over sparse_variable axes
        alone, all of one kind, below a visited one; or likewise over sparse_fixed axes. No other
        iteration visits the last of them.
    parts : int or str, optional
        The number of ranges of columns to visit one after another; None for the order of storage.
        A name makes it a computed parameter, as in `divide`.
    default : int or dict
        The number of parts unless the plan overrides it, or a recipe for it, as in the function
        attribute "computed".
    rows : {"table", "search", "blocks"}
        Where kernels find the row of an element: "table", one for all elements; "search", in the
        offsets of rows; "blocks", there between the rows where thread blocks begin. All but the
        first require the order of storage. Slots need no rows, and for them `parts` is None.

    Returns
    -------
    SpIter
        The loop.
    """
    change = change_of(NAME, func, loop)
    func, (made,) = _Positions(change, parts is None).run(parts, default, rows)
    return func, made


def slots_counted(caller: str, func: SparseFunc, loop: SpIter) -> tuple[SparseFunc, SpIter]:
    """The function with a loop over slots by position; unchanged for other loops."""
    change = change_of(caller, func, loop)
    (old,) = change.chosen
    if not isinstance(old.node, Axis | FusedAxis) or not _is_slots(flat_axes([old.node])[-1]):
        return func, loop
    func, (made,) = _Positions(change, True).run(None, 1, "table")
    return func, made


def _is_slots(axis: Axis) -> bool:
    return axis.kind == "sparse_fixed"


class _Positions(ElementOrder):
    def __init__(self, change: Change, below: bool) -> None:
        self.tables: list[str] = []  # names of the arrays over positions
        super().__init__(change, _path(change), change.chosen[0].vars, below)
        self.var = tirx.Var("".join(v.name for v in self.old.vars), self.idtype)
        at = {axis.name: var for axis, var, _ in self.it.axis_of()}
        above = [] if self.row.parent is None else self.row.parent.ancestors()
        self.table_axes = [*above, self.positions]  # the axes of these arrays
        if not below and above:
            self.refuse(f"argument 'parts': expected None below '{above[-1].name}'")
        if _is_slots(self.column) and above and self.below:
            self.refuse(
                f"'{next(iter(self.below))}' is below '{self.column.name}'; expected slots that "
                "are fused with a dense axis above, or nothing below"
            )
        self.here = [at[axis.name] for axis in above] + [self.var]

    def run(
        self, parts: int | str | None, default: Any, rows: str
    ) -> tuple[SparseFunc, list[SpIter]]:
        """The rewritten function and the handle of the loop."""
        it, old, order = self.it, self.old, None
        position: Any = self.var
        self._refuse_rows(rows, parts)
        if parts is not None:
            order = self._order(parts, default)
            position = load(order, self.var)
        fields: dict[str, Any] = {}
        coordinates, stored = (
            self._slot_coordinates() if _is_slots(self.column) else self._row_coordinates(order)
        )
        if stored:
            fields["body"] = tirx.IfThenElse(conjunction(stored), it.body, None)
        if rows != "table":
            self._find_rows(rows)
        unknown = [tirx.Var(v.name, v.ty.dtype) for v in old.vars]
        init = None if it.init is None else self.rewritten(it.init, position, unknown)
        # An init that uses the coordinates runs for all of them, not only for stored ones.
        if init is not None and (len(set(old.kinds)) > 1 or free_vars(init) & {*unknown}):
            fields |= {"before": self.split_init(), "init": None}
        elif init is not None and stored and old.kinds[0] == "S":
            fields["init"] = tirx.IfThenElse(conjunction(stored), it.init, None)
        new = [Loop(self.positions, [self.var], old.kinds[0])]
        loops = [self._moved_loop(loop) for loop in self.with_loops(*new)]
        return self.by_positions(new, loops, position, coordinates, **fields)

    def _moved_loop(self, loop: Loop) -> Loop:
        """A loop over an axis that is now below the positions."""
        if isinstance(loop.node, Axis) and loop.name in self.below:
            return Loop(self.below[loop.name], loop.vars, loop.kinds)
        if set(loop.axes) & set(self.below):
            self.refuse(
                f"'{loop.name}' is below '{self.column.name}'; expected a loop over one axis"
            )
        return loop

    def _slot_coordinates(self) -> tuple[list[Any], list[Any]]:
        """The coordinates of the slot at a position, and the guards against padding."""
        coordinates: list[Any] = []
        stored: list[Any] = []
        position: Any = self.var
        facts = known(self.func)
        for level, axis in enumerate(reversed(self.path)):
            coordinate = as_dtype(position, axis.idtype)
            if axis.is_sparse and axis.name not in facts.counted:
                over = self.positions
                if level:
                    over = self.dense(f"{axis.name}_all", slots_of(self.path[:-level], self.idtype))
                places = [*self.table_axes[:-1], over]
                table = self.bound(f"{axis.name}_at", places, axis.indices, axis.idtype)
                coordinate = load(table, *self.here[:-1], position)
                if axis.name not in facts.filled:
                    stored.insert(0, coordinate >= 0)
            coordinates.insert(0, coordinate)
            if axis.is_sparse:
                position = tirx.floordiv(position, as_dtype(axis.nnz_cols, self.idtype))
        return coordinates, stored

    def _row_coordinates(self, order: SparseBuffer | None) -> tuple[list[Any], list[Any]]:
        """The coordinates of the element at a position, without conditions."""
        return [load(b, *self.here) for b in self._levels(order)], []

    def _levels(self, order: SparseBuffer | None) -> list[SparseBuffer]:
        """The coordinates of each level: buffers over the positions of the last one.

        order : the positions in the order of visits, as `in_order` takes it; None for storage order
        """
        *above, last = self.path
        which: dict[str, Any] = {} if order is None else {"order": order}
        visited, below = which, last
        held: list[SparseBuffer] = []
        for axis in reversed(above):
            what = "position" if axis.is_sparse else "at"
            table = self._coordinates(axis, what, row_of_position, indptr=below.indptr, **which)
            which, below = {"order": table}, axis
            if axis.is_sparse:
                table = self._coordinates(axis, "at", in_order, values=axis.indices, **which)
            held.insert(0, table)
        if order is None:
            return [*held, self.bound(f"{last.name}_at", self.table_axes, last.indices)]
        return [*held, self._coordinates(last, "at", in_order, values=last.indices, **visited)]

    def _refuse_rows(self, rows: str, parts: Any) -> None:
        if rows not in ROWS_FROM:
            legal = " or ".join(f'"{word}"' for word in ROWS_FROM)
            self.refuse(f"argument 'rows': expected {legal}, got {rows!r}")
        if _is_slots(self.column) and (parts is not None or rows != "table"):
            name, value = ("rows", rows) if parts is None else ("parts", parts)
            self.refuse(f"argument '{name}': expected the default for slots, got {value!r}")
        if rows == "table":
            return
        if self.row.is_sparse:
            self.refuse(
                f"argument 'rows': expected \"table\" below '{self.table_axes[-2].name}', whose "
                f"elements have '{self.row.name}' by number, got {rows!r}"
            )
        if parts is not None:
            self.refuse(
                f"argument 'rows': expected \"table\" with parts = {parts!r}, in whose order "
                f"rows do not follow each other, got {rows!r}"
            )
        names = {a.name for a in self.path[1:]}
        for other in sparse_iterations(self.func):
            both = names & {a.name for a in flat_axes(other.axes)}
            for name in both if other.name != self.it.name else []:
                self.refuse(
                    f"argument 'rows': expected \"table\", as sp_iter '{other.name}' visits "
                    f"'{name}' too, got {rows!r}"
                )

    def _find_rows(self, rows: str) -> None:
        """Bind the arrays that rows are found in, and set the attribute."""
        for axis in self.path[1:]:
            self.offsets(axis, f"{axis.name}_bounds")
            if axis is not self.column:
                each = self.dense(f"{axis.name}_each", axis.nnz)
                self.bound(f"{axis.name}_idx", [each], axis.indices)
        said = {name: {"from": rows} for name in self.tables}
        self.func = self.func.with_attr(ROWS, {**dict(self.func.attrs.get(ROWS, {})), **said})

    def _order(self, parts: int | str, default: Any) -> SparseBuffer:
        """The position visited at each place of the order."""
        self.check_count("parts", parts, or_name=True)
        if not isinstance(default, dict):
            self.check_count("default", default)
        column, count = self.column, self.choice(parts, default)
        arrays = {"indices": column.indices, "n": column.length, "parts": count}
        return self._coordinates(self.positions, "order", order_by_column_parts, **arrays)

    def _coordinates(self, of: Axis, what: str, recipe: Any, **how: Any) -> SparseBuffer:
        """A computed array over the positions."""
        table = self.table(f"{of.name}_{what}", self.table_axes, recipe, **how)
        self.tables.append(table.name)
        return table


def _path(change: Change) -> list[Axis]:
    """The axes of a loop: rows and levels under them, or levels under a visited row."""
    (loop,) = change.chosen
    node, axes = loop.node, flat_axes([loop.node])
    root, *levels = axes
    below_one = root.is_sparse
    kinds = {a.kind for a in (axes if below_one else levels)}
    fits = isinstance(node, FusedAxis) or isinstance(node, Axis) and _is_slots(node)
    fits = fits and (below_one or root.kind == "dense_fixed")
    fits = fits and (kinds == {"sparse_fixed"} or kinds == {"sparse_variable"})
    if not fits or any(b.parent.name != a.name for a, b in zip(axes, levels, strict=False)):
        change.refuse(
            "expected a loop over a dense axis fused with sparse_variable axes, or with "
            "sparse_fixed ones, each under the one before, or over these alone, got "
            f"'{loop.name}'; sparse_fuse makes such a loop"
        )
    kinds = set(loop.kinds)
    slots = _is_slots(axes[-1])
    if len(kinds) > 1 and ("RS" in loop.kinds or not slots and (below_one or "SS" in loop.kinds)):
        change.refuse(
            "expected axes of one kind, or a reduction below the first of them where that is "
            f"dense, got '{loop.kinds}' for '{loop.name}'"
        )
    if slots and below_one and len(axes) > 1 and is_one(root.parent.length):
        change.refuse(f"expected '{root.parent.name}', of one coordinate, to be fused with these")
    if below_one:
        visited = {a.name for a in flat_axes(change.it.axes)}
        for axis in root.parent.ancestors():
            if axis.name not in visited:
                change.refuse(f"expected '{axis.name}', above '{root.name}', to be visited too")
    return axes
