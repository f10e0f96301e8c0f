"""Products and sums of sparse matrices, whose result is sparse, as what is tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of
from sparsetir.planning.request import Request
from sparsetir.records.task import Config, Matrices, of_threads, statistics
from sparsetir.schedules.operators.operands import TOLERANCES
from sparsetir.tuning.case import first_wrong
from sparsetir.tuning.operator_case import SEED, Prepared, costs
from sparsetir.tuning.sparse_reference import exact_result


@dataclass(frozen=True, eq=False)
class SparseTask:
    """An operator of sparse matrices; one of :class:`sparsetir.records.task.Tunable`.

    request : what a plan is asked for
    target : as of :class:`sparsetir.records.task.Task`
    """

    request: Request
    target: str | Mapping[str, object] = "llvm"

    @property
    def threads(self) -> int:
        return self.request.threads

    def identity(self) -> dict[str, Any]:
        return self.request.task().identity()

    def statistics(self) -> dict[str, float]:
        return statistics(self.request.matrices.each[0])

    def title(self, name: str = "") -> str:
        asked, on = self.request, f" on {name}" if name else ""
        sizes = [
            f"{x.shape[0]:,} x {x.shape[1]:,}, {x.nnz:,} elements" for x in asked.matrices.each
        ]
        words = [asked.problem.how, *["masked"] * (asked.matrices.mask is not None)]
        words += [asked.problem.result, *of_threads(self)]
        return f"{asked.name}{on} ({'; '.join(sizes)}), {', '.join(words)}"


class SparseCase:
    """A task with random values, and what its result must be: in float64, by scipy."""

    def __init__(self, task: SparseTask) -> None:
        asked, rng = task.request, np.random.default_rng(SEED)
        each = [
            x.with_values((rng.random(x.nnz) * 2 - 1).astype(asked.problem.result))
            for x in asked.matrices.each
        ]
        given = Matrices(tuple(each), asked.matrices.mask)
        self.task = SparseTask(replace(asked, matrix=given), task.target)
        self.expected, self.scale = exact_result(self.task.request)

    def prepared(self, config: Config, device: object = None) -> Prepared:
        """A config as a plan, whose first call was made."""
        del device
        made = plan_of(self.task.request, config)
        found = [made()]

        def call() -> None:
            found[0] = made()

        size = sum(x.nnz * (x.values.itemsize + 4) for x in self.task.request.matrices.each)
        about = {**costs(made), "bytes": size}
        return Prepared(call, lambda: self.error(found[0]), made.kernel, about)

    def error(self, found: SparseMatrix) -> str | None:
        """The first fault of a result, or None."""
        expected = self.expected
        for name in ("indptr", "columns"):
            if not np.array_equal(getattr(found.pattern, name), getattr(expected.pattern, name)):
                return f"other elements are stored: {found.nnz}, not {expected.nnz}"
        got, want = (np.asarray(x.values, "float64") for x in (found, expected))
        tolerance = TOLERANCES.get(str(found.dtype), 0.0) * self.scale
        return first_wrong(np.isclose(got, want, 0, tolerance, equal_nan=True), got, want)

    def release(self) -> None:
        """Nothing is kept for a candidate alone."""
