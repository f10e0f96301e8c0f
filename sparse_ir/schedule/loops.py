"""The loops of a sparse iteration, their handles, and how primitives look up and replace them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tvm import tirx

from sparsetir.sparse_ir.annotations import WORKERS
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import block_name, fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    declare_more,
    entry_text,
    flat_axes,
    iteration_with,
    names_inside,
    nodes_of,
    sparse_iterations,
)
from sparsetir.sparse_ir.reduction import Reduction, reduction_of
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.verify import find_problem
from sparsetir.sparse_ir.workers import divided

# Bound of the number of parts (more would need gigabytes of offsets), and of visits per tile.
MOST = 2**24


@dataclass(frozen=True)
class SparseIterationRef:
    """A handle of a sparse iteration, with the iteration's name."""

    name: str

    @property
    def block(self) -> str:
        """The name of its outermost block in stage II."""
        return block_name(self.name)


@dataclass(frozen=True)
class SpIter:
    """A handle of one loop of an iteration: an axis, or a fused, attached or part axis."""

    iteration: str
    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The axis's name; for a fused axis its names joined by `_`."""
        return "_".join(self.axes)


@dataclass(frozen=True)
class Loop:
    """One entry in an iteration's list of axes.

    node : Axis, FusedAxis, AttachedAxis or PartAxis
    vars : its coordinate variables, one per axis
    kinds : "S" or "R" for each
    """

    node: Any
    vars: list[Any]
    kinds: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of its axes."""
        return tuple(a.name for a in flat_axes([self.node]))

    @property
    def name(self) -> str:
        """The names of its axes, joined."""
        return "_".join(self.axes)

    @property
    def var(self) -> Any:
        """The coordinate of a loop over one axis."""
        return self.vars[0]

    def of_kind(self, kind: str) -> Loop:
        """The loop as one over axes of a kind."""
        return Loop(self.node, self.vars, kind * len(self.kinds))

    @property
    def is_dense(self) -> bool:
        """Whether it is over one dense_fixed axis."""
        return isinstance(self.node, Axis) and self.node.kind == "dense_fixed"

    @property
    def is_constant(self) -> bool:
        """Whether it is over one dense_fixed axis of constant length."""
        return self.is_dense and isinstance(self.node.length, tirx.IntImm)


def loops_of(it: SparseIteration) -> list[Loop]:
    """The loops of an iteration, in their order."""
    return [Loop(node, list(it.vars[at:end]), it.kinds[at:end]) for node, at, end in it.entries()]


def changed(it: SparseIteration, loops: Sequence[Loop] | None = None, **fields: Any) -> Any:
    """An iteration with other loops, or other fields.

    Annotations about the division among workers are kept for loops that are unchanged.
    """
    if loops is not None:
        names = [loop.name for loop in loops]
        entries = it.annotations.get(WORKERS, [])
        kept = [e for e, of in zip(entries, divided(it), strict=True) if _run_of(of, names)]
        annotations = fields.get("annotations", it.annotations)
        notes = {k: v for k, v in annotations.items() if k != WORKERS}
        fields |= {
            "annotations": {**notes, **({WORKERS: kept} if kept else {})},
            "axes": [loop.node for loop in loops],
            "vars": [v for loop in loops for v in loop.vars],
            "kinds": "".join(loop.kinds for loop in loops),
        }
    return iteration_with(it, **fields)


def find_iteration(func: SparseFunc, name: str, caller: str = "") -> SparseIteration:
    """The iteration of this name. Raises ScheduleError, with the names there are, if none has it.

    caller : the caller, for the message; the function by default
    """
    iterations = {it.name: it for it in sparse_iterations(func)}
    if name not in iterations:
        there = f"no sparse iteration '{name}'; there are {list(iterations)}"
        raise ScheduleError(f"{caller or func.name}: {there}")
    return iterations[name]


def inside(it: SparseIteration) -> list[SparseIteration]:
    """The iterations nested in an iteration."""
    return nodes_of(SparseIteration, it.body)


def name_of(caller: str, handle: Any) -> str:
    """The name behind a handle of an iteration."""
    if not isinstance(handle, SparseIterationRef):
        raise ScheduleError(
            f"{caller}: argument 'iteration': expected a handle of get_sparse_iteration, "
            f"got {handle!r}"
        )
    return handle.name


def iteration_of(caller: str, func: SparseFunc, handle: Any) -> SparseIteration:
    """The iteration that a handle of a loop belongs to."""
    if not isinstance(handle, SpIter):
        raise ScheduleError(
            f"{caller}: argument 'loop': expected a handle of get_sp_iters, got {handle!r}"
        )
    return find_iteration(func, handle.iteration, caller)


def place_of(caller: str, func: SparseFunc, it: SparseIteration, handle: Any) -> int:
    """The index of a handle's loop in its iteration.

    Raises ScheduleError if the iteration has no such loop, with the iterations that do, since
    primitives move loops from one to another.
    """
    have = _axes_of(it)
    if not isinstance(handle, SpIter) or handle.axes not in have:
        name, now = getattr(handle, "name", handle), ""
        if isinstance(handle, SpIter):
            others = [o.name for o in sparse_iterations(func) if handle.axes in _axes_of(o)]
            now = f", but of {others}, whose get_sp_iters gives its handle"
            if not others:
                names = [loop.name for loop in loops_of(it)]
                now = f", but {names} are: what cuts or fuses loops returns handles of new ones"
        raise ScheduleError(f"{caller}: '{name}' is not an axis of this iteration{now}\n{show(it)}")
    return have.index(handle.axes)


def _axes_of(it: SparseIteration) -> list[tuple[str, ...]]:
    return [loop.axes for loop in loops_of(it)]


def handle_of(it: SparseIteration, loop: Loop) -> SpIter:
    """The handle of a loop."""
    return SpIter(it.name, loop.axes)


class Change:
    """A primitive's change of one iteration.

    caller : the primitive, which refusals name
    loops : all loops of the iteration
    chosen, places : those that the primitive was given, and their indices
    """

    def __init__(
        self, caller: str, func: SparseFunc, it: SparseIteration, chosen: Sequence[Loop] = ()
    ) -> None:
        self.caller, self.func, self.it, self.loops = caller, func, it, loops_of(it)
        self.chosen = list(chosen)
        places = {loop.axes: n for n, loop in enumerate(self.loops)} if chosen else {}
        self.places = [places[loop.axes] for loop in chosen]

    def refuse(self, message: str) -> NoReturn:
        """Raise ScheduleError with the iteration."""
        raise ScheduleError(f"{self.caller}: {message}\n{show(self.it)}")

    def check_word(self, argument: str, value: Any, words: Collection[str]) -> None:
        """Refuse an argument that is none of some words."""
        if value not in words:
            self.refuse(f"argument '{argument}': expected one of {', '.join(words)}, got {value!r}")

    def check_neighbours(self, argument: str = "") -> None:
        """Refuse chosen loops that do not follow each other."""
        if self.places != list(range(self.places[0], self.places[0] + len(self.places))):
            self.refuse(
                f"{argument}expected neighbours in the order of the iteration, got "
                f"{[x.name for x in self.chosen]}; sparse_reorder can bring them together"
            )

    def loop_of(self, handle: Any) -> Loop:
        """The loop of the iteration that a handle means."""
        return self.loops[place_of(self.caller, self.func, self.it, handle)]

    def check_inside(self, loops: Sequence[Loop], inner: Sequence[Loop], what: str) -> None:
        """Refuse loops that are none of those inside of the place of something."""
        for loop in loops:
            if loop.axes not in [other.axes for other in inner]:
                self.refuse(
                    f"expected loops inside of the place of the {what}, {[x.name for x in inner]}, "
                    f"got '{loop.name}'; sparse_reorder can bring it there"
                )

    def check_count(
        self, name: str, value: Any, *, least: int = 1, below: int = MOST, or_name: bool = False
    ) -> None:
        """Refuse an argument that is not such an integer, nor, if allowed, a name."""
        if or_name and isinstance(value, str) and value.isidentifier():
            return
        if type(value) is int and least <= value < below:
            return
        expected = "a positive integer" if least else "an integer of 0 or more"
        expected += " or a name" if or_name else ""
        expected += f" below {below}" if type(value) is int and value >= below else ""
        self.refuse(f"argument '{name}': expected {expected}, got {value!r}")

    def check_alone(self) -> None:
        """Refuse an iteration with nested ones, and one with annotations."""
        if nodes_of(SparseIteration, self.it.body) or self.it.annotations:
            self.refuse("expected an iteration without nested ones and annotations")

    def reduced(self, besides: str = "") -> Reduction:
        """The reduction of the body; other bodies are refused.

        besides : text to append to the refusal
        """
        reduction = reduction_of(self.it.body)
        if reduction is None:
            self.refuse(
                f"expected a body of the form X[..] = X[..] + term (or *, max, min){besides}"
            )
        return reduction

    def dense_axis(self, loop: Loop, instead: str = "") -> Axis:
        """The axis of a loop; other loops than over one dense axis are refused."""
        if not loop.is_dense:
            kind = loop.node.kind if isinstance(loop.node, Axis) else type(loop.node).__name__
            self.refuse(
                f"expected a loop over one dense_fixed axis, got '{loop.name}' ({kind}){instead}"
            )
        return loop.node

    def name(self, step: str) -> str:
        """A new name for a step of the iteration."""
        return fresh_name(self.func, f"{self.it.name}_{step}")

    def handles(self, *loops: Loop) -> list[SpIter]:
        """The handles of loops."""
        return [SpIter(self.it.name, loop.axes) for loop in loops]

    def with_loops(self, *new: Loop) -> list[Loop]:
        """The loops of the iteration, with others in place of the chosen neighbours."""
        return [*self.loops[: self.places[0]], *new, *self.loops[self.places[-1] + 1 :]]

    def put(self, stmt: Any, **declarations: Any) -> SparseFunc:
        """The function with a statement in place of the iteration; see :func:`replaced`."""
        return replaced(self.caller, self.func, self.it, stmt, **declarations)


def change_of(caller: str, func: SparseFunc, *handles: SpIter) -> Change:
    """The change of loops of one iteration, given their handles."""
    it = iteration_of(caller, func, handles[0])
    loops = loops_of(it)
    return Change(
        caller, func, it, [loops[place_of(caller, func, it, handle)] for handle in handles]
    )


def change_in(caller: str, func: SparseFunc, handle: SparseIterationRef, *loops: SpIter) -> Change:
    """The change of an iteration, or of loops of it, given its handle."""
    it = find_iteration(func, name_of(caller, handle), caller)
    every = loops_of(it)
    return Change(caller, func, it, [every[place_of(caller, func, it, loop)] for loop in loops])


def replaced(
    caller: str,
    func: SparseFunc,
    it: SparseIteration,
    stmt: Any,
    *,
    axes: Sequence[Axis] = (),
    buffers: Sequence[Any] = (),
    params: Sequence[Any] = (),
    trusted: bool = True,
) -> SparseFunc:
    """The function with one iteration replaced by a statement, and added declarations; verified.

    trusted : whether `func` is already verified; False if its other iterations, or buffers that
        these may use, have changed since, so that they are verified too

    Raises ScheduleError if the result breaks a rule of the language, and if loops that are divided
    among workers no longer exist.
    """
    kept = [names for n in nodes_of(SparseIteration, stmt) for names in divided(n)]
    for names in divided(it):
        if names not in kept:
            raise ScheduleError(
                f"{caller}: {names} is divided among workers and has to stay as it is; expected "
                f"{caller} before parallelize\n{show(it)}"
            )
    beside: list[SparseIteration] = []
    body = _put(func.body, str(it.name), stmt, beside)
    more = {"params": params, "axes": axes, "buffers": buffers}
    grown = {name: [*getattr(func, name), *new] for name, new in more.items() if new}
    out = func.replace(**grown, body=body)
    declare_more(out, func, **more)
    problem = find_problem(out, known=beside, before=func) if trusted else find_problem(out)
    if problem is not None:
        reason = problem.message if problem.of == it.name else problem
        raise ScheduleError(f"{caller}: {reason}\n{show(it)}")
    return out


def _put(tree: Any, name: str, stmt: Any, beside: list[SparseIteration]) -> Any:
    """The tree with the named iteration replaced by a statement.

    beside : collects the outermost iterations that neither contain it nor are nested in it
    """
    if isinstance(tree, tirx.SeqStmt):
        parts = [*tree.seq]
        put = [_put(part, name, stmt, beside) for part in parts]
        return tree if put == parts else tirx.SeqStmt(put)
    if not isinstance(tree, SparseIteration):
        there = nodes_of(SparseIteration, tree, nested=False)
        beside += [x for x in there if x.name != name and name not in names_inside(x)]
        return map_expr(tree, [(SparseIteration, lambda x: stmt if x.name == name else x)])
    if tree.name == name:
        return stmt
    if name not in names_inside(tree):
        beside.append(tree)
        return tree
    init = None if tree.init is None else _put(tree.init, name, stmt, beside)
    return iteration_with(tree, init=init, body=_put(tree.body, name, stmt, beside))


def _run_of(names: list[str], all_names: list[str]) -> bool:
    """Whether names are neighbours in a list."""
    starts = range(len(all_names) - len(names) + 1)
    return any(all_names[at : at + len(names)] == names for at in starts)


def show(it: SparseIteration) -> str:
    """The head of an iteration, for messages."""
    entries = map(entry_text, it.axes)
    return f'  in T.sp_iter([{", ".join(entries)}], "{it.kinds}", "{it.name}")'
