"""Sparse results of any levels, written in any order: programs for pattern and values.

:mod:`sparsetir.sparse_ir.assemble` needs writes row by row. For other programs, `entries` lists the
coordinates of all writes, with repetitions::

    said[0] = 0
    with T.sp_iter([O, J, K], "SSS", "outer") as [o, j, k]:
        C_at[said[0]] = j
        C_at_1[said[0]] = k
        said[0] = said[0] + 1

Sorted and without repetitions they are the levels of the result; those that exceed the room are
dropped, but counted. `values` is the program on the pattern so obtained, without its initial value,
which the caller writes.

For scalars in rows of one level, `count` and `fill` replace both: the first counts the writes to
each row, the second lists their columns and values. As for a transpose, that is the result if
columns come in order; else `combine` computes it from the list, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.annotations import ORDERED
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    iteration_with,
    loads_of,
    make_func,
    nodes_of,
    same_indices,
    sparse_iterations,
    stores_of,
)
from sparsetir.sparse_ir.open_axes import closed, is_open, open_axes, open_result
from sparsetir.sparse_ir.reduction import reduction_of
from sparsetir.sparse_ir.script.parser import from_source
from sparsetir.sparse_ir.tir import as_dtype, as_one, dtype_of, statements_of
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.verify import verify


class LevelsAssembly(NamedTuple):
    """The programs of a sparse result, and the names of the parameters that describe the result.

    entries : takes `room`, int64, and `coordinates`, (room,) for the root and each level. Writes
        these, and `said`, (2 + levels,) int64: the number of entries, and the lengths
    values : takes the parameters of `levels` and `result`, which it updates
    levels : `indptr`, `indices` and `nnz` of each assembled level
    first : the initial value of elements
    idtypes : of the root and each level
    dtype : of the values
    rows : the programs for results of scalars with one level, else None
    """

    entries: SparseFunc
    values: SparseFunc
    said: str
    room: str
    coordinates: list[str]
    levels: list[tuple[str, str, str]]
    result: str
    first: int | float
    idtypes: list[str]
    dtype: str
    rows: Rows | None


class Rows(NamedTuple):
    """The programs of a matrix, or of a vector as one row, that is filled by rows in two passes.

    count : adds to `ends`, (rows,) int64, the number of writes to each row
    fill : takes `ends`, of the type of columns, as the start of each row, and advances each to its
        end; writes the value of each visit to `found` and its column to `at`, both (room,)
    combine : takes the output of `fill` as a matrix with unsorted and repeated columns, see
        :func:`sparsetir.sparse_ir.assemble.assemble`; None where updates cannot be combined
    """

    count: SparseFunc
    fill: SparseFunc
    combine: SparseFunc | None
    room: str
    at: str
    found: str
    ends: str


def assemble_levels(func: SparseFunc) -> LevelsAssembly:
    """The programs that compute the result of a program over axes whose nnz is None.

    Parameters
    ----------
    func : SparseFunc
        Of stage I, as written. The coordinates of its writes do not depend on what the result
        holds, whose initial value is zero, or the constant in the `init` of the first iteration.

    Returns
    -------
    LevelsAssembly

    Raises
    ------
    ValueError
        For an unsupported program; the message says what is expected.
    """
    return _Levels(func).run()


class _Levels:
    def __init__(self, func: SparseFunc) -> None:
        self.func, self.open = func, open_axes(func)
        self.out: Any = open_result(func)
        self.path = self.open[-1].ancestors()
        written = {s.buffer for s in stores_of(func.body)}
        outputs = [b.name for b in func.buffers if b.handle is not None and b.var in written]
        if len(outputs) > 1:
            self.refuse(f"expected one result of the program, got {outputs}")
        over, path = [a.name for a in self.out.axes], [a.name for a in self.path]
        rest = self.out.axes[len(path) :]
        if over[: len(path)] != path or any(a.kind != "dense_fixed" for a in rest):
            self.refuse(f"expected it to be over {path}, then dense axes, got {over}")

    def refuse(self, text: str) -> NoReturn:
        raise ValueError(
            f"build_assembled: function '{self.func.name}': result '{self.out.name}': {text}"
        )

    def run(self) -> LevelsAssembly:
        first = self._first()
        at_pattern = closed(self.func)
        body = map_expr(self.func.body, [(SparseIteration, self._without_init)])
        values = at_pattern.replace(body=body)
        names = {a.name: a for a in at_pattern.axes}
        levels = [names[a.name] for a in self.open]
        entries, said, room, coordinates = self._entries(body)
        rows = self._rows(body, first)
        for program in (entries, values):
            verify(program)
        return LevelsAssembly(
            entries, values, said, room, coordinates,
            [(str(a.indptr.name), str(a.indices.name), str(a.nnz.name)) for a in levels],
            str(self.out.handle.name), first, [a.idtype for a in self.path], self.out.dtype, rows,
        )  # fmt: skip

    def _stores(self, *trees: Any) -> list[Any]:
        return [s for s in stores_of(*trees) if s.buffer.same_as(self.out.var)]

    def _first(self) -> int | float:
        """The initial value of elements."""
        writers = [it for it in sparse_iterations(self.func) if self._stores(it.init, it.body)]
        begun = [it for it in writers if self._stores(it.init)]
        if not begun:
            return 0
        (it, *more), whole = begun, statements_of(self.func.body)
        init: Any = it.init
        if more or it is not writers[0] or not any(it.same_as(s) for s in whole):
            self.refuse(
                "expected a T.init() in the first iteration that writes it alone, inside of no "
                f"other, got those of {[x.name for x in begun]}"
            )
        constant = isinstance(getattr(init, "value", None), tirx.IntImm | tirx.FloatImm)
        if not (constant and isinstance(init, tirx.BufferStore)) or not all(
            same_indices([*s.indices], [*init.indices]) for s in self._stores(it.body)
        ):
            self.refuse(f"expected T.init() to write a constant where the body writes, got {init}")
        return init.value.value

    def _without_init(self, it: SparseIteration) -> SparseIteration:
        return iteration_with(it, init=None) if self._stores(it.init) else it

    def _entries(self, body: Any) -> tuple[SparseFunc, str, str, list[str]]:
        """The program that lists coordinates, and the names of its parameters."""
        outputs = _Outputs(self.func, self.out)
        room = outputs.axis("ROOM", outputs.scalar("room"))
        said = outputs.array(
            "said", outputs.axis("SAID", as_dtype(1 + len(self.path), "int64")), "int64"
        )
        at = [outputs.array("at", room, a.idtype) for a in self.path]
        places = [tirx.IntImm("int64", n) for n in range(len(at) + 1)]
        count = tirx.BufferLoad(said, places[:1])

        def noted(store: Any) -> list[Any]:
            pairs = zip(at, store.indices, self.path, strict=False)
            out = [tirx.BufferStore(to, as_dtype(i, a.idtype), [count]) for to, i, a in pairs]
            return [*out, tirx.BufferStore(said, count + places[1], places[:1])]

        begins = [
            tirx.BufferStore(said, as_dtype(x, "int64"), [n])
            for n, x in zip(places, (0, *(a.length for a in self.path)), strict=True)
        ]
        program = self._visiting("entries", outputs, body, noted, begins)
        names = [str(p.name) for p in outputs.params]
        return program, names[1], names[0], names[2:]

    def _rows(self, body: Any, first: int | float) -> Rows | None:
        """The programs for scalars in rows, or None if elements are not scalars in rows."""
        out, begun = self.out, tirx.const(first, self.out.dtype)
        if len(self.path) != 2 or len(out.axes) != 2:
            return None
        rows, columns = self.path
        at_first = map_expr(
            body, [(ir.TensorLoad, lambda x: begun if x.source.same_as(out.var) else x)]
        )

        def program(name: str, types: Sequence[str]) -> tuple[SparseFunc, list[str]]:
            outputs = _Outputs(self.func, out)
            room = outputs.axis("ROOM", outputs.scalar("room")) if types else rows
            arrays = [
                outputs.array(w, room, t) for w, t in zip(("at", "found"), types, strict=False)
            ]
            dtype = columns.idtype if types else "int64"
            ends = outputs.array("ends", rows, dtype)

            def noted(store: Any) -> list[Any]:
                row, column = store.indices
                place = tirx.BufferLoad(ends, [row])
                pairs = zip(arrays, (as_dtype(column, columns.idtype), store.value), strict=False)
                stores = [tirx.BufferStore(to, x, [place]) for to, x in pairs]
                return [*stores, tirx.BufferStore(ends, place + tirx.IntImm(dtype, 1), [row])]

            func = self._visiting(name, outputs, at_first, noted)
            return func, [str(p.name) for p in outputs.params]

        count, _ = program("count", ())
        fill, names = program("fill", (columns.idtype, out.dtype))
        for one in (count, fill):
            verify(one)
        return Rows(count, fill, self._combine(body, first), *names)

    def _combine(self, body: Any, first: int | float) -> SparseFunc | None:
        """The program that combines the listed values of each element, or None."""
        ways = set[str]()
        for store in self._stores(body):
            update = reduction_of(store)
            if update is None and loads_of(store.value, self.out.var):
                return None
            if update is not None and (update.keeps_nan or dtype_of(update.term) != self.out.dtype):
                return None
            ways.add("" if update is None else update.operator)
        way = ways.pop()
        if ways or first != {"sum": 0, "product": 1}.get(way, first):
            return None
        (rows, columns), dtype = self.path, self.out.dtype
        value = {"sum": "{} + {}", "product": "{} * {}", "max": "T.max({}, {})",
                 "min": "T.min({}, {})", "": "{1}"}[way].format("C[i, j]", "V[i, j]")  # fmt: skip
        begun = "" if not way else f"with T.init():\n            C[i, j] = T.{dtype}('{first}')"
        return from_source(f"""
@T.prim_func
def combine(
    v: T.handle, ptr: T.handle, idx: T.handle, c: T.handle, c_ptr: T.handle, c_idx: T.handle,
    m: T.{rows.idtype}, n: T.{columns.idtype}, nnz: T.{columns.idtype},
):
    I = T.dense_fixed(m, '{rows.idtype}')
    J = T.sparse_variable(I, (n, nnz), (ptr, idx), '{columns.idtype}', unique=False)
    K = T.sparse_variable(I, (n, None), (c_ptr, c_idx), '{columns.idtype}')
    V = T.match_sparse_buffer(v, (I, J), '{dtype}')
    C = T.match_sparse_buffer(c, (I, K), '{dtype}')
    with T.sp_iter([I, J], 'SS', 'combine') as [i, j]:
        {begun}
        C[i, j] = {value}
""")

    def _visiting(
        self, name: str, outputs: _Outputs, body: Any, noted: Callable[[Any], list[Any]],
        begins: Sequence[Any] = (),
    ) -> SparseFunc:  # fmt: skip
        """A program with the same visits, and other statements in place of stores of the result."""
        func, out = self.func, self.out
        lengths = {v: a for it in nodes_of(SparseIteration, body) for a, v, _ in it.axis_of()}

        def known(index: Any, axis: Axis) -> bool:
            visited = lengths.get(index) if isinstance(index, ir.Var) else None
            return visited is not None and tvm_ffi.structural_equal(visited.length, axis.length)

        def listed(store: Any) -> Any:
            if not store.buffer.same_as(out.var):
                return store
            pairs = zip(store.indices, out.axes, strict=True)
            inside = [(i >= 0, i < a.length) for i, a in pairs if not known(i, a)]
            stmt = as_one(noted(store))
            return tirx.IfThenElse(tirx.all(*sum(inside, ())), stmt, None) if inside else stmt

        def ordered(it: SparseIteration) -> SparseIteration:
            annotations = {**it.annotations, ORDERED: 1}
            kinds = it.kinds if it.init is not None else "S" * len(it.vars)
            return iteration_with(it, kinds=kinds, annotations=annotations)

        listing = map_expr(body, [(tirx.BufferStore, listed), (SparseIteration, ordered)])
        if loads_of(listing, out.var):
            self.refuse("expected where it is written not to depend on what it holds")
        gone = [out.handle, *(h for a in self.open for h in (a.indptr, a.indices))]
        kept = [p for p in func.params if not any(p.same_as(h) for h in gone)]
        return make_func(
            f"{func.name}_{name}", [*kept, *outputs.params],
            [*(a for a in func.axes if not is_open(a)), *outputs.axes],
            [*(b for b in func.buffers if b.name != out.name), *outputs.buffers],
            as_one([*begins, listing]),
            {k: v for k, v in func.attrs.items() if k != "global_symbol"}, func.span,
        )  # fmt: skip


class _Outputs:
    """The declarations of a generated program besides those of the source program."""

    def __init__(self, func: SparseFunc, out: SparseBuffer) -> None:
        self.func, self.handle, self.taken = func, out.handle, list[str]()
        self.params, self.axes, self.buffers = list[Any](), list[Axis](), list[SparseBuffer]()

    def _fresh(self, wish: str) -> str:
        self.taken.append(fresh_name(self.func, f"{self.handle.name}_{wish}", self.taken))
        return self.taken[-1]

    def scalar(self, wish: str) -> Any:
        """A scalar parameter, int64."""
        self.params.append(tirx.Var(self._fresh(wish), "int64"))
        return self.params[-1]

    def axis(self, wish: str, length: Any) -> Axis:
        """An axis of positions."""
        self.axes.append(Axis(self._fresh(wish), "dense_fixed", length, idtype="int64"))
        return self.axes[-1]

    def array(self, wish: str, axis: Axis, dtype: str) -> Any:
        """A parameter for an array, and its buffer."""
        handle = ir.Var(self._fresh(wish), self.handle.ty)
        var = buffer_var([axis.length], dtype, self._fresh(f"{wish}_values"))
        self.params.append(handle)
        self.buffers.append(SparseBuffer(var, [axis], handle))
        return var
