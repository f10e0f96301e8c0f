"""The config of a problem whose matrix is stored in a format that the caller names."""

from __future__ import annotations

from typing import Any

from sparsetir.formats import BSR, DBSR, Format, Pattern
from sparsetir.schedules.operators.problems import CsrPattern, Product, unsupported
from sparsetir.schedules.search.choose import Statistics, block_rows
from sparsetir.schedules.targets import is_gpu
from sparsetir.schedules.templates.decomposed import Decomposed, is_full
from sparsetir.schedules.templates.registry import templates_for
from sparsetir.sparse_ir.errors import ScheduleError


def by_format(
    fmt: Format, problem: Product, pattern: Pattern, stats: Statistics, target: Any
) -> Any:
    """A config for a problem that stores the matrix in a format, without masks if possible.

    On a GPU, tensor cores multiply blocks of 16-bit types whole: a caller who names such a format
    accepts that padding is multiplied as zero times finite.
    Raises ScheduleError for problems that formats do not support.
    """
    missing = unsupported(problem)
    if missing is not None:
        raise ScheduleError(
            f"plan: argument 'format': formats are for sums of one matrix, got {missing}"
        )
    full = is_full(fmt, pattern)
    if is_gpu(target):
        return next(iter(on_engine(problem, None, stats, target, fmt)), Decomposed(fmt, full))
    if isinstance(fmt, BSR | DBSR):
        return block_rows(problem, stats, fmt, full, target)
    return Decomposed(fmt, full)


def on_engine(
    problem: Any, matrix: CsrPattern | None, stats: Statistics, target: Any, fmt: Format | None
) -> list[Any]:
    """Configs for the matrix engine of a target; see `Template.engine`."""
    engines = (template.engine for template in templates_for(problem, is_gpu(target)))
    each = (engine(problem, matrix, stats, target, fmt) for engine in engines if engine is not None)
    return [config for configs in each for config in configs]
