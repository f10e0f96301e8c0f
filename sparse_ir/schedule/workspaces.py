"""Results in workspaces; see :mod:`sparsetir.sparse_ir.schedule.precompute`."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm_ffi import structural_equal

from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.legal import for_dependences
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    buffer_var,
    is_among,
    loads_of,
    same_indices,
    stores_of,
)
from sparsetir.sparse_ir.reduction import (
    add_guards,
    factors_of,
    reduction_of,
    split_guards,
    widened,
)
from sparsetir.sparse_ir.schedule.init_elimination import with_init_before
from sparsetir.sparse_ir.schedule.loops import Change, Loop, SparseIterationRef, changed
from sparsetir.sparse_ir.schedule.steps import Steps
from sparsetir.sparse_ir.separate_init import init_runs_in_place
from sparsetir.sparse_ir.speculation import speculative
from sparsetir.sparse_ir.tile_marks import is_tail
from sparsetir.sparse_ir.tir import cast, free_vars, size_text
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.workers import divided

NAME = "precompute"


def precompute_result(
    change: Change, target: SparseBuffer, outer: list[Loop], inner: list[Loop], held: list[Loop],
    lanes: list[Loop], scope: str, dtype: str, name: str | None, hoist: bool,
) -> tuple[SparseFunc, list[SparseIterationRef]]:  # fmt: skip
    """The function that accumulates the results of each outer visit in a workspace."""
    options = target, outer, inner, held, lanes, scope, dtype, name
    begun = with_init_before(change.func, change.it)
    if begun is not None:
        result = _Result(Change(NAME, *begun), *options)
        if result.written_once():
            return result.run(hoist)
    return _Result(change, *options).run(hoist)


class _Result(Steps):
    reduction: Any  # a Reduction; None where the result is only written

    def __init__(
        self, change: Change, target: SparseBuffer, outer: list[Loop], inner: list[Loop],
        held: list[Loop], lanes: list[Loop], scope: str, dtype: str, name: str | None,
    ) -> None:  # fmt: skip
        super().__init__(change)
        func, it = self.func, self.it
        self.target, self.dtype = target, dtype
        self.outer, self.inner, self.held, self.lanes = outer, inner, held, lanes
        self._refuse_loops(scope)
        self._refuse_accesses()
        self.scope = scope
        self.seen: Any = None  # a flag whether there was a term, if that matters
        self.reduction = reduction_of(it.body)
        conditions, self.store = split_guards(it.body)
        name = fresh_name(func, name or f"{target.name}_ws")
        self.ws = workspace(func, name, held + lanes, dtype, scope)
        self.sums = workspace(func, f"{name}_sum", held, dtype, scope) if lanes else self.ws
        self.buffers += [self.ws, self.sums] if lanes else [self.ws]
        # Conditions of the write: those that are invariant in the inner loops. Conditions other
        # than those of tails and of the init may skip elements that a write has to set, but none
        # that it updates.
        changing = {v for loop in inner if loop not in held for v in loop.vars}
        still = [c for c in conditions if not free_vars(c) & changing]
        self.begun = [] if it.init is None else split_guards(it.init)[0]
        self.steady = [c for c in still if is_tail(c) or is_among(c, self.begun)]
        self.still = [c for c in still if is_tail(c) or not loads_of(c, target.var)]

    def run(self, hoist: bool) -> tuple[SparseFunc, list[SparseIterationRef]]:
        """The rewritten function and its handles."""
        it, outer = self.it, self.outer
        if not hoist and self._is_plain():
            steps = [self._reduce(None, "value"), self._write(True, [])]
            return self.put_steps(outer, steps), [SparseIterationRef(s.name) for s in steps]
        once = self.written_once()
        needs = "lanes" if self.lanes else "hoist" if hoist else None
        if self.reduction is None and (needs or not once):
            what = (
                f"with {needs}" if needs else "where a visit does not see all terms of an element"
            )
            self.refuse(
                f"{what} expects a body of the form X[..] = X[..] + term (or *, max, min), got "
                "another"
            )
        factors, term = [], None
        if self.reduction is not None:
            factors, term = self._factors(self.reduction.term) if hoist else ([], None)
        looks: list[Any] = []
        if "float" in self.dtype and not all(map(self._is_finite, factors)):
            self.seen = workspace(self.func, f"{self.ws.name}_any", [], "bool", self.scope)
            self.buffers.append(self.seen)
            looks = self._look_for_terms()
        steps: list[Any] = [self._start(once and not factors), self._reduce(term)]
        if self.lanes:
            steps.append(self._add_lanes())
        steps.append(self._write(once, factors))
        before = self.split_init() if it.init is not None and not once else []
        func = self.put_steps(outer, [*looks, *steps], before)
        return func, [SparseIterationRef(s.name) for s in steps]

    # -- the steps ----------------------------------------------------------------------------

    def _start(self, with_init: bool) -> Any:
        """Set the workspace to the initial value, or to the operator's identity."""
        over = self.held + self.lanes
        if with_init and not self.lanes:
            _, first = split_guards(self.it.init)
            value = self._wide(first.value)
        else:
            value = self.reduction.identity(self.dtype)
        body = tirx.BufferStore(self.ws.var, value, [loop.var for loop in over])
        return self.step("start", [loop.of_kind("S") for loop in over], body)

    def _look_for_terms(self) -> list[Any]:
        """Whether the sum has a term: otherwise factors are not applied, as 0 * NaN is NaN.

        Compilers turn this loop into a comparison.
        """
        loops = [x for x in self.inner if x not in self.held]
        moving = {v for loop in loops for v in loop.vars}
        conditions = [c for c in split_guards(self.it.body)[0] if free_vars(c) & moving]
        first, then = (tirx.BufferStore(self.seen.var, tirx.const(x, "bool"), []) for x in (0, 1))
        return [self.step("none", [], first), self.step("any", loops, add_guards(conditions, then))]

    def _reduce(self, term: Any, step: str = "reduce") -> Any:
        """The reduction into the workspace."""
        place = self._place()
        conditions, store = split_guards(self.it.body)
        if term is not None:
            total = tirx.BufferLoad(self.ws.var, place)
            value = self.reduction.combine(total, cast(self._wide(term), self.dtype))
        else:
            value = self._wide(store.value)
        body = add_guards(conditions, tirx.BufferStore(self.ws.var, value, place))
        loops = [x.of_kind("S") if x in self.lanes else x for x in self.inner]
        return changed(self.it, loops, name=self.name(step), init=None, body=body)

    def _add_lanes(self) -> Any:
        """The reduction over the lanes' accumulators."""
        at = [loop.var for loop in self.held]
        init = self.reduction.identity(self.dtype)
        total = self.reduction.combine(
            tirx.BufferLoad(self.sums.var, at), tirx.BufferLoad(self.ws.var, self._place())
        )
        first, then = (tirx.BufferStore(self.sums.var, value, at) for value in (init, total))
        return self.step("sums", self.held + self.lanes, then, first)

    def _write(self, once: bool, factors: list[Any]) -> Any:
        """Write the workspace to the result."""
        value = tirx.BufferLoad(self.sums.var, [loop.var for loop in self.held])
        for factor in factors:
            value = value * cast(self._wide(factor), self.dtype)
        if self.seen is not None:
            value = tirx.Select(
                tirx.BufferLoad(self.seen.var, []), value, tirx.const(0, self.dtype)
            )
        target, indices = self.target, self.store.indices
        if once and (self.lanes or factors):
            _, first = split_guards(self.it.init)
            if not structural_equal(self._wide(first.value), self.reduction.identity(self.dtype)):
                value = self.reduction.combine(self._wide(first.value), value)
        if not once:
            held = tirx.BufferLoad(target.var, indices)
            value = self.reduction.combine(cast(held, self.dtype), value)
        store = tirx.BufferStore(target.var, cast(value, target.dtype), indices)
        body = add_guards(self.steady if once else self.still, store)
        return self.step("write", self.held, body)

    def _place(self) -> list[Any]:
        """The indices of a visit's element in the workspace."""
        return [loop.var for loop in self.held + self.lanes]

    # -- analysis -----------------------------------------------------------------------------

    def _is_plain(self) -> bool:
        """Whether each element is stored once, and the result is not read."""
        conditions, _ = split_guards(self.it.body)
        spatial = self.it.init is None and all("R" not in x.kinds for x in self.inner)
        return spatial and not self._loads() and len(conditions) == len(self.steady)

    def written_once(self) -> bool:
        """Whether each visit of the outer loops sees all terms of the elements it writes."""
        if self.it.init is None or any("R" in loop.kinds for loop in self.outer):
            return False
        plain = for_dependences(self.it, self.func)
        return init_runs_in_place(plain, self.func) and self._all_terms_inside()

    def _all_terms_inside(self) -> bool:
        _, first = split_guards(self.it.init)
        begun = all(is_tail(c) or is_among(c, self.steady) for c in self.begun)
        return begun and same_indices(first.indices, self.store.indices)

    def _factors(self, term: Any) -> tuple[list[Any], Any]:
        """The loop-invariant factors of the terms, and the product of the others."""
        moving = {v for x in self.inner if x not in self.held for v in x.vars}
        parts = factors_of(term)
        over_axes = {b.var for b in self.func.buffers if b.axes is not None}
        still = [  # evaluated even if there are no terms
            speculative(f, lambda load: load.source not in over_axes)
            for f in parts
            if not free_vars(f) & moving
        ]
        rest = [f for f in parts if free_vars(f) & moving]
        held = {v for x in self.held for v in x.vars}
        conditions = map(free_vars, split_guards(self.it.body)[0])
        if any(c & held and c & moving for c in conditions):
            return [], None  # some of these sums are empty, and others not
        if self.reduction.operator != "sum" or not still or not rest:
            return [], None
        product = rest[0]
        for factor in rest[1:]:
            product = product * factor
        return still, product

    def _is_finite(self, factor: Any) -> bool:
        """Whether a factor is known to be neither NaN nor infinite."""
        recipes = known(self.func).recipes
        read = [b.handle for b in self.func.buffers if loads_of(factor, b.var)]
        names = [None if handle is None else str(handle.name) for handle in read]
        finite = all(n in recipes and recipes[n].finite for n in names)
        is_load = isinstance(factor, ir.TensorLoad) and bool(names)
        return isinstance(factor, tirx.FloatImm) or is_load and finite

    def _wide(self, expr: Any) -> Any:
        """An expression of the body in the workspace's type, with the workspace as the result."""

        def held(load: Any) -> Any:
            mine = load.source.same_as(self.target.var)
            return tirx.BufferLoad(self.ws.var, self._place()) if mine else None

        if self.dtype != self.target.dtype:
            return widened(expr, self.dtype, held)

        def load(node: Any) -> Any:
            value = held(node)
            return node if value is None else value

        return map_expr(expr, [(ir.TensorLoad, load)])

    # -- refusals -----------------------------------------------------------------------------

    def _refuse_loops(self, scope: str) -> None:
        names = [loop.name for loop in self.held]
        for loop in [*self.held, *self.lanes]:
            if not loop.is_dense:
                self.refuse(f"expected loops over dense axes for the workspace, got '{loop.name}'")
            if scope == "local" and not loop.is_constant:
                self.refuse(
                    f'expected loops of constant extent for a workspace in scope "local", got '
                    f"'{loop.name}' of {size_text(loop.node.length)}; split it first"
                )
        for group in divided(self.it):
            if not {x.name for x in self.inner}.isdisjoint(group):
                self.refuse(
                    f"{group} inside is divided among workers; expected {NAME} before parallelize"
                )
        for loop in self.lanes:
            if loop.kinds != "R":
                self.refuse(f"argument 'lanes': expected reduction loops, got '{loop.name}'")
        for loop in self.held:
            if loop.kinds != "S":
                self.refuse(f"argument 'axes': expected spatial loops, got '{loop.name}'")
        for loop in self.inner:
            if "S" in loop.kinds and loop.name not in names:
                self.refuse(
                    f"the spatial loop '{loop.name}' inside would change what the workspace stands "
                    f"for; expected it among the axes {names}, or outside"
                )

    def _refuse_accesses(self) -> None:
        """Refuse accesses for which the workspace would not stand for one element at a time."""
        _, store = split_guards(self.it.body)
        if not isinstance(store, tirx.BufferStore):
            self.refuse(
                f"expected a body of one store to '{self.target.name}', got {type(store).__name__}"
            )
        _, first = split_guards(self.it.init) if self.it.init is not None else ([], None)
        for other in [*stores_of(self.it.body, self.it.init), *self._loads()]:
            source = other.buffer if isinstance(other, tirx.BufferStore) else other.source
            if not source.same_as(self.target.var):
                self.refuse(
                    f"expected '{self.target.name}' alone to be written, got '{source.name}'"
                )
            if not same_indices(other.indices, store.indices):
                self.refuse(
                    f"'{self.target.name}' is accessed at more than one place, "
                    f"{list(store.indices)} and {list(other.indices)}: the value that the "
                    "workspace holds would change in between"
                )
        if self.it.init is not None and not isinstance(first, tirx.BufferStore):
            self.refuse(f"expected an init of one store, got {type(first).__name__}")

    def _loads(self) -> list[Any]:
        return loads_of(self.it.body, self.target.var)


def workspace(
    func: SparseFunc, name: str, loops: list[Loop], dtype: str, scope: str
) -> SparseBuffer:
    """A buffer over the axes of some loops."""
    axes = [loop.node for loop in loops]
    var = buffer_var([a.length for a in axes], dtype, fresh_name(func, name), scope)
    return SparseBuffer(var=var, axes=axes, handle=None)
