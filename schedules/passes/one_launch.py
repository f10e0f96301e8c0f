"""Fuse consecutive parallel loops into one, so that threads are woken once (CPU).

Waking threads, and waiting for them, takes as long as a small product. Before::

    for b in T.parallel(blocks): ...              # spmv, rows side by side
    for b in T.parallel(long_blocks): ...         # spmv_long, long rows

After `one_launch(func, ["spmv", "spmv_long"], race="ignore")`::

    for b in T.parallel(T.max(blocks, long_blocks)):
        if b < blocks: ...
        if b < long_blocks: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir, tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import iteration_of
from sparsetir.sparse_ir.nodes import nodes_of, substitute
from sparsetir.sparse_ir.tir import as_dtype, as_one, block_with, loop_with

NAME = "one_launch"


def one_launch(func: tirx.PrimFunc, iterations: Sequence[Any], race: str = "none") -> tirx.PrimFunc:
    """The function with the parallel loops of consecutive iterations fused.

    func : a stage-II function; one of the last steps
    iterations : two or more, in order, by reference or name, with `parallelize(.., "cpu")`
    race : "none" requires that none of them accesses what another one writes; "ignore": the caller
        guarantees that they write disjoint elements

    Raises ScheduleError for other iterations, and for those that may race.
    """
    if race not in ("none", "ignore"):
        raise ValueError(f"{NAME}: argument 'race': expected 'none' or 'ignore', got {race!r}")
    names = [str(getattr(it, "name", it)) for it in iterations]
    root = func.body.block
    steps = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    loops = {_name(step): n for n, step in enumerate(steps) if _name(step)}
    places = [loops.get(name, -1) for name in names]
    first = places[0] if places else -1
    if len(names) < 2 or first < 0 or places != list(range(first, first + len(names))):
        raise ScheduleError(
            f"{NAME}: argument 'iterations': expected some that follow each other, outermost and "
            f"parallel, of {[*loops]}, got {names}"
        )
    chosen = [steps[place] for place in places]
    if race == "none":
        _refuse_dependences(names, chosen)
    dtype = str(chosen[0].loop_var.ty.dtype)
    extents = [as_dtype(loop.extent, dtype) for loop in chosen]
    most = extents[0]
    for extent in extents[1:]:
        most = most if extent.same_as(most) else tirx.max(most, extent)
    index, parts = chosen[0].loop_var, []
    for loop, extent in zip(chosen, extents, strict=True):
        body = substitute(loop.body, {loop.loop_var: as_dtype(index, str(loop.loop_var.ty.dtype))})
        parts.append(body if extent.same_as(most) else tirx.IfThenElse(index < extent, body, None))
    whole = loop_with(chosen[0], extent=most, body=as_one(parts))
    body = as_one([*steps[:first], whole, *steps[first + len(names) :]])
    return func.with_body(s_tir.SBlockRealize([], True, block_with(root, body=body)))


def _name(step: Any) -> str:
    """The iteration of an outermost parallel loop."""
    if not isinstance(step, tirx.For) or step.kind != tirx.ForKind.PARALLEL:
        return ""
    return iteration_of(str(nodes_of(s_tir.SBlock, step, nested=False)[0].name_hint))


def _refuse_dependences(names: Sequence[str], loops: Sequence[Any]) -> None:
    """Refuse loops if one accesses what another one writes."""
    read: dict[str, str] = {}
    written: dict[str, str] = {}
    for name, loop in zip(names, loops, strict=True):
        (block,) = nodes_of(s_tir.SBlock, loop, nested=False)
        reads, writes = ({str(r.source.name) for r in part} for part in (block.reads, block.writes))
        for does, touched, other, did in (
            ("reads or writes", reads | writes, written, "writes"),
            ("writes", writes, read, "reads"),
        ):
            meet = sorted(touched & other.keys())
            if meet:
                raise ScheduleError(
                    f"{NAME}: '{name}' {does} '{meet[0]}', which '{other[meet[0]]}' {did}; pass "
                    'race="ignore" where they do so at elements of their own'
                )
        read |= dict.fromkeys(reads, name)
        written |= dict.fromkeys(writes, name)
