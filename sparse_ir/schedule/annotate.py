"""Set an annotation of an iteration; it rides on the blocks of stage II."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsetir.sparse_ir.annotations import reserved_problem
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.handles import SparseIterationRef
from sparsetir.sparse_ir.schedule.loops import changed, find_iteration, name_of, replaced, show
from sparsetir.sparse_ir.schedule.primitives import primitive

__all__ = ["annotate"]


@primitive
def annotate(
    func: SparseFunc, iteration: SparseIterationRef, key: str, value: Any
) -> tuple[SparseFunc, None]:
    """Set an annotation of the iteration; it rides on the blocks of stage II.

    Parameters
    ----------
    iteration : SparseIterationRef
        The iteration.
    key : str
        Of the annotation.
    value : Any
        None, a string, a number, or lists and dicts of these with strings as keys.
    """
    it = find_iteration(func, name_of("annotate", iteration), "annotate")
    if not isinstance(key, str) or not key:
        raise ScheduleError(f"annotate: argument 'key': expected a name, got {key!r}\n{show(it)}")
    problem = reserved_problem(key)
    if problem:
        raise ScheduleError(f"annotate: argument 'key': {problem}\n{show(it)}")
    if not _prints(value):
        raise ScheduleError(
            "annotate: argument 'value': expected None, a string, a number of 64 bits, or lists "
            f"and dicts of these, got {value!r}\n{show(it)}"
        )
    new = changed(it, annotations={**dict(it.annotations.items()), key: value})
    return replaced("annotate", func, it, new), None


def _prints(value: Any) -> bool:
    """Whether it can be written as text that is read back."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _prints(v) for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(_prints(v) for v in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, str | float)
