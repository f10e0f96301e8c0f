"""Visit orders: the common base of primitives that visit stored elements in another order.

A visit order replaces loops by others, and declares what these need:

- axes, dense or under another, whose offsets recipes compute (`dense`, `ragged`, `counted`,
  `part`);
- parameters that recipes compute: arrays, numbers and tables (`array`, `number`, `table`), so that
  kernels are called as before;
- if loops are cut, the new loops, with the same coordinates (:meth:`VisitOrder.instead`);
- if elements are visited by position, the position of each and its coordinates, mostly loads of
  tables (:class:`ElementOrder`). Buffers over rows and columns then lie over positions.

So a primitive consists of its refusals and its declarations. Invariants of a table, such as that it
holds each position once, are facts of its recipe (:mod:`sparsetir.sparse_ir.recipes.registry`),
from which the lowering proves that loops are free of races and that loads need no guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.sparse_ir.computed import COMPUTED, keyword
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    accesses_of,
    buffer_var,
    declared,
    flat_axes,
    nodes_of,
    same_indices,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.recipes.general import in_order, part_numbers
from sparsetir.sparse_ir.recipes.positions import last_of
from sparsetir.sparse_ir.reduction import Reduction, reduction_of
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    SpIter,
    changed,
    handle_of,
    iteration_of,
    loops_of,
    place_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.workspaces import split_init
from sparsetir.sparse_ir.tir import as_dtype, as_one, size_text, slots_of
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.workers import divided

# Bound of the number of parts (more would need gigabytes of offsets), and of visits per tile.
MOST = 2**24


def chosen_loops(
    caller: str, func: SparseFunc, *handles: SpIter
) -> tuple[SparseIteration, list[Loop]]:
    """The loops of these handles, and their iteration."""
    it = iteration_of(caller, func, handles[0])
    return it, [loops_of(it)[place_of(caller, func, it, handle)] for handle in handles]


class VisitOrder:
    """Loops that replace a loop, and the declarations that they need.

    loop : the loop to replace, after which declarations are named
    computed, params, axes, buffers : the declarations
    """

    def __init__(self, caller: str, func: SparseFunc, it: SparseIteration, loop: Loop) -> None:
        self.caller, self.func, self.it, self.loop = caller, func, it, loop
        self.computed: dict[str, Any] = dict(func.attrs.get(COMPUTED, {}).items())
        self.params: list[Any] = []
        self.axes: list[Axis] = []
        self.buffers: list[SparseBuffer] = []
        self.visited = flat_axes([loop.node])
        self.last, self.idtype = self.visited[-1], self.visited[-1].idtype

    # -- axes -----------------------------------------------------------------------------------

    def axis(self, what: str, **fields: Any) -> Axis:
        """A new axis, named after the loop."""
        name = fresh_name(self.func, f"{self.loop.name}_{what}", [a.name for a in self.axes])
        self.axes.append(Axis(name=name, idtype=self.idtype, **fields))
        return self.axes[-1]

    def dense(self, what: str, length: Any) -> Axis:
        """A new dense axis."""
        return self.axis(what, kind="dense_fixed", length=as_dtype(length, self.idtype))

    def counted(self, what: str, parent: Axis, count: Any) -> Axis:
        """A new axis with `count` coordinates under each of a parent's."""
        how = {"rows": parent.length, "parts": count}
        ids = self.array("ids", part_numbers, **how)
        return self.axis(
            what, kind="sparse_fixed", length=count, parent=parent, nnz_cols=count, indices=ids
        )

    def ragged(
        self, what: str, parent: Axis, recipe: Callable[..., Any], *, ptr: str = "",
        count: str = "", how: Mapping[str, Any] | None = None, **also: Any,
    ) -> Axis:  # fmt: skip
        """A new axis whose extents under a parent's coordinates are given by computed offsets.

        ptr, count : suffixes of the names of the parameters for the offsets and for their number
        how, also : keywords of the recipe of the offsets
        """
        indptr = self.array(ptr or f"{what}_ptr", recipe, **{**(how or {}), **also})
        size = self.number(count or f"{what}_count", last_of, offsets=indptr)
        return self.part(parent, size, size, indptr, what)

    def part(self, parent: Axis, length: Any, nnz: Any, indptr: Any, what: str = "part") -> Axis:
        """A new axis of the positions between offsets, under a parent."""
        kind = "dense_variable"
        return self.axis(what, kind=kind, length=length, parent=parent, nnz=nnz, indptr=indptr)

    # -- computed parameters --------------------------------------------------------------------

    def array(self, what: str, recipe: Callable[..., Any], **how: Any) -> Any:
        """A new parameter: an array that a recipe computes, named after the loop."""
        return self._array(f"{self.loop.name}_{what}", recipe, how)

    def number(self, what: str, recipe: Callable[..., Any], **how: Any) -> Any:
        """A new parameter: an integer that a recipe computes, named after the loop."""
        name = fresh_name(self.func, f"{self.loop.name}_{what}", list(self.computed))
        return self._number(name, self.made(recipe, how))

    def choice(self, value: int | str, default: int | dict[str, Any]) -> Any:
        """A number; for a name, a new parameter with a default or a recipe."""
        if not isinstance(value, str):
            return as_dtype(value, self.idtype)
        if fresh_name(self.func, value, list(self.computed)) != value:
            self.refuse(
                f"argument 'parts': expected a number or a new name, got {value!r}, which the "
                "function has already"
            )
        how = default if isinstance(default, dict) else {"recipe": "number", "value": default}
        return self._number(value, how)

    def table(
        self, name: str, axes: list[Axis], recipe: Callable[..., Any], **how: Any
    ) -> SparseBuffer:
        """A new buffer over some axes, of integers that a recipe computes, as a new parameter."""
        return self.bound(name, axes, self._array(name.lower(), recipe, how))

    def bound(
        self, name: str, axes: list[Axis], handle: Any, dtype: str | None = None
    ) -> SparseBuffer:
        """A new buffer over some axes, by default of integers."""
        name = fresh_name(self.func, name, [b.name for b in self.buffers])
        var = buffer_var([a.length for a in axes], dtype or self.idtype, name)
        self.buffers.append(SparseBuffer(var=var, axes=axes, handle=handle))
        return self.buffers[-1]

    def _array(self, wish: str, recipe: Callable[..., Any], how: dict[str, Any]) -> Any:
        name = fresh_name(self.func, wish, list(self.computed))
        self.params.append(ir.Var(name, ir.PointerType(ir.PrimType("void"))))
        self.computed[name] = self.made(recipe, how)
        return self.params[-1]

    def _number(self, name: str, how: dict[str, Any]) -> Any:
        self.params.append(tirx.Var(name, self.idtype))
        self.computed[name] = how
        return self.params[-1]

    def made(self, recipe: Callable[..., Any], how: dict[str, Any]) -> dict[str, Any]:
        """A recipe and its keywords, in the form of the attribute."""
        return {"recipe": recipe.__name__, **{key: self._keyword(x) for key, x in how.items()}}

    def _keyword(self, value: Any) -> Any:
        """A number, a string, a size, an array, or a table's array, as a recipe's keyword."""
        if isinstance(value, int | str):
            return value
        text = keyword(value.handle if isinstance(value, SparseBuffer) else value)
        if text is None:
            self.refuse(
                "expected a length that is a number or a parameter, got "
                f"{size_text(value)}; split cuts others"
            )
        return text

    # -- loops ----------------------------------------------------------------------------------

    def loops(self, **axes: tuple[Axis, str]) -> list[Loop]:
        """Loops over axes, each of a kind, by the name of their coordinate."""
        name = self.loop.vars[0].name
        return [
            Loop(axis, [tirx.Var(f"{name}_{what}", self.idtype)], kind)
            for what, (axis, kind) in axes.items()
        ]

    def within(self, part: Axis) -> Loop:
        """The loop over one part of its axis."""
        return Loop(PartAxis(axis=self.loop.node, by=part), self.loop.vars, self.loop.kinds)

    def instead(self, new_loops: list[Loop], **fields: Any) -> tuple[SparseFunc, list[SpIter]]:
        """The function with these loops in place of the original, and their handles.

        fields : fields of the iteration besides its loops
        """
        for names in divided(self.it):
            if self.loop.name in names:
                self.refuse(
                    f"{names} is divided among workers and has to stay as it is; expected "
                    f"{self.caller} before parallelize"
                )
        new = changed(self.it, self.around(new_loops, self.loop), **fields)
        return self.replaced(new), [handle_of(self.it, loop) for loop in new_loops]

    def around(self, new: list[Loop], old: Loop) -> list[Loop]:
        """The loops of the iteration, with one replaced by others."""
        return [x for loop in loops_of(self.it) for x in (new if loop.axes == old.axes else [loop])]

    def replaced(self, *stmts: Any, **attrs: Any) -> SparseFunc:
        """The function with statements in place of the iteration, and all declarations."""
        func = self.function()
        trusted = func is self.func
        if self.computed:
            attrs[COMPUTED] = self.computed
        for key, value in attrs.items():
            func = func.with_attr(key, value)
        return replaced(
            self.caller, func, self.it, as_one([*stmts]),
            axes=self.axes, buffers=self.buffers, params=self.params, trusted=trusted,
        )  # fmt: skip

    def function(self) -> SparseFunc:
        """The function into which the loops are put."""
        return self.func

    def split_init(self) -> list[SparseIteration]:
        """The init as separate iterations, to be placed before; also declares their axes."""
        firsts, axes = split_init(self.func, self.it)
        self.axes.extend(axes)
        return firsts

    # -- refusals -------------------------------------------------------------------------------

    def check_count(
        self, name: str, value: Any, *, least: int = 1, below: int = MOST, or_name: bool = False
    ) -> None:
        """Refuse an argument that is not such an integer, nor, if allowed, a name."""
        if or_name and isinstance(value, str) and value.isidentifier():
            return
        if type(value) is int and least <= value < below:
            return
        expected = "a positive integer" if least else "an integer of 0 or more"
        expected += " or a name" if or_name else ""
        expected += f" below {below}" if type(value) is int and value >= below else ""
        self.refuse(f"argument '{name}': expected {expected}, got {value!r}")

    def check_alone(self) -> None:
        """Refuse an iteration with nested ones, and one with annotations."""
        if nodes_of(SparseIteration, self.it.body) or self.it.annotations:
            self.refuse("expected an iteration without nested ones and annotations")

    def reduced(self, besides: str = "") -> Reduction:
        """The reduction of the body; other bodies are refused.

        besides : text to append to the refusal
        """
        reduction = reduction_of(self.it.body)
        if reduction is None:
            self.refuse(
                f"expected a body of the form X[..] = X[..] + term (or *, max, min){besides}"
            )
        return reduction

    def refuse(self, message: str) -> NoReturn:
        """Raise ScheduleError with the iteration."""
        raise ScheduleError(f"{self.caller}: {message}\n{show(self.it)}")


class ElementOrder(VisitOrder):
    """An iteration over rows and their stored elements that is visited by position.

    path : a dense axis, and sparse_variable axes, each under the one before; or only the latter; or
        likewise with sparse_fixed axes
    over : their coordinates
    positions : an axis of all elements, which replaces the path in buffers: a dense one, or, if the
        path has no dense axis and is not of slots, one under the parent of its first axis
    below : by name, axes below the last one of the path, as axes below `positions`; only if
        elements are visited in the order of storage
    """

    rest: Sequence[Loop] = ()

    def __init__(
        self, caller: str, func: SparseFunc, it: SparseIteration, loop: Loop,
        path: list[Axis], over: list[Any], below: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(caller, func, it, loop)
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
        self.below = self._under_positions() if below else {}
        self.moved = self._moved_buffers()

    def visit(
        self, loops: list[Loop], position: Any, coordinates: list[Any], **fields: Any
    ) -> SparseIteration:
        """The iteration over loops whose visits are of the element at `position`.

        coordinates : those of the element, along the path
        fields : fields of the iteration; `body` and `init` in the original coordinates
        """
        for what in ("body", "init"):
            tree = fields.get(what, getattr(self.it, what))
            fields[what] = None if tree is None else self.rewritten(tree, position, coordinates)
        return changed(self.it, loops, **fields)

    def by_positions(
        self, new_loops: list[Loop], loops: list[Loop], position: Any, coordinates: list[Any], *,
        before: Sequence[SparseIteration] = (), **fields: Any,
    ) -> tuple[SparseFunc, list[SpIter]]:  # fmt: skip
        """The function with :meth:`visit` in its place, after `before`; and the handles."""
        main = self.visit(loops, position, coordinates, **fields)
        return self.replaced(*before, main), [handle_of(main, loop) for loop in new_loops]

    def function(self) -> SparseFunc:
        """The function with its buffers over positions."""
        buffers = [self.moved.get(b.var, b) for b in self.func.buffers]
        axes = [a for a in self.func.axes if a.name not in self.below]
        return self.func.replace(axes=axes, buffers=buffers)

    def offsets(self, axis: Axis, wish: str) -> SparseBuffer:
        """A buffer of the offsets of each parent's elements, with the end."""
        above = axis.parent
        count = above.length if above.kind == "dense_fixed" else above.nnz
        length = as_dtype(count, self.idtype) + as_dtype(1, self.idtype)
        return self.bound(f"{axis.name}_ptr", [self.dense(wish, length)], axis.indptr)

    def columns_at(self, what: str, axes: list[Axis], slots: SparseBuffer) -> SparseBuffer:
        """A table of the columns of the elements at the positions in another table."""
        values = self.column.indices
        return self.table(f"{self.column.name}_{what}", axes, in_order, values=values, order=slots)

    def _all_elements(self) -> list[Axis]:
        """The axis of all elements, or of each parent's, after those of the levels above."""
        names = [a.name for a in self.path]
        if self.column.kind == "sparse_fixed":
            name = fresh_name(self.func, "_".join([*names, *["slots"] * self.row.is_sparse]))
            length, idtype = slots_of(self.path, self.idtype), self.idtype
            return [Axis(name=name, kind="dense_fixed", length=length, idtype=idtype)]
        if self.row.parent is None:
            name = fresh_name(self.func, "_".join(names))
            nnz, idtype = self.column.nnz, self.idtype
            return [Axis(name=name, kind="dense_fixed", length=nnz, idtype=idtype)]
        out: list[Axis] = []
        ptr = self.row.indptr
        for count, axis in enumerate(self.path[1:], 2):
            ptr = self.array("ptr", in_order, values=axis.indptr, order=ptr)
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

    def _moved_buffers(self) -> dict[Any, SparseBuffer]:
        """Buffers over the whole path, moved to positions, by their variables."""
        out: dict[Any, SparseBuffer] = {}
        path = [a.name for a in self.path]
        for b in self.func.buffers:
            axes = list(b.axes or ())
            names = [a.name for a in axes]
            if self.column.name not in names:
                continue
            at = names.index(self.column.name) + 1 - len(path)
            above = self.row.parent if self.column.kind == "sparse_fixed" else None
            if above is not None and names[at - 1] != above.name:
                self.refuse(
                    f"expected '{self.row.name}' right behind '{above.name}' among the axes of "
                    f"buffer '{b.name}', got {names}"
                )
            if names[max(at, 0) : at + len(path)] != path or any(
                a.parent is not None and a.parent.name == self.column.name
                for a in axes
                if a.name not in self.below
            ):
                self.refuse(
                    f"buffer '{b.name}' over {names} does not lie over the elements of {path} alone"
                )
            rest = [self.below.get(a.name, a) for a in axes[at + len(path) :]]
            axes = [*axes[:at], self.positions, *rest]
            var = buffer_var([a.length for a in axes], b.dtype, b.name, b.var.ty.storage_scope)
            out[b.var] = SparseBuffer(var=var, axes=axes, handle=b.handle)
            self._refuse_accesses(b, at)
        return out

    def _refuse_accesses(self, buffer: SparseBuffer, at: int) -> None:
        """Refuse accesses of a buffer over the whole path other than at the visited element."""
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

    def rewritten(self, tree: Any, position: Any, coordinates: list[Any]) -> Any:
        """A statement at another position, and at the coordinates of its element."""

        def at(buffer: Any, indices: Any) -> list[Any]:
            old = declared(self.func).buffers[buffer.name]
            first = [a.name for a in old.axes or ()].index(self.row.name)
            return [*indices[:first], position, *indices[first + len(self.path) :]]

        def loaded(node: Any) -> Any:
            new = self.moved.get(node.source)
            return node if new is None else load(new, *at(node.source, node.indices))

        def stored(node: Any) -> Any:
            new = self.moved.get(node.buffer)
            if new is None:
                return node
            return tirx.BufferStore(new.var, node.value, at(node.buffer, node.indices), node.span)

        tree = map_expr(tree, [(ir.TensorLoad, loaded), (tirx.BufferStore, stored)])
        return substitute(tree, dict(zip(self.over, coordinates, strict=True)))


def elements_of_rows(
    caller: str, func: SparseFunc, it: SparseIteration, rows: Loop, columns: Loop, *,
    unique: bool = False, reduces: str | None = None,
) -> ElementOrder:  # fmt: skip
    """The visit order of a spatial loop over a dense axis, and a reduction over its rows' elements.

    unique : whether a row may not store a column twice
    reduces : for a body that must be a reduction, text to append to its refusal
    """
    plain, row, column = VisitOrder(caller, func, it, rows), rows.node, columns.node
    if not (
        isinstance(row, Axis)
        and row.kind == "dense_fixed"
        and isinstance(column, Axis)
        and column.kind == "sparse_variable"
        and (column.unique or not unique)
        and column.parent.name == row.name
        and (rows.kinds, columns.kinds) == ("S", "R")
    ):
        plain.refuse(
            "expected a spatial loop over a dense axis and a reduction over a sparse_variable "
            f"axis under it, got '{rows.name}' and '{columns.name}'"
        )
    if reduces is not None:
        plain.reduced(reduces)
    plain.check_alone()
    rest = [x for x in loops_of(it) if x.axes not in (rows.axes, columns.axes)]
    for loop in rest:
        if not isinstance(loop.node, Axis) or loop.node.kind != "dense_fixed":
            plain.refuse(f"expected other loops over dense axes, got '{loop.name}'")
    order = ElementOrder(caller, func, it, rows, [row, column], [rows.var, columns.var])
    order.rest = rest
    return order


def is_path(node: Any) -> bool:
    """Whether a loop is over a root axis, or over axes fused from a root on."""
    if not isinstance(node, Axis | FusedAxis):
        return False
    axes = flat_axes([node])
    return [a.name for a in axes] == [a.name for a in axes[-1].ancestors()]


def load(buffer: SparseBuffer, *indices: Any) -> Any:
    """An element of a buffer."""
    return tirx.BufferLoad(buffer.var, [*indices])
