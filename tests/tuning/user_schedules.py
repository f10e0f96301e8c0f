"""Schedules as a user writes them, for the tuner's workers to import."""

from __future__ import annotations

from typing import Any

from sparsetir.sparse_ir.errors import ScheduleError

SPACE = {"how": ["tiled", "fast"]}


def apply(sch: Any, config: Any) -> None:
    """Tiles of the columns, or what each name says."""
    iteration = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(iteration)
    if config["how"] == "refused":
        sch.parallelize(j)
    if config["how"] == "broken":
        raise ScheduleError(f"made of {config}")
    if config["how"] == "tiled":
        outer, inner = sch.split(k, [None, 4])
        sch.sparse_reorder(iteration, [i, outer, j, inner])


class Holder:
    """A module that workers do not search."""

    @staticmethod
    def apply(sch: Any, config: Any) -> None:
        """A duplicate of the one above."""
