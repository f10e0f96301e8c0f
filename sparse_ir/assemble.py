"""A result whose pattern is not known beforehand: the programs that count it and fill it.

A program says what it computes with a dense result::

    with T.sp_iter([I, T.union(J1, J2)], "SS", "add") as [i, j]:
        C[i, j] = A[i, j] + B[i, j]

What the iteration visits is what a sparse result stores: in CSR, each row in increasing order. Two
programs make it, of which the first counts ::

    with T.sp_iter([I, T.union(J1, J2)], "SR", "add_count") as [i, j]:
        with T.init():
            C_count[i] = 0
        C_count[i] = C_count[i] + 1

and the second, once the counts are summed up to `c_indptr`, goes through the same visits::

    JC = T.dense_variable(I, (n, c_nnz), c_indptr)
    with T.sp_iter([I], "S", "add_rows") as [i]:
        at[0] = 0
        with T.sp_iter([T.union(J1, J2)], "S", "add") as [j]:
            T.sp_iter_attr({"ordered": 1})
            C_indices[i, at[0]] = j
            C[i, at[0]] = A[i, j] + B[i, j]
            at[0] = at[0] + 1

(Senanayake et al., section 6.1; Kjolstad et al., "Tensor algebra compilation with workspaces",
section 5: symbolic and numeric kernels.) The rows are free of races in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.sparse_ir.annotations import ORDERED
from sparsetir.sparse_ir.gradient import needed
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    loads_of,
    same_indices,
    sparse_iterations,
    stores_of,
)
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.promises import with_fact
from sparsetir.sparse_ir.schedule.loops import Loop, loops_of
from sparsetir.sparse_ir.tir import as_dtype, as_one
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.verify import verify


class Assembly(NamedTuple):
    """The two programs of a sparse result, and the names of their parameters for it.

    count : writes `counts`, (rows,) of the idtype: how many elements each row has
    fill : takes `indptr`, (rows + 1,), and `nnz`; writes `indices`, (nnz,), and `values`
    """

    count: SparseFunc
    fill: SparseFunc
    counts: str
    indptr: str
    indices: str
    values: str
    nnz: str


def assemble(func: SparseFunc, result: str) -> Assembly:
    """The programs that make a dense result of a program as a sparse one, in CSR.

    Parameters
    ----------
    func : SparseFunc
        Of stage I, as written: one iteration, over rows, then over columns in increasing order (a
        merged axis, a stored one or a dense one), then over what is inside of an element.
    result : str
        The name of the result's buffer, or of its parameter: over a dense axis of rows, one of
        columns, and any dense ones of the elements.

    Returns
    -------
    Assembly

    Raises
    ------
    ValueError
        For a program of another kind, which says what is expected.
    """
    if not isinstance(func, SparseFunc):
        raise ValueError(
            f"assemble: argument 'func': expected a stage-I function, got {type(func).__name__}"
        )
    return _Assembler(func, result).run()


class _Assembler:
    def __init__(self, func: SparseFunc, result: str) -> None:
        self.func = func
        iterations = sparse_iterations(func)
        if len(iterations) != 1 or not func.body.same_as(iterations[0]):
            names = [it.name for it in iterations]
            self.refuse(f"expected a single iteration and nothing around it, got {names}")
        (self.it,) = iterations
        self.out = self._result(result)
        self.place = self._columns()
        loops = loops_of(self.it)
        self.rows, self.columns, self.inner = (
            loops[: self.place], loops[self.place], loops[self.place + 1 :],
        )  # fmt: skip

    def refuse(self, text: str) -> Any:
        raise ValueError(f"assemble: function '{self.func.name}': {text}")

    def _result(self, name: str) -> SparseBuffer:
        written = {s.buffer for s in stores_of(self.it.body, self.it.init)}
        outputs = [b for b in self.func.buffers if b.var in written and b.handle is not None]
        found = [b for b in outputs if name in (b.name, str(b.handle.name))]
        if len(outputs) != 1 or not found:
            self.refuse(
                f"argument 'result': expected the one result of the program, "
                f"{[b.name for b in outputs]}, got {name!r}"
            )
        (out,) = found
        axes = list(out.axes or ())
        if len(axes) < 2 or any(a.kind != "dense_fixed" for a in axes):
            kinds = [f"{a.name} ({a.kind})" for a in axes]
            self.refuse(
                f"result '{out.name}': expected dense axes of rows and columns, then any of its "
                f"elements, got {kinds or 'a dense buffer'}"
            )
        return out

    def _columns(self) -> int:
        """Which loop goes over the columns of the result."""
        it, out = self.it, self.out
        stores = [s for s in stores_of(it.body, it.init) if s.buffer.same_as(out.var)]
        coordinates = set(it.vars)
        first = list(stores[0].indices)
        accesses = [*stores, *loads_of(it.body, out.var)]
        same = all(same_indices(list(s.indices), first) for s in accesses)
        variables = all(isinstance(i, ir.Var) and i in coordinates for i in first)
        if not same or not variables or len(set(first)) < len(first):
            self.refuse(
                f"result '{out.name}': expected it to be accessed at different coordinates of the "
                f"iteration, the same in all places, got {out.name}[{', '.join(map(str, first))}]"
            )
        loops = loops_of(it)
        plain = [loop for loop in loops if len(loop.vars) == 1 and isinstance(loop.node, Axis)]
        at = {loop.var: n for n, loop in enumerate(loops) if loop in plain}
        if len(plain) < len(loops):
            self.refuse("expected plain and merged axes, none fused, attached or in parts")
        row, column = at[first[0]], at[first[1]]
        axis: Axis = loops[column].node
        before = loops[:column]
        ordered = row < column and all(loop.kinds == "S" for loop in [*before, loops[column]])
        others = [x for x in before if not x.var.same_as(first[0])]
        several = any(constant_length(x.node) != 1 for x in others)
        if not ordered or several or not axis.unique:
            self.refuse(
                f"result '{out.name}': expected each row's columns to be visited once, in "
                f"increasing order: spatial loops over the rows, then over the columns, got "
                f'{[x.name for x in loops]} as "{it.kinds}" for '
                f"{out.name}[{', '.join(map(str, first))}]"
            )
        if any(at[i] <= column for i in first[2:]):
            self.refuse(f"result '{out.name}': expected the loops of its elements inside")
        return column

    def run(self) -> Assembly:
        name = str(self.out.handle.name)
        taken: list[str] = []

        def fresh(wish: str) -> str:
            taken.append(fresh_name(self.func, wish, taken))
            return taken[-1]

        names = {w: fresh(f"{name}_{w}") for w in ("counts", "indptr", "indices", "nnz")}
        made = Assembly(
            self._count(names["counts"], fresh), self._fill(names, fresh), names["counts"],
            names["indptr"], names["indices"], name, names["nnz"],
        )  # fmt: skip
        verify(made.count)
        verify(made.fill)
        return made

    def _handle(self, name: str) -> Any:
        return ir.Var(name, self.out.handle.ty)

    def _coordinates(self) -> tuple[Any, Any]:
        first = next(s for s in stores_of(self.it.body) if s.buffer.same_as(self.out.var)).indices
        return first[0], first[1]

    def _count(self, counts: str, fresh: Any) -> SparseFunc:
        row_axis = list(self.out.axes or ())[0]
        idtype = self.columns.node.idtype
        var = buffer_var([row_axis.length], idtype, fresh(f"{self.out.name}_COUNTS"))
        out = SparseBuffer(var=var, axes=[row_axis], handle=self._handle(counts))
        row, _ = self._coordinates()
        one = tirx.BufferLoad(var, [row]) + as_dtype(1, idtype)
        loops = [*self.rows, Loop(self.columns.node, self.columns.vars, "R")]
        it = _iteration(
            self.it, f"{self.it.name}_count", loops, tirx.BufferStore(var, one, [row]),
            init=tirx.BufferStore(var, as_dtype(0, idtype), [row]),
        )  # fmt: skip
        params = [p for p in self.func.params if not p.same_as(self.out.handle)]
        func = self.func.with_attr("global_symbol", f"{self.func.name}_count")
        return needed(func, [*params, out.handle], [*self.func.buffers, out], it)

    def _fill(self, names: dict[str, str], fresh: Any) -> SparseFunc:
        rows, old_columns, *rest = list(self.out.axes or ())
        idtype = self.columns.node.idtype
        handles = {w: self._handle(names[w]) for w in ("indptr", "indices")}
        nnz = tirx.Var(names["nnz"], idtype)
        axis = Axis(
            name=fresh(f"{old_columns.name}_{self.out.name}"), kind="dense_variable",
            length=old_columns.length, parent=rows, nnz=nnz, indptr=handles["indptr"],
            idtype=idtype,
        )  # fmt: skip
        shape = [a.length for a in (rows, axis, *rest)]
        values = SparseBuffer(
            var=buffer_var(shape, self.out.dtype, self.out.name),
            axes=[rows, axis, *rest],
            handle=self.out.handle,
        )
        indices = SparseBuffer(
            var=buffer_var(shape[:2], idtype, fresh(f"{self.out.name}_INDICES")),
            axes=[rows, axis],
            handle=handles["indices"],
        )
        one = Axis(name=fresh("ONE"), kind="dense_fixed", length=as_dtype(1, idtype), idtype=idtype)
        at = buffer_var([one.length], idtype, fresh("at"))
        zero = as_dtype(0, idtype)
        here = tirx.BufferLoad(at, [zero])
        row, column = self._coordinates()

        def store(node: Any) -> Any:
            if not node.buffer.same_as(self.out.var):
                return node
            index = [node.indices[0], here, *node.indices[2:]]
            return tirx.BufferStore(values.var, node.value, index, span=node.span)

        def load(node: Any) -> Any:
            if not node.source.same_as(self.out.var):
                return node
            return tirx.BufferLoad(values.var, [node.indices[0], here, *node.indices[2:]])

        def moved(stmt: Any) -> Any:
            stmt = map_expr(stmt, [(ir.TensorLoad, load)])
            return map_expr(stmt, [(tirx.BufferStore, store)])

        body = moved(self.it.body)
        init = None if self.it.init is None else moved(self.it.init)
        element: list[Any] = [body] if init is None else [init, body]
        if self.inner:
            element = [_iteration(self.it, f"{self.it.name}_element", self.inner, body, init)]
        step = tirx.BufferStore(at, here + as_dtype(1, idtype), [zero])
        place = tirx.BufferStore(indices.var, column, [row, here])
        columns = _iteration(
            self.it, self.it.name, [self.columns], as_one([place, *element, step]),
            annotations={ORDERED: 1},
        )  # fmt: skip
        begin = [tirx.BufferStore(at, as_dtype(0, idtype), [zero])]
        outer = _iteration(self.it, f"{self.it.name}_rows", self.rows, as_one([*begin, columns]))
        params: list[Any] = []
        for param in self.func.params:
            params += [*handles.values()] if param.same_as(self.out.handle) else []
            params.append(param)
        buffers = [values if b.name == self.out.name else b for b in self.func.buffers]
        func = self.func.with_attr("global_symbol", f"{self.func.name}_fill")
        func = func.replace(axes=[*func.axes, axis, one])
        counter = SparseBuffer(var=at, axes=[one], handle=None)
        made = needed(func, [*params, nnz], [*buffers, indices, counter], outer)
        for buffer in (values, indices):
            made = with_fact(made, "inside", buffer=buffer.name, axis=axis.name)
        return made


def _iteration(
    it: SparseIteration, name: str, loops: list[Loop], body: Any, init: Any = None,
    annotations: Any = None,
) -> SparseIteration:  # fmt: skip
    return SparseIteration(
        span=it.span,
        axes=[loop.node for loop in loops],
        kinds="".join(loop.kinds for loop in loops),
        name=name,
        vars=[v for loop in loops for v in loop.vars],
        init=init,
        body=body,
        annotations=annotations or {},
    )
