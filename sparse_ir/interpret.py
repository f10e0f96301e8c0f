"""Run a stage-I function on NumPy arrays, one visit at a time: the meaning of the language.

Each expression and statement is compiled once to a Python closure; running the function calls
them. Sizes and structure are trusted, as in a kernel: see :mod:`sparsetir.sparse_ir.structure`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import ir, tirx

from sparsetir.sparse_ir.computed import compute, computed_parameters
from sparsetir.sparse_ir.interpret_scalar import STATEMENTS, Evaluator, Thunk
from sparsetir.sparse_ir.interpret_storage import Storage, Structure, Variable, garbage
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    flat_axes,
    nodes_of,
    visited_node,
)
from sparsetir.sparse_ir.open_axes import refuse_open
from sparsetir.sparse_ir.promises import check_promises, promises_of


def interpret(func: SparseFunc, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
    """Execute `func` on NumPy arrays, writing its outputs in place.

    Parameters
    ----------
    func : SparseFunc
        Of stage I.
    arguments : mapping or sequence
        A value for every parameter, by name or in order. `indptr` and `indices` are (parents + 1,)
        and (nnz,) arrays of the axis's idtype; arrays of values are C-contiguous, of the buffer's
        dtype, and have as many elements as its axes store: one dimension for the stored elements,
        then one per trailing dense axis, or any other shape of that size. Scalars are numbers;
        those that shapes imply may be omitted. Computed parameters may be omitted: all of them,
        or all but numbers that their recipes leave open.

    Raises
    ------
    TypeError
        For a missing, unknown or wrongly typed argument.
    ValueError
        For a wrong size or a broken promise, and if some computed parameters are omitted and
        others, not left open by their recipes, are passed.
    NotImplementedError
        For a node that is not part of stage I.

    Notes
    -----
    An iteration visits the coordinates that its axes store, in the order of the axes. Reading an
    absent coordinate gives zero, writing one is discarded. The init statement runs beforehand, for
    every coordinate of the spatial axes that it uses. Buffers allocated in the function initially
    hold NaN, or the largest integer. Which operand max and min return for NaN is not specified.
    """
    refuse_open("interpret", func)
    with np.errstate(all="ignore"):
        _Interpreter(func, _by_name(func, arguments)).run()


def _by_name(func: SparseFunc, arguments: Any) -> dict[str, Any]:
    names = [str(p.name) for p in func.params]
    computed = computed_parameters(func)
    callers = [name for name in names if name not in computed]
    if not isinstance(arguments, Mapping):
        if len(arguments) not in (len(callers), len(names)):
            raise TypeError(
                f"{func.name}: expected {len(callers)} arguments {callers}, got {len(arguments)}"
            )
        arguments = dict(zip(names, arguments, strict=False))
    for name in callers:
        if name not in arguments:
            raise TypeError(f"{func.name}: argument '{name}' is missing")
    for name in arguments:
        if name not in names:
            raise TypeError(f"{func.name}: unknown argument '{name}'; expected {names}")
    overrides = {name: value for name, value in arguments.items() if name in computed}
    values = dict(arguments)
    if len(overrides) < len(computed):
        values = {**compute(func, arguments, overrides), **values}
    check_promises(func.name, promises_of(func), values)
    return values


class _Interpreter(Evaluator):
    def __init__(self, func: SparseFunc, arguments: dict[str, Any]) -> None:
        super().__init__(func.name)
        self.func = func
        self.structure = Structure()
        self.current: dict[str, Variable] = {}  # by axis, its variable in the innermost iteration
        self.arrays: dict[int, tuple[str, Any]] = {}
        self.merged = {str(a.name) for axis in func.axes for a in axis.members}
        for param in func.params:
            self._bind(param, arguments[str(param.name)])
        for axis in func.axes:
            self._add_axis(self.structure, axis)
        for buffer in func.buffers:
            self._add_buffer(buffer)

    def run(self) -> None:
        """Execute the body."""
        self.stmt(self.func.body)()

    # Arguments

    def _bind(self, param: Any, value: Any) -> None:
        name = f"{self.name}: argument '{param.name}'"
        if isinstance(param.ty, ir.PointerType):
            self.arrays[hash(param)] = (name, value)
            return
        dtype = np.dtype(str(param.ty.dtype))
        kinds = (int, np.integer) if dtype.kind in "iu" else (int, float, np.number, np.bool_)
        if not isinstance(value, kinds) or (isinstance(value, bool) and dtype.kind != "b"):
            raise TypeError(f"{name}: expected a number of type {dtype}, got {value!r}")
        if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise ValueError(f"{name}: expected a number of type {dtype}, got {value}")
        self.variable(param).value = dtype.type(value)

    def _array(self, handle: Any, dtype: str, size: int, what: str) -> np.ndarray:
        """The array of a handle, flattened and checked."""
        name, value = self.arrays[hash(handle)]
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array, got {type(value).__name__}")
        if value.dtype != np.dtype(dtype):
            raise TypeError(f"{name}: {what}: expected dtype {dtype}, got {value.dtype}")
        if value.size != size:
            raise ValueError(f"{name}: {what}: expected {size} elements, got shape {value.shape}")
        if not value.flags.c_contiguous:
            raise ValueError(f"{name}: {what}: expected a C-contiguous array")
        return value.reshape(-1)

    def _add_axis(self, to: Structure, axis: Axis) -> None:
        name, what = axis.name, f"axis '{axis.name}'"
        to.length[name] = int(self.expr(axis.length)())
        if axis.is_merged:
            return
        parents = to.size[axis.parent.name] if axis.parent is not None else 1
        if axis.is_variable:
            to.size[name] = int(self.expr(axis.nnz)())
            to.indptr[name] = self._array(axis.indptr, axis.idtype, parents + 1, what)
        elif axis.is_sparse:
            to.width[name] = int(self.expr(axis.nnz_cols)())
            to.size[name] = parents * to.width[name]
        else:
            to.size[name] = to.length[name]
        if axis.is_sparse:
            to.indices[name] = self._array(axis.indices, axis.idtype, to.size[name], what)

    def _add_buffer(self, buffer: SparseBuffer) -> None:
        what = f"buffer '{buffer.name}'"
        leaves: dict[str, str] = {}
        if buffer.axes is None:
            dims = [int(self.expr(n)()) for n in buffer.var.ty.shape]
        else:
            for axis in buffer.axes:
                above = axis.parent.name if axis.parent is not None else None
                if leaves.get(axis.root.name) != above:
                    raise ValueError(
                        f"{self.name}: {what}: axis '{axis.name}' does not follow its parent "
                        f"'{above}' in {[a.name for a in buffer.axes]}"
                    )
                leaves[axis.root.name] = axis.name
            dims = [self.structure.size[leaf] for leaf in leaves.values()]
        count = math.prod(dims)
        if buffer.handle is None:
            data = garbage(count, buffer.dtype)
        else:
            data = self._array(buffer.handle, buffer.dtype, count, what)
        axes = None if buffer.axes is None else list(buffer.axes)
        storage = Storage(buffer.name, data, axes, dims, list(leaves.values()))
        self.storage[hash(buffer.var)] = storage

    def place(self, var: Any, indices: Any) -> tuple[Storage, Callable[[], int | None]]:
        """The storage that an access refers to, and a closure for the offset in it."""
        if hash(var) not in self.storage:
            raise ValueError(f"{self.name}: buffer '{var.name}' is not declared")
        storage = self.storage[hash(var)]
        index = self.expr if storage.axes is None else self.coordinate
        thunks = [index(i) for i in indices]
        variables = [self.variable(i) if isinstance(i, ir.Var) else None for i in indices]
        locate = self.structure.locate
        return storage, lambda: locate(storage, [int(t()) for t in thunks], variables)

    # Sparse iterations

    def _iteration(self, node: SparseIteration) -> Thunk:
        entries = [visited_node(a) for a in node.axes]
        attached = {a.name: a.to.name for a in entries if isinstance(a, AttachedAxis)}
        axes = flat_axes(node.axes)
        parts = {flat_axes([a])[0].name: a for a in node.axes if isinstance(a, PartAxis)}
        # What visits need of each axis, read once: access to fields of TVM's objects is slow.
        names = [str(a.name) for a in axes]
        indices = [np.dtype(a.idtype).type for a in axes]
        counts = [len(flat_axes([parts[n]])) if n in parts else 1 for n in names]
        variables = [self.variable(v) for v in node.vars]
        body = self.stmt(node.body)
        init = None if node.init is None else self.stmt(node.init)
        in_init = self._used_in_init(node)

        def parent_position(axis: Axis) -> int:
            if axis.name in attached:
                return int(self.current[attached[axis.name]].value)
            if axis.parent is None:
                return 0
            if axis.parent.name not in self.current:
                raise ValueError(
                    f"{self.name}: sp_iter '{node.name}': axis '{axis.name}' is visited "
                    f"outside an iteration over its parent '{axis.parent.name}'"
                )
            return self.current[axis.parent.name].position

        def set_position(level: int, parent: int, position: int, coordinate: int) -> None:
            name, variable = names[level], variables[level]
            variable.value = indices[level](coordinate)
            variable.axis, variable.parent, variable.position = name, parent, position
            self.current[name] = variable

        def merge(level: int, stop: int, action: Thunk) -> None:
            """Visit each coordinate of a merged axis once, positioned on the axes that store it."""
            variable, stored = variables[level], dict[int, list[tuple[str, int, int]]]()
            for member in axes[level].merged:
                axis = member.axis if isinstance(member, AttachedAxis) else member
                if axis.is_merged:
                    continue
                if isinstance(member, AttachedAxis):
                    parent = int(self.current[str(member.to.name)].value)
                elif axis.parent is None or axis.parent.name in self.current:
                    parent = parent_position(axis)
                else:
                    parent = None  # it is absent
                if parent is not None:
                    for position, coordinate in self.structure.stored(axis, parent):
                        stored.setdefault(coordinate, []).append((str(axis.name), parent, position))

            def visited(coordinate: int) -> bool:
                there = {name for name, *_ in stored[coordinate]}
                every = (lambda *of: any(of)), (lambda *of: all(of)), operator.not_
                return axes[level].stores(there.__contains__, *every)

            for coordinate in filter(visited, sorted(stored)):
                variable.value, variable.axis = indices[level](coordinate), None
                self.current[names[level]] = variable
                for name, *place in stored[coordinate]:
                    self.current[name] = Variable(variable.value, None, name, *place)
                visit(level + 1, stop, action)
                for name, *_ in stored[coordinate]:
                    del self.current[name]
            self.current.pop(names[level], None)

        def visit(level: int, stop: int, action: Thunk) -> None:
            if level == stop:
                action()
                return
            if axes[level].is_merged:
                merge(level, stop, action)
                return
            part, count = parts.get(names[level]), counts[level]
            here, known = axes[level : level + count], names[level : level + count]
            above = here[0].parent
            if above is not None and above.name in self.merged and above.name not in self.current:
                return  # below an axis that does not store the coordinate
            outer = {name: self.current[name] for name in known if name in self.current}
            if part is None:
                parent = parent_position(here[0])
                for position, coordinate in self.structure.stored(here[0], parent):
                    set_position(level, parent, position, coordinate)
                    visit(level + 1, stop, action)
            else:
                for path in self.structure.paths(here, part.by, parent_position(part.by)):
                    for n, place in enumerate(path):
                        set_position(level + n, *place)
                    visit(level + count, stop, action)
            for name in known:
                self.current.pop(name, None)
            self.current |= outer

        def run() -> None:
            if init is not None:
                self._sweep([n for n, used in enumerate(in_init) if used], node, init)
                if not all(axis.unique for axis in axes):
                    # A coordinate that is stored twice has two elements: initialise both.
                    visit(
                        0, max((n + 1 for n, used in enumerate(in_init) if used), default=0), init
                    )
            visit(0, len(axes), body)

        return run

    def _used_in_init(self, node: SparseIteration) -> list[bool]:
        """Whether the init uses each coordinate; only those of spatial axes are allowed."""
        used = {hash(var) for var in nodes_of(ir.Var, node.init)}
        for axis, var, kind in node.axis_of():
            if kind != "S" and hash(var) in used:
                raise ValueError(
                    f"{self.name}: sp_iter '{node.name}': the init uses '{var.name}' of "
                    f"reduction axis '{axis.name}'"
                )
        return [hash(var) in used for var in node.vars]

    def _sweep(self, levels: list[int], node: SparseIteration, init: Thunk) -> None:
        """Run the init for every coordinate of these axes, stored or not."""
        if not levels:
            init()
            return
        axis, var, _ = node.axis_of()[levels[0]]
        variable, index = self.variable(var), np.dtype(axis.idtype).type
        variable.axis = None  # a coordinate, not a position
        coordinates: Any = range(self.structure.length[axis.name])
        if axis.is_sparse and self._stores_by(node.init, axis, var):
            coordinates = np.unique(self.structure.indices[axis.name])  # other writes are discarded
            coordinates = coordinates[coordinates >= 0]
        for coordinate in coordinates:
            variable.value = index(coordinate)
            self._sweep(levels[1:], node, init)

    def _stores_by(self, stmt: Any, axis: Axis, var: Any) -> bool:
        """Whether a statement is one store to a buffer over an axis, indexed there by `var`."""
        if not isinstance(stmt, tirx.BufferStore):
            return False
        for buf in self.func.buffers:
            if buf.var.same_as(stmt.buffer) and buf.axes is not None:
                at = [n for n, a in enumerate(buf.axes) if a.name == axis.name]
                return bool(at) and stmt.indices[at[0]].same_as(var)
        return False


STATEMENTS[SparseIteration] = _Interpreter._iteration
