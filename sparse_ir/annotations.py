"""Annotations that primitives alone write into a function: a user's program has none of them.

Lowering takes these for facts: the annotations of an iteration that say how its loops are divided
and how visits meet, and the marks of tiles (:mod:`sparsetir.sparse_ir.tile_marks`). A decorated
function and `annotate` are refused them. The text of a scheduled function has them, and is read
back; the verifier looks at what they say, and lowering proves again what can be proven.
"""

from __future__ import annotations

from typing import Any

from tvm import ir

from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, flat_axes, nodes_of, sparse_iterations
from sparsetir.sparse_ir.recipes.ranges import range_tile_ptr, range_tile_starts
from sparsetir.sparse_ir.tile_marks import is_bound, is_tail
from sparsetir.sparse_ir.verify_sites import Broken, Found, Site

# [{"loops": [names], "unit": "cpu", "race": ...}, ...], and "per_block", the visits that a block of
# threads has of a loop over blocks and threads
WORKERS = "parallel"
# {loop: what a later cut of it cuts}
CUT = "cut"
# 1 where what the iteration adds is added atomically
ATOMIC = "atomic"
# {"lanes": name of a loop, "size": lanes of a group, "runs": 0 or 1}
GROUP = "group"
# The axes whose loops are over ranges of coordinates of an axis, which are the same for all of its
# parents.
RANGES = "ranges"
# {name of an intersection: how many times the elements of another axis one has that gallops}
GALLOP = "gallop"
# Units of :data:`WORKERS`, beside "cpu" and "vector".
THREAD_UNITS = ("warp", "thread")
GPU_UNITS = ("block", *THREAD_UNITS)
# 1 of an iteration that copies the values of a format back, each to an element of its own
RESTORE = "sparsetir.restore"
# 1 where visits follow each other, in the order of storage: what one leaves, the next one takes up.
# A program may say so of its own iterations, as it only forbids.
ORDERED = "ordered"
# 1 where one thread of a CPU does all: to wake others takes as long as the iteration.
THREADS = "threads"
# "ignore" of a loop in a body, T.parallel or T.vectorized: the author knows that no visits meet
RACE = "race"
# The primitive that sets each.
SET_BY = {
    WORKERS: "parallelize",
    CUT: "pos or coord",
    ATOMIC: 'race="atomics" of parallelize or meet',
    GROUP: 'race="group(r)" of parallelize',
    RANGES: "ranges",
    GALLOP: "gallop",
}
OURS = "sparsetir."


def reserved_problem(key: str) -> str:
    """Why a key cannot be that of an annotation of one's own; "" if it can."""
    if key in SET_BY:
        return f"expected a key of your own, got {key!r}, which {SET_BY[key]} sets"
    if key.startswith(OURS):
        return f"expected a key of your own, got {key!r}; those that begin with {OURS!r} are not"
    return ""


def range_problems(site: Site) -> Found:
    """The verifier's rule: ranges are those of the recipes that make them the same for all parents.

    Where tiles of rows begin within a parent's ranges, and the rows of each, are made of one and
    the same cut.
    """
    func, it = site.func, site.stmt
    for name in map(str, it.annotations.get(RANGES, [])):
        tiles = _made(func, name, range_tile_ptr)
        parts = [p for axis, how in tiles for p, of in _made(func, axis, range_tile_starts)
                 if of == how]  # fmt: skip
        if not parts:
            yield Broken(
                it.span,
                f"sp_iter '{it.name}': annotation '{RANGES}': expected an axis whose tiles "
                f"recipes range_tile_ptr and range_tile_starts make, got '{name}'",
            )


def intersected(it: Any) -> dict[str, list[str]]:
    """The intersections that an iteration goes through, and those of their axes with padding."""
    loops = {a.name: flat_axes(a.of) for a in it.axes
             if isinstance(a, Axis) and a.kind == "intersect"}  # fmt: skip
    plain = {n: of for n, of in loops.items() if not any(x.is_merged for x in of)}
    return {n: [x.name for x in of if x.kind == "sparse_fixed"] for n, of in plain.items()}


def gallop_problems(site: Site) -> Found:
    """The verifier's rule: what gallops are intersections of axes without padding."""
    it = site.stmt
    loops = intersected(it)
    for name, ratio in it.annotations.get(GALLOP, {}).items():
        if name not in loops or loops[name] or int(ratio) < 0:
            yield Broken(
                it.span,
                f"sp_iter '{it.name}': annotation '{GALLOP}': expected one of the intersections "
                f"and its axes with padding, of which there are to be none, {loops}, and a ratio "
                f"of 0 or more, got '{name}' and {ratio}",
            )


def _made(func: SparseFunc, parent: str, recipe: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names of the axes under one whose offsets a recipe makes, and of what."""
    computed = computed_parameters(func)
    under = [a for a in func.axes if a.parent is not None and a.parent.name == parent]
    of_axes = [(a.name, dict(computed.get(str(getattr(a.indptr, "name", "")), {}))) for a in under]
    return [(name, how) for name, how in of_axes if how.pop("recipe", None) == recipe.__name__]


def is_scheduled(func: SparseFunc) -> bool:
    """Whether primitives have changed a function, as far as it shows."""
    return bool(computed_parameters(func)) or any(True for _ in written_by_hand_problems(func))


def written_by_hand_problems(func: SparseFunc) -> Found:
    """Annotations of a function that a user's program cannot have."""
    for it in sparse_iterations(func):
        for key in it.annotations:
            problem = reserved_problem(str(key))
            if problem:
                yield Broken(it.span, f"sp_iter '{it.name}': annotation: {problem}")
    for call in nodes_of(ir.Call, func.body):
        if is_tail(call) or is_bound(call):
            name, instead = ("tail", "likely(p)") if is_tail(call) else ("at_most", "min(a, b)")
            yield Broken(
                call.span, f"T.{name} marks what split made; expected T.{instead} in a program"
            )
