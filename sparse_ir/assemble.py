"""Results whose pattern is not known beforehand: the programs that assemble them.

A program states the computation with a dense result::

    with T.sp_iter([I, J, T.attach(K, J)], "SRS", "spgemm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

A sparse result stores the elements that the iteration writes: in CSR, each row in increasing order.
Three programs make it. `bound` counts the visits of each row; a merged axis has at most as many as
its members have elements. These bounds are the allocation, so `fill` makes the visits only once, in
parts of the rows (one per thread) that each have their own section of the arrays::

    with T.sp_iter([PARTS], "S", "spgemm_parts") as [p]:
        at[0] = 0
        ...                                                 # workspace, words and groups cleared
        with T.sp_iter([T.part(I, ROWS)], "S", "spgemm_rows") as [i]:
            with T.sp_iter([J, T.attach(K, J)], "SS", "spgemm") as [j, k]:
                workspace[k] = workspace[k] + A[i, j] * B[j, k]
                words[k >> 6] = words[k >> 6] | 1 << (k & 63)
                groups[k >> 12] = groups[k >> 12] | 1 << (k >> 6 & 63)
            ...                      # for each bit of each word of each group, at its column `col`:
                C_indices[p, at[0]] = col[0]
                C[p, at[0]] = workspace[col[0]]
                workspace[col[0]] = 0.0
                at[0] = at[0] + 1
            C_ends[i] = at[0]

Several iterations may add to the result, after one that sets its initial value::

    with T.sp_iter([I, N], "SS", "zero") as [i, k]:
        C[i, k] = 0.0

Scanning two or three levels of bits costs far less than sorting, and skips what a row did not
touch. Rows of a few visits need no bitmap: `short_fill` keeps them sorted where they are stored.
Where the columns of a row are visited once and in order, as those of a union are, elements are
appended as they come, without a workspace. Last, the gaps between the parts are closed. `numeric`
computes the values of a given pattern, through the same workspace.

(Kjolstad et al., "Tensor algebra compilation with workspaces", sections 4 and 5; Gustavson, "Two
fast algorithms for sparse matrices"; Senanayake et al., section 6.1.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import product
from operator import mul
from typing import Any, NamedTuple

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.annotations import ORDERED
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    attached_axes,
    buffer_var,
    flat_axes,
    loads_of,
    make_func,
    nodes_of,
    same_indices,
    sparse_iterations,
    stores_of,
    substitute,
    variables_of,
    visited_axes,
)
from sparsetir.sparse_ir.open_axes import as_dense, open_axes
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.promises import with_fact
from sparsetir.sparse_ir.schedule.loops import Loop, loops_of
from sparsetir.sparse_ir.search import load_one, store_one
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    dtype_of,
    free_vars,
    size_text,
    statements_of,
    zero,
)
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.verify import verify

WORD = 64  # bits, one per column
SHORT = 16  # visits of a row that are sorted by insertion


class Assembly(NamedTuple):
    """The programs of a sparse result, and the names of the parameters that describe the result.

    bound : writes `bounds`, (rows,) int64, the most elements of each row, and `width`, (2,) int64,
        the number of columns and the number of consecutive rows that must stay in one part
    fill : takes `rows_ptr`, (parts + 1,) of the idtype, the rows of each part (the outer rows,
        where several loops are over rows), and `starts`, (parts + 1,) int64, the start of each
        part's section of the arrays. Writes `ends`, (rows,) int64, the end of each row in its
        section, and `indices` and `values`, (room,) and any trailing dimensions
    narrow_fill : `fill` with a one-level bitmap, whose words are all scanned for each row
    wide_fill : `fill` with a three-level bitmap, for matrices with many groups of columns
    short_fill : for a matrix of scalars, `wide_fill` that also takes `bounds`, and sorts rows of
        few visits by insertion, without a workspace
    masked_bound : `bound` with a pattern as a further operand: `indptr`, (rows + 1,), `indices`,
        (nnz,)
    numeric : takes `rows_ptr` and a pattern; writes `values`, and drops visits that the pattern
        lacks. None where several loops are over rows
    parted : whether rows can be divided into parts; else there is one part, and no `rows_ptr`
    shape : the parameters that hold the numbers of rows and columns; () where these are other sizes
    members : parameters whose sum bounds the number of elements of the result; () if there are none
    first : the initial value of elements
    idtype, dtype : the types of the result's indices and values
    """

    bound: SparseFunc
    fill: SparseFunc
    narrow_fill: SparseFunc
    wide_fill: SparseFunc
    short_fill: SparseFunc
    masked_bound: SparseFunc
    numeric: SparseFunc | None
    bounds: str
    width: str
    rows_ptr: str
    starts: str
    ends: str
    indptr: str
    indices: str
    values: str
    parts: str
    room: str
    nnz: str
    parted: bool
    shape: tuple[str, ...]
    members: tuple[str, ...]
    first: int | float
    idtype: str
    dtype: str


class NotByRowsError(ValueError):
    """A program that does not write its result row by row."""


def assemble(func: SparseFunc, result: str | None = None) -> Assembly:
    """The programs that compute a dense result of a program as a sparse one, in CSR.

    Parameters
    ----------
    func : SparseFunc
        Of stage I, as written: iterations over rows first, then over columns in any way, once and
        in order, or several times. The initial value is a constant, set by the `init` of the first
        iteration or by an iteration over dense rows and columns before all others.
    result : str, optional
        The name of the result's buffer or parameter: over a dense axis of rows, an axis of columns,
        `T.sparse_variable(I, (n, None), ..)` or dense, and any dense axes of the elements. By
        default the only result.

    Returns
    -------
    Assembly

    Raises
    ------
    ValueError
        For an unsupported program; the message says what is expected.
    """
    if not isinstance(func, SparseFunc):
        raise ValueError(
            f"assemble: argument 'func': expected a stage-I function, got {type(func).__name__}"
        )
    return _Assembler(func, result).run()


class _Visits:
    """One iteration of the program.

    rows, to_columns, inside : its loops down to that over rows, from there down to that over
        columns, and those below
    """

    def __init__(self, of: _Assembler, it: SparseIteration) -> None:
        self.it, self.out, self.out_columns = it, of.out, of.axes[1]
        out, index = of.out, of.index_of(it)
        loops = loops_of(it)
        accessed = f"{out.name}[{', '.join(map(str, index))}]"
        if any(len(loop.vars) > 1 or isinstance(loop.node, PartAxis) for loop in loops):
            of.refuse("expected plain, attached and merged axes, none fused or in parts")
        at = {loop.var: n for n, loop in enumerate(loops)}
        row, column = ([at[v] for v in variables_of(i) if v in at] for i in index[:2])
        last, end = max(row, default=-1) + 1, max(column, default=-1) + 1
        self.rows, self.to_columns, self.inside = loops[:last], loops[last:end], loops[end:]
        others = [_length(x) for n, x in enumerate(self.rows) if n not in row]
        spatial = {x.kinds for n, x in enumerate(self.rows) if n in row} == {"S"}
        if last > end or any(n != 1 for n in others) or not spatial:
            of.refuse(
                f"result '{out.name}': expected a spatial loop over its rows around all others, "
                f'got {[x.name for x in loops]} as "{it.kinds}" for {accessed}'
            )
        for axis, i in zip(of.axes[:2], index, strict=False):
            if not isinstance(i, ir.Var):
                if dtype_of(i) != axis.idtype:
                    of.refuse(f"result '{out.name}': expected {i} of {axis.idtype}, got {i.ty}")
                continue
            (gone,) = flat_axes([loops[at[i]].node])
            same = tvm_ffi.structural_equal(gone.length, axis.length)
            if not same or gone.idtype != axis.idtype:
                of.refuse(
                    f"result '{out.name}': expected '{gone.name}', which its '{axis.name}' is gone "
                    f"through by, to be of its length and type, {size_text(axis.length)} "
                    f"{axis.idtype}, got {size_text(gone.length)} {gone.idtype}"
                )
        rows = [x.node for x in self.rows]
        again = [a.name for a in flat_axes(rows) if not a.unique]
        if again:
            of.refuse(
                f"result '{out.name}': expected each row to be visited once, got '{again[0]}', "
                "which may store a row several times (unique=False)"
            )
        whole = all(isinstance(x, Axis) and x.kind == "dense_fixed" for x in rows)
        if not isinstance(index[0], ir.Var) and not (
            whole and _counts_up(index[0], self.rows, of.axes[0])
        ):
            of.refuse(
                f"result '{out.name}': expected its rows to be a coordinate, or those of dense "
                f"axes in the order of their loops, as in i1 * m2 + i2 of m1 * m2 rows, got "
                f"{index[0]} of {size_text(of.axes[0].length)}"
            )
        self.index, self.known = index, {}

    def nest_under(self, rows: list[Loop]) -> bool:
        """Nest under `rows` if both iterate over the same rows; return whether they do."""
        inner, others = (flat_axes([x.node for x in loops]) for loops in (self.rows, rows))
        self.known = {x.var: y.var for x, y in zip(self.rows, rows, strict=False)}
        self.index = [substitute(i, self.known) for i in self.index]
        pairs = zip(inner, others, strict=False)
        return len(inner) == len(others) and all(a.same_as(b) for a, b in pairs)

    @property
    def in_order(self) -> bool:
        """Whether the columns of each row are visited once, in order, each with all its terms."""
        last = self.to_columns[-1:]
        loops = [*(x for x in self.to_columns[:-1] if _length(x) != 1), *last]
        inner = {x.var for x in self.inside}
        once = all(x.kinds == "S" and flat_axes([x.node])[0].unique for x in loops)
        plain = len(loops) == 1 and self.index[1].same_as(loops[0].var)
        ordered = plain or _counts_up(self.index[1], loops, self.out_columns)
        return once and ordered and inner >= set(self.index[2:])

    @property
    def reads_result_elsewhere(self) -> bool:
        """Whether something other than its update reads the result, such as a condition."""
        out, body = self.out.var, self.it.body
        mine = [s for s in stores_of(body) if s.buffer.same_as(out)]
        return len(loads_of(body, out)) > len(loads_of(mine, out))

    @property
    def always_writes(self) -> bool:
        """Whether visiting a column always writes its element, whatever the loops below visit."""
        dense = all(a.kind == "dense_fixed" for a in flat_axes([x.node for x in self.inside]))
        return dense and isinstance(self.it.body, tirx.BufferStore)

    def rewritten(
        self,
        moved: Callable[[Sequence[Any]], tuple[Any, list[Any]]],
        around: Callable[[Any], list[Any]] = lambda store: [store],
    ) -> Any:
        """Body and init, with accesses of the result redirected by `moved`.

        around : returns the statements that replace a store of the body
        """
        out = self.out.var

        def store(node: Any, around: Callable[[Any], list[Any]]) -> Any:
            if not node.buffer.same_as(out):
                return node
            buffer, index = moved(node.indices)
            return as_one(around(tirx.BufferStore(buffer, node.value, index, span=node.span)))

        def load(node: Any) -> Any:
            return tirx.BufferLoad(*moved(node.indices)) if node.source.same_as(out) else node

        def all_of(stmt: Any, around: Callable[[Any], list[Any]]) -> Any:
            stmt = map_expr(substitute(stmt, self.known), [(ir.TensorLoad, load)])
            return map_expr(stmt, [(tirx.BufferStore, lambda node: store(node, around))])

        init = self.it.init
        return all_of(self.it.body, around), None if init is None else all_of(init, lambda s: [s])


class _Assembler:
    def __init__(self, func: SparseFunc, result: str | None) -> None:
        self.open, self.func = open_axes(func), as_dense(func)
        if len(self.open) > 1:
            self.refuse(f"expected one axis to assemble, got {[a.name for a in self.open]}")
        func = self.func
        iterations = list(sparse_iterations(func))
        steps = statements_of(func.body)
        if len(steps) != len(iterations) or not all(
            a.same_as(b) for a, b in zip(steps, iterations, strict=True)
        ):
            names = [it.name for it in iterations]
            self.refuse(f"expected iterations, and nothing around and beside them, got {names}")
        self.out = self._result(iterations, result)
        self.axes = list(self.out.axes or ())
        self.row_axis, self.column_axis, *self.rest = self.axes
        self.idtype, self.name = self.column_axis.idtype, iterations[-1].name
        self.first, iterations = self._first(iterations)
        self.visits = [_Visits(self, it) for it in iterations]
        self.index = self.visits[0].index
        self.rows = self.visits[0].rows
        for other in self.visits[1:]:
            if not other.nest_under(self.rows):
                self.refuse(
                    f"expected all iterations to be over the same rows, got those of "
                    f"{[v.it.name for v in self.visits]}"
                )

    def refuse(self, text: str) -> Any:
        raise NotByRowsError(f"assemble: function '{self.func.name}': {text}")

    # -- analysis of the program --------------------------------------------------------------

    def _result(self, iterations: list[SparseIteration], name: str | None) -> SparseBuffer:
        written = {s.buffer for it in iterations for s in stores_of(it.body, it.init)}
        outputs = [b for b in self.func.buffers if b.var in written and b.handle is not None]
        named = [b for b in outputs if name in (None, b.name, str(b.handle.name))]
        if len(outputs) != 1 or not named:
            self.refuse(
                f"argument 'result': expected the one result of the program, "
                f"{[b.name for b in outputs]}, got {name!r}"
            )
        (out,) = named
        axes = list(out.axes or ())
        if len(axes) < 2 or any(a.kind != "dense_fixed" for a in axes):
            kinds = [f"{a.name} ({a.kind})" for a in axes]
            self.refuse(
                f"result '{out.name}': expected dense axes of rows and columns, then any of its "
                f"elements, got {kinds or 'a dense buffer'}"
            )
        return out

    def index_of(self, it: SparseIteration) -> list[Any]:
        """The coordinates at which an iteration accesses the result."""
        out = self.out
        stores = [s for s in stores_of(it.body, it.init) if s.buffer.same_as(out.var)]
        if not stores:
            self.refuse(f"iteration '{it.name}': expected it to write '{out.name}'")
        first = list(stores[0].indices)
        accesses = [*stores, *loads_of(it.body, out.var)]
        same = all(same_indices(list(s.indices), first) for s in accesses)
        variables = [i for i in first if isinstance(i, ir.Var)]
        known, used = {*it.vars}, variables_of(*first)
        plain = {*variables, *first[2:]} <= known and len({*variables}) == len(variables)
        if not same or not plain or not {*used} <= known | {*self.func.params}:
            self.refuse(
                f"result '{out.name}': expected it to be accessed at different coordinates of the "
                f"iteration, the same in all places, got {out.name}[{', '.join(map(str, first))}]"
            )
        return first

    def _first(self, iterations: list[SparseIteration]) -> tuple[Any, list[SparseIteration]]:
        """The initial value, None where elements are set directly; and the other iterations."""
        out, (it, *others) = self.out, iterations
        if any(x.init is not None for x in others):
            self.refuse(
                f"expected a T.init() in the first of several iterations, '{it.name}', alone"
            )
        if others and it.init is None:
            by_axes = dict(zip(it.vars, it.axes, strict=False))
            index = self.index_of(it)
            whole = [by_axes.get(i) for i in index]
            alone = isinstance(it.body, tirx.BufferStore) and len(it.vars) == len(index)
            same = all(
                a is not None and a.same_as(b) for a, b in zip(whole, self.axes, strict=True)
            )
            if not alone or not same:
                self.refuse(
                    f"iteration '{it.name}': expected the first of several to write a constant "
                    f"over the axes of '{out.name}', {[a.name for a in self.axes]}, or to have a "
                    "T.init()"
                )
            return self._constant(it.body), others
        if it.init is None:
            if loads_of(it.body, out.var):
                self.refuse(
                    f"result '{out.name}': expected a `with T.init():`, as it is read, and holds "
                    "nothing before"
                )
            return None, iterations
        return self._constant(it.init), iterations

    def _constant(self, store: Any) -> Any:
        value = store.value if isinstance(store, tirx.BufferStore) else None
        if value is None or free_vars(value) or nodes_of(ir.TensorLoad, value):
            self.refuse(
                f"result '{self.out.name}': expected one constant as its first value, got {store}"
            )
        return value

    @property
    def appended(self) -> bool:
        """Whether elements are written in the order in which they are stored."""
        return len(self.visits) == 1 and self.visits[0].in_order

    # -- the programs -------------------------------------------------------------------------

    def run(self) -> Assembly:
        func, name = self.func, str(self.out.handle.name)
        wishes = "bounds width rows_ptr starts ends indptr indices parts room nnz".split()
        self.names = names = {w: fresh_name(func, f"{name}_{w}") for w in wishes}
        for axis in self.open:
            names |= {w: str(getattr(axis, w).name) for w in ("indptr", "indices")}
        self.whole = isinstance(self.index[0], ir.Var)
        self.divided = -1 if self.whole else 0
        rows = self.rows[self.divided].node
        self.parted = isinstance(rows, Axis) and rows.kind == "dense_fixed"
        fill = self._fill("fill", 2)
        narrow = fill if self.appended else self._fill("narrow_fill", 1)
        wide = fill if self.appended else self._fill("wide_fill", 3)
        plain = self.appended or self.rest or any(v.reads_result_elsewhere for v in self.visits)
        short = wide if plain else self._fill("short_fill", 3, short=True)
        masked = self._bound("masked_bound"), self._numeric() if self.whole else None
        programs = self._bound("bound"), fill, narrow, wide, short, *masked
        for program in filter(None, programs):
            verify(program)
        lengths = [a.length for a in self.axes[:2]] if self.parted and self.whole else [None]
        members = [a.nnz for a in self._appended_axes()]
        types = {"idtype": self.idtype, "dtype": self.out.dtype}
        return Assembly(
            *programs, **names, values=name, parted=self.parted, shape=self._scalars(lengths),
            members=self._scalars(members), first=getattr(self.first, "value", 0), **types,
        )  # fmt: skip

    def _scalars(self, sizes: Sequence[Any]) -> tuple[str, ...]:
        """The parameters that hold these sizes; () if one is not a parameter."""
        params = {*self.func.params}
        named = [str(x.name) for x in sizes if isinstance(x, ir.Var) and x in params]
        return (*named,) if len(named) == len(sizes) else ()

    def _appended_axes(self) -> list[Axis]:
        """The axes whose elements together bound the number of elements of the result."""
        columns = self.visits[0].to_columns
        if not self.appended or len(columns) != 1 or len(self.rows) != 1:
            return []
        (row,) = flat_axes([self.rows[0].node])
        members = _members(columns[0].node)
        plain = all(isinstance(a, Axis) and a.kind == "sparse_variable" for a in members)
        return members if plain and all(row.same_as(a.parent) for a in members) else []

    def _bound(self, name: str) -> SparseFunc:
        program = _Program(self, name)
        if name == "masked_bound":  # so that its arguments are checked
            program.stored()
        at = program.local("at", "int64")
        counted = []
        for visits in self.visits:
            for nodes in _counted([x.node for x in visits.to_columns]):
                loops = [Loop(n, [_variable_like(n)], "S") for n in nodes]
                counted.append(program.iterate("counted", loops, program.step(at)))
        out = program.output("bounds", "int64", [self.row_axis])
        most = tirx.min(load_one(at), as_dtype(self.column_axis.length, "int64"))
        body = [store_one(at, zero("int64")), *counted, out.store(most, self.index[:1])]
        rows = program.iterate("rows", self.rows, as_one(body), ordered=False)
        two = program.axis("WIDTH", "dense_fixed", as_dtype(2, "int64"))
        width = program.output("width", "int64", [two])
        inner = [] if self.whole else [x.node.length for x in self.rows[1:]]
        step = reduce(mul, (as_dtype(n, "int64") for n in inner), as_dtype(1, "int64"))
        columns = as_dtype(self.column_axis.length, "int64")

        def said(index: list[Any]) -> Any:
            return width.store(tirx.Select(index[0] < 1, columns, step), index)

        return program.made(as_one([rows, program.over([two], "width", said)]))

    def _fill(self, name: str, levels: int, short: bool = False) -> SparseFunc:
        program = _Program(self, name)
        parts, index = program.parts()
        room = program.axis("ROOM", "dense_variable", program.scalar("room", "int64"), parts,
                            indptr="starts")  # fmt: skip
        columns = program.output("indices", self.idtype, [parts, room])
        values = program.output("values", self.out.dtype, [parts, room, *self.rest])
        ends = program.output("ends", "int64", [self.row_axis])
        for buffer in (columns, values):
            program.fact(buffer, room)
        # Unsigned: signed integers would be guarded against overflow at each step.
        at = program.local("at", "uint64")
        here = [index, as_dtype(load_one(at), "int64")]
        begins = [store_one(at, zero("uint64"))]
        if self.appended:
            (only,) = self.visits
            one = as_dtype(1, "uint64")
            wrote = None if only.always_writes else program.local("wrote", "uint64")

            def moved(indices: Sequence[Any]) -> tuple[Any, list[Any]]:
                return values.var, [*here, *indices[2:]]

            def noted(store: Any) -> list[Any]:
                return [store] if only.always_writes else [store, store_one(wrote, one)]

            body, init = only.rewritten(moved, noted)
            element = [body] if init is None else [init, body]
            if only.inside:
                inner = program.iterate("element", only.inside, body, init=init, plain=False)
                element = [inner]
            step = [program.step(at)]
            if not only.always_writes:
                nothing = zero(self.out.dtype)
                begun = program.over(
                    self.rest, "begun", lambda rest: values.store(nothing, [*here, *rest])
                )
                element = [store_one(wrote, zero("uint64")), begun, *element]
                step = [store_one(at, load_one(at) + load_one(wrote))]
            statements = [columns.store(self.index[1], here), *element, *step]
            visits = [program.iterate("visit", only.to_columns, as_one(statements))]
        else:
            space = _Workspace(program, levels)
            begins += space.cleared()

            def emitted(column: Any) -> list[Any]:
                def copied(rest: list[Any]) -> Any:
                    taken = values.store(space.values.load([column, *rest]), [*here, *rest])
                    return as_one([taken, space.reset([column, *rest])])

                moved = program.over(self.rest, "copied", copied)
                return [columns.store(column, here), moved, program.step(at)]

            visits = [*(program.visit(v, space) for v in self.visits)]
            visits.append(space.scan_and_clear(emitted))
            if short:
                known = program.output("bounds", "int64", [self.row_axis]).load(self.index[:1])
                row = _ShortRow(program, index, columns, values, at)
                each = [row.begun(), *(program.visit(v, row) for v in self.visits)]
                few = known <= as_dtype(SHORT, "int64")
                visits = [tirx.IfThenElse(few, as_one(each), as_one(visits))]
        visits.append(ends.store(as_dtype(load_one(at), "int64"), self.index[:1]))
        return program.made(program.in_parts(parts, index, begins, visits))

    def _numeric(self) -> SparseFunc:
        program = _Program(self, "numeric")
        parts, index = program.parts()
        stored = program.stored()
        values = program.output("values", self.out.dtype, [self.row_axis, stored, *self.rest])
        space = _Workspace(program, 0)
        row = self.index[0]
        (row_axis,) = flat_axes([self.rows[-1].node])
        node = stored if row_axis.same_as(self.row_axis) else AttachedAxis(stored, row_axis)

        def each(name: str, body_of: Callable[[list[Any]], Any]) -> Any:
            column = tirx.Var("col", self.idtype)
            loop = Loop(node, [column], "S")
            rest = program.over(self.rest, f"{name}_element", lambda i: body_of([column, *i]))
            return program.iterate(name, [loop], rest)

        visits = [
            each("begun", space.reset),
            *(program.visit(v, space) for v in self.visits),
            each("taken", lambda i: values.store(space.values.load(i), [row, *i])),
        ]
        return program.made(program.in_parts(parts, index, space.cleared(), visits))


class _Output(NamedTuple):
    """A buffer that a generated program declares."""

    var: Any

    def store(self, value: Any, index: Sequence[Any]) -> Any:
        return tirx.BufferStore(self.var, value, [*index])

    def load(self, index: Sequence[Any]) -> Any:
        return tirx.BufferLoad(self.var, [*index])


class _Program:
    """One of the generated programs, and its declarations besides those of the source program."""

    def __init__(self, of: _Assembler, name: str) -> None:
        self.of, self.name = of, name
        self.axes: list[Axis] = []
        self.buffers: list[SparseBuffer] = []
        self.params: list[Any] = []
        self.facts: list[tuple[str, str]] = []
        self.one: Axis | None = None
        self.taken = [*of.names.values()]

    def fresh(self, wish: str) -> str:
        """A name that is not taken."""
        self.taken.append(fresh_name(self.of.func, wish, self.taken))
        return self.taken[-1]

    def scalar(self, name: str, dtype: str) -> Any:
        """A scalar parameter that describes the result."""
        self.params.append(tirx.Var(self.of.names[name], dtype))
        return self.params[-1]

    def handle(self, name: str) -> Any:
        """A handle parameter for an array of the result."""
        if name == "values":
            return self.of.out.handle
        self.params.append(ir.Var(self.of.names[name], self.of.out.handle.ty))
        return self.params[-1]

    def axis(self, wish: str, kind: str, size: Any, parent: Any = None, **arrays: str) -> Axis:
        """A new axis; `size` is its length, or its number of stored elements."""
        column = kind == "sparse_variable"
        length = self.of.column_axis.length if column else size
        handles = {what: self.handle(name) for what, name in arrays.items()}
        new = Axis(
            name=self.fresh(wish), kind=kind, length=length, parent=parent,
            nnz=size if handles else None, idtype=str(size.ty), **handles,
        )  # fmt: skip
        self.axes.append(new)
        return new

    def output(self, name: str, dtype: str, axes: list[Axis]) -> _Output:
        """An output buffer for the result."""
        wish = self.of.out.name if name == "values" else f"{self.of.out.name}_{name}"
        named = wish if name == "values" else self.fresh(wish)
        return self._buffer(named, dtype, axes, self.handle(name))

    def room(self, wish: str, dtype: str, axes: list[Axis]) -> _Output:
        """A workspace buffer."""
        return self._buffer(self.fresh(wish), dtype, axes, None)

    def local(self, wish: str, dtype: str) -> Any:
        """A workspace of one element."""
        if self.one is None:
            self.one = self.axis("ONE", "dense_fixed", as_dtype(1, self.of.idtype))
        return self.room(wish, dtype, [self.one]).var

    def _buffer(self, name: str, dtype: str, axes: list[Axis], handle: Any) -> _Output:
        var = buffer_var([a.length for a in axes], dtype, name)
        self.buffers.append(SparseBuffer(var=var, axes=axes, handle=handle))
        return _Output(var)

    def fact(self, buffer: _Output, axis: Axis) -> None:
        """Record that accesses of a buffer stay within an axis."""
        self.facts.append((str(buffer.var.name), axis.name))

    def step(self, at: Any) -> Any:
        """A statement that increments a counter."""
        return store_one(at, load_one(at) + as_dtype(1, str(at.ty.dtype)))

    def iterate(
        self, name: str, loops: Sequence[Loop], body: Any, *, init: Any = None,
        ordered: bool = True, plain: bool = True,
    ) -> Any:  # fmt: skip
        """An iteration over loops, all spatial if `plain`; without loops the body alone."""
        if not loops:
            return body
        kinds = "".join("S" if plain else x.kinds for x in loops)
        return SparseIteration(
            span=self.of.func.span, axes=[x.node for x in loops], kinds=kinds,
            name=self.fresh(f"{self.of.name}_{name}"), vars=[v for x in loops for v in x.vars],
            init=init, body=body, annotations={ORDERED: 1} if ordered and plain else {},
        )  # fmt: skip

    def visit(self, visits: _Visits, space: _Workspace | _ShortRow) -> Any:
        """The body of an iteration for one row, with the result redirected to `space`."""
        column = visits.index[1]
        body = visits.rewritten(space.moved, lambda store: space.around(store, column))[0]
        if not isinstance(column, ir.Var):
            there = tirx.all(column >= 0, column < self.of.column_axis.length)
            body = tirx.IfThenElse(there, body, None)
        loops = [*visits.to_columns, *visits.inside]
        if isinstance(space, _ShortRow):  # the same visits also exist with a workspace
            fresh = {x.var: _variable_like(x.node) for x in loops}
            body = substitute(body, fresh)
            loops = [Loop(x.node, [fresh[x.var]], x.kinds) for x in loops]
        return self.iterate("visit", loops, body)

    def over(self, axes: Sequence[Axis], name: str, body_of: Callable[[list[Any]], Any]) -> Any:
        """A statement executed for all coordinates of dense axes."""
        variables = [tirx.Var(a.name.lower(), a.idtype) for a in axes]
        loops = [Loop(a, [v], "S") for a, v in zip(axes, variables, strict=True)]
        return self.iterate(name, loops, body_of([*variables]), ordered=False)

    def parts(self) -> tuple[Axis, Any]:
        """The axis of parts, and its coordinate."""
        length = self.scalar("parts", self.of.idtype)
        return self.axis("PARTS", "dense_fixed", length), tirx.Var("p", self.of.idtype)

    def stored(self) -> Axis:
        """The columns of a given pattern."""
        return self.axis("STORED", "sparse_variable", self.scalar("nnz", self.of.idtype),
                         self.of.row_axis, indptr="indptr", indices="indices")  # fmt: skip

    def in_parts(self, parts: Axis, index: Any, begins: list[Any], visits: list[Any]) -> Any:
        """The loop over parts and over the rows of each."""
        rows = self.of.rows
        if self.of.parted:
            rows, at = [*rows], self.of.divided
            length = rows[at].node.length
            by = self.axis("ROWS", "dense_variable", length, parts, indptr="rows_ptr")
            rows[at] = Loop(PartAxis(rows[at].node, by), rows[at].vars, "S")
        inside = self.iterate("rows", rows, as_one(visits))
        loop = Loop(parts, [index], "S")
        return self.iterate("parts", [loop], as_one([*begins, inside]), ordered=False)

    def made(self, body: Any) -> SparseFunc:
        """The complete program."""
        old = self.of.func
        kept = [b for b in old.buffers if b.name != self.of.out.name]
        values = any(b.handle is not None and b.name == self.of.out.name for b in self.buffers)
        params = [p for p in old.params if values or not p.same_as(self.of.out.handle)]
        func = make_func(
            f"{old.name}_{self.name}", [*params, *self.params], [*old.axes, *self.axes],
            [*kept, *self.buffers], body,
            {k: v for k, v in old.attrs.items() if k != "global_symbol"}, old.span,
        )  # fmt: skip
        for buffer, axis in self.facts:
            func = with_fact(func, "inside", buffer=buffer, axis=axis)
        return func


class _Bits(NamedTuple):
    """A level of the bitmap: `left` holds the bits still to scan, `place` the current one."""

    axis: Axis
    buffer: _Output
    left: Any
    place: Any


class _Workspace:
    """A dense workspace for one row of the result, with a bitmap of its columns by level."""

    def __init__(self, program: _Program, levels: int) -> None:
        self.program, self.of = program, program.of
        axes = [self.of.column_axis, *self.of.rest]
        self.values = program.room("workspace", self.of.out.dtype, axes)
        self.first = zero(self.of.out.dtype) if self.of.first is None else self.of.first
        program.fact(self.values, axes[0])
        self.levels, size = [], 1
        for wish, bit in (("words", "col"), ("groups", "word"), ("heaps", "group"))[:levels]:
            size *= WORD
            most = as_dtype(size, self.of.idtype)
            count = Analyzer().simplify(tirx.floordiv(axes[0].length + most - 1, most))
            axis = program.axis(wish.upper(), "dense_fixed", count)
            buffer = program.room(wish, "uint64", [axis])
            program.fact(buffer, axis)
            left = program.local(f"{wish}_left", "uint64")
            self.levels.append(_Bits(axis, buffer, left, program.local(bit, self.of.idtype)))

    def moved(self, indices: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The workspace element that replaces an element of the result."""
        return self.values.var, [*indices[1:]]

    def reset(self, index: Sequence[Any]) -> Any:
        """A store of the initial value."""
        return self.values.store(self.first, index)

    def cleared(self) -> list[Any]:
        """Statements that clear the workspace and its bitmap."""
        axes = [self.of.column_axis, *self.of.rest]
        out = [self.program.over(axes, "cleared", self.reset)]
        nothing = zero("uint64")
        for axis, buffer, left, place in self.levels:
            name = f"cleared_{axis.name.lower()}"
            out.append(self.program.over([axis], name, partial(buffer.store, nothing)))
            out += [store_one(x, zero(str(x.ty.dtype))) for x in (left, place)]
        return out

    def noted(self, column: Any) -> list[Any]:
        """Statements that set a column's bits."""
        out, bit = [], column
        shift, rest = (as_dtype(n, self.of.idtype) for n in (WORD.bit_length() - 1, WORD - 1))
        for level in self.levels:
            word = bit >> shift
            one = as_dtype(1, "uint64") << as_dtype(bit & rest, "uint64")
            out.append(level.buffer.store(level.buffer.load([word]) | one, [word]))
            bit = word
        return out

    def around(self, body: Any, column: Any) -> list[Any]:
        """The statements of a visit of a column."""
        return [body, *self.noted(column)]

    def scan_and_clear(self, emitted: Callable[[Any], list[Any]]) -> Any:
        """A scan of all columns set, in increasing order, which clears their bits."""
        last = tirx.Var("w", self.of.idtype)
        above = [*(load_one(level.place) for level in self.levels[1:]), last]
        inside = emitted(load_one(self.levels[0].place))
        for level, word in zip(self.levels, above, strict=True):
            inside = [
                store_one(level.left, level.buffer.load([word])),
                level.buffer.store(zero("uint64"), [word]),
                _each_bit(level.left, level.place, word, inside),
            ]
        return self.program.iterate("noted", [Loop(level.axis, [last], "S")], as_one(inside))


class _ShortRow:
    """A row kept sorted where it is stored; `place` is one past the element of a visit."""

    def __init__(
        self, program: _Program, part: Any, columns: _Output, values: _Output, at: Any
    ) -> None:
        self.program, self.part, self.columns, self.values = program, part, columns, values
        self.at, names = at, ("begin", "place", "move")
        self.begin, self.place, self.move = (program.local(x, "uint64") for x in names)
        self.first = zero(program.of.out.dtype) if program.of.first is None else program.of.first

    def begun(self) -> Any:
        """The statement before the visits of a row."""
        return store_one(self.begin, load_one(self.at))

    def before(self, place: Any) -> list[Any]:
        """The index of the element before a place."""
        return [self.part, as_dtype(load_one(place) - as_dtype(1, "uint64"), "int64")]

    def moved(self, indices: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The stored element that replaces an element of the result."""
        del indices
        return self.values.var, self.before(self.place)

    def around(self, body: Any, column: Any) -> list[Any]:
        """The statements of a visit of a column: search for it backwards, and insert it."""
        one, no = as_dtype(1, "uint64"), tirx.const(False, "bool")
        place, move, program = load_one(self.place), load_one(self.move), self.program
        some, last = load_one(self.begin) < place, self.columns.load(self.before(self.place))
        back = store_one(self.place, place - one)
        here, there = (self.part, as_dtype(move, "int64")), self.before(self.move)
        shift = [
            self.columns.store(self.columns.load(there), here),
            self.values.store(self.values.load(there), here),
            store_one(self.move, move - one),
        ]  # fmt: skip
        insert = [
            store_one(self.move, load_one(self.at)),
            tirx.While(place < move, as_one(shift)),
            program.step(self.at), program.step(self.place),
            self.columns.store(column, self.before(self.place)),
            self.values.store(self.first, self.before(self.place)),
        ]  # fmt: skip
        stored = tirx.if_then_else(some, tirx.EQ(last, column), no)
        return [
            store_one(self.place, load_one(self.at)),
            tirx.While(tirx.if_then_else(some, last > column, no), back),
            tirx.IfThenElse(tirx.Not(stored), as_one(insert), None),
            body,
        ]


def _each_bit(bits: Any, found: Any, word: Any, body: list[Any]) -> Any:
    """A loop over the set bits of `bits`, clearing them; `found` gets the bit's overall number."""
    value, one = load_one(bits), as_dtype(1, "uint64")
    dtype = str(found.ty.dtype)
    below = tirx.popcount((value - one) & ~value)  # the number of trailing zeros
    number = word * as_dtype(WORD, dtype) + as_dtype(below, dtype)
    step = [store_one(found, number), store_one(bits, value & (value - one))]
    return tirx.While(value != zero("uint64"), as_one([*step, *body]))


def _length(loop: Loop) -> int | None:
    """The number of coordinates of a loop's axis, also an attached one, if it is constant."""
    (axis,) = flat_axes([loop.node])
    return constant_length(axis)


def _counts_up(index: Any, loops: Sequence[Loop], axis: Axis) -> bool:
    """Whether an index enumerates the visits of loops in order, as `i1 * m2 + i2` does; the axis
    has as many coordinates as the loops have visits."""
    place, size = tirx.const(0, axis.idtype), tirx.const(1, axis.idtype)
    for loop in loops:
        (one,) = flat_axes([loop.node])
        place, size = place * one.length + loop.var, size * one.length
    pairs = ((place, index), (size, axis.length))
    return bool(loops) and all(affine(a) == affine(b) for a, b in pairs)


def _counted(nodes: list[Any]) -> Iterable[Sequence[Any]]:
    """Lists of axes; the elements of one of these lists bound the visits of `nodes`."""
    merged = {a.name for n in nodes if isinstance(n, Axis) for a in (n, *n.members) if n.is_merged}
    above = [a.parent for a in visited_axes(nodes)] + [a.to for a in attached_axes(nodes)]
    if merged & {a.name for a in above if a is not None}:
        return [nodes]  # a merged axis has others below
    return product(*map(_members, nodes))


def _members(node: Any) -> list[Any]:
    """Axes that together are visited at least as often as the axis."""
    if not isinstance(node, Axis) or not node.is_merged:
        return [node]
    return [x for n in (node.of if node.kind == "union" else [*node.of][:1]) for x in _members(n)]


def _variable_like(node: Any) -> Any:
    (axis,) = flat_axes([node])
    return tirx.Var(axis.name.lower(), axis.idtype)
