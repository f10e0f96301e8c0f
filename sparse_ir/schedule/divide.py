"""Cut a loop into parts where the structure says (Senanayake's thesis, chapters 5 and 10).

Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:

After `divide(i, 16, by="work")`, sixteen blocks of rows with about as many non-zeros each::

    T.func_attr({"computed": {"I_ptr": {"recipe": "equal_work", "indptr": "$indptr", ...}}})
    I_parts = T.dense_fixed(16)
    I_part = T.dense_variable(I_parts, (m, m), I_ptr)
    with T.sp_iter([I_parts, T.part(I, I_part), J, K], "SSRS", "spmm") as [i_parts, i, j, k]:

The coordinates stay those of the axis, so the body and what hangs under the axis stay as they are.
Where parts begin is a computed parameter: kernels are called as before. After `divide(j, 4,
by="coordinates")`, four ranges of columns, whose elements lie together in each row::

    J_parts = T.sparse_fixed(I, (4, 4), J_ids)
    J_part = T.dense_variable(J_parts, (n, nnz), J_ptr)
    with T.sp_iter([I, J_parts, T.part(J, J_part), K], "SRRS", "spmm") as [i, j_parts, j, k]:
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    PartAxis,
    SparseFunc,
    SparseIteration,
    flat_axes,
)
from sparsetir.sparse_ir.position_space import as_dtype
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
    show,
)

__all__ = ["divide"]

WHO = "divide"
BY = ("positions", "work", "coordinates")


def divide(
    func: SparseFunc, loop: SpIter, parts: int | str, *, by: str = "positions", cost: int = 2,
    default: int = 16,
) -> tuple[SparseFunc, list[SpIter]]:  # fmt: skip
    """The function with a loop in parts, and the handles of the parts and of what is in one.

    parts : how many, or a name: then the number is a computed parameter of that name, which is
        `default` unless whoever makes a plan says otherwise, and is not compiled in
    by : "positions", parts of equal length, of a root axis or of fused axes from a root on; "work",
        the same of a root axis, by the elements under each coordinate and `cost` for each;
        "coordinates", ranges of the coordinates of a sparse_variable axis under each parent
    """
    it = iteration_of(WHO, func, loop)
    place = place_of(WHO, it, loop)
    if by not in BY:
        raise ScheduleError(
            f"{WHO}: argument 'by': expected one of {', '.join(BY)}, got {by!r}\n{show(it)}"
        )
    made = _Division(func, it, loops_of(it)[place], parts, default)
    if by == "coordinates":
        outer, inner = made.by_coordinates()
    else:
        outer, inner = made.by_positions(by, cost)
    loops = loops_of(it)
    new = changed(it, [*loops[:place], outer, inner, *loops[place + 1 :]])
    assert isinstance(inner.node, PartAxis)
    axes = [outer.node, inner.node.by]
    func = func.with_attr("computed", made.computed)
    out = replaced(WHO, func, it, new, axes=axes, params=made.params)
    return out, [handle_of(it, outer), handle_of(it, inner)]


class _Division:
    def __init__(
        self, func: SparseFunc, it: SparseIteration, loop: Loop, parts: int | str, default: int
    ) -> None:
        self.func, self.it, self.loop = func, it, loop
        self.computed: dict[str, Any] = dict(func.attrs.get("computed", {}).items())
        self.params: list[Any] = []
        axes = flat_axes([loop.node])
        self.last, self.idtype = axes[-1], axes[-1].idtype
        self.axes = axes
        if isinstance(loop.node, PartAxis):
            self._refuse(f"'{loop.name}' is in parts already; divide a part's children, or split")
        self.parts, self.count = self._number(parts, default)

    def by_positions(self, by: str, cost: int) -> tuple[Loop, Loop]:
        """Parts of a root axis, or of fused axes from a root on."""
        node = self.loop.node
        fused = isinstance(node, FusedAxis)
        path = [a.name for a in self.last.ancestors()]
        if [a.name for a in self.axes] != path or not (fused or isinstance(node, Axis)):
            self._refuse(
                f"expected a root axis, or axes fused from a root on, got '{self.loop.name}'; "
                'by="coordinates" cuts the columns of each row'
            )
        size = self.last.length if self.last.kind == "dense_fixed" else self.last.nnz
        if self.last.kind == "sparse_fixed":
            self._refuse(f"axis '{self.last.name}' has slots, of which some may be padding")
        if by == "work":
            how = {"recipe": "equal_work", "indptr": f"${self._children()}", "cost": cost}
        else:
            how = {"recipe": "equal_parts", "length": self._named(size)}
        parts = self._axis("parts", kind="dense_fixed", length=self.count)
        ptr = self._array("ptr", {**how, "parts": self.parts})
        part = self._axis(
            "part", kind="dense_variable", length=size, parent=parts, nnz=size, indptr=ptr
        )
        return self._loops(parts, part, "S" if "S" in self.loop.kinds else "R")

    def by_coordinates(self) -> tuple[Loop, Loop]:
        """Ranges of the coordinates of an axis under its parent."""
        axis = self.loop.node
        if not isinstance(axis, Axis) or axis.kind != "sparse_variable" or not axis.unique:
            self._refuse(
                f'by="coordinates" expects a sparse_variable axis whose coordinates differ, got '
                f"'{self.loop.name}'"
            )
        parent = axis.parent
        if parent.kind != "dense_fixed":
            self._refuse(f"expected the parent of '{axis.name}' to be a root, got '{parent.name}'")
        # This one first: its recipe refuses more parts of rows than the index type counts.
        ptr = self._array("ptr", {
            "recipe": "column_parts", "indptr": f"${axis.indptr.name}",
            "indices": f"${axis.indices.name}", "n": self._named(axis.length), "parts": self.parts,
        })  # fmt: skip
        ids = self._array("ids", {
            "recipe": "part_numbers", "rows": self._named(parent.length), "parts": self.parts,
        })  # fmt: skip
        parts = self._axis(
            "parts", kind="sparse_fixed", length=self.count, parent=parent, nnz_cols=self.count,
            indices=ids,
        )  # fmt: skip
        part = self._axis(
            "part", kind="dense_variable", length=axis.length, parent=parts, nnz=axis.nnz,
            indptr=ptr,
        )  # fmt: skip
        return self._loops(parts, part, self.loop.kinds)

    # -- declarations -------------------------------------------------------------------------

    def _loops(self, parts: Axis, part: Axis, kind: str) -> tuple[Loop, Loop]:
        outer = Loop(parts, [tirx.Var(f"{self.loop.var.name}_parts", self.idtype)], kind)
        inner = PartAxis(axis=self.loop.node, by=part)
        return outer, Loop(inner, self.loop.vars, self.loop.kinds)

    def _axis(self, what: str, **fields: Any) -> Axis:
        name = fresh_name(self.func, f"{self.loop.name}_{what}")
        return Axis(name=name, idtype=self.idtype, **fields)

    def _array(self, what: str, how: dict[str, Any]) -> Any:
        """A computed array, as a parameter."""
        name = fresh_name(self.func, f"{self.loop.name}_{what}")
        handle = ir.Var(name, ir.PointerType(ir.PrimType("void")))
        self.params.append(handle)
        self.computed[name] = how
        return handle

    def _number(self, parts: int | str, default: int) -> tuple[Any, Any]:
        """The number of parts as a recipe takes it, and as an expression."""
        if isinstance(parts, str):
            if not parts.isidentifier() or fresh_name(self.func, parts) != parts:
                self._refuse(f"argument 'parts': expected a number or a new name, got {parts!r}")
            var = tirx.Var(parts, self.idtype)
            self.params.append(var)
            self.computed[parts] = {"recipe": "number", "value": default}
            return f"${parts}", var
        if isinstance(parts, bool) or not isinstance(parts, int) or not 0 < parts < 2**31:
            self._refuse(f"argument 'parts': expected a positive integer or a name, got {parts!r}")
        return parts, as_dtype(parts, self.idtype)

    def _children(self) -> str:
        """The offsets of the variable axis under a root axis: how much each coordinate holds."""
        for node in self.it.axes:
            for axis in flat_axes([node]):
                parent = axis.parent
                if axis.is_variable and parent is not None and parent.name == self.last.name:
                    return str(axis.indptr.name)
        return self._refuse(
            f"by=\"work\" expects a variable axis under '{self.last.name}' in the iteration; "
            'by="positions" makes parts of equal length'
        )

    def _named(self, size: Any) -> Any:
        """A size as a recipe takes it."""
        if isinstance(size, tirx.IntImm):
            return int(size)
        if isinstance(size, ir.Var):
            return f"${size.name}"
        return self._refuse(f"expected a size that is a number or a parameter, got {size}")

    def _refuse(self, message: str) -> Any:
        raise ScheduleError(f"{WHO}: {message}\n{show(self.it)}")
