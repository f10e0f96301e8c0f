"""What was done to a function: prints as Python, and can be applied to other functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparsetir.sparse_ir.errors import ScheduleError

__all__ = ["Instruction", "Trace"]


@dataclass
class Instruction:
    """One applied primitive: what it was called with and the handles it gave."""

    primitive: str
    inputs: list[Any]
    outputs: list[Any]
    options: dict[str, Any] = field(default_factory=dict)


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
            arguments = [text(v) for v in step.inputs]
            arguments += [f"{key}={text(v)}" for key, v in step.options.items()]
            call = f"sch.{step.primitive}({', '.join(arguments)})"
            for out in step.outputs:
                names[id(out)] = f"v{len(names)}"
            left = ", ".join(names[id(o)] for o in step.outputs)
            lines.append(f"    {left} = {call}" if left else f"    {call}")
        return "\n".join(lines if len(lines) > 1 else [*lines, "    pass"]) + "\n"

    def apply(self, func: Any) -> Any:
        """Replay on a function; returns the new schedule. Raises ScheduleError where it fails."""
        from sparsetir.sparse_ir.schedule.schedule import Schedule

        sch = Schedule(func)
        renamed: dict[int, Any] = {}

        def now(value: Any) -> Any:
            if isinstance(value, list):
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
        return sch

    def __str__(self) -> str:
        return self.as_python()
