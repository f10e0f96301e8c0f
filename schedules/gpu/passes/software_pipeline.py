"""Copies for later visits of a loop overlapped with the current one (software pipeline).

The trip count of the loop may only be known on the GPU. Before, with copies that
:func:`sparsetir.schedules.gpu.passes.cooperative_copy.cooperative_copy` has made::

    for jo in range(indptr[vio + 1] - indptr[vio]):
        with T.sblock("reduce0"):
            ...  # A_ws_copy0, B_ws_copy0
            ...  # reduce_rest0, of A_ws and B_ws

After `software_pipeline(func, "reduce0", ["A_ws_copy0", "B_ws_copy0"], stages=3)`::

    trips = indptr[vio + 1] - indptr[vio]
    for s in T.unroll(2):
        if s < trips:
            ...  # copies of visit s to A_ws[s], B_ws[s]
        commit
    for step in range(trips):
        wait for all groups but the last      # those of this visit are there
        barrier                               # for all threads; and all have done the visit before
        if step + 2 < trips:
            ...  # copies of visit step + 2, to where that visit's were
        commit
        ...  # reduce_rest0, of A_ws[step % 3] and B_ws[step % 3]
    barrier

Each visit commits a group, even if empty, so that it waits for a constant number of groups. TVM's
pipeline derives that number from the extent, and misses a barrier in a loop that runs once. With
one stage a visit copies, waits and works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.schedules.gpu.passes.cooperative_copy import places_of
from sparsetir.schedules.gpu.passes.ptx import commit_copies, wait_for_copies
from sparsetir.schedules.passes.nests import (
    element_bytes,
    find_nest,
    redirected,
    replaced,
    with_buffer,
    with_fresh,
    without_buffers,
)
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import accesses_of, buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.tir import as_dtype, as_one, barrier, dtype_of, loop_over
from sparsetir.sparse_ir.traversal import map_expr

NAME = "software_pipeline"
MAX_SHARED = 48 * 1024  # bytes available to a kernel without a launch attribute
ALIGNED = 64  # elements: the alignment of an array's start
DYNAMIC_BYTES = 163 * 1024  # available to a launch, on sm_80


def software_pipeline(
    func: tirx.PrimFunc, loop: str, copies: Sequence[str], *, stages: int, room: int = MAX_SHARED,
    shown: Sequence[Any] = (),
) -> tirx.PrimFunc:  # fmt: skip
    """A stage-II function whose loop around a block copies `stages - 1` visits ahead.

    loop : block in the loop, or in a nest of loops that is fused to one; all threads of a thread
        block run it equally often
    copies : blocks in it that copy to shared memory, which nothing else writes
    stages : visits whose copies are in shared memory at a time, at least 1
    room : the most bytes of shared memory for these
    shown : statements by which a thread shows what it has copied to more than ordinary loads

    Raises ScheduleError for other blocks, and for copies that exceed shared memory.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ScheduleError(f"{NAME}: argument 'stages': expected at least 1, got {stages!r}")
    nest = find_nest(NAME, func, loop)
    parts = list(nest.body.seq) if isinstance(nest.body, tirx.SeqStmt) else [nest.body]
    ahead = [p for p in parts if _name(p) in copies]
    work = [p for p in parts if _name(p) not in copies]
    if len(ahead) != len(copies):
        raise ScheduleError(
            f"{NAME}: argument 'copies': expected blocks in block '{loop}', among "
            f"{[_name(p) for p in parts]}, got {list(copies)}"
        )
    buffers = _in_stages(_shared(ahead), stages, room)
    pipelined = _Pipeline(nest.loops, ahead, work, buffers, stages, shown).run()
    func = replaced(func, nest, pipelined)
    for old, new in buffers.items():
        left = accesses_of(func.body, old)
        if left:
            raise ScheduleError(
                f"{NAME}: argument 'copies': expected what they copy to be used in the loop alone, "
                f"got {left[0]}"
            )
        func = with_buffer(func, old, new, list)
    return func


class _Pipeline:
    def __init__(
        self, loops: list[Any], ahead: list[Any], work: list[Any], buffers: dict[Any, Any],
        stages: int, shown: Sequence[Any],
    ) -> None:  # fmt: skip
        self.loops, self.ahead, self.work = loops, ahead, work
        self.buffers, self.stages, self.shown = buffers, stages, shown
        self.dtype = dtype_of(loops[0].loop_var)
        self.trips = tirx.Var("trips", self.dtype)

    def run(self) -> Any:
        """The statement that replaces the loop."""
        extent = self.loops[0].extent
        for loop in self.loops[1:]:
            extent = extent * loop.extent
        step = tirx.Var("step", self.dtype)
        if self.stages == 1:
            copies = self._visit(self.ahead, step)
            inside = [barrier(), *copies, commit_copies(), wait_for_copies(0), *self.shown]
            body = tirx.SeqStmt([*inside, barrier(), *self._visit(self.work, step)])
            return tirx.SeqStmt([loop_over(step, extent, body), barrier()])
        first: list[Any] = []
        for s in range(self.stages - 1):
            first += [*self._guarded(as_dtype(s, self.dtype)), commit_copies()]
        later = step + as_dtype(self.stages - 1, self.dtype)
        inside = [wait_for_copies(self.stages - 2), *self.shown, barrier()]
        inside += [*self._guarded(later), commit_copies(), *self._visit(self.work, step)]
        main = loop_over(step, self.trips, tirx.SeqStmt(inside))
        return tirx.SeqStmt([tirx.Bind(self.trips, extent), *first, main, barrier()])

    def _guarded(self, step: Any) -> list[Any]:
        """The copies of a visit, if that visit exists."""
        return [tirx.IfThenElse(step < self.trips, as_one(self._visit(self.ahead, step)), None)]

    def _visit(self, parts: list[Any], step: Any) -> list[Any]:
        """Statements of one visit, with its stage of the shared arrays."""
        places = places_of(step, self.loops, [x.extent for x in self.loops])
        stage = as_dtype(tirx.floormod(step, as_dtype(self.stages, self.dtype)), "int32")

        def staged(buffer: Any, indices: list[Any]) -> Any:
            new, (first, *rest) = self.buffers.get(buffer), indices
            if new is None:
                return None
            return new, [stage, first, *rest] if rest else [stage * int(buffer.ty.shape[0]) + first]

        return [redirected(with_fresh(p, places), staged) for p in parts]


def _name(stmt: Any) -> str:
    blocks = nodes_of(s_tir.SBlock, stmt)
    return str(blocks[0].name_hint) if blocks else ""


def _shared(stmts: list[Any]) -> list[Any]:
    """The shared arrays that statements use."""
    buffers = [n.source for n in nodes_of(ir.TensorLoad, *stmts)]
    buffers += [n.buffer for n in nodes_of(tirx.BufferStore, *stmts)]
    shared = [b for b in buffers if b.ty.storage_scope.startswith("shared")]
    return list(dict.fromkeys(shared))


def _in_stages(buffers: list[Any], stages: int, room: int) -> dict[Any, Any]:
    """Arrays with an additional dimension of stages; flat ones stay flat."""
    shapes: dict[Any, list[int]] = {}
    for old in buffers:
        shape = [int(n) for n in old.ty.shape]
        shapes[old] = [stages, *shape] if len(shape) > 1 else [stages * shape[0]]
    size = sum(math.prod(shape) * element_bytes(old) for old, shape in shapes.items())
    if size > room:
        raise ScheduleError(
            f"{NAME}: argument 'stages': expected stages of {size // stages} bytes each to fit in "
            f"{room} bytes of shared memory, got {stages}"
        )
    return {
        old: buffer_var(shape, str(old.ty.dtype), old.name, "shared", align=64)
        for old, shape in shapes.items()
    }


def one_shared_array(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-II function with one dynamic array if its shared ones exceed 48 KB.

    A kernel may declare 48 KB; more must be one dynamic array. Before, and after::

        A_ws: 8 x 64 x 72 float16 in "shared"        shared_tiles: flat float16 in "shared.dyn"
        B_ws: 8 x 32 x 72 float16 in "shared"
        ... A_ws[s, i, j] ... B_ws[s, i, j]          ... shared_tiles[s * 4608 + i * 72 + j] ...

    Raises ScheduleError for arrays of several types.
    """
    arrays = [
        s.buffer
        for s in nodes_of(tirx.AllocBuffer, func.body)
        if s.buffer.ty.storage_scope == "shared"
    ]
    shapes = [[int(n) for n in b.ty.shape] for b in arrays]
    sizes = [-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes]
    if sum(n * element_bytes(b) for n, b in zip(sizes, arrays, strict=True)) <= MAX_SHARED:
        return func
    dtypes = {str(b.ty.dtype) for b in arrays}
    if len(dtypes) != 1:
        raise ScheduleError(
            f"one_shared_array: expected shared arrays of one type, got {sorted(dtypes)}"
        )
    begins = {b: (sum(sizes[:n]), shapes[n]) for n, b in enumerate(arrays)}
    whole = buffer_var([sum(sizes)], dtypes.pop(), "shared_tiles", "shared.dyn", align=ALIGNED)

    def at(buffer: Any, indices: list[Any]) -> Any:
        if buffer not in begins:
            return None
        (begin, shape), place = begins[buffer], as_dtype(0, "int32")
        for index, length in zip(indices, shape, strict=True):
            place = place * length + as_dtype(index, "int32")
        return whole, [place + as_dtype(begin, "int32")]

    def allocation(node: Any) -> Any:
        if node.buffer not in begins:
            return node
        return tirx.AllocBuffer(whole) if node.buffer.same_as(arrays[0]) else tirx.Evaluate(0)

    declared = (s_tir.SBlock, lambda node: without_buffers(node, begins))
    rules = [(tirx.AllocBuffer, allocation), declared]
    body = map_expr(redirected(func.body, at), rules)
    return func.with_body(substitute(body, dict.fromkeys(arrays, whole)))
