"""A task with operands, and what their result must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of, requested
from sparsetir.planning.run_plan import Plan
from sparsetir.records.task import Config, Task
from sparsetir.runtime.arrays import is_array, itemsize, memory
from sparsetir.runtime.kernel import Kernel
from sparsetir.tuning.case import Array, Case, Reference, array, make, numbers

SEED = 0


@dataclass(frozen=True)
class Prepared:
    """A config ready to be measured.

    call : one call of it; wrong : what is wrong with what the first call gave, or None
    kernel : what is called in the end; about : fields of its Outcome
    """

    call: Callable[[], None]
    wrong: Callable[[], str | None]
    kernel: Kernel
    about: dict[str, Any]


def case_of(task: Task) -> Case:
    """A task with random operands and values: ones, as many graphs have, would hide a wrong order
    of them.
    """
    pattern, rng = task.matrix.pattern, np.random.default_rng(SEED)
    kind = "float64" if task.dtype == "float64" else "float32"
    values = rng.random(task.matrix.nnz, kind) * 2 - 1
    matrix = sp.csr_array((values, pattern.columns, pattern.indptr), shape=task.matrix.shape)
    return make(task.op, matrix, task.feat, task.dtype, task.reduce, task.heads)


class OperatorCase:
    """A task as a case, and what is known of the result.

    matrix : the pattern of the task's, with the values of the case
    """

    def __init__(self, task: Task) -> None:
        self.task, self.case = task, case_of(task)
        self._placed: list[Array] | None = None
        self.matrix: SparseMatrix = task.matrix.with_values(self.case.matrix.data)
        self.check = Reference(self.case)

    def prepared(self, config: Config, device: object = None) -> Prepared:
        """A config as a plan, with the operands on a device (None: this CPU)."""
        task = self.task
        made = plan_of(requested(task.op, self.matrix, task.feat, **task.options), config)
        about = {**costs(made), "bytes": stored_bytes(made)}
        operands = self._on(device)
        out = array(np.full(self.check.shape, np.nan), task.dtype, device)

        def call() -> None:
            made(*operands, out=out)

        return Prepared(call, lambda: self.check.error(numbers(out)), made.kernel, about)

    def _on(self, device: object) -> list[Array]:
        """The operands on a device, once for all configs."""
        if self._placed is None:
            self._placed = [array(x, self.task.dtype, device) for x in self.case.operands]
        return self._placed

    def release(self) -> None:
        """Forget what the pattern was converted to."""
        self.matrix.clear_cache()


def costs(made: Any) -> dict[str, Any]:
    """Fields of an Outcome that a plan, or a :class:`sparsetir.tuning.remote.Compiled`, tells."""
    names = ("compile_seconds", "convert_seconds", "padding", "launches")
    return {name: getattr(made, name) for name in names}


def stored_bytes(made: Plan) -> int:
    """Bytes of the arrays that hold the matrix of a plan, each memory once."""
    signature = made.kernel.signature
    dtypes = [signature.dtypes[signature.position[name]] for name in signature.passed]
    pairs = zip(made._args, dtypes, strict=True)
    places = (memory(x, itemsize(d)) for x, d in pairs if is_array(x))
    return sum({at: size for at, size in places if size}.values())  # empty ones may share theirs
