"""Annotations that only primitives may write; a user's program cannot have them.

Lowering relies on them: annotations of an iteration that say how its loops are divided and how
visits synchronise, and the marks of tiles (:mod:`sparsetir.sparse_ir.tile_marks`). Decorated
functions and `annotate` may not set them. The text of a scheduled function contains them and parses
back; the verifier checks their form, and lowering proves again what can be proven.
"""

from __future__ import annotations

from typing import Any

from tvm import ir

from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, flat_axes, nodes_of, sparse_iterations
from sparsetir.sparse_ir.recipes.ranges import range_tile_ptr, range_tile_starts
from sparsetir.sparse_ir.tile_marks import is_bound, is_tail
from sparsetir.sparse_ir.verify_sites import Broken, Found, Site, Texts

# [{"loops": [names], "unit": "cpu", "race": ...}, ...], and "per_block", the number of visits that
# a thread block makes of a loop over blocks and threads
WORKERS = "parallel"
# {loop: the loop that a later cut of it divides}
CUT = "cut"
# 1 where the iteration's additions are atomic
ATOMIC = "atomic"
# {"lanes": name of a loop, "size": lanes per group, "runs": 0 or 1}
GROUP = "group"
# The axes whose loops are over ranges of an axis's coordinates that are equal for all its parents.
RANGES = "ranges"
# {name of an intersection: the ratio of lengths from which an axis gallops}
GALLOP = "gallop"
# Units of :data:`WORKERS`, besides "cpu" and "vector".
THREAD_UNITS = ("warp", "thread")
GPU_UNITS = ("block", *THREAD_UNITS)
# 1 for an iteration that copies a format's values back, each to its own element
RESTORE = "sparsetir.restore"
# 1 where visits run in the order of storage and later ones depend on earlier ones. A program may
# set it on its own iterations, since it only forbids.
ORDERED = "ordered"
# 1 where a single CPU thread does everything: waking others takes as long as the iteration.
THREADS = "threads"
# "ignore" on a loop in a body, T.parallel or T.vectorized: the author asserts that no visits race
RACE = "race"
# The primitive that sets each.
SET_BY = {
    WORKERS: "parallelize",
    CUT: "pos or coord",
    ATOMIC: 'race="atomics" of parallelize or combine_row_pieces',
    GROUP: 'race="group(r)" of parallelize',
    RANGES: "ranges",
    GALLOP: "gallop",
}
OURS = "sparsetir."


def reserved_problem(key: str) -> str:
    """Why a user's annotation may not have this key; "" if it may."""
    if key in SET_BY:
        return f"expected a key of your own, got {key!r}, which {SET_BY[key]} sets"
    if key.startswith(OURS):
        return f"expected a key of your own, got {key!r}; those that begin with {OURS!r} are not"
    return ""


def range_problems(site: Site) -> Texts:
    """The verifier's rule: ranges come from recipes whose result is equal for all parents.

    Where tiles of rows begin within a parent's ranges, both are made from the same cut.
    """
    func, it = site.func, site.stmt
    for name in map(str, it.annotations.get(RANGES, [])):
        tiles = _made(func, name, range_tile_ptr)
        parts = [p for axis, how in tiles for p, of in _made(func, axis, range_tile_starts)
                 if of == how]  # fmt: skip
        if not parts:
            yield (
                f"annotation '{RANGES}': expected an axis whose tiles recipes range_tile_ptr and "
                f"range_tile_starts make, got '{name}'"
            )


def intersected(it: Any) -> dict[str, list[str]]:
    """The intersections that an iteration visits, with those of their axes that have padding."""
    loops = {a.name: flat_axes(a.of) for a in it.axes
             if isinstance(a, Axis) and a.kind == "intersect"}  # fmt: skip
    plain = {n: of for n, of in loops.items() if not any(x.is_merged for x in of)}
    return {n: [x.name for x in of if x.kind == "sparse_fixed"] for n, of in plain.items()}


def gallop_problems(site: Site) -> Texts:
    """The verifier's rule: only intersections of axes without padding gallop."""
    it = site.stmt
    loops = intersected(it)
    for name, ratio in it.annotations.get(GALLOP, {}).items():
        if name not in loops or loops[name] or int(ratio) < 0:
            yield (
                f"annotation '{GALLOP}': expected an intersection whose list of axes with padding "
                f"is empty in {loops}, and a ratio of 0 or more, got '{name}' and {ratio}"
            )


def _made(func: SparseFunc, parent: str, recipe: Any) -> list[tuple[str, dict[str, Any]]]:
    """The axes below `parent` whose offsets a recipe computes, with the recipe's keywords."""
    computed = computed_parameters(func)
    under = [a for a in func.axes if a.parent is not None and a.parent.name == parent]
    of_axes = [(a.name, dict(computed.get(str(getattr(a.indptr, "name", "")), {}))) for a in under]
    return [(name, how) for name, how in of_axes if how.pop("recipe", None) == recipe.__name__]


def is_scheduled(func: SparseFunc) -> bool:
    """Whether primitives have changed a function, as far as its annotations show."""
    return bool(computed_parameters(func)) or any(True for _ in written_by_hand_problems(func))


def written_by_hand_problems(func: SparseFunc) -> Found:
    """The function's annotations that a user's program cannot have."""
    for it in sparse_iterations(func):
        for key in it.annotations:
            problem = reserved_problem(str(key))
            if problem:
                yield Broken(it.span, f"annotation: {problem}", it.name)
    for call in nodes_of(ir.Call, func.body):
        if is_tail(call) or is_bound(call):
            name, instead = ("tail", "likely(p)") if is_tail(call) else ("at_most", "min(a, b)")
            yield Broken(
                call.span, f"T.{name} marks what split made; expected T.{instead} in a program"
            )
