"""Fission: a nested iteration becomes plain iterations, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.formats.preprocess import statements
from sparsetir.formats.queries import fresh_name, uses
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    flat_axes,
    iteration_with,
    nodes_of,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.parallel import has_own_place, written_accesses
from sparsetir.sparse_ir.tir import as_one
from sparsetir.sparse_ir.traversal import map_expr


def fission(func: SparseFunc, buffers: Collection[str]) -> SparseFunc:
    """Split nested iterations that access some buffers.

    func : stage-I function
    buffers : names of its buffers; nests that access none of them are unchanged

    Before::

        with T.sp_iter([I], "S", "scale") as [i]:
            with T.sp_iter([J], "R", "total") as [j]:
                with T.init():
                    TOTAL[i] = 0.0
                TOTAL[i] = TOTAL[i] + A[i, j]
            INV[i] = 1.0 / TOTAL[i]
            with T.sp_iter([J], "S", "divide") as [j]:
                OUT[i, j] = A[i, j] * INV[i]

    After `fission(func, ["A"])`::

        with T.sp_iter([I, J], "SR", "total") as [i, j]:
            with T.init():
                TOTAL[i] = 0.0
            TOTAL[i] = TOTAL[i] + A[i, j]
        with T.sp_iter([I], "S", "scale") as [i]:
            INV[i] = 1.0 / TOTAL[i]
        with T.sp_iter([I, J], "SS", "divide") as [i, j]:
            OUT[i, j] = A[i, j] * INV[i]

    A buffer allocated inside the nest and used by several of its parts gets the outer axes as
    additional leading dimensions.

    Raises LoweringError if this could change the program's meaning: for an outer axis that is
    reduced or may repeat a coordinate, a buffer through which one visit could read what another
    wrote, an init that would run for more coordinates than before.
    """
    return _Fission(func, [func.buffer(name).var for name in buffers]).run()


class _Fission:
    def __init__(self, func: SparseFunc, targets: list[Any]) -> None:
        self.func = func
        self.targets = targets
        self.names = {it.name for it in sparse_iterations(func)}
        self.buffers = list(func.buffers)
        self.axes = list(func.axes)

    def run(self) -> SparseFunc:
        parts = statements(self.func)
        body = [new for part in parts for new in self._split(part)]
        if len(body) == len(parts) and all(map(_is, body, parts)):
            return self.func
        return self.func.replace(axes=self.axes, buffers=self.buffers, body=as_one(body))

    def _split(self, it: Any) -> list[Any]:
        """A statement as plain ones, if it uses the targets."""
        if not isinstance(it, SparseIteration) or not _holds_iterations(it.body):
            return [it]
        if not uses(it, self.targets):
            return [it]
        self._check_axes(it)
        parts = self._with_own_temporaries(it, _parts(it.body))
        whole = as_one([s for p in parts for s in p])
        self._check_flow(_iteration(it, init=it.init, body=whole))
        self.names.discard(it.name)
        out = [] if it.init is None else [self._init(it)]
        for part in parts:
            if not isinstance(part[0], SparseIteration):
                for stmt in part:
                    if _holds_iterations(stmt) and uses(stmt, self.targets):
                        self._refuse(it, f"holds iterations inside of a {type(stmt).__name__}")
                out.append(_iteration(it, name=self._name(it.name), body=as_one(part)))
                continue
            inner = part[0]
            if inner.init is not None:
                self._check_init(it, inner.init)
            merged = _iteration(
                it, axes=[*it.axes, *inner.axes], kinds=it.kinds + inner.kinds, name=inner.name,
                vars=[*it.vars, *inner.vars], init=inner.init, body=inner.body,
                annotations={**it.annotations, **inner.annotations},
            )  # fmt: skip
            out.extend(self._split(merged))
        return out

    def _init(self, it: SparseIteration) -> SparseIteration:
        """The init of an outer iteration as an iteration of its own."""
        self._check_init(it, it.init)
        used = [(a, v) for a, v, _ in it.axis_of() if uses(it.init, [v])]
        return _iteration(
            it, axes=[a for a, _ in used], kinds="S" * len(used), vars=[v for _, v in used],
            name=self._name(f"{it.name}_init"), body=it.init, annotations={},
        )  # fmt: skip

    # -- temporaries ----------------------------------------------------------------------------

    def _with_own_temporaries(self, it: SparseIteration, parts: list[list[Any]]) -> list[list[Any]]:
        """The parts of a body, none of which uses definitions of another."""
        for at, part in enumerate(parts):
            others = [s for n, p in enumerate(parts) if n != at for s in p]
            for stmt in part:
                if isinstance(stmt, tirx.Bind) and any(uses(s, [stmt.var]) for s in others):
                    self._refuse(it, f"gives '{stmt.var.name}' a value for other parts of its body")
                if isinstance(stmt, tirx.AllocBuffer) and any(
                    uses(s, [stmt.buffer]) for s in others
                ):
                    expand = self._expanded(it, stmt.buffer)
                    parts = [[expand(s) for s in p if not _is(s, stmt)] for p in parts]
                    return self._with_own_temporaries(it, [p for p in parts if p])
        return parts

    def _expanded(self, it: SparseIteration, var: Any) -> Callable[[Any], Any]:
        """Give a buffer private to each visit the outer axes; returns the rewrite for its users."""
        outer = flat_axes(it.axes)
        parents = [a.parent.name for a in outer if a.parent is not None]
        attached = any(isinstance(a, AttachedAxis) for a in it.axes)
        sizes = list(var.ty.shape)
        params = list(self.func.params)
        varying = any(_variables(n, params) for n in sizes)
        if attached or varying or len(set(parents)) < len(parents):
            self._refuse(it, f"allocates '{var.name}', which cannot be stored over its axes")
        if all(isinstance(n, tirx.IntImm) and int(n.value) == 1 for n in sizes):
            sizes = []
        taken = {a.name for a in self.axes}
        inner = [
            Axis(name=fresh_name(f"{var.name}_{n}", taken), kind="dense_fixed", length=size,
                 idtype=str(size.ty.dtype))
            for n, size in enumerate(sizes)
        ]  # fmt: skip
        name = fresh_name(str(var.name), {b.name for b in self.buffers})
        axes = [*outer, *inner]
        new = buffer_var([a.length for a in axes], str(var.ty.dtype), name)
        self.axes += inner
        self.buffers.append(SparseBuffer(var=new, axes=axes, handle=None))

        def place(indices: Any) -> list[Any]:
            return [*it.vars, *(list(indices) if inner else [])]

        def load(node: Any) -> Any:
            return tirx.BufferLoad(new, place(node.indices)) if _is(node.source, var) else node

        def store(node: Any) -> Any:
            if not _is(node.buffer, var):
                return node
            return tirx.BufferStore(new, node.value, place(node.indices), node.span)

        return lambda s: map_expr(s, [(ir.TensorLoad, load), (tirx.BufferStore, store)])

    # -- refusals -------------------------------------------------------------------------------

    def _check_axes(self, it: SparseIteration) -> None:
        for axis, _, kind in it.axis_of():
            if kind != "S":
                self._refuse(it, f"holds other iterations and reduces over '{axis.name}'")
            if not axis.unique:
                self._refuse(
                    it, f"holds other iterations and may visit a coordinate of '{axis.name}' twice"
                )

    def _check_flow(self, it: SparseIteration) -> None:
        """Refuse programs in which a visit of the outer iteration may read what another wrote."""
        for buf, accesses in written_accesses(it).items():
            for var in it.vars:
                if not has_own_place(it, var, accesses):
                    self._refuse(
                        it,
                        f"holds other iterations and accesses '{buf.name}', which it writes, "
                        f"elsewhere than at its own '{var.name}'",
                    )

    def _check_init(self, it: SparseIteration, init: Any) -> None:
        """Refuse an init that would also run at coordinates which the outer axes do not store.

        If these do not store all, the buffer must lie over them: writes to coordinates that are not
        stored are then discarded.
        """
        axes = it.axis_of()
        partial = next((a for a, _, _ in axes if a.kind != "dense_fixed"), None)
        if partial is None:
            return
        plain = not any(isinstance(a, AttachedAxis) for a in it.axes)
        stores = nodes_of(tirx.BufferStore, init)
        for store in stores:
            buf = next((b for b in self.buffers if _is(b.var, store.buffer)), None)
            over = {} if buf is None else _by_axis(buf, store.indices)
            if not plain or not all(_is(over.get(a.name), v) for a, v, _ in axes):
                self._refuse(
                    it,
                    f"holds an init of '{store.buffer.name}', which would run for coordinates that "
                    f"'{partial.name}' does not store",
                )

    def _refuse(self, it: SparseIteration, why: str) -> NoReturn:
        raise LoweringError(
            f"fission: iteration '{it.name}' of '{self.func.name}' {why}; write plain iterations "
            "one after the other"
        )

    def _name(self, name: str) -> str:
        return fresh_name(name, self.names)


def _parts(body: Any) -> list[list[Any]]:
    """The inner iterations of a body, and the statements between them."""
    out: list[list[Any]] = []
    for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        alone = isinstance(stmt, SparseIteration)
        if alone or not out or isinstance(out[-1][0], SparseIteration):
            out.append([stmt])
        else:
            out[-1].append(stmt)
    return out


def _iteration(it: SparseIteration, **changes: Any) -> SparseIteration:
    """An iteration with some fields changed, without init by default, and with fresh variables."""
    changed = iteration_with(it, **{"init": None, **changes})
    fresh = {v: tirx.Var(v.name, v.ty.dtype) for v in changed.vars}
    init = None if changed.init is None else substitute(changed.init, fresh)
    body = substitute(changed.body, fresh)
    return iteration_with(changed, vars=list(fresh.values()), init=init, body=body)


def _by_axis(buf: SparseBuffer, indices: Any) -> dict[str, Any]:
    """The index of each axis in an access of a buffer."""
    return {a.name: i for a, i in zip(buf.axes or (), indices, strict=False)}


def _holds_iterations(stmt: Any) -> bool:
    iterations = nodes_of(SparseIteration, stmt)
    return bool(iterations)


def _variables(expr: Any, known: list[Any]) -> list[Any]:
    """The variables of an expression, without the known ones."""
    return [var for var in nodes_of(ir.Var, expr) if var not in known]


def _is(a: Any, b: Any) -> bool:
    return a is not None and a.same_as(b)
