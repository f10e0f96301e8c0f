"""Sums over neighbouring GPU threads, written by one of them (Sgap, section 5).

An iteration with the annotation "group" stores `X[..] = X[..] + term` for each visit of a loop over
threads, its lanes. The interpreter, and any serial order, can execute that as written. Before::

    with T.sp_iter([I, L], "SS", "spmv") as [i, l]:        # l, a loop over 32 threads
        with T.sp_iter([], "", "spmv_write") as []:
            T.sp_iter_attr({"group": {"lanes": "L", "size": 32, "runs": 0}})
            y[i] = y[i] + y_ws[()]

In stage II the lanes reduce their terms by shuffles, in log2(32) steps, and the first lane of
each group writes::

    with T.sblock("spmv_write0"):
        total[0] = y_ws[0]
        lane16 = T.call_extern("float32", "__shfl_down_sync", mask, total[0], 16, 32)
        total[0] = total[0] + lane16
        ...
        if vl % 32 == 0:
            y[vi] = total[0]

A group larger than a warp consists of all threads of a block: each warp reduces its terms as above,
then all of them reduce the warps' sums, exchanged through shared memory between barriers::

        T.tvm_storage_sync("shared")
        if vl % 32 == 0:
            warps[vl // 32] = total[0]
        T.tvm_storage_sync("shared")
        total[0] = warps[vl % 4]
        ...

With runs, the rows of the lanes differ: neighbouring lanes of equal row are a run, whose sum its
first lane writes. Runs are found by one vote, `__ballot_sync`, for all columns: each lane that
begins a run sets its bit, and each adds the terms up to the next bit.

Lanes beyond the end take part with the operator's identity (Sgap, "zero extension"): guards around
the update select the term instead. If all terms of a row are in one group, and nothing else is
added to it, the initial value is merged in and the iteration that set it is removed.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.annotations import ATOMIC, GROUP, THREAD_UNITS
from sparsetir.sparse_ir.atomics import atomic_update
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import (
    SparseFunc,
    SparseIteration,
    buffer_var,
    iteration_with,
    iterations_around,
    nodes_of,
    sparse_iterations,
    variables_of,
    without_iteration,
)
from sparsetir.sparse_ir.reduction import Reduction, add_guards, reduction_of
from sparsetir.sparse_ir.tir import as_dtype, barrier, cast, dtype_of, free_vars
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.workers import WARP, entries_of

GROUP_DTYPES = ("float32", "float64", "int32", "int64")  # the types that shuffles move


def with_group_calls(func: SparseFunc, tags: dict[tuple[str, ...], list[str]]) -> SparseFunc:
    """The function with calls in place of the stores of iterations whose lanes cooperate.

    tags : what the function's loops are bound to, as returned by :func:`thread_tags`

    Raises LoweringError for such an iteration that stores anything but a reduction, for a loop over
    lanes that is not over neighbouring threads, and for lanes of several warps that are not all
    threads of their block, which barriers need.
    """
    for it in [x for x in sparse_iterations(func) if GROUP in x.annotations]:
        func = _Group(func, it, tags).run()
    return func


class _Group:
    def __init__(
        self, func: SparseFunc, it: SparseIteration, tags: dict[tuple[str, ...], list[str]]
    ) -> None:
        self.func, self.it = func, it
        how = dict(it.annotations[GROUP].items())
        self.size, self.runs = int(how["size"]), bool(int(how["runs"]))
        self.instead = "" if ATOMIC in it.annotations else str(how.get("instead", ""))
        self.around = [*iterations_around(func, it), it]
        workers = [
            (x, axis, var)
            for x in self.around
            for axis, var, _ in x.axis_of()
            if axis.name == str(how["lanes"])
        ]
        reduction = reduction_of(it.body)
        if not workers or reduction is None or it.init is not None:
            raise LoweringError(
                f"sp_iter '{it.name}': annotation '{GROUP}': expected X[..] = X[..] + term (or *, "
                f"max, min) inside a loop '{how['lanes']}', got another statement"
            )
        self.owner, self.lanes, self.var = workers[-1]
        bound = tags.get((self.owner.name, str(self.lanes.name)), [])
        if bound != ["threadIdx.x"]:
            raise LoweringError(
                f"sp_iter '{it.name}': annotation '{GROUP}': expected the lanes "
                f"'{self.lanes.name}' to be the innermost loop over threads, got "
                f"{' and '.join(bound) or 'no threads'}"
            )
        if not self.runs and self.var in variables_of(*reduction.store.indices):
            raise LoweringError(
                f"sp_iter '{it.name}': annotation '{GROUP}': expected the lanes of a group to add "
                f"to one element, got '{reduction.store.buffer.name}' at an index that depends on "
                f"'{self.lanes.name}'"
            )
        if self.size > WARP:
            self._refuse_other_threads(tags)
        self.reduction: Reduction = reduction
        self.dtype = dtype_of(reduction.term)
        self.store = reduction.store
        inner = {v for x in self.around[self.around.index(self.owner) + 1 :] for v in x.vars}
        self.steady = [c for c in reduction.conditions if not free_vars(c) & inner]
        self.lane = tirx.Cast(
            "int32", tirx.floormod(self.var, as_dtype(self.size, dtype_of(self.var)))
        )

    def run(self) -> SparseFunc:
        """The function with the calls."""
        first = tirx.Var("lanes", "uint32")
        mask: Any = tirx.const(0xFFFFFFFF, "uint32")
        prepared: list[Any] = []
        if self.size < WARP:
            prepared.append(tirx.Bind(first, self._first_lane()))
            mask = tirx.shift_left(tirx.const((1 << self.size) - 1, "uint32"), first)
        writes: Any = tirx.EQ(self.lane, tirx.const(0, "int32"))
        end = None
        if self.runs:
            steps, writes, end = self._runs(mask, first)
            prepared += steps
        body = self._update(mask, writes, end)
        if self.instead:
            body_without = without_iteration(self.func.body, self.instead)
            self.func = self.func.replace(body=body_without)
        annotations = {k: v for k, v in self.it.annotations.items() if k not in (GROUP, ATOMIC)}
        if self.owner is self.it:
            body, prepared = tirx.SeqStmt([*prepared, *body.seq]), []
        summed = iteration_with(self.it, body=body, annotations=annotations)
        summed = tirx.SeqStmt([*prepared, summed]) if prepared else summed
        body = map_expr(
            self.func.body, [(SparseIteration, lambda n: summed if n.name == self.it.name else n)]
        )
        return self.func.replace(body=body)

    # -- the steps ----------------------------------------------------------------------------

    def _update(self, mask: Any, writes: Any, end: Any) -> Any:
        """The reduction over lanes, and the write."""
        reduction, conditions = self.reduction, self.reduction.conditions
        term = reduction.term
        if conditions:
            term = tirx.if_then_else(tirx.all(*conditions), term, reduction.identity(self.dtype))
        held = buffer_var([1], self.dtype, "total", "local")
        zero = [tirx.const(0, "int32")]
        total = tirx.BufferLoad(held, zero)
        steps: list[Any] = [tirx.AllocBuffer(held), tirx.BufferStore(held, term, zero)]
        steps += self._added(held, min(self.size, WARP), mask, end)
        if self.size > WARP:
            steps += self._over_warps(held, mask)
        if ATOMIC in self.it.annotations:
            store = atomic_update(reduction, total)
        else:
            value = total
            if not self.instead:
                old = tirx.BufferLoad(self.store.buffer, self.store.indices)
                value = reduction.combine(cast(old, self.dtype), total)
            store = tirx.BufferStore(
                self.store.buffer, cast(value, dtype_of(self.store.value)), self.store.indices
            )
        return tirx.SeqStmt([*steps, add_guards([writes, *conditions], store)])

    def _added(self, held: Any, lanes: int, mask: Any, end: Any = None) -> list[Any]:
        """Shuffles after which the first of `lanes` lanes holds the sum of all."""
        zero, reduction, steps = [tirx.const(0, "int32")], self.reduction, []
        total = tirx.BufferLoad(held, zero)
        distances = [1 << n for n in range(lanes.bit_length() - 1)]
        for distance in distances if self.runs else reversed(distances):
            other: Any = tirx.Var(f"lane{distance}", self.dtype)
            steps.append(tirx.Bind(other, self._shuffled("down", mask, total, distance, lanes)))
            if end is not None:
                same = self.lane + tirx.const(distance, "int32") < end
                other = tirx.Select(same, other, reduction.identity(self.dtype))
            steps.append(tirx.BufferStore(held, reduction.combine(total, other), zero))
        return steps

    def _over_warps(self, held: Any, mask: Any) -> list[Any]:
        """Reduce the sums of the first lanes of all warps; every warp does so, so none waits."""
        count, zero = self.size // WARP, [tirx.const(0, "int32")]
        warps = buffer_var([count], self.dtype, "warps", "shared")
        warp, lane = (
            divided(self.lane, tirx.const(WARP, "int32"))
            for divided in (tirx.floordiv, tirx.floormod)
        )
        first = tirx.EQ(lane, tirx.const(0, "int32"))
        keep = tirx.BufferStore(warps, tirx.BufferLoad(held, zero), [warp])
        back = tirx.BufferLoad(warps, [tirx.floormod(self.lane, tirx.const(count, "int32"))])
        return [
            tirx.AllocBuffer(warps),
            barrier(),  # the values of an earlier visit have been read
            add_guards([first], keep),
            barrier(),
            tirx.BufferStore(held, back, zero),
            *self._added(held, count, mask),
        ]

    def _refuse_other_threads(self, tags: dict[tuple[str, ...], list[str]]) -> None:
        """Refuse other thread loops of the block: they would have barriers of their own."""
        nest = [self.around[0], *nodes_of(SparseIteration, self.around[0].body)]
        names = {it.name for it in nest}
        for (name, *loops), kinds in tags.items():
            if name in names and any(k.startswith("threadIdx") for k in kinds):
                if kinds != ["threadIdx.x"]:
                    raise LoweringError(
                        f"sp_iter '{self.it.name}': annotation '{GROUP}': expected "
                        f"{self.size} lanes to be all threads of their block, as they wait for "
                        f"each other, got {loops} of '{name}' beside them; legal are loops over "
                        "blocks, or groups within a warp"
                    )

    def _runs(self, mask: Any, first: Any) -> tuple[list[Any], Any, Any]:
        """Statements, the predicate that a lane begins a run, and the lane where its run ends."""
        steps: list[Any] = []
        begins: Any = tirx.EQ(self.lane, tirx.const(0, "int32"))
        for number, index in enumerate(self._rows()):
            valid = tirx.all(*self.steady) if self.steady else None
            key = (
                index
                if valid is None
                else tirx.if_then_else(valid, index, as_dtype(-1, dtype_of(index)))
            )
            row, above = (tirx.Var(f"{what}{number}", dtype_of(index)) for what in ("row", "above"))
            steps.append(tirx.Bind(row, key))
            steps.append(tirx.Bind(above, self._shuffled("up", mask, row, 1, self.size)))
            begins = tirx.Or(begins, tirx.NE(row, above))
        head, votes, left = (
            tirx.Var(name, dtype)
            for name, dtype in (("head", "bool"), ("votes", "uint32"), ("left", "int32"))
        )
        steps.append(tirx.Bind(head, begins))
        vote = tirx.call_extern("uint32", "__ballot_sync", mask, tirx.Cast("int32", head))
        if self.size < WARP:
            vote = tirx.shift_right(vote, first)
        steps.append(tirx.Bind(votes, vote))
        lane, one = tirx.Cast("uint32", self.lane), tirx.const(1, "uint32")
        later = tirx.shift_right(tirx.shift_right(votes, lane), one)
        steps.append(tirx.Bind(left, tirx.call_extern("int32", "__ffs", tirx.Cast("int32", later))))
        end = tirx.Var("end", "int32")
        none = tirx.EQ(left, tirx.const(0, "int32"))
        size = tirx.const(self.size, "int32")
        steps.append(tirx.Bind(end, tirx.Select(none, size, self.lane + left)))
        return steps, head, end

    def _rows(self) -> list[Any]:
        """The indices of the update that differ among lanes."""
        rows = [i for i in self.store.indices if self.var in free_vars(i)]
        inner = {v for x in self.around[self.around.index(self.owner) + 1 :] for v in x.vars}
        if not rows or any(free_vars(i) & inner for i in rows):
            raise LoweringError(
                f"sp_iter '{self.it.name}': annotation '{GROUP}': expected an index by the lanes "
                f"'{self.lanes.name}' alone, got {list(self.store.indices)}"
            )
        return rows

    def _shuffled(self, way: str, mask: Any, value: Any, distance: int, lanes: int) -> Any:
        """The value of the lane `distance` up or down, among `lanes` lanes."""
        by, size = tirx.const(distance, "uint32"), tirx.const(lanes, "int32")
        return tirx.call_extern(dtype_of(value), f"__shfl_{way}_sync", mask, value, by, size)

    def _first_lane(self) -> Any:
        """The lane of the warp at which a group begins."""
        place, width = self._place(self.owner, str(self.lanes.name)), 1
        total: Any = as_dtype(0, "int32")
        for extent, var in [(int(self.lanes.length), self.var), *place]:
            total = total + tirx.Cast("int32", var) * tirx.const(width, "int32")
            width *= extent
        begin = tirx.floormod(total - self.lane, tirx.const(WARP, "int32"))
        return tirx.Cast("uint32", begin)

    def _place(self, owner: SparseIteration, lanes: str) -> list[tuple[int, Any]]:
        """(extent, coordinate) of the loops over threads around the lanes, innermost first."""
        out: list[tuple[int, Any]] = []
        for it in self.around[: self.around.index(owner) + 1]:
            axes = {axis.name: (axis, var) for axis, var, _ in it.axis_of()}
            for name in [n for n in axes if n != lanes]:
                for entry in entries_of(it):
                    if name not in entry.loops or entry.unit not in THREAD_UNITS:
                        continue
                    (axis, var), size = axes[name], entry.per_block
                    if size:
                        var = tirx.floormod(var, as_dtype(size, dtype_of(var)))
                    elif isinstance(axis.length, tirx.IntImm):
                        size = int(axis.length)
                    if not size or len(entry.loops) > 1 or axis.kind != "dense_fixed":
                        raise LoweringError(
                            f"sp_iter '{self.it.name}': annotation '{GROUP}': expected other loops "
                            f"over threads to be over one dense axis each, got '{name}'"
                        )
                    out.append((size, var))
        return out[::-1]
