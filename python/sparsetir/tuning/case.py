"""A task with operands, and what their result must be."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm

from sparsetir.arrays import is_array, itemsize, memory
from sparsetir.bench.operators import aligned
from sparsetir.plan import Plan, plan
from sparsetir.schedules.operators.operands import OPERATORS, Check
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.sparse_tensor import SparseMatrix
from sparsetir.tuning.task import Task

__all__ = ["Case", "Prepared", "array", "numbers", "stored_bytes"]

SEED = 1


@dataclass(frozen=True)
class Prepared:
    """A config ready to be measured.

    call : one call of it; wrong : what is wrong with what the first call gave, or None
    kernel : what is called in the end; about : fields of its Outcome
    """

    call: Callable[[], None]
    wrong: Callable[[], str | None]
    kernel: Any
    about: dict[str, Any]


class Case:
    """Random operands and values for a task, and what is known of the result.

    folder : keeps the exact result, which is so computed once for several processes

    Values of the task's matrix play no part: ones, as many graphs have, would hide a wrong order.

    matrix : the pattern of the task's with the random values
    operands : arrays in float32 or float64, of numbers that the dtype has
    """

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
        self._placed: list[Any] | None = None
        operator = OPERATORS[task.op]
        problem = operator.compiled_for(task.dtype, task.reduce, task.heads is not None)
        rng, pattern = np.random.default_rng(SEED), task.matrix.pattern
        shape = pattern.shape[0], pattern.shape[1]
        self.operands = operator.operands(problem, shape, task.feat, task.heads, rng)
        values = operator.values(problem, task.matrix.nnz, None, rng)
        self.matrix: SparseMatrix = task.matrix.with_values(values)
        kept = folder / "check.pickle"
        if kept.exists():
            self.check: Check = pickle.loads(kept.read_bytes())
        else:
            csr = CsrPattern(pattern.indptr, pattern.coords[1], shape)
            self.check = Check(operator, problem, csr, values, self.operands)
            part = kept.with_suffix(".part")
            part.write_bytes(pickle.dumps(self.check))
            part.rename(kept)

    def prepared(self, config: Any, device: Any = None) -> Prepared:
        """A config as a plan, with the operands on a device (None: this CPU)."""
        task = self.task
        made = plan(task.op, self.matrix, task.feat, config=config, **task.options)
        about = {
            "compile_seconds": made.compile_seconds, "convert_seconds": made.convert_seconds,
            "padding": made.padding, "launches": made.launches, "bytes": stored_bytes(made),
        }  # fmt: skip
        operands = self._on(device)
        out = array(np.full(self.check.shape, np.nan), task.dtype, device)

        def call() -> None:
            made(*operands, out=out)

        return Prepared(call, lambda: self.check.error(numbers(out)), made.kernel, about)

    def _on(self, device: Any) -> list[Any]:
        """The operands on a device, once for all configs."""
        if self._placed is None:
            self._placed = [array(x, self.task.dtype, device) for x in self.operands]
        return self._placed

    def release(self) -> None:
        """Forget what the pattern was converted to."""
        self.matrix.clear_cache()


def stored_bytes(made: Plan) -> int:
    """Of the arrays that hold the matrix as a plan arranged it, each memory once."""
    signature = made.kernel.signature
    dtypes = [signature.dtypes[signature.position[name]] for name in signature.passed]
    pairs = zip(made._args, dtypes, strict=True)
    places = (memory(x, itemsize(d)) for x, d in pairs if is_array(x))
    return sum({at: size for at, size in places if size}.values())  # empty ones may share theirs


def array(values: np.ndarray, dtype: str, device: Any = None) -> Any:
    """Values in a dtype on a device: an array of NumPy's on this CPU (None), else one of TVM's."""
    if device is None and dtype != "bfloat16":  # which NumPy's arrays cannot hand over
        return aligned(values.astype(dtype))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return tvm.runtime.tensor(np.ascontiguousarray(values.astype(kind)), device)


def numbers(result: Any) -> np.ndarray:
    """What :func:`array` made or a kernel wrote to it, in float32 or float64."""
    found = result if isinstance(result, np.ndarray) else result.numpy()
    return found if found.dtype == np.float64 else found.astype("float32")
