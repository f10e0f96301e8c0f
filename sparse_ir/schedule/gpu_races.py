"""Race strategies for GPU loops whose visits update the same elements; see `parallelize`.

"atomics" : each update, of a sum, maximum or minimum, is atomic. In a loop over chunks of the
    elements of all rows, rows within one chunk are written with plain stores
    (:mod:`sparsetir.sparse_ir.schedule.combine_row_pieces`). Before::

        with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
            C[i, k] = 0.0
        with T.sp_iter([I_J0, I_J1, K], "SSS", "spmm") as [ij0, ij1, k]:
            C[I_at[..], k] = C[I_at[..], k] + A[..] * B[J_at[..], k]

    After `parallelize(ij1, "thread", race="atomics")`::

        with T.sp_iter([I_J0, I_J1, K], "SSS", "spmm") as [ij0, ij1, k]:
            T.sp_iter_attr({"atomic": 1, "parallel": [...]})

"segment(r)" : each r neighbouring threads reduce their terms over each run of equal rows, and the
    first of a run adds the sum atomically, as the row may continue elsewhere. After
    `parallelize(ij1, "thread", race="segment(32)")`::

        with T.sp_iter([I_J0, I_J1], "SS", "spmm") as [ij0, ij1]:
            with T.sp_iter([K], "S", "spmm_write") as [k]:
                T.sp_iter_attr({"atomic": 1, "group": {"lanes": "I_J1", "size": 32, "runs": 1}})
                C[I_at[..], k] = C[I_at[..], k] + A[..] * B[J_at[..], k]

"group(r)" : all threads of the loop update one element; every r of them reduce their terms, and one
    of these writes, atomically if the loop has more than r. Threads without a term take part.
"temporary" : group(r) of all threads of a loop. Above 32 they must be all threads of a block, and
    reduce through shared memory.

For groups in stage II, see :mod:`sparsetir.sparse_ir.groups`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sparsetir.sparse_ir.annotations import ATOMIC, GROUP
from sparsetir.sparse_ir.atomics import ATOMIC_KINDS, has_atomics
from sparsetir.sparse_ir.groups import GROUP_DTYPES
from sparsetir.sparse_ir.legal import own_stores, parallelizable
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    declared,
    flat_axes,
    same_indices,
)
from sparsetir.sparse_ir.races import private_buffers
from sparsetir.sparse_ir.reduction import Reduction, reduction_of
from sparsetir.sparse_ir.schedule.combine_row_pieces import combine_row_pieces
from sparsetir.sparse_ir.schedule.init_elimination import set_before, with_plain_init
from sparsetir.sparse_ir.schedule.loops import (
    Change,
    Loop,
    SparseIterationRef,
    changed,
    find_iteration,
    inside,
    loops_of,
    replaced,
)
from sparsetir.sparse_ir.schedule.pieces import pieces_under
from sparsetir.sparse_ir.schedule.steps import Steps
from sparsetir.sparse_ir.tir import as_one, dtype_of, free_vars
from sparsetir.sparse_ir.workers import WARP

GROUPS = re.compile(r"(group|segment)\((1|2|4|8|16|32)\)")


def parsed(race: Any) -> tuple[str, int]:
    """The strategy, and the lanes of its groups, 0 for strategies without groups."""
    match = GROUPS.fullmatch(race) if isinstance(race, str) else None
    return (match[1], int(match[2])) if match else (str(race), 0)


def with_race_strategy(
    caller: str, func: SparseFunc, it: SparseIteration, places: list[int], race: str, lanes: int
) -> tuple[SparseFunc, list[SparseIterationRef]]:
    """The function with a race strategy for some loops, and the iterations that write."""
    change = Change(caller, func, it, [loops_of(it)[p] for p in places])
    return _RaceStrategy(change).run(race, lanes)


class _RaceStrategy(Steps):
    def run(self, race: str, lanes: int) -> tuple[SparseFunc, list[SparseIterationRef]]:
        """The rewritten function and the handles."""
        func, writes = self._with_race(race, lanes)
        for ref in writes:
            stores = own_stores(find_iteration(func, ref.name))
            buffer = declared(func).buffers[stores[0].buffer.name]
            func = with_plain_init(func, self.it.name, buffer)
        return func, writes

    def _with_race(self, race: str, lanes: int) -> tuple[SparseFunc, list[SparseIterationRef]]:
        if race == "atomics" and any(pieces_under(self.func, self.it, x.node) for x in self.chosen):
            return self._chunks()
        if self.it.init is not None:
            firsts = self.split_init()
            self._replace([*firsts, changed(self.it, init=None)], axes=self.axes)
        if race != "atomics":
            (loop,) = self.chosen
            self._nest(loop)
            size = int(loop.node.length)
            if race == "temporary":
                lanes = size
            self._refuse_lanes(loop, size, lanes, race)
            return self._groups(loop, size, lanes, race)
        names = self._racing()
        for name in names:
            self._mark(name, {ATOMIC: 1})
        return self.func, [SparseIterationRef(name) for name in names]

    # -- steps --------------------------------------------------------------------------------

    def _chunks(self) -> tuple[SparseFunc, list[SparseIterationRef]]:
        """Overwrite rows within one chunk, update others atomically."""
        writes = [n for n in inside(self.it) if self._shared(n)]
        if not writes or self.it.init is not None:
            self.refuse(
                "expected the sum of a piece of a row in a workspace, which precompute makes, got "
                "one that is added to in place"
            )
        refs = [SparseIterationRef(n.name) for n in writes]
        func, added = combine_row_pieces(self.func, refs, race="atomics")
        return func, [*refs, *added]

    def _nest(self, loop: Loop) -> None:
        """Move the loops inside the one over lanes to a nested iteration."""
        loops = loops_of(self.it)
        place = [x.axes for x in loops].index(loop.axes) + 1
        if place == len(loops) or not self._shared(self.it):
            return
        if any("R" in x.kinds for x in loops[place:]):
            names = [x.name for x in loops[place:] if "R" in x.kinds]
            self.refuse(
                f"expected the sum over {names} in a workspace, which precompute makes, got one "
                "that is added to in place"
            )
        name = self.name("write")
        kept = {k: v for k, v in self.it.annotations.items() if k == ATOMIC}
        inner = changed(self.it, loops[place:], name=name, annotations=kept)
        notes = {k: v for k, v in self.it.annotations.items() if k != ATOMIC}
        self._replace([changed(self.it, loops[:place], body=inner, annotations=notes)])

    def _groups(
        self, loop: Loop, size: int, lanes: int, race: str
    ) -> tuple[SparseFunc, list[SparseIterationRef]]:
        """Let lanes reduce their terms."""
        names = self._racing()
        runs = int(race == "segment")
        for name in names:
            update = self._update(find_iteration(self.func, name))
            differs = any(set(loop.vars) & free_vars(i) for i in update.store.indices)
            if differs and not runs:
                self.refuse(
                    f"lanes of '{loop.name}' add to different elements, "
                    f'{list(update.store.indices)}; legal is race="segment({lanes})", where each '
                    "run of lanes with the same one is added up"
                )
            if not differs and runs:
                self.refuse(
                    f"all lanes of '{loop.name}' add to the same element, "
                    f'{list(update.store.indices)}; legal is race="group({lanes})"'
                )
            self._refuse_loops(name)
            how: dict[str, Any] = {"lanes": loop.name, "size": lanes, "runs": runs}
            if runs or lanes < size:
                self._refuse_atomics(name)
                self._mark(name, {GROUP: how, ATOMIC: 1})
                continue
            first = self._first(loop, find_iteration(self.func, name))
            self._mark(name, {GROUP: how if first is None else {**how, "instead": first}})
        if not names:
            self.refuse(
                f"visits of '{loop.name}' do not add to the same elements; legal is race=\"none\""
            )
        return self.func, [SparseIterationRef(name) for name in names]

    def _first(self, lanes: Loop, update: SparseIteration) -> str | None:
        """The iteration that sets what a group of all lanes updates, if nothing else does."""
        outer = [x for x in loops_of(self.it) if x.name != lanes.name]
        path = [n for n in inside(self.it) if update.name in {x.name for x in [n, *inside(n)]}]
        loops = [*outer, *(x for n in path for x in loops_of(n))]
        if any("R" in x.kinds for x in loops):
            return None
        axes = {v: a for x in loops for a, v in zip(flat_axes([x.node]), x.vars, strict=True)}
        preceding = set_before(self.func, self.it.name, update.body, axes)
        if preceding is None:
            return None
        before, value = preceding
        unit = self._update(update).identity(dtype_of(value))
        return before.name if same_indices([value], [unit]) else None

    def _mark(self, name: str, notes: dict[str, Any]) -> None:
        it = find_iteration(self.func, name)
        if ATOMIC in notes:
            self._refuse_atomics(name)
        marked = changed(it, annotations={**dict(it.annotations.items()), **notes})
        self.func = replaced(self.caller, self.func, it, marked)
        self.it = find_iteration(self.func, self.it.name)

    def _replace(self, parts: list[Any], axes: Sequence[Axis] = ()) -> None:
        self.func = self.put(as_one(parts), axes=axes)
        self.it = find_iteration(self.func, self.it.name)

    # -- analysis -----------------------------------------------------------------------------

    def _shared(self, it: SparseIteration) -> bool:
        """Whether an iteration itself stores to a buffer that is not private to visits."""
        private = private_buffers(self.func, self.it)
        return any(s.buffer not in private for s in own_stores(it))

    def _racing(self) -> list[str]:
        """The iterations that update elements shared by visits of the loops."""
        facts = parallelizable(self.func, self.it)
        names = {x.name for x in self.chosen}
        shared = {
            b
            for x, fact in zip(loops_of(self.it), facts, strict=True)
            if x.name in names
            for b in fact.buffers
        }
        racing = [
            n.name
            for n in [self.it, *inside(self.it)]
            if any(s.buffer.name in shared for s in own_stores(n))
        ]
        for name in racing:
            self._update(find_iteration(self.func, name))
        return racing

    def _update(self, it: SparseIteration) -> Reduction:
        """The update that an iteration performs."""
        reduction = reduction_of(it.body)
        if reduction is None or it.init is not None:
            self.refuse(
                f"expected '{it.name}' to update by X[..] = X[..] + term (or *, max, min), got "
                "another statement"
            )
        if dtype_of(reduction.term) not in GROUP_DTYPES:
            self.refuse(
                f"expected terms of {', '.join(GROUP_DTYPES)}, got {dtype_of(reduction.term)} in "
                f"'{it.name}'; precompute(.., dtype=\"float32\") sums in a wider type"
            )
        return reduction

    # -- refusals -----------------------------------------------------------------------------

    def _refuse_lanes(self, loop: Loop, size: int, lanes: int, race: str) -> None:
        if race == "temporary" and size & (size - 1):
            self.refuse(
                f'race="temporary" expects a power of two of threads, got {size} of '
                f"'{loop.name}'; legal is race=\"group({WARP})\" of a multiple"
            )
        if size % lanes:
            self.refuse(
                f"argument 'race': expected a loop over a multiple of {lanes} threads, got {size} "
                f"of '{loop.name}'"
            )

    def _refuse_atomics(self, name: str) -> None:
        it = find_iteration(self.func, name)
        update = self._update(it)
        dtype = dtype_of(update.store.value)
        if not has_atomics(update.operator, dtype):
            self.refuse(
                f"atomics expect {ATOMIC_KINDS}, got a {update.operator} of {dtype} in '{name}'; "
                "legal are groups of all threads that share a row"
            )

    def _refuse_loops(self, name: str) -> None:
        """Refuse loops between the lanes and the update that differ between lanes."""
        for n in inside(self.it):
            if name != n.name and name not in {x.name for x in inside(n)}:
                continue
            for x in loops_of(n):
                if not x.is_dense:
                    self.refuse(
                        f"lanes visit '{x.name}' of '{n.name}' different numbers of times, and "
                        "cannot reduce inside; expected the sum over it in a workspace, as made by "
                        "precompute"
                    )
