"""Sparse iteration lowering: stage I to stage II (SparseTIR, section 3.3.1).

Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After::

    for i in range(m):
        with T.sblock("spmm0"):
            vi = T.axis.spatial(m, i)
            for j, k in T.grid(J_indptr[vi + 1] - J_indptr[vi], feat):
                with T.sblock("spmm1"):
                    vj, vk = T.axis.remap("RS", [j, k])
                    with T.init():
                        C[vi, vk] = 0.0
                    C[vi, vk] = C[vi, vk] + A[vi, vj] * B[J_indices[vi, vj], vk]

An iteration becomes levels of loops, one block each: see :mod:`sparsetir.sparse_ir.levels`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.allocations import allocate_in_visits
from sparsetir.sparse_ir.annotations import ATOMIC, CUT, GALLOP, GROUP, ORDERED, RANGES, WORKERS
from sparsetir.sparse_ir.atomics import as_call, with_atomic_calls
from sparsetir.sparse_ir.computed import COMPUTED
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.groups import with_group_calls
from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.legal import for_dependences, races, without_permutations
from sparsetir.sparse_ir.levels import Level, init_loops, levels_of
from sparsetir.sparse_ir.merge_loops import MergeLoop
from sparsetir.sparse_ir.names import block_name
from sparsetir.sparse_ir.nodes import (
    SparseFunc,
    SparseIteration,
    make_func,
    nodes_of,
    sparse_iterations,
    stores_of,
    variables_of,
)
from sparsetir.sparse_ir.open_axes import refuse_open
from sparsetir.sparse_ir.position_loop import PositionLoop
from sparsetir.sparse_ir.position_loops import PositionLoops
from sparsetir.sparse_ir.position_space import DECLARED, LAYOUTS, SIGNATURE, PositionSpace
from sparsetir.sparse_ir.promises import ASSUMED, PROMISES
from sparsetir.sparse_ir.races import FREE, RACES, Fact, private_buffers, races_of
from sparsetir.sparse_ir.row_search import RowSearch
from sparsetir.sparse_ir.rows import ROWS
from sparsetir.sparse_ir.search import load_one, store_one
from sparsetir.sparse_ir.separate_init import init_runs_in_place, separate_init
from sparsetir.sparse_ir.tail_predicates import resolve_tails
from sparsetir.sparse_ir.tir import as_dtype, as_one, dtype_of, free_vars, loop_with, pass_on
from sparsetir.sparse_ir.translate import Around, Scope, Search, Translator
from sparsetir.sparse_ir.workers import (
    entries_of,
    loops_around,
    thread_tags,
    with_spatial_workers,
    workers_of,
)

# Attributes that are part of the signature.
SIGNATURE_ATTRS = (COMPUTED, PROMISES, ASSUMED)
STAGE_ONE_ATTRS = (*SIGNATURE_ATTRS, ROWS, DECLARED)
# Annotations of iterations that are not copied to blocks.
STAGE_ONE = (WORKERS, CUT, ATOMIC, GROUP, RANGES, GALLOP, ORDERED)


def lower_sparse_iter(func_or_mod: Any) -> Any:
    """Lower a stage-I function to an ordinary PrimFunc in position space.

    Parameters
    ----------
    func_or_mod : SparseFunc or IRModule
        A module's SparseFuncs are lowered and its other functions kept.

    Returns
    -------
    PrimFunc or IRModule
        Accepted by `tvm.s_tir.Schedule`. Its attributes say which axes each buffer lies over
        ("sparsetir.layouts", which :func:`lower_sparse_buffer` needs), and annotations of its
        blocks which loops may run in parallel (:mod:`sparsetir.sparse_ir.races`).

    Raises
    ------
    LoweringError
        For constructs without a position-space form.
    """
    if isinstance(func_or_mod, tvm.IRModule):
        return LowerSparseIter()(func_or_mod)
    if not isinstance(func_or_mod, SparseFunc):
        raise TypeError(
            "lower_sparse_iter: argument 'func_or_mod': expected a stage-I function or an "
            f"IRModule, got {type(func_or_mod).__name__}"
        )
    refuse_open("lower_sparse_iter", func_or_mod)
    return _Lowering(func_or_mod).run()


def LowerSparseIter() -> Any:
    """The pass: :func:`lower_sparse_iter` on every stage-I function of a module."""

    return pass_on("sparsetir.LowerSparseIter", SparseFunc, lower_sparse_iter)


class _Lowering:
    def __init__(self, func: SparseFunc) -> None:
        # Dependences are computed on the function before shifted tiles and permutations.
        self.plain = {it.name: for_dependences(it, func) for it in sparse_iterations(func)}
        self.orders = known(func).permutations
        func, self.in_turn = resolve_tails(func)
        self.tags = thread_tags(func)
        func = with_spatial_workers(with_atomic_calls(with_group_calls(func, self.tags)))
        self.func = func
        self.space = PositionSpace(func)
        written = {store.buffer for store in stores_of(func.body)}
        self.translate = Translator(self.space, written)
        self.translate.rows = self.rows = RowSearch(func, self.translate)
        self.units = PositionLoops(self.space, self.translate)
        self.closed: set[Any] = set()  # locals of finished blocks
        self.placed: set[Any] = set()  # buffers allocated in a visit's block

    def run(self) -> tirx.PrimFunc:
        scope = Scope()
        body = self._stmt(self.func.body, scope)
        allocated = [v for v in self.space.allocated() if v not in self.placed]
        body, allocs = allocate_in_visits(body, allocated)
        searches = [s for _, s in scope.searches]  # those of statements outside of iterations
        ahead = [s.stmt for s in searches if not isinstance(s.stmt, tirx.Evaluate)]
        body, allocs = as_one([*ahead, body]), [*allocs, *(v for s in searches for v in s.locals)]
        root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=allocs)
        attrs = {
            **{k: v for k, v in self.func.attrs.items() if str(k) not in STAGE_ONE_ATTRS},
            "tirx.noalias": True,
            "s_tir": True,
            LAYOUTS: self.space.layouts,
            SIGNATURE: self._signature(),
        }
        return tirx.PrimFunc(
            self.space.params,
            s_tir.SBlockRealize([], True, root),
            attrs=tvm.ir.make_node("ir.DictAttrs", **attrs),
            span=self.func.span,
        )

    def _signature(self) -> SparseFunc:
        """The function without its body: parameters, computed ones, axes, buffers."""
        written: list[str] = []
        attrs = self.func.attrs
        declared = {str(k): v for k, v in attrs.get(DECLARED, {}).items()}
        for buf in self.func.buffers:
            if buf.handle is not None and buf.var in self.translate.written:
                written.append(buf.handle.name)
        return make_func(
            self.func.name,
            list(self.func.params),
            list(self.func.axes),
            [declared.get(b.name, b) for b in self.func.buffers],
            tirx.Evaluate(0),
            {"outputs": written, **{k: attrs[k] for k in SIGNATURE_ATTRS if k in attrs}},
        )

    # -- statements ---------------------------------------------------------------------------

    def _stmt(self, stmt: Any, scope: Scope) -> tirx.Stmt:
        if isinstance(stmt, SparseIteration):
            return self._iteration(stmt, scope)
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([self._stmt(s, scope) for s in stmt.seq])
        if isinstance(stmt, tirx.For):
            return self._for(stmt, scope)
        if isinstance(stmt, tirx.While):
            return self._while(stmt, scope)
        if isinstance(stmt, tirx.IfThenElse):
            return self._with_searches(
                scope,
                lambda: self.translate.expr(stmt.condition, scope),
                lambda cond: tirx.IfThenElse(
                    cond,
                    self._stmt(stmt.then_case, scope),
                    None if stmt.else_case is None else self._stmt(stmt.else_case, scope),
                    stmt.span,
                ),
            )
        if isinstance(stmt, tirx.BufferStore):
            return self._with_searches(scope, lambda: as_call(self.translate.store(stmt, scope)))
        if isinstance(stmt, tirx.Evaluate):
            return self._with_searches(
                scope, lambda: tirx.Evaluate(self.translate.expr(stmt.value, scope), stmt.span)
            )
        if isinstance(stmt, tirx.Bind):
            return self._with_searches(scope, lambda: self._bind(stmt, scope))
        if isinstance(stmt, tirx.AllocBuffer):
            scope.bound_in_body.add(stmt.buffer)
            self.closed.add(stmt.buffer)
            return stmt
        if isinstance(stmt, tirx.AssertStmt):
            return self._with_searches(
                scope,
                lambda: tirx.AssertStmt(
                    self.translate.expr(stmt.condition, scope),
                    stmt.error_kind,
                    [ir.StringImm(f"{self.func.name}: "), *stmt.message_parts],
                    stmt.span,
                ),
            )
        raise LoweringError(
            f"{self.func.name}: a statement {type(stmt).__name__} is not part of stage I"
        )

    def _bind(self, stmt: Any, scope: Scope) -> tirx.Stmt:
        bindings = self.translate.bind(stmt, scope)
        bound = {b.var for b in bindings}
        scope.bound_in_body |= bound
        self.closed |= bound  # a block's regions cannot refer to variables bound inside it
        return as_one(bindings)

    def _for(self, stmt: Any, scope: Scope) -> tirx.Stmt:
        binds: list[tirx.Stmt] = []  # bounds evaluated once, before the loop

        def build(bounds: list[Any]) -> tirx.Stmt:
            first, extent, step = bounds
            var, changes = stmt.loop_var, {"min": first, "extent": extent}
            if step is not None:
                var = tirx.Var(stmt.loop_var.name, dtype_of(stmt.loop_var))
                first, extent, step = self._once(bounds, var, binds, scope)
                scope.coords[stmt.loop_var] = first + var * step
                zero = as_dtype(0, dtype_of(var))
                changes = {"min": zero, "extent": _steps(extent, step), "step": None}
            scope.bound_in_body.add(var)
            body = self._stmt(stmt.body, scope)
            scope.coords.pop(stmt.loop_var, None)
            return as_one([*binds, loop_with(stmt, loop_var=var, body=body, **changes)])

        return self._with_searches(scope, lambda: self.translate.loop(stmt, scope), build)

    def _once(self, values: list[Any], var: Any, binds: list[Any], scope: Scope) -> list[Any]:
        """Bounds of a loop in the type of its variable, bound to variables if they are loaded."""
        out = [as_dtype(value, dtype_of(var)) for value in values]
        for n, value in enumerate(out):
            if nodes_of((ir.TensorLoad, ir.Call), value):
                out[n] = tirx.Var(f"{var.name}_bound", dtype_of(var))
                binds.append(tirx.Bind(out[n], value))
                scope.bound_in_body.add(out[n])
                self.closed.add(out[n])
        return out

    def _while(self, stmt: Any, scope: Scope) -> tirx.Stmt:
        """A loop whose condition, with the searches it needs, is evaluated in each iteration."""
        outer, scope.local = scope.local, []
        condition = self.translate.expr(stmt.condition, scope)
        local, scope.local = scope.local, outer
        body = self._stmt(stmt.body, scope)
        if not local:
            return tirx.While(condition, body, stmt.span)
        goes_on = self.translate.local("goes_on", "bool")
        self._allocate(scope, [goes_on, *(v for s in local for v in s.locals)])
        turn = tirx.IfThenElse(load_one(goes_on), body, None)
        searches = [s.stmt for s in local]
        turn = tirx.SeqStmt([*searches, store_one(goes_on, condition), turn])
        first = store_one(goes_on, tirx.const(True, "bool"))
        return tirx.SeqStmt([first, tirx.While(load_one(goes_on), turn, stmt.span)])

    @staticmethod
    def _allocate(scope: Scope, buffers: list[Any]) -> None:
        """Let the enclosing block allocate the buffers of searches that are made in place."""
        scope.searches.append((("", []), Search(tirx.Evaluate(0), buffers, set())))

    def _with_searches(self, scope: Scope, head: Any, build: Any = None) -> tirx.Stmt:
        """Emit the searches of the statement alone in front of it."""
        outer, scope.local = scope.local, []
        value = head()
        local, scope.local = scope.local, outer
        stmt = value if build is None else build(value)
        if not local:
            return stmt
        self._allocate(scope, [v for s in local for v in s.locals])
        return tirx.SeqStmt([*(s.stmt for s in local), stmt])

    # -- iterations ---------------------------------------------------------------------------

    def _iteration(self, it: SparseIteration, outer: Scope) -> tirx.Stmt:
        scope = outer.nested()
        for axis, var, _ in it.axis_of():
            scope.axis_of_var[var] = axis
        units = self.units.of(it, scope)
        scope.around += [Around(u.name, u.var, u.coords, u.extent, scope) for u in units]
        scope.local = []
        init: tirx.Stmt | None = None
        straight = without_permutations(it, self.orders)
        if it.init is not None and init_runs_in_place(straight, self.func):
            spatial = [u for u in units if set(u.kinds) == {"S"}]
            pads = [cond for u in spatial for cond in u.pads]
            init = _guarded(pads, self._stmt(it.init, scope))
            # Searches would have to precede the init, outside its block.
            if scope.searches or _found_later(init, units):
                scope.searches, scope.rows, init = [], [], None
        before: list[tirx.Stmt] = []
        if it.init is not None and init is None:
            firsts = separate_init(it, self.func, outer.visits)
            before += [self._iteration(first, outer) for first in firsts]
        body = _guarded([c for u in units for c in u.pads], self._stmt(it.body, scope))
        levels, prelude = levels_of(units, scope)
        in_body = [
            v for _, s in scope.searches if isinstance(s.stmt, tirx.Evaluate) for v in s.locals
        ]
        stmt = self._emit(it, levels, body, init, in_body)
        outer_locals = [v for s in prelude for v in s.locals]
        before.extend(s.stmt for s in prelude)
        # Results of searches before the loops live in a block of their own.
        whole = tirx.SeqStmt([*before, stmt]) if before else stmt
        if outer_locals:
            whole = self._block(f"{it.name}_search", [], whole, None, outer_locals, {})
        return whole

    # -- blocks -------------------------------------------------------------------------------

    def _emit(
        self,
        it: SparseIteration,
        levels: list[Level],
        body: tirx.Stmt,
        init: tirx.Stmt | None,
        body_locals: list[Any],
    ) -> tirx.Stmt:
        init_level = next(
            (n for n, lv in enumerate(levels) if any("R" in u.kinds for u in lv.units)), None
        )
        units = [u for lv in levels for u in lv.units]
        private = private_buffers(self.func, it)
        in_turn = self.in_turn | self.rows.in_turn
        facts = races_of(self.plain.get(it.name, it), private, in_turn, self.func)
        self._refuse_races(it, units, facts)
        if ATOMIC in it.annotations and GROUP not in it.annotations:
            facts = [
                FREE if set(u.kinds) == {"S"} else f for u, f in zip(units, facts, strict=True)
            ]
        fact_of = {id(u): [f.kind, *f.buffers] for u, f in zip(units, facts, strict=True)}
        buffers = [self.space.buffers[b.name] for b in self.func.buffers if b.var in private]
        body_locals = [*body_locals, *(v for v in buffers if v not in self.placed)]
        self.placed.update(buffers)
        workers = workers_of(it, [level.units for level in levels], self.tags)
        outward: list[Any] = []
        stmt = body
        for number in reversed(range(len(levels))):
            level = levels[number]
            if level.searches:
                stmt = tirx.SeqStmt([*(s.stmt for s in level.searches), stmt])
            allocs = [v for s in level.searches for v in s.locals]
            if number == len(levels) - 1:
                allocs += body_locals
            if init is not None and number > (init_level or 0):
                outward += allocs
                allocs = []
            elif init is not None and number == init_level:
                allocs += outward
            here = None
            if init is not None and number == init_level:
                here = init_loops(init, [u for lv in levels[number + 1 :] for u in lv.units])
            annotations = {str(k): v for k, v in it.annotations.items() if str(k) not in STAGE_ONE}
            name = block_name(it.name, number)
            merge = next((u for u in level.units if isinstance(u, MergeLoop)), None)
            if merge is not None:
                stmt = merge.around(stmt, self.space)
                stmt = self._block(name, [], stmt, None, [*merge.state, *allocs], annotations)
                continue
            annotations[RACES] = {str(u.var.name): fact_of[id(u)] for u in level.units}
            stmt = self._block(name, level.units, stmt, here, allocs, annotations)
            stmt = loops_around(stmt, level.units, workers)
        return stmt

    def _refuse_races(
        self, it: SparseIteration, units: list[PositionLoop], facts: list[Fact]
    ) -> None:
        """Refuse loops that are annotated as free of races, but are not proven so here.

        Changes after a loop was divided, or text that is parsed back, may invalidate the
        annotation.
        """
        fact_of = {unit.name: fact for unit, fact in zip(units, facts, strict=True)}
        for entry in entries_of(it):
            for name in entry.loops if entry.race == "none" else ():
                if races(it, fact_of.get(name, FREE), entry.unit):
                    raise LoweringError(
                        f"sp_iter '{it.name}': annotation '{WORKERS}': expected loops that are "
                        f"proven free of races, got '{name}' ({fact_of[name]})"
                    )

    def _block(
        self,
        name: str,
        units: list[PositionLoop],
        body: tirx.Stmt,
        init: tirx.Stmt | None,
        allocs: list[Any],
        annotations: dict[str, Any],
    ) -> tirx.Stmt:
        iter_vars = [
            tirx.IterVar(
                ir.Range.from_min_extent(as_dtype(0, dtype_of(u.var)), u.extent), u.var, u.iter_type
            )
            for u in units
        ]

        def make(reads: list[Any], writes: list[Any]) -> Any:
            return s_tir.SBlock(
                iter_vars,
                reads,
                writes,
                name,
                body,
                init,
                alloc_buffers=allocs,
                annotations=annotations,
            )

        self.closed.update(allocs)
        visible = [v for v in self.translate.locals if v not in self.closed]
        placed = self.placed & set(allocs)
        plain = make([], [])
        there = {v.__chandle__() for v in variables_of(plain)}  # few of all
        known = {
            v: v
            for v in [*self.space.all_buffers(), *visible]
            if v.__chandle__() in there and v not in placed
        }
        reads, writes = s_tir.analysis.get_sblock_read_write_region(plain, known)
        reads, writes = ([self._relax(r) for r in regions] for regions in (reads, writes))
        return s_tir.SBlockRealize([u.loop for u in units], True, make(reads, writes))

    def _relax(self, region: Any) -> Any:
        """A region without variables that are not visible outside: whole dimensions instead."""
        ranges = []
        for rng, size in zip(region.region, region.source.ty.shape, strict=True):
            used = set(variables_of(rng.min, rng.extent))
            # TVM cannot bound a loaded value where another block of this function writes it.
            loads = any(tirx.is_buffer_var(v) for v in used)
            loaded = loads and region.source in self.translate.written_now()
            if used & self.closed or loaded:
                rng = ir.Range.from_min_extent(as_dtype(0, dtype_of(size)), size)
            ranges.append(rng)
        return tirx.BufferRegion(region.source, ranges)


def _found_later(init: tirx.Stmt, units: list[PositionLoop]) -> bool:
    """Whether an init, in its loops, needs what the reduction's block finds by searches."""
    first = next(n for n, u in enumerate(units) if "R" in u.kinds)
    found = {v for u in units[first:] for search in u.searches for v in search.locals}
    return bool(found & free_vars(init_loops(init, units[first:])))


def _guarded(conditions: list[Any], stmt: tirx.Stmt) -> tirx.Stmt:
    return tirx.IfThenElse(tirx.all(*conditions), stmt, None) if conditions else stmt


def _steps(extent: Any, step: Any) -> Any:
    """The number of iterations of a loop over an extent by steps of the same sign; 0 if step 0."""
    zero, one, less = (as_dtype(n, dtype_of(step)) for n in (0, 1, -1))
    up = tirx.floordiv(tirx.max(extent, zero) - one, tirx.max(step, one)) + one
    down = tirx.floordiv(less - tirx.min(extent, zero), zero - tirx.min(step, less)) + one
    return tirx.if_then_else(step > zero, up, tirx.if_then_else(step < zero, down, zero))
