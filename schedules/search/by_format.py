"""The config of a problem whose matrix is stored in a format that the user names."""

from __future__ import annotations

from typing import Any

from sparsetir.formats import BSR, DBSR, Format, Pattern
from sparsetir.schedules.gpu.spmm_tensor_cores import for_format
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.search.choose import Statistics, block_rows
from sparsetir.schedules.targets import is_gpu
from sparsetir.schedules.templates import decomposed
from sparsetir.schedules.templates.decomposed import Decomposed, is_full
from sparsetir.sparse_ir.errors import ScheduleError


def by_format(fmt: Format, problem: Spmm, pattern: Pattern, stats: Statistics, target: Any) -> Any:
    """A config for a problem that stores the matrix in a format, without masks where it can.

    On a GPU, tensor cores multiply blocks of 16-bit types whole: who names such a format takes
    padding for zero times finite (see :mod:`sparsetir.schedules.gpu.spmm_tensor_cores`).
    Raises ScheduleError for problems that are not served by formats.
    """
    missing = decomposed.serves(problem)
    if missing is not None:
        raise ScheduleError(
            f"plan: argument 'format': formats are for sums of one matrix, got {missing}"
        )
    full = is_full(fmt, pattern)
    if is_gpu(target):
        return for_format(fmt, problem, stats.feat, target) or Decomposed(fmt, full)
    if isinstance(fmt, BSR | DBSR):
        return block_rows(problem, stats, fmt, full, target)
    return Decomposed(fmt, full)
