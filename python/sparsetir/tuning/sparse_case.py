"""Products and sums of sparse matrices, whose result is sparse, as what is tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of, requested
from sparsetir.planning.request import Request
from sparsetir.records.task import Config, of_threads, statistics
from sparsetir.schedules.operators.operands import TOLERANCES
from sparsetir.schedules.operators.sparse_results import SEMIRINGS
from sparsetir.tuning.case import first_wrong
from sparsetir.tuning.operator_case import SEED, Prepared, costs
from sparsetir.tuning.sparse_reference import exact_result

ARRAYS = "matrices.npz"


@dataclass(frozen=True, eq=False)
class SparseTask:
    """An operator of sparse matrices; one of :class:`sparsetir.records.task.Tunable`.

    request : what a plan is asked for
    target : as of :class:`sparsetir.records.task.Task`
    """

    request: Request
    target: str | Mapping[str, Any] = "llvm"

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

    def saved(self, folder: Path) -> dict[str, Any]:
        asked, arrays = self.request, {}
        masks = [] if asked.matrices.mask is None else [asked.matrices.mask]
        for n, x in enumerate([*asked.matrices.each, *masks]):
            arrays |= {f"indptr{n}": x.pattern.indptr, f"indices{n}": x.pattern.columns}
        np.savez(folder / ARRAYS, **arrays)
        target = self.target if isinstance(self.target, str) else dict(self.target)
        return {
            "kind": "sparse result", "op": asked.name,
            "shapes": [x.shape for x in (*asked.matrices.each, *masks)],
            "masked": bool(masks), "target": target, "threads": self.threads,
            "how": asked.problem.how, "dtype": asked.problem.result,
        }  # fmt: skip

    @staticmethod
    def loaded(data: Mapping[str, Any], folder: Path) -> SparseTask:
        """Load what :meth:`saved` wrote, with random values."""
        rng, found = np.random.default_rng(SEED), []
        with np.load(folder / ARRAYS) as arrays:
            for n, shape in enumerate(data["shapes"]):
                indptr, indices = arrays[f"indptr{n}"], arrays[f"indices{n}"]
                values = rng.random(len(indices)) * 2 - 1
                csr = sp.csr_array((values, indices, indptr), shape=tuple(shape))
                found.append(SparseMatrix(csr).astype(data["dtype"]))
        mask = found.pop() if data["masked"] else None
        options = {n: data[n] for n in ("dtype", "target", "threads")} | {"mask": mask}
        if data["how"] in SEMIRINGS:
            options["semiring"] = data["how"]
        return SparseTask(requested(data["op"], *found, **options), data["target"])


class SparseCase:
    """A task, and what its result must be: in float64, by scipy."""

    def __init__(self, task: SparseTask) -> None:
        self.task = task
        self.expected, self.scale = exact_result(task.request)

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
