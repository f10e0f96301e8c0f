"""The trace of a schedule: prints as Python, and can be applied to other functions.

One trace covers both stages. `lower`, and each `rewrite`, is followed by the instructions of TVM's
own trace of the resulting schedule::

    def apply(sch):
        v0 = sch.get_sparse_iteration('spmm')
        v1, v2, v3 = sch.get_sp_iters(v0)
        v4, v5 = sch.split(v3, [None, 16], tail='exact')
        sch2 = sch.lower()
        b0 = sch2.get_sblock(name="spmm1", func_name="main")
        l1, l2, l3 = sch2.get_loops(block=b0)
        sch2.unroll(loop=l2)
        from sparsetir.schedules.passes.prefetch import prefetch
        sch2 = sch.rewrite(prefetch)
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any

from sparsetir.sparse_ir.errors import ScheduleError

STAGE_TWO = "sch2"


@dataclass
class Instruction:
    """One applied primitive: its arguments and the handles it returned.

    several : whether it returns a list of handles, possibly of one
    stage_two : TVM's own trace of the `tvm.s_tir.Schedule` that it continued with, which follows
    """

    primitive: str
    inputs: list[Any]
    outputs: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    several: bool = False
    stage_two: Any = None


@dataclass
class Trace:
    """The primitives applied to a schedule, in order."""

    instructions: list[Instruction] = field(default_factory=list)

    def as_python(self) -> str:
        """The trace as a Python function `apply(sch)`."""
        names: dict[int, str] = {}
        lines: list[str] = []

        def text(value: Any) -> str:
            if id(value) in names:
                return names[id(value)]
            if isinstance(value, list | tuple):
                return f"[{', '.join(text(v) for v in value)}]"
            return value.__name__ if callable(value) else repr(value)

        for step in self.instructions:
            given = [*step.inputs, *step.options.values()]
            lines += [_import_of(v) for v in given if callable(v)]
            arguments = [text(v) for v in step.inputs]
            arguments += [f"{k}={text(v)}" for k, v in step.options.items() if v is not None]
            call = f"sch.{step.primitive}({', '.join(arguments)})"
            for out in step.outputs:
                names[id(out)] = f"v{len(names)}"
            left = ", ".join(names[id(o)] for o in step.outputs)
            if step.several and len(step.outputs) == 1:
                left = f"({left},)"
            if step.stage_two is not None:
                left = STAGE_TWO
            lines.append(f"{left} = {call}" if left else call)
            lines += _lines_of(step.stage_two)
        return "\n".join(["def apply(sch):", *(f"    {x}" for x in lines or ["pass"])]) + "\n"

    def apply(self, func: Any) -> Any:
        """Replay on a function; returns the new schedule. Raises ScheduleError if a step fails."""
        from sparsetir.sparse_ir.schedule.schedule import Schedule

        sch = Schedule(func)
        renamed: dict[int, Any] = {}

        def now(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [now(v) for v in value]
            return renamed.get(id(value), value)

        for step in self.instructions:
            options = {key: now(v) for key, v in step.options.items()}
            result = getattr(sch, step.primitive)(*(now(v) for v in step.inputs), **options)
            results = list(result) if isinstance(result, list | tuple) else [result]
            if len(step.outputs) not in (0, len(results)):
                raise ScheduleError(
                    f"{step.primitive}: the trace expects {len(step.outputs)} handles, this "
                    f"function gives {len(results)}"
                )
            for old, new in zip(step.outputs, results, strict=False):
                renamed[id(old)] = new
            if step.stage_two is not None:
                step.stage_two.apply_to_schedule(result, remove_postproc=False)
        return sch

    def __str__(self) -> str:
        return self.as_python()


def _lines_of(stage_two: Any) -> list[str]:
    """The instructions of TVM's trace."""
    if stage_two is None:
        return []
    lines = [str(line) for line in stage_two.as_python()]
    return [re.sub(r"^((?:[\w, ]+ = )?)sch\.", rf"\1{STAGE_TWO}.", line) for line in lines]


def _import_of(function: Any) -> str:
    """The line that imports a pass by its public name."""
    module, name = str(function.__module__), str(function.__qualname__)
    if getattr(sys.modules.get(module), name, None) is not function:
        return f"# {name} of {module} has no name to import it by"
    return f"from {module} import {name}"
