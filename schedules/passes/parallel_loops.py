"""Parallel and thread loops, by proof that their visits do not race.

TVM's `parallel` and `bind` require more than the absence of races, for example that each block is
the only writer of its output, which inits are not. Here a loop becomes parallel by the facts on its
blocks (:mod:`sparsetir.sparse_ir.races`), which survive TVM's split, fuse and reorder.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.affine import affine, expr_of, is_injective
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import block_name, iteration_of
from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.races import FREE, RACES, Fact, facts_of
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.tir import constant, free_vars, is_one, loop_with
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.workers import KIND

LOOPS = {"parallel": tirx.ForKind.PARALLEL, "vectorized": tirx.ForKind.VECTORIZED}
LEGAL = 'pass race="ignore" if visits only conflict through atomics, or not at all'


def run_in_parallel(sch: Any, loop: Any, kind: str, race: str = "none") -> None:
    """Run a loop of stage II in parallel; :func:`materialize_loop_kinds` does it at the end.

    sch : tvm.s_tir.Schedule of a stage-II function, or a sparsetir.Schedule lowered to it
    loop : one of its loops
    kind : "parallel", "vectorized", or a thread dimension such as "threadIdx.x"
    race : "none" requires the proof; "ignore": the caller guarantees that visits only conflict
        through atomics, or not at all for reasons that the lowering cannot know

    Before::

        for o, i in T.grid(8, 16):                 # from one loop, over vi: "free"

    After `run_in_parallel(sch, o, "parallel")`::

        for o in T.parallel(8):
            for i in range(16):

    A loop over a reduction may be bound to threadIdx if its block has an init: the threads reduce
    together. Raises ScheduleError, which names the loop, if there is no proof, ValueError for
    another `race`.
    """
    if race not in ("none", "ignore"):
        raise ValueError(
            f"run_in_parallel: argument 'race': expected 'none' or 'ignore', got {race!r}"
        )
    sch = stage_two_of("run_in_parallel", sch)
    if race == "none":
        _refuse_race("run_in_parallel", sch, loop, kind)
    sch.annotate(loop, KIND, kind)


def in_vectors(sch: Any, block: Any, loops: int = 2) -> None:
    """Vectorise straight-line code: a block's innermost loop in lanes, those around it unrolled.

    sch : see :func:`run_in_parallel`
    block : a stage-II block, or a sparse iteration, by reference or name: its innermost block
    loops : the number of the block's loops, counted from the innermost; of constant extents

    An init inside the block gets vectorised loops of its own before. The last loop only has to be
    free of races, which is less than TVM's `vectorize` requires. Raises ScheduleError if that is
    not proven, and if there are no such loops.
    """
    caller = "in_vectors"
    sch = stage_two_of(caller, sch)
    if not isinstance(block, s_tir.schedule.SBlockRV):
        block = innermost_block(sch, block, caller)
    name = sch.get(block).name_hint
    chosen = sch.get_loops(block)[-loops:]
    if not chosen:
        raise ScheduleError(
            f"{caller}: argument 'block': block '{name}' is in no loop of its own, so that it has "
            "no lanes; leave it out"
        )
    for loop in map(sch.get, chosen):
        if not isinstance(loop.extent, tirx.IntImm):
            raise ScheduleError(
                f"{caller}: argument 'loops': expected constant extents of the innermost {loops} "
                f"of block '{name}', got {loop.extent} of '{loop.loop_var.name}'; split its axis, "
                "or bound it, in stage I, or take fewer loops"
            )
    *straight, lanes = chosen
    _refuse_race(caller, sch, lanes, "vectorized")
    if sch.get(block).init is not None:
        try:
            init = sch.decompose_reduction(block, sch.get_loops(block)[0])
        except s_tir.ScheduleError:
            raise ScheduleError(
                f"{caller}: argument 'block': the result of reduction '{name}' is written by other "
                "blocks, too; give each a buffer of its own"
            ) from None
        in_vectors(sch, init, loops)
    for loop in straight:
        sch.unroll(loop)
    sch.annotate(lanes, KIND, "vectorized")


def stage_two_of(caller: str, sch: Any) -> Any:
    """The stage-II schedule behind a schedule that was lowered to it."""
    if not isinstance(sch, Schedule):
        return sch
    if sch.stage_two is None:
        raise ScheduleError(
            f"{caller}: argument 'sch': expected a schedule of stage II; call its lower() before"
        )
    return sch.stage_two


def innermost_block(sch: Any, iteration: Any, caller: str = "innermost_block") -> Any:
    """The innermost block of a sparse iteration, which has one per level of ragged loops.

    sch : tvm.s_tir.Schedule
    iteration : its reference or name
    caller : the caller, for the message of the ScheduleError if there is no such iteration
    """
    name = iteration if isinstance(iteration, str) else iteration.name
    have = _iterations(sch.mod)
    if name not in have:
        raise ScheduleError(f"{caller}: expected a sparse iteration among {have}, got '{name}'")
    level, block = 0, sch.get_sblock(block_name(name))
    while (inner := block_name(name, level + 1)) in {
        str(sch.get(b).name_hint) for b in sch.get_child_blocks(block)
    }:
        level, block = level + 1, sch.get_sblock(inner)
    return block


def _iterations(mod: Any) -> list[str]:
    """The names of the iterations of a module's functions."""
    blocks = nodes_of(s_tir.SBlock, *(func.body for func in mod.functions.values()))
    return [name for block in blocks if (name := iteration_of(str(block.name_hint)))]


def _refuse_race(caller: str, sch: Any, loop: Any, kind: str) -> None:
    problem = _race(sch, loop, kind)
    if problem:
        node = sch.get(loop)
        raise ScheduleError(
            f"{caller}: loop '{node.loop_var.name}' as {kind}: {problem}\n"
            f"  in for {node.loop_var.name} in range({node.extent})"
        )


def is_free(sch: Any, loop: Any, threads: bool = False) -> bool:
    """Whether a loop is proven free of races, so that threads may run it, if requested.

    Threads do not wait for each other between visits of loops around theirs.
    """
    return not _race(sch, loop, "parallel") and not (threads and _remapped_variable(sch, loop))


def materialize_loop_kinds(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the loops of :func:`run_in_parallel` parallel or bind them to threads."""

    def visit(loop: Any) -> Any:
        kind = loop.annotations.get(KIND)
        if kind is None:
            return loop
        rest = {k: v for k, v in loop.annotations.items() if k != KIND}
        shared = _shared_by_lanes(loop) if kind == "vectorized" else ""
        if shared:
            raise ScheduleError(f"loop '{loop.loop_var.name}' as vectorized: {shared}")
        if kind in LOOPS:
            return loop_with(loop, kind=LOOPS[kind], annotations=rest)
        axis = thread_axis(str(kind))
        how = tirx.ForKind.THREAD_BINDING
        return loop_with(loop, kind=how, thread_binding=axis, annotations=rest)

    marked = any(KIND in loop.annotations for loop in nodes_of(tirx.For, func.body))
    return func.with_body(map_expr(func.body, [(tirx.For, visit)])) if marked else func


def thread_axis(tag: str) -> Any:
    """The iteration variable of a thread dimension."""
    return tirx.IterVar(None, tirx.Var(tag, "int32"), tirx.IterVar.ThreadIndex, tag)


def _race(sch: Any, loop: Any, kind: str) -> str:
    """Why visits of a loop may race, and what would be legal; "" if they do not."""
    node, extents = sch.get(loop), _extents_around(sch, loop)
    around = _remapped_variable(sch, loop) if "Idx" in kind else ""
    if around:
        return (
            f"the coordinates of its positions differ between visits of {around}, which may race, "
            "as threads do not wait between them; choose a loop over coordinates"
        )
    if kind == "vectorized" and _shared_by_lanes(node):
        return _shared_by_lanes(node)
    for realize in nodes_of(s_tir.SBlockRealize, node.body, nested=False):
        problem = _race_in(realize, node, kind, extents)
        if problem:
            return f"block '{realize.block.name_hint}': {problem}"
    return ""


def _shared_by_lanes(loop: Any) -> str:
    """Why lanes cannot be visits with local buffers, since vectors share one buffer."""
    for block in nodes_of(s_tir.SBlock, loop.body):
        for buffer in block.alloc_buffers:
            return (
                f"block '{block.name_hint}' has '{buffer.name}' for each visit, which lanes would "
                "share; choose a loop inside or outside of it, or give it an axis of the lanes"
            )
    return ""


def _remapped_variable(sch: Any, loop: Any) -> str:
    """A variable around a racy loop in whose visits a position is another coordinate each time.

    For example `j` of `C[i] += A[j, i]` with i stored under j, where threads over the positions of
    i would update elements that others update for another j.
    """
    facts: dict[Any, Fact] = {}
    ref = sch.get_sref(loop)
    while ref is not None:
        block = ref.stmt
        if isinstance(block, s_tir.SBlock) and RACES in block.annotations:
            facts |= facts_of(block)
        ref = ref.parent
    node = sch.get(loop)
    for realize in nodes_of(s_tir.SBlockRealize, node.body, nested=False):
        for v, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            if node.loop_var in free_vars(value):
                for around in free_vars(v.dom.extent) & set(facts):
                    if facts[around] != FREE:
                        return f"'{around.name}' ({facts[around]})"
    return ""


def _race_in(realize: Any, loop: Any, kind: str, extents: dict[Any, Any]) -> str:
    block = realize.block
    facts = facts_of(block)
    moved = [
        (iter_var, value)
        for iter_var, value in zip(block.iter_vars, realize.iter_values, strict=True)
        if loop.loop_var in free_vars(value)
    ]
    if not moved:
        outside = [w.source.name for w in block.writes if kind == "parallel" or not _is_local(w)]
        if outside and not is_one(loop.extent):
            return f"each visit writes the same elements of '{outside[0]}'; {LEGAL}"
        return ""
    whole = _is_fused_whole([value for _, value in moved], loop.loop_var)
    for iter_var, value in moved:
        name, fact = str(iter_var.var.name), facts[iter_var.var]
        if fact == FREE and whole and _is_injective(value, extents):
            continue
        summed = iter_var.iter_type == tirx.IterVar.CommReduce and block.init is not None
        if summed and kind.startswith("threadIdx"):
            continue
        if fact == FREE:
            return f"visits may share '{name}' = {value}; {LEGAL}"
        of = f" of '{', '.join(fact.buffers)}'" if fact.buffers else ""
        summed = fact.kind == "reduction"
        how = "add to" if summed else "may write"
        choose = "choose a loop over spatial axes" if summed else LEGAL
        return (
            f"'{name}' is no free variable ({fact.kind}): visits {how} the same elements{of}; "
            f"{choose}"
        )
    return ""


def _is_injective(value: Any, extents: dict[Any, Any]) -> bool:
    """Whether a sum is injective, as the sums that splits create are.

    extents : of the enclosing loops, by variable

    A term is a loop's variable, or a quotient or remainder of a fused one.
    """
    terms = affine(value).terms
    atoms = {t: expr_of(*t) for t in terms if len(t) == 1}
    kinds = (ir.Var, tirx.FloorDiv, tirx.FloorMod)
    if not all(t == () or isinstance(atoms.get(t), kinds) for t in terms):
        return False
    sized = [(t, terms[t], _extent(atom, extents)) for t, atom in atoms.items()]
    return is_injective([term for term in sized if term[2] != 1])


def _extent(atom: Any, extents: dict[Any, Any]) -> int | None:
    """The number of values that a term takes, if it is constant."""
    return constant(atom.b if isinstance(atom, tirx.FloorMod) else extents.get(atom))


def _is_fused_whole(values: list[Any], loop_var: Any) -> bool:
    """Whether the parts of a fused loop determine it: each quotient comes with its remainder."""
    divisions = [*nodes_of(tirx.FloorDiv, *values), *nodes_of(tirx.FloorMod, *values)]
    return len({type(d) for d in divisions if loop_var in free_vars(d.a)}) != 1


def _extents_around(sch: Any, loop: Any) -> dict[Any, Any]:
    """The extents of the loops around, up to the next block, and inside, by variable."""
    out = {inner.loop_var: inner.extent for inner in nodes_of(tirx.For, sch.get(loop))}
    ref = sch.get_sref(loop)
    while ref is not None and isinstance(ref.stmt, tirx.For):
        out[ref.stmt.loop_var] = ref.stmt.extent
        ref = ref.parent
    return out


def _is_local(region: Any) -> bool:
    return region.source.ty.storage_scope == "local"
