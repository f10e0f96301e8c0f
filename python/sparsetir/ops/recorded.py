"""Plans for patterns of torch tensors by what tuning has recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of, requested
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import Plan
from sparsetir.records.fingerprint import Sizes
from sparsetir.records.lookup import (
    recorded_config,
    recorded_configs,
    there_are_records,
    warn_of_record,
)
from sparsetir.records.task import Task
from sparsetir.schedules.operators.problems import CsrPattern


class Planned(NamedTuple):
    """A plan, and how it takes values, and gives them.

    columns_in_order : with the columns of each row in order, that of
        :attr:`Structure.with_columns_in_order`. Which is not kept here: what a structure keeps must
        not refer to it, or nothing would be freed when its cache drops it
    in_blocks : block by block, as `Structure.blocks` arranges them
    """

    plan: Plan
    columns_in_order: bool = False
    in_blocks: bool = False


def recorded(
    pattern: CsrPattern,
    in_order: Callable[[], CsrPattern],
    op: str,
    feat: int,
    ones: bool,
    **options: Any,
) -> Planned | None:
    """The plan with the config that is recorded for a pattern; None where none applies.

    pattern : may have the columns of a row in any order, but each once, as what is tuned has
    in_order : gives it with the columns of each row in order, where they are not
    ones : for runs without values: they are arranged as the config wants them once. Values of a
        run would be arranged in each, which takes longer than what most configs save, and was not
        timed when they were tuned: no config that needs it applies
    options : dtype, reduce, heads and target, as :func:`sparsetir.plan` takes them
    """
    if not there_are_records():
        return None
    task = _task(op, pattern.shape, pattern.nnz, feat, **options)
    config = recorded_config(task, lambda: pattern.in_order)
    if config is None:
        return None
    resorted = not pattern.increases
    matrix: Any = in_order() if resorted else pattern
    if ones:
        matrix = SparseMatrix.from_csr(matrix.indptr, matrix.indices, shape=matrix.shape)
    else:
        config = getattr(config, "unpacked", config)
    try:
        found = plan_of(requested(op, matrix, feat, **task.options), config)
    except Exception as error:  # such as of a template that has changed since, as in `plan`
        warn_of_record(config, error)
        return None
    if found.needs_values and found.arranges_values:
        return None
    found.chosen_by = "record"
    return Planned(found, resorted)


def may_be_recorded(op: str, shape: tuple[int, int], nnz: int, feat: int, **options: Any) -> bool:
    """Whether there are records for patterns of about these sizes; options as of `recorded`."""
    return there_are_records() and bool(recorded_configs(_task(op, shape, nnz, feat, **options)))


def _task(op: str, shape: tuple[int, int], nnz: int, feat: int, **options: Any) -> Task:
    return Task(op, cast(Any, Sizes(shape, nnz)), feat, threads=default_threads(), **options)
