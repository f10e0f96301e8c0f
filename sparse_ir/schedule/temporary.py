"""Rows updated by several chunks: all chunks but the owner keep their sums, to be added later.

(Senanayake's thesis, section 7.3, race strategy "temporary".) In a loop over chunks of the nonzeros
of all rows (:mod:`sparsetir.sparse_ir.schedule.pieces`) most rows have one writer. Before::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0.0
    with T.sp_iter([O, S, P], "SSS", "spmm") as [o, i, p]:
        ...                                       # C_ws, the sum of a piece of the row i
        with T.sp_iter([V, L], "SS", "spmm_write") as [v, l]:
            C[i, p * 32 + v * 16 + l] = C[i, p * 32 + v * 16 + l] + C_ws[v, l]

After `parallelize(o, "cpu", race="temporary")`, without an init, since each row has an owner::

    with T.sp_iter([O, S, P], "SSS", "spmm") as [o, i, p]:
        ...
        if i != C_row[o]:
            with T.sp_iter([V, L], "SS", "spmm_write") as [v, l]:
                C[i, p * 32 + v * 16 + l] = C_ws[v, l]
        else:
            with T.sp_iter([V, L], "SS", "spmm_keep") as [v, l]:
                C_rest[o, p * 32 + v * 16 + l] = C_ws[v, l]
    with T.sp_iter([O], "S", "spmm_carry") as [o]:
        if C_row[o] >= 0:
            with T.sp_iter([P, V, L], "SSS", "spmm_add") as [p, v, l]:
                C[C_row[o], p * 32 + v * 16 + l] = C[..] + C_rest[o, p * 32 + v * 16 + l]

Only the first piece of a chunk can belong to a row that another chunk owns, so each chunk needs one
row of `C_rest`. They are added in order: results do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.legal import for_dependences, parallelizable
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    declared,
    loads_of,
    same_indices,
    stores_of,
    substitute,
    variables_of,
    without_iteration,
)
from sparsetir.sparse_ir.races import FREE, private_buffers, races_of
from sparsetir.sparse_ir.recipes.positions import piece_rest
from sparsetir.sparse_ir.reduction import add_guards, reduction_of, split_guards
from sparsetir.sparse_ir.schedule.init_elimination import set_before
from sparsetir.sparse_ir.schedule.loops import Change, Loop, SparseIterationRef, changed, loops_of
from sparsetir.sparse_ir.schedule.pieces import pieces_under
from sparsetir.sparse_ir.schedule.steps import over_fresh_vars
from sparsetir.sparse_ir.schedule.visit_order import VisitOrder
from sparsetir.sparse_ir.tir import cast, free_vars, statements_of
from sparsetir.sparse_ir.traversal import map_expr


def with_temporaries(
    caller: str, func: SparseFunc, it: SparseIteration, place: int, annotations: dict[str, Any]
) -> tuple[SparseFunc, list[SparseIterationRef]]:
    """The function in which chunks keep their sums for rows of other chunks.

    place : the index of the loop over the chunks
    annotations : the new annotations of the iteration

    The handles are those of the iteration that keeps, of the one that loops over the chunks
    afterwards, and of the one that adds.
    """
    return _Temporaries(Change(caller, func, it, [loops_of(it)[place]])).run(annotations)


class _Temporaries(VisitOrder):
    def __init__(self, change: Change) -> None:
        super().__init__(change)
        func, it = self.func, self.it
        self.chunks = self.old.node
        self.pieces = self._pieces()
        by_axis = {x.name: x for x in self.loops}
        self.row = by_axis[self.pieces.name].var
        outer, inner = self._outside()
        nest = changed(it, outer, init=None) if inner else it
        self.whole, self.outer = nest, outer
        self.update = self._update(inner)
        self._refuse_stores()
        conditions, self.store = split_guards(self.update.body)
        reduction = reduction_of(self.update.body)
        if reduction is None:
            self.refuse(
                'race="temporary" expects rows that are added to, as X[..] = X[..] + term (or *, '
                "max, min), got another update"
            )
        self.conditions, self.reduction = conditions, reduction
        self.target = declared(func).buffers[self.store.buffer.name]
        self._refuse_indices()

    def run(self, annotations: dict[str, Any]) -> tuple[SparseFunc, list[SparseIterationRef]]:
        """The rewritten function and its handles."""
        rest, rows = self._declared()
        keep = self._keep(rest)
        last = self._add_kept_sums(rest, rows)
        func, write = self._write()
        condition = self.row != tirx.BufferLoad(rows.var, [self.old.var])
        branch = tirx.IfThenElse(condition, write, keep)
        if self.whole is self.it:
            name = self.update.name
            body = map_expr(
                self.it.body, [(SparseIteration, lambda n: branch if n.name == name else n)]
            )
        else:
            body = branch
        main = changed(self.whole, body=body, annotations=annotations)
        self.func = func
        out = self.replaced(main, last)
        add = last.body.then_case
        names = [keep.name, last.name, *([add.name] if isinstance(add, SparseIteration) else [])]
        return out, [SparseIterationRef(name) for name in names]

    # -- analysis -----------------------------------------------------------------------------

    def _outside(self) -> tuple[list[Loop], list[Loop]]:
        """The loops down to that over pieces; and those inside, if they update the rows."""
        loops = self.loops
        if reduction_of(self.it.body) is None and self.it.init is None:
            return loops, []
        place = [x.name for x in loops].index(self.pieces.name) + 1
        return loops[:place], loops[place:]

    def _update(self, inner: list[Loop]) -> SparseIteration:
        """The iteration that updates the rows: a nested one, or the body of the pieces' loop."""
        if inner:
            spatial = [x for x in [*self.outer, *inner] if "S" in x.kinds]
            for x in spatial:
                plain = isinstance(x.node, Axis) and x.node.kind == "dense_fixed"
                if not plain and x.name != self.pieces.name:
                    self.refuse(
                        f"the spatial loop '{x.name}' is over a sparse axis, so that an owner "
                        "would not write all of its row; expected dense ones beside the pieces"
                    )
            return changed(self.it, inner, name=self.name("write"), annotations={})
        if any("R" in x.kinds for x in self.outer):
            names = [x.name for x in self.outer if "R" in x.kinds]
            self.refuse(
                f"a row's piece is written in each visit of {names}; expected its sum to be "
                "precomputed outside of them"
            )
        nested = [s for s in statements_of(self.it.body) if isinstance(s, SparseIteration)]
        private = private_buffers(self.func, self.it)
        writing = [
            n for n in nested if any(s.buffer not in private for s in stores_of(n.body, n.init))
        ]
        if len(writing) != 1 or writing[0].init is not None:
            self.refuse(
                'race="temporary" expects one nested iteration that adds to the rows, got '
                f"{[n.name for n in writing]}"
            )
        return writing[0]

    def _declared(self) -> tuple[SparseBuffer, SparseBuffer]:
        """Declarations of the kept sums, and of the row of each."""
        pieces, name = self.pieces, self.target.name
        part = [a for a in self.func.axes if a.parent is not None and a.parent.name == pieces.name]
        starts = next(a for a in part if a.kind == "dense_variable").indptr
        handle = self.array(
            "rest", piece_rest, indptr=self.computed[str(pieces.indptr.name)]["indptr"],
            ptr=pieces.indptr, rows=pieces.indices, starts=starts,
        )  # fmt: skip
        axes = [a for n, a in enumerate(self.target.axes or []) if n != self.dimension]
        dtype = str(self.reduction.term.ty.dtype)
        return (
            self.bound(f"{name}_rest", [self.chunks, *axes], None, dtype),
            self.bound(f"{name}_row", [self.chunks], handle),
        )

    # -- iterations ---------------------------------------------------------------------------

    def _write(self) -> tuple[SparseFunc, SparseIteration]:
        """The write of an owner, which overwrites its row if nothing else has set it."""
        if self.whole is not self.it:
            return self.func, self.update
        axes = {v: a for x in (self.it, self.update) for a, v, _ in x.axis_of()}
        every = Axis(
            name=self.pieces.name, kind="dense_fixed", length=self.pieces.length, idtype=self.idtype
        )  # the row of a piece: every row has an owner
        axes[self.row] = every
        used = variables_of(*self.store.indices, *self.conditions)
        preceding = set_before(
            self.func, self.it.name, self.update.body, {v: axes[v] for v in used if v in axes}
        )
        if preceding is None:
            return self.func, self.update
        before, value = preceding
        func = self.func.replace(body=without_iteration(self.func.body, before.name))
        term = self.reduction.term
        dtype = str(term.ty.dtype)
        first = cast(value, dtype)
        if not same_indices([first], [self.reduction.identity(dtype)]):
            term = self.reduction.combine(first, term)
        value = cast(term, self.target.dtype)
        store = tirx.BufferStore(self.target.var, value, self.store.indices)
        return func, changed(self.update, body=add_guards(self.conditions, store))

    def _keep(self, rest: SparseBuffer) -> SparseIteration:
        """The iteration that keeps the sum for a row that another chunk owns."""
        place = [self.old.var, *self._beside(self.store.indices)]
        init, value = None, self.reduction.term
        if self.whole is not self.it:  # the sum itself, not a workspace
            init = tirx.BufferStore(rest.var, self.reduction.identity(rest.dtype), place)
            value = self.reduction.combine(tirx.BufferLoad(rest.var, place), value)
        body = add_guards(self.conditions, tirx.BufferStore(rest.var, value, place))
        return over_fresh_vars(changed(self.update, init=init, body=body, name=self.name("keep")))

    def _add_kept_sums(self, rest: SparseBuffer, rows: SparseBuffer) -> SparseIteration:
        """The iteration that adds all kept sums to their rows."""
        chunk = tirx.Var(self.old.var.name, self.idtype)
        row = tirx.BufferLoad(rows.var, [chunk])
        mine = (self.chunks.name, self.pieces.name)
        over = [x for x in [*self.outer, *loops_of(self.update)] if "S" in x.kinds]
        over = [x for x in over if x.name not in mine]
        indices = list(self.store.indices)
        indices[self.dimension] = row
        held = cast(tirx.BufferLoad(self.target.var, indices), rest.dtype)
        kept = tirx.BufferLoad(rest.var, [chunk, *self._beside(self.store.indices)])
        total = cast(self.reduction.combine(held, kept), self.target.dtype)
        coords = {v for x in over for v in x.vars} | {self.row, self.old.var}
        moving = {v for x in loops_of(self.update) for v in x.vars} - coords
        steady = [c for c in self.conditions if not free_vars(c) & moving]
        inner: Any = add_guards(steady, tirx.BufferStore(self.target.var, total, indices))
        inner = substitute(inner, {self.row: row, self.old.var: chunk})
        if over:
            inner = self.step("add", over, inner, annotations={})  # on one worker
        body = tirx.IfThenElse(row >= 0, inner, None)
        loop, name = Loop(self.chunks, [chunk], "S"), self.name("carry")
        return changed(self.it, [loop], name=name, init=None, body=body, annotations={})

    def _beside(self, indices: Any) -> list[Any]:
        return [x for n, x in enumerate(indices) if n != self.dimension]

    # -- refusals -----------------------------------------------------------------------------

    def _pieces(self) -> Axis:
        """The axis of the pieces of rows in a chunk."""
        if isinstance(self.chunks, Axis):
            axis = pieces_under(self.func, self.it, self.chunks)
            if axis is not None:
                return axis
        if "R" in self.old.kinds:
            self.refuse(
                f"race=\"temporary\" of the reduction loop '{self.old.name}': {self._advice()}"
            )
        self.refuse(
            'race="temporary" expects the loop over the chunks that split or divide made of fused '
            f"rows and elements, got '{self.old.name}'"
        )

    def _advice(self) -> str:
        """Legal alternatives for a reduction loop, for a message."""
        axis = self.chunks
        if isinstance(axis, Axis) and axis.kind == "dense_fixed":
            return (
                "precompute(.., lanes=[loop]) gives each visit a sum of its own, and parallelize "
                "then takes the loop without a race"
            )
        loops = self.loops
        facts = parallelizable(self.func, self.it)
        free = [x.name for x, fact in zip(loops, facts, strict=True) if fact == FREE]
        legal = f"legal are loops free of races, {free}"
        rows = [x.name for x in loops if isinstance(x.node, Axis) and x.kinds == "S"]
        if not isinstance(axis, Axis) or not axis.is_variable or axis.parent.name not in rows:
            return legal
        if axis.parent.kind != "dense_fixed" or str(axis.indptr.name) in self.computed:
            return legal
        return (
            f"{legal}, or, after sparse_fuse of '{axis.parent.name}' and '{axis.name}' and split "
            'of the fused loop, the first of the loops made, with race="temporary"'
        )

    def _refuse_stores(self) -> None:
        """Refuse stores to other buffers than the rows, and other uses of the rows."""
        private = private_buffers(self.func, self.it)
        written = [s.buffer for s in stores_of(self.it.body, self.it.init)]
        names = sorted({b.name for b in written if b not in private})
        store = split_guards(self.update.body)[1]
        if not isinstance(store, tirx.BufferStore) or names != [store.buffer.name]:
            self.refuse(f"expected one buffer to be written outside of workspaces, got {names}")
        loads = loads_of(self.it.body, store.buffer)
        if any(not same_indices(x.indices, store.indices) for x in loads):
            self.refuse(f"'{store.buffer.name}' is read at more than one place")

    def _refuse_indices(self) -> None:
        """Refuse visits that write more than their row, and pieces that write an element twice."""
        plain = for_dependences(self.it, self.func)
        private = private_buffers(self.func, self.it)
        nests = [
            plain,
            *(n for n in statements_of(plain.body) if getattr(n, "name", "") == self.update.name),
        ]
        for nest in nests:
            for loop, fact in zip(loops_of(nest), races_of(nest, private), strict=True):
                if "S" in loop.kinds and loop.name != self.chunks.name and fact != FREE:
                    self.refuse(
                        f"visits of the loop '{loop.name}' add to the same element ({fact})"
                    )
        indices = list(self.store.indices)
        places = [n for n, x in enumerate(indices) if x.same_as(self.row)]
        kept = {v for n, x in enumerate(indices) if n not in places for v in free_vars(x)}
        over = [a for n, a in enumerate(self.target.axes or []) if n not in places]
        dense = self.target.axes is not None and all(a.kind == "dense_fixed" for a in over)
        if len(places) != 1 or kept & {self.row, self.old.var} or not dense:
            self.refuse(
                f"expected '{self.target.name}' to be written at the row '{self.row.name}' and "
                f"otherwise over dense axes, got {indices}"
            )
        self.dimension = places[0]
