"""Schedules of the test programs, to take apart."""

from __future__ import annotations

from typing import Any

import sparsetir
from programs import PROGRAMS

__all__ = ["opened", "program"]


def program(name: str = "spmm", dtype: str = "float32") -> Any:
    """A test program over 32-bit indices."""
    return PROGRAMS[name].make(dtype, "int32")


def opened(func: Any = None, name: str = "spmm") -> tuple[Any, Any, list[Any]]:
    """A schedule, a handle of one of its iterations, and those of that one's loops."""
    sch = sparsetir.Schedule(program() if func is None else func)
    it = sch.get_sparse_iteration(name)
    return sch, it, sch.get_sp_iters(it)
