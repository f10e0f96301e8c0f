"""Stage-I schedules: transformations of sparse iterations in coordinate space.

(SparseTIR, section 3.2.2.) Stage II is scheduled with TVM's own `tvm.s_tir.Schedule`; what has to
happen before positions exist happens here, in the same manner: a schedule holds a function, hands
out handles, applies each primitive at once, and keeps a trace that prints as Python and replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm

from sparsetir.sparse_ir.errors import IllFormedError, ScheduleError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    FusedAxis,
    SparseFunc,
    SparseIteration,
    flat_axes,
    map_expr,
    sparse_iterations,
)
from sparsetir.sparse_ir.verify import verify

__all__ = ["Schedule", "SpIter", "SparseIterationRef", "Trace"]


@dataclass(frozen=True)
class SparseIterationRef:
    """A handle of a sparse iteration; `name` is the iteration's."""

    name: str


@dataclass(frozen=True)
class SpIter:
    """A handle of one entry in an iteration's list of axes: an axis, a fused or attached one."""

    iteration: str
    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The axis's name; of a fused axis the names joined by `_`."""
        return "_".join(self.axes)


@dataclass
class Instruction:
    """One applied primitive: what it was called with and the handles it gave."""

    primitive: str
    inputs: list[Any]
    outputs: list[Any]


@dataclass
class Trace:
    """The primitives applied to a schedule, in order."""

    instructions: list[Instruction] = field(default_factory=list)

    def as_python(self) -> str:
        """The trace as a Python function `apply(sch)`."""
        names: dict[int, str] = {}

        def text(value: Any) -> str:
            if id(value) in names:
                return names[id(value)]
            if isinstance(value, list):
                return f"[{', '.join(text(v) for v in value)}]"
            return repr(value)

        lines = ["def apply(sch):"]
        for step in self.instructions:
            arguments = ", ".join(text(v) for v in step.inputs)
            call = f"sch.{step.primitive}({arguments})"
            for out in step.outputs:
                names[id(out)] = f"v{len(names)}"
            left = ", ".join(names[id(o)] for o in step.outputs)
            lines.append(f"    {left} = {call}" if left else f"    {call}")
        return "\n".join(lines if len(lines) > 1 else [*lines, "    pass"]) + "\n"

    def apply(self, func: SparseFunc) -> Schedule:
        """Replay on a function; returns the new schedule. Raises ScheduleError where it fails."""
        sch = Schedule(func)
        renamed: dict[int, Any] = {}

        def now(value: Any) -> Any:
            if isinstance(value, list):
                return [now(v) for v in value]
            return renamed.get(id(value), value)

        for step in self.instructions:
            result = getattr(sch, step.primitive)(*(now(v) for v in step.inputs))
            results = result if isinstance(result, list) else [result]
            if len(step.outputs) not in (0, len(results)):
                raise ScheduleError(
                    f"{step.primitive}: the trace expects {len(step.outputs)} handles, this "
                    f"function gives {len(results)}"
                )
            for old, new in zip(step.outputs, results, strict=False):
                renamed[id(old)] = new
        return sch

    def __str__(self) -> str:
        return self.as_python()


class Schedule:
    """Transform the sparse iterations of a stage-I function; the function given is not changed.

    func : SparseFunc, or an IRModule that holds just one
    """

    def __init__(self, func: SparseFunc | tvm.IRModule) -> None:
        if isinstance(func, tvm.IRModule):
            found = [f for f in func.functions.values() if isinstance(f, SparseFunc)]
            if len(found) != 1:
                raise TypeError(
                    "Schedule: argument 'func': expected a module of one stage-I function, got "
                    f"{len(found)}"
                )
            func = found[0]
        if not isinstance(func, SparseFunc):
            raise TypeError(
                "Schedule: argument 'func': expected a stage-I function, got "
                f"{type(func).__name__} (stage II is scheduled with tvm.s_tir.Schedule)"
            )
        self._func = func
        self.trace = Trace()

    @property
    def func(self) -> SparseFunc:
        """The function as it is now."""
        return self._func

    def get_sparse_iteration(self, name: str) -> SparseIterationRef:
        """The iteration of that name, nested ones included."""
        self._iteration(name)
        return self._done("get_sparse_iteration", [name], SparseIterationRef(name))

    def get_sp_iters(self, iteration: SparseIterationRef) -> list[SpIter]:
        """Handles of the iteration's axes, in their order."""
        it = self._iteration(self._name("get_sp_iters", iteration))
        handles = [SpIter(it.name, _names(a)) for a in it.axes]
        self.trace.instructions.append(Instruction("get_sp_iters", [iteration], list(handles)))
        return handles

    def sparse_reorder(self, iteration: SparseIterationRef, order: Sequence[SpIter]) -> None:
        """Visit the iteration's axes in another order.

        Before `T.sp_iter([I, J, K], "SRS", ...)`, with order [K, I, J] after
        `T.sp_iter([K, I, J], "SSR", ...)`. An axis stays behind its parent.
        """
        who = "sparse_reorder"
        it = self._iteration(self._name(who, iteration))
        places = [self._place(who, it, handle) for handle in order]
        if sorted(places) != list(range(len(it.axes))):
            have = [_label(a) for a in it.axes]
            got = [getattr(h, "name", h) for h in order]
            raise ScheduleError(f"{who}: expected each of {have} once, got {got}\n{_show(it)}")
        parts = _parts(it)
        self._replace(who, it, [parts[p] for p in places])
        self._done(who, [iteration, list(order)])

    def sparse_fuse(self, iteration: SparseIterationRef, axes: Sequence[SpIter]) -> SpIter:
        """Iterate neighbouring axes as one loop over their joint positions.

        Before `T.sp_iter([I, J, K], "SSR", ...)`, fusing I and J gives
        `T.sp_iter([T.fuse(I, J), K], "SSR", ...)`: one loop over the non-zeros. Each axis must
        follow its parent or be a dense_fixed axis.
        """
        who = "sparse_fuse"
        it = self._iteration(self._name(who, iteration))
        places = [self._place(who, it, handle) for handle in axes]
        if len(places) < 2:
            raise ScheduleError(
                f"{who}: expected at least two axes, got {len(places)}\n{_show(it)}"
            )
        if places != list(range(places[0], places[0] + len(places))):
            got = [h.name for h in axes]
            raise ScheduleError(
                f"{who}: expected neighbours in the order of the iteration, got {got}; "
                f"sparse_reorder can bring them together\n{_show(it)}"
            )
        parts = _parts(it)
        chosen = [parts[p] for p in places]
        for node, _, _ in chosen:
            if isinstance(node, AttachedAxis):
                raise ScheduleError(
                    f"{who}: axis '{node.name}' is attached and cannot be fused\n{_show(it)}"
                )
        node = FusedAxis(axes=[a for n, _, _ in chosen for a in flat_axes([n])])
        fused = (node, [v for _, vs, _ in chosen for v in vs], "".join(k for _, _, k in chosen))
        self._replace(who, it, [*parts[: places[0]], fused, *parts[places[-1] + 1 :]])
        return self._done(who, [iteration, list(axes)], SpIter(it.name, _names(node)))

    def annotate(self, iteration: SparseIterationRef, key: str, value: Any) -> None:
        """Set an annotation of the iteration; it rides on the blocks of stage II."""
        it = self._iteration(self._name("annotate", iteration))
        self._set(it, annotations={**dict(it.annotations.items()), key: value})
        self._done("annotate", [iteration, key, value])

    # -- internals ----------------------------------------------------------------------------

    def _iteration(self, name: str) -> SparseIteration:
        found = {it.name: it for it in sparse_iterations(self._func)}
        if name not in found:
            raise ScheduleError(
                f"{self._func.name}: no sparse iteration '{name}'; there are {list(found)}"
            )
        return found[name]

    def _name(self, who: str, handle: Any) -> str:
        if not isinstance(handle, SparseIterationRef):
            raise ScheduleError(
                f"{who}: argument 'iteration': expected a handle of get_sparse_iteration, "
                f"got {handle!r}"
            )
        return handle.name

    @staticmethod
    def _place(who: str, it: SparseIteration, handle: Any) -> int:
        have = [_names(a) for a in it.axes]
        if not isinstance(handle, SpIter) or handle.axes not in have:
            name = getattr(handle, "name", handle)
            raise ScheduleError(f"{who}: '{name}' is not an axis of this iteration\n{_show(it)}")
        return have.index(handle.axes)

    def _replace(
        self, who: str, it: SparseIteration, parts: list[tuple[Any, list[Any], str]]
    ) -> None:
        before = self._func
        self._set(
            it,
            axes=[n for n, _, _ in parts],
            vars=[v for _, vs, _ in parts for v in vs],
            kinds="".join(k for _, _, k in parts),
        )
        try:
            verify(self._func)
        except IllFormedError as err:
            self._func = before
            reason = str(err).split(f"sp_iter '{it.name}': ", 1)[-1]
            raise ScheduleError(f"{who}: {reason}\n{_show(it)}") from None

    def _set(self, it: SparseIteration, **changes: Any) -> None:
        def swap(node: Any) -> Any:
            if node.name != it.name:
                return node
            names = ("span", "axes", "kinds", "name", "vars", "init", "body", "annotations")
            return SparseIteration(**{n: changes.get(n, getattr(node, n)) for n in names})

        self._func = self._func.replace(body=map_expr(self._func.body, [(SparseIteration, swap)]))

    def _done(self, primitive: str, inputs: list[Any], output: Any = None) -> Any:
        outputs = [] if output is None else [output]
        self.trace.instructions.append(Instruction(primitive, inputs, outputs))
        return output


def _names(node: Any) -> tuple[str, ...]:
    return tuple(a.name for a in flat_axes([node]))


def _label(node: Any) -> str:
    return "_".join(_names(node))


def _parts(it: SparseIteration) -> list[tuple[Any, list[Any], str]]:
    """(entry, its coordinate variables, their kinds) for each entry in the list of axes."""
    out: list[tuple[Any, list[Any], str]] = []
    at = 0
    for node in it.axes:
        count = len(flat_axes([node]))
        out.append((node, list(it.vars[at : at + count]), it.kinds[at : at + count]))
        at += count
    return out


def _show(it: SparseIteration) -> str:
    entries = [
        f"T.fuse({', '.join(_names(n))})"
        if isinstance(n, FusedAxis)
        else f"T.attach({n.name}, {n.to.name})"
        if isinstance(n, AttachedAxis)
        else n.name
        for n in it.axes
    ]
    return f'  in T.sp_iter([{", ".join(entries)}], "{it.kinds}", "{it.name}")'
