"""A task with operands, and what their result must be."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm

from sparsetir.bench.operators import aligned
from sparsetir.schedules.operators.operands import OPERATORS, Check
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.sparse_tensor import SparseMatrix
from sparsetir.tuning.task import Task

__all__ = ["Case", "array", "numbers"]

SEED = 1


class Case:
    """Random operands and values for a task, and what is known of the result.

    folder : keeps the exact result, which is so computed once for several processes

    Values of the task's matrix play no part: ones, as many graphs have, would hide a wrong order.

    matrix : the pattern of the task's with the random values
    operands : arrays in float32 or float64, of numbers that the dtype has
    """

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
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
