"""Cut a loop into a number of parts by the structure (Senanayake's thesis, chapters 5 and 10).

Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:

After `divide(i, 16, by="work")`, sixteen blocks of rows with about as many nonzeros each::

    T.func_attr({"computed": {"I_ptr": {"recipe": "equal_work", "indptr": "$indptr", ...}}})
    I_parts = T.dense_fixed(16)
    I_part = T.dense_variable(I_parts, (m, m), I_ptr)
    with T.sp_iter([I_parts, T.part(I, I_part), J, K], "SSRS", "spmm") as [i_parts, i, j, k]:

Coordinates remain those of the axis, so the body and axes below it do not change. Where parts begin
is a computed parameter: kernels are called as before. Another iteration over the same rows that is
divided the same way shares `I_parts` and `I_part`. After `divide(j, 4, by="coordinates")`, four
ranges of columns, whose elements are contiguous in each row::

    J_parts = T.sparse_fixed(I, (4, 4), J_ids)
    J_part = T.dense_variable(J_parts, (n, nnz), J_ptr)
    with T.sp_iter([I, J_parts, T.part(J, J_part), K], "SRRS", "spmm") as [i, j_parts, j, k]:

A loop over the elements of all rows, fused from a spatial and a reduction axis, becomes three
loops: see :mod:`sparsetir.sparse_ir.schedule.pieces`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_ffi import structural_equal

from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import Axis, PartAxis, SparseFunc, flat_axes
from sparsetir.sparse_ir.recipes.general import column_parts, equal_parts, equal_work
from sparsetir.sparse_ir.recipes.positions import equal_parts_of_rows
from sparsetir.sparse_ir.schedule.cut_space import space_of, without_choice
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    SpIter,
    inside,
    iteration_of,
    loops_of,
    place_of,
    show,
)
from sparsetir.sparse_ir.schedule.pieces import chunk_loops, has_rows_to_carry
from sparsetir.sparse_ir.schedule.positions import slots_counted
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.visit_order import VisitOrder, is_path

NAME = "divide"
BY = ("positions", "work", "coordinates")


@primitive
def divide(
    func: SparseFunc, loop: SpIter, parts: int | str, *, by: str | None = None, cost: int = 2,
    default: int = 16, ahead: str | None = None,
) -> tuple[SparseFunc, list[SpIter]]:  # fmt: skip
    """Cut a loop into parts that follow from the structure.

    Parameters
    ----------
    loop : SpIter
        The loop.
    parts : int or str
        The number of parts, or a name: then the number is a computed parameter of that name, which
        is `default` unless the plan overrides it, and is not compiled in.
    by : {"positions", "work", "coordinates"}, optional
        "positions", parts of equal length; "work", for a root axis parts of equal work, which is
        the elements of each coordinate plus its `cost`, for fused rows and elements likewise;
        "coordinates", ranges of the coordinates of a sparse_variable axis under each parent. By
        default the space that `coord` has chosen, else "positions".
    cost : int
        The cost of a coordinate for "work", in elements.
    default : int
        The number of parts if `parts` is a name and the plan does not override it.
    ahead : str, optional
        For a root axis by work: name of a computed parameter, 0 by default, the extra work of the
        first part, whose thread starts while others wake.

    Returns
    -------
    list of SpIter
        The loop over parts, and the loop within a part.

    Notes
    -----
    Rows and elements fused as "SR" give three loops: chunks, pieces of rows and elements.
    """
    func, loop = slots_counted(NAME, func, loop)
    it = iteration_of(NAME, func, loop)
    chosen = loops_of(it)[place_of(NAME, func, it, loop)]
    if by is None:
        sparse = isinstance(chosen.node, Axis) and chosen.node.is_sparse
        by = space_of(it, chosen) if sparse else "positions"
    if by not in BY:
        raise ScheduleError(
            f"{NAME}: argument 'by': expected one of {', '.join(BY)}, got {by!r}\n{show(it)}"
        )
    division = _Division(NAME, func, it, chosen)
    if isinstance(chosen.node, PartAxis):
        division.refuse(f"'{chosen.name}' is in parts already; divide a part's children, or split")
    division.check_count("parts", parts, or_name=True)
    division.check_count("default", default)
    division.count = division.choice(parts, default)
    division.check_count("cost", cost, least=0)
    if ahead is not None and not (isinstance(ahead, str) and ahead.isidentifier()):
        division.refuse(f"argument 'ahead': expected a name or None, got {ahead!r}")
    if ahead is not None and (by != "work" or has_rows_to_carry(chosen)):
        division.refuse("argument 'ahead': expected None where a root axis is not cut by='work'")
    if by == "coordinates":
        loops = division.by_coordinates()
    elif has_rows_to_carry(chosen):
        loops = chunk_loops(division, division.count, cost if by == "work" else 0)
    elif by == "positions" and division.is_under_a_root():
        loops = division.parts_of_parents(equal_parts_of_rows, indptr=division.last.indptr)
    else:
        loops = division.by_positions(by, cost, ahead)
    return division.instead(loops, annotations=without_choice(it, chosen))


class _Division(VisitOrder):
    count: Any

    def by_positions(self, by: str, cost: int, ahead: str | None) -> list[Loop]:
        """Parts of a root axis, or of fused axes that start at a root."""
        if not is_path(self.loop.node):
            self.refuse(
                f"expected a root axis, or axes fused from a root on, got '{self.loop.name}'; "
                'by="coordinates" cuts the columns of each row'
            )
        size = self.last.length if self.last.kind == "dense_fixed" else self.last.nnz
        if by == "work":
            recipe, how = equal_work, {"indptr": self._children(), "cost": cost}
            if ahead is not None:
                how["ahead"] = self.choice(ahead, 0)
        else:
            recipe, how = equal_parts, {"length": size}
        how["parts"] = self.count
        part = self._declared(self.made(recipe, how), size) if by == "work" else None
        if part is None:
            parts = self.dense("parts", self.count)
            part = self.part(parts, size, size, self.array("ptr", recipe, **how))
        return self._loops(part.parent, part, "S" if "S" in self.loop.kinds else "R")

    def is_under_a_root(self) -> bool:
        """Whether the loop is over one variable axis that is the child of a root."""
        axis = self.loop.node
        return isinstance(axis, Axis) and axis.is_variable and axis.parent.kind == "dense_fixed"

    def by_coordinates(self) -> list[Loop]:
        """Ranges of the coordinates of an axis under its parent."""
        axis = self.loop.node
        if not isinstance(axis, Axis) or axis.kind != "sparse_variable" or not axis.unique:
            self.refuse(
                f'by="coordinates" expects a sparse_variable axis whose coordinates differ, got '
                f"'{self.loop.name}'"
            )
        if axis.parent.kind != "dense_fixed":
            self.refuse(
                f"expected the parent of '{axis.name}' to be a root, got '{axis.parent.name}'"
            )
        return self.parts_of_parents(
            column_parts, indptr=axis.indptr, indices=axis.indices, n=axis.length
        )

    def parts_of_parents(self, recipe: Callable[..., Any], **how: Any) -> list[Loop]:
        """Parts of the elements under each coordinate of a root, equally many for each.

        recipe, how : the recipe of the parts' offsets, without the number of parts
        """
        axis = self.last
        # The offsets first: their recipe refuses more parts of rows than the index type can count.
        ptr = self.array("ptr", recipe, **how, parts=self.count)
        parts = self.counted("parts", axis.parent, self.count)
        part = self.part(parts, axis.length, axis.nnz, ptr)
        return self._loops(parts, part, self.loop.kinds)

    # -- declarations -------------------------------------------------------------------------

    def _declared(self, how: dict[str, Any], size: Any) -> Axis | None:
        """The axis of the same parts, if another iteration was divided the same way."""
        recipes = computed_parameters(self.func)
        for axis in self.func.axes:
            if axis.kind != "dense_variable" or axis.parent.kind != "dense_fixed":
                continue
            same = axis.idtype == self.idtype and structural_equal(axis.length, size)
            if same and recipes.get(str(axis.indptr.name)) == how:
                return axis
        return None

    def _loops(self, parts: Axis, part: Axis, kind: str) -> list[Loop]:
        return [*self.loops(parts=(parts, kind)), self.within(part)]

    def _children(self) -> Any:
        """The offsets of the variable axis under a root axis, which give each coordinate's work."""
        for node in (node for it in [self.it, *inside(self.it)] for node in it.axes):
            for axis in flat_axes([node]):
                parent = axis.parent
                if axis.is_variable and parent is not None and parent.name == self.last.name:
                    return axis.indptr
        return self.refuse(
            f"by=\"work\" expects a variable axis under '{self.last.name}' in the iteration; "
            'by="positions" makes parts of equal length'
        )
