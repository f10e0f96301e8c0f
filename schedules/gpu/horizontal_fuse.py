"""Horizontal fusion of a schedule's nests: the parts of a decomposed program in one launch.

(SparseTIR, section 3.4.2.) Before, in stage I, a kernel launch for each iteration::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]: ...
    with T.sp_iter([IO0, IB0, JB0, K], "SSRS", "spmm_b0") as [io, ib, jb, k]: ...
    with T.sp_iter([IO1, IB1, JB1, K], "SSRS", "spmm_b1") as [io, ib, jb, k]: ...

After `horizontal_fuse(sch)`, in stage II, `spmm_b0` and `spmm_b1` share a grid, as shown in
:mod:`sparsetir.schedules.gpu.passes.horizontal_fuse`. Both update C, and now do so atomically.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from sparsetir.formats.preprocess import statements
from sparsetir.schedules.default import bind_to_threads, on_one_thread
from sparsetir.schedules.gpu.passes import horizontal_fuse as stage_two
from sparsetir.sparse_ir.annotations import ATOMIC
from sparsetir.sparse_ir.atomics import atomic_reduction
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import block_name
from sparsetir.sparse_ir.nodes import SparseIteration, nodes_of
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef


def horizontal_fuse(
    sch: Schedule,
    parts: Sequence[SparseIterationRef | str] | None = None,
    *,
    independent: Sequence[str] = (),
    max_threads: int = stage_two.MAX_THREADS,
) -> Any:
    """Fuse iterations that would each be a kernel into one GPU launch.

    It can serve as a schedule, `sparsetir.build(func, "cuda", schedule=sparsetir.horizontal_fuse)`,
    or as the last step of one, after primitives of stage I and II; it lowers to stage II.
    Iterations without bound loops get the default schedule. (SparseTIR, section 3.4.2.)

    Parameters
    ----------
    sch : Schedule
        A schedule of a program for a GPU.
    parts : sequence of SparseIterationRef or str, optional
        Iterations to fuse, adjacent or not; refused if they cannot be fused. By default every
        maximal run of adjacent iterations that can be fused, without refusals.
    independent : sequence of str
        Buffers where each part writes disjoint elements, and reads none that another part writes.
    max_threads : int
        The most threads that a block may have.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule of stage II.

    Raises
    ------
    ScheduleError
        If one of `parts` reads what another writes, so that they need an order, if they do not fit
        in a block, or are not iterations; and for an unknown buffer.

    Notes
    -----
    Fused parts run in no particular order. In stage I, parts that all update a buffer by sums (of
    float32, float64 or int32; maxima, minima of float32 or int32) become atomic updates, unless the
    buffer is `independent`; after `sch.lower()` they cannot, and there is a RuntimeWarning. A float
    sum may differ in its last bits from run to run. A preceding `precompute` leaves one such update
    per row and feature. Values that `decompose_format` copies back are known to be disjoint.
    """
    if not isinstance(sch, Schedule):
        raise ScheduleError(
            f"horizontal_fuse: argument 'sch': expected a sparsetir.Schedule, got "
            f"{type(sch).__name__}; build(func, target, schedule=horizontal_fuse) gives it one"
        )
    names: list[Any] | None = None if parts is None else [getattr(p, "name", p) for p in parts]
    top = {it.name: it for it in statements(sch.func) if isinstance(it, SparseIteration)}
    for name in [parts] if isinstance(parts, str) else names or ():
        if isinstance(parts, str) or name not in top:
            raise ScheduleError(
                f"horizontal_fuse: argument 'parts': expected a list of iterations among "
                f"{[*top]}, got {name!r}"
            )
    updates = _updates_of_shared([top[n] for n in names or top], independent)
    if sch.stage_two is None:
        for name in updates:
            sch.atomic(sch.get_sparse_iteration(name))
    elif updates and names is None:  # with names the pass refuses
        warnings.warn(
            f"horizontal_fuse: {', '.join(updates)} remain a launch each, as each updates what "
            "others update, and the schedule has been lowered: call horizontal_fuse before "
            "sch.lower(), or sch.atomic of them, or name the buffer in 'independent' if they "
            "update different elements",
            RuntimeWarning,
            stacklevel=2,
        )
    names = names and [block_name(name) for name in names]
    sch.rewrite(bind_to_threads)
    sch.rewrite(on_one_thread)
    return sch.rewrite(
        stage_two.horizontal_fuse, names, independent=independent, max_threads=max_threads
    )


def _updates_of_shared(parts: list[SparseIteration], independent: Sequence[str]) -> list[str]:
    """The iterations, also nested ones, that update a buffer that another part updates, too."""
    updates: dict[str, list[tuple[int, str]]] = {}
    for n, part in enumerate(parts):
        for it in nodes_of(SparseIteration, part):
            update = None if ATOMIC in it.annotations else atomic_reduction(it)
            if update is not None and update.store.buffer.name not in independent:
                updates.setdefault(update.store.buffer.name, []).append((n, it.name))
    several = [writers for writers in updates.values() if len({n for n, _ in writers}) > 1]
    return [name for writers in several for _, name in writers]
