"""Visit rows once where a program takes steps over them one after the other (CPU, stage I).

Decides where :mod:`~sparsetir.sparse_ir.schedule.fuse_steps` pays. Steps that are already nested in
rows, but with features inside, are rewritten in the same way. Steps are fused where that leaves a
number per visit of what was an array. Steps that gather rows with many features are not: a row of
them is read in one go. If their number is a parameter, a version of the kernel has them fused.
(Zen 5, one thread, 3 to 30 elements a row: 0.35 to 0.9 of the time up to 32 features, 1.1 with 64,
1.0 to 1.65 with 128.)
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm import ir

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    declared,
    flat_axes,
    nodes_of,
    stores_of,
    variables_of,
)
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.schedule.fuse_steps import fuse_steps
from sparsetir.sparse_ir.schedule.loops import Loop, SparseIterationRef, SpIter, inside, loops_of
from sparsetir.sparse_ir.sequences import without_nest
from sparsetir.sparse_ir.tir import statements_of

FEW = 32  # features of gathered rows up to which one visit per feature is as fast


def fused_rows(func: SparseFunc, few: bool = False) -> SparseFunc:
    """Visit rows once where a program takes steps over them one after the other.

    few : whether there are at most :data:`FEW` features where their number is a parameter
    """
    at = 0
    while at < len(steps := statements_of(func.body)):
        apart, first = func, steps[at]
        if nested := isinstance(first, SparseIteration) and bool(inside(first)):
            apart = without_nest(func, first)
        more = len(statements_of(apart.body)) - len(steps)
        last = at + more + 1 if more else len(steps)
        ends = range(last, max(at + more, at + 1), -1)
        fused = (_fused(apart, at, end, few) for end in ends)
        done = next((x for x in fused if x is not None), func)
        if not nested or _axes(done, at) != _axes(func, at):
            func = done
        at += 1
    return func


def _axes(func: SparseFunc, at: int) -> list[str]:
    """The names of the axes of a program's iteration."""
    return [axis.name for axis in flat_axes(statements_of(func.body)[at].axes)]


def _fused(func: SparseFunc, at: int, end: int, few: bool) -> SparseFunc | None:
    """The program with its iterations from `at` to `end` fused; None if they cannot be, or if that
    gains nothing."""
    every = statements_of(func.body)
    steps = every[at:end]
    if any(not isinstance(s, SparseIteration) or inside(s) or s.annotations for s in steps):
        return None
    each = [{loop.name: loop for loop in loops_of(step)} for step in steps]
    common = [
        [loops[name] for loops in each]
        for name, first in each[0].items()
        if first.is_dense and all(name in x and x[name].kinds == "S" for x in each)
    ]
    names = {same[0].name for same in common}
    rest = [[loop for loop in loops_of(step) if loop.name not in names] for step in steps]
    nodes = [loop.node for loops in rest for loop in loops]
    if not all(isinstance(x, Axis) and x.kind != "dense_fixed" for x in nodes):
        return None  # products with features have schedules of their own
    rows = {x.parent.name for x in nodes if x.parent is not None} & names
    if not rows:
        return None
    common.sort(key=lambda same: same[0].name not in rows)
    features = [same for same in common if same[0].name not in rows]
    if features and len(steps) < len(every):
        # Only programs of one nest are vectorised over features. With all of them (Zen 3, scores,
        # softmax and product of 8 heads, one thread) steps within take 1.0 to 1.05 times as long.
        return None
    counts = [constant_length(same[0].node) for same in features]
    many = prod(n or 1 for n in counts) > FEW or (None in counts and not few)
    for n, (step, loops) in enumerate(zip(steps, rest, strict=True)):
        if many and _gathers(func, step, loops, [same[n].var for same in features]):
            return None  # a row with many features is gathered in one go
    results = [store.buffer.name for step in steps for store in stores_of(step.init)]
    if len({*results}) < len(results):
        return None  # TVM (0.27) separates no init of a buffer that two reductions write
    handles = [SpIter(steps[0].name, (same[0].name,)) for same in common]
    try:
        fused, _ = fuse_steps(func, [SparseIterationRef(step.name) for step in steps], handles)
    except ScheduleError:
        return None
    return fused if _values(fused) < _values(func) else None


def _values(func: SparseFunc) -> int:
    """The number of axes of a program's arrays."""
    return sum(len(buffer.axes or ()) for buffer in func.buffers)


def _gathers(
    func: SparseFunc, step: SparseIteration, loops: list[Loop], features: list[Any]
) -> bool:
    """Whether a step reads features of rows that columns of its loops name."""
    for load in nodes_of(ir.TensorLoad, step.init, step.body):
        buffer, used = declared(func).buffer_of(load.source), variables_of(*load.indices)
        over = {axis.name for axis in (buffer and buffer.axes) or ()}
        columns = [x.var for x in loops if x.name not in over]
        if any(v in used for v in columns) and any(v in used for v in features):
            return True
    return False
