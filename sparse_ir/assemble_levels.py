"""A sparse result of any levels, written in any order: programs of its pattern and its values.

:mod:`sparsetir.sparse_ir.assemble` goes row by row. Of a program that does not, `entries` lists the
coordinates at which it writes, as often as it does::

    said[0] = 0
    with T.sp_iter([O, J, K], "SSS", "outer") as [o, j, k]:
        C_at[said[0]] = j
        C_at_1[said[0]] = k
        said[0] = said[0] + 1

Without repetitions and sorted they are the levels of the result; what is behind the room for them
is discarded, and counted. `values` is the program with that pattern, which is given, and without
what the result begins with: the caller writes it.
"""

from __future__ import annotations

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
from sparsetir.sparse_ir.tir import as_dtype, as_one
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.verify import verify


class LevelsAssembly(NamedTuple):
    """The programs of a sparse result, and the names of their parameters for it.

    entries : takes `room`, of int64, and `coordinates`, (room,) for the root and each level.
        Writes these, and `said`, (2 + levels,) of int64: how many there are, and the lengths
    values : takes the parameters of `levels` and `result`, which it updates
    levels : of each level that is assembled `indptr`, `indices` and `nnz`
    first : what elements begin with
    idtypes : of the root and each level
    dtype : of the values
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


def assemble_levels(func: SparseFunc) -> LevelsAssembly:
    """The programs that make the result of a program over axes whose nnz is None.

    Parameters
    ----------
    func : SparseFunc
        Of stage I, as written. Where it writes does not depend on what the result holds, which
        begins with zero, or with the constant in the `init` of the first iteration.

    Returns
    -------
    LevelsAssembly

    Raises
    ------
    ValueError
        For a program of another kind, which says what is expected.
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
        for program in (entries, values):
            verify(program)
        return LevelsAssembly(
            entries, values, said, room, coordinates,
            [(str(a.indptr.name), str(a.indices.name), str(a.nnz.name)) for a in levels],
            str(self.out.handle.name), first, [a.idtype for a in self.path], self.out.dtype,
        )  # fmt: skip

    def _stores(self, *trees: Any) -> list[Any]:
        return [s for s in stores_of(*trees) if s.buffer.same_as(self.out.var)]

    def _first(self) -> int | float:
        """What elements begin with."""
        writers = [it for it in sparse_iterations(self.func) if self._stores(it.init, it.body)]
        begun = [it for it in writers if self._stores(it.init)]
        if not begun:
            return 0
        (it, *more), body = begun, self.func.body
        whole = body.seq if isinstance(body, tirx.SeqStmt) else [body]
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
        func, out, taken = self.func, self.out, []

        def fresh(wish: str) -> str:
            taken.append(fresh_name(func, f"{out.handle.name}_{wish}", taken))
            return taken[-1]

        params, buffers = [tirx.Var(fresh("room"), "int64")], list[SparseBuffer]()
        two = as_dtype(1 + len(self.path), "int64")
        one = Axis(fresh("SAID"), "dense_fixed", two, idtype="int64")
        room = Axis(fresh("ROOM"), "dense_fixed", params[0], idtype="int64")

        def output(wish: str, axis: Axis, dtype: str) -> Any:
            handle = ir.Var(fresh(wish), out.handle.ty)
            var = buffer_var([axis.length], dtype, fresh(f"{wish}_values"))
            params.append(handle)
            buffers.append(SparseBuffer(var, [axis], handle))
            return var

        said = output("said", one, "int64")
        at = [output("at", room, a.idtype) for a in self.path]
        places = [tirx.IntImm("int64", n) for n in range(len(at) + 1)]
        count = tirx.BufferLoad(said, places[:1])
        lengths = {v: a for it in nodes_of(SparseIteration, body) for a, v, _ in it.axis_of()}

        def known(index: Any, axis: Axis) -> bool:
            visited = lengths.get(index) if isinstance(index, ir.Var) else None
            return visited is not None and tvm_ffi.structural_equal(visited.length, axis.length)

        def listed(store: Any) -> Any:
            if not store.buffer.same_as(out.var):
                return store
            pairs = list(zip(store.indices, out.axes, strict=True))
            noted = [
                tirx.BufferStore(to, as_dtype(i, a.idtype), [count])
                for to, (i, a) in zip(at, pairs, strict=False)
            ]
            noted.append(tirx.BufferStore(said, count + places[1], places[:1]))
            inside = [(i >= 0, i < a.length) for i, a in pairs if not known(i, a)]
            if not inside:
                return as_one(noted)
            return tirx.IfThenElse(tirx.all(*sum(inside, ())), as_one(noted), None)

        def ordered(it: SparseIteration) -> SparseIteration:
            annotations = {**it.annotations, ORDERED: 1}
            kinds = it.kinds if it.init is not None else "S" * len(it.vars)
            return iteration_with(it, kinds=kinds, annotations=annotations)

        listing = map_expr(body, [(tirx.BufferStore, listed), (SparseIteration, ordered)])
        if loads_of(listing, out.var):
            self.refuse("expected where it is written not to depend on what it holds")
        begins = [
            tirx.BufferStore(said, as_dtype(x, "int64"), [n])
            for n, x in zip(places, (0, *(a.length for a in self.path)), strict=True)
        ]
        gone = [out.handle, *(h for a in self.open for h in (a.indptr, a.indices))]
        kept = [p for p in func.params if not any(p.same_as(h) for h in gone)]
        made = make_func(
            f"{func.name}_entries", [*kept, *params],
            [*(a for a in func.axes if not is_open(a)), one, room],
            [*(b for b in func.buffers if b.name != out.name), *buffers],
            as_one([*begins, listing]),
            {k: v for k, v in func.attrs.items() if k != "global_symbol"}, func.span,
        )  # fmt: skip
        names = [str(p.name) for p in params]
        return made, names[1], names[0], names[2:]
