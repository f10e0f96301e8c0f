"""Measured operators: their operands, exact results, and prepared configs.

spmm : C = A B, B (n, d), C (m, d); also the mean or maximum of what a sum would add up
sddmm : OUT[i, j] = X[i] . Y[j] where A has an element, X (m, d), Y (n, d), OUT (nnz,); values of A
    play no part, as in torch.sparse.sampled_addmm
spmv : y = A x

With heads, all dense arrays have them as a first dimension, and share the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import scipy.sparse as sp
import tvm

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of, requested
from sparsetir.planning.run_plan import Plan
from sparsetir.records.task import Config, Task
from sparsetir.runtime.arrays import CACHE_LINE, is_array, itemsize, memory
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules.operators.operands import MOST_EXACT, Check, rounded
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.registry import OPERATORS

SEED = 0
Array: TypeAlias = np.ndarray | tvm.runtime.Tensor


@dataclass(frozen=True)
class Case:
    """One operator on one matrix.

    matrix : CSR, float32 values (float64 for the dtype float64), int32 indices
    operands : (B,), (X, Y) or (x,), of the type of the values, with numbers that are exact in the
        dtype
    reduce, heads : as for `sparsetir.plan`
    """

    op: str
    matrix: sp.csr_array
    feat: int
    dtype: str
    operands: tuple[np.ndarray, ...]
    reduce: str = "sum"
    heads: int | None = None

    @property
    def problem(self) -> Any:
        """The problem that a kernel is compiled for."""
        return OPERATORS[self.op].compiled_for(self.dtype, self.reduce, self.heads is not None)


def make(
    op: str,
    matrix: sp.csr_array,
    feat: int,
    dtype: str,
    reduce: str = "sum",
    heads: int | None = None,
) -> Case:
    """Make a case with random operands, and the matrix's values rounded to the dtype."""
    feat = 1 if OPERATORS[op].vectors else feat
    case = Case(op, matrix, feat, dtype, (), reduce, heads)
    rng = np.random.default_rng(1)
    operands = OPERATORS[op].operands(case.problem, matrix.shape, case.feat, heads, rng)
    if dtype != "float32":
        data = rounded(matrix.data, dtype)
        matrix = sp.csr_array((data, matrix.indices, matrix.indptr), shape=matrix.shape)
    return replace(case, matrix=matrix, operands=operands)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a cache line, like torch's memory, unlike NumPy's."""
    buffer = np.empty(array.nbytes + CACHE_LINE, "uint8")
    start = -buffer.ctypes.data % CACHE_LINE
    out = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def array(values: np.ndarray, dtype: str, device: object = None) -> Array:
    """Convert values to a dtype on a device: a NumPy array on this CPU (None), else TVM's."""
    if device is None and dtype != "bfloat16":  # NumPy cannot pass it by DLPack
        return aligned(values.astype(dtype))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return tvm.runtime.tensor(np.ascontiguousarray(values.astype(kind)), device)


def numbers(result: Array) -> np.ndarray:
    """Convert a result of :func:`array` to float32 or float64 of NumPy."""
    values = result if isinstance(result, np.ndarray) else result.numpy()
    return values if values.dtype == np.float64 else values.astype("float32")


class Reference(Check):
    """The exact result of a case in float64, and its tolerance."""

    def __init__(self, case: Case, most_exact: int = MOST_EXACT) -> None:
        a = case.matrix
        pattern = CsrPattern(a.indptr, a.indices, a.shape)
        operator = OPERATORS[case.op]
        super().__init__(operator, case.problem, pattern, a.data, case.operands, most_exact)


def first_wrong(right: np.ndarray, got: np.ndarray, want: np.ndarray) -> str | None:
    """A text with the number of wrong elements and the first of them; None if all are right."""
    if right.all():
        return None
    place = tuple(int(n) for n in np.unravel_index(int(right.argmin()), right.shape))
    text = f"{got[place]:.6g}, not {want[place]:.6g}"
    return f"{(~right).sum()} of {right.size} wrong, the first at {list(place)}: {text}"


@dataclass(frozen=True)
class Prepared:
    """A config ready to be measured.

    call : runs it once; wrong : returns an error in the first call's result, or None
    kernel : its kernel; about : fields of its Outcome
    """

    call: Callable[[], None]
    wrong: Callable[[], str | None]
    kernel: Kernel
    about: dict[str, Any]


def case_of(task: Task) -> Case:
    """Make a case from a task, with random operands and values; ones, as many graphs have, would
    hide a wrong order.
    """
    pattern, rng = task.matrix.pattern, np.random.default_rng(SEED)
    kind = "float64" if task.dtype == "float64" else "float32"
    values = rng.random(task.matrix.nnz, kind) * 2 - 1
    matrix = sp.csr_array((values, pattern.columns, pattern.indptr), shape=task.matrix.shape)
    return make(task.op, matrix, task.feat, task.dtype, task.reduce, task.heads)


class OperatorCase:
    """A task as a case, with a check of results.

    matrix : the pattern of the task's, with the values of the case
    request : the request that all plans are made from
    """

    def __init__(self, task: Task) -> None:
        self.task, self.case = task, case_of(task)
        self._placed: list[Array] | None = None
        self.matrix: SparseMatrix = task.matrix.with_values(self.case.matrix.data)
        self.request = requested(task.op, self.matrix, task.feat, **task.options)
        self.check = Reference(self.case)

    def prepared(self, config: Config, device: object = None) -> Prepared:
        """Prepare a config as a plan, with the operands on a device (None: this CPU)."""
        plan = plan_of(self.request, config)
        about = {**costs(plan), "bytes": stored_bytes(plan)}
        operands = self._on(device)
        out = array(np.full(self.check.shape, np.nan), self.task.dtype, device)

        def call() -> None:
            plan(*operands, out=out)

        return Prepared(call, lambda: self.check.error(numbers(out)), plan.kernel, about)

    def _on(self, device: object) -> list[Array]:
        """The operands on a device, moved once for all configs."""
        if self._placed is None:
            self._placed = [array(x, self.task.dtype, device) for x in self.case.operands]
        return self._placed

    def release(self) -> None:
        """Drop the conversions of the pattern."""
        self.matrix.clear_cache()


def costs(compiled: Any) -> dict[str, Any]:
    """Fields of an Outcome from a plan or a :class:`sparsetir.tuning.remote.Compiled`."""
    names = ("compile_seconds", "convert_seconds", "padding", "launches")
    return {name: getattr(compiled, name) for name in names}


def stored_bytes(plan: Plan) -> int:
    """Bytes of the arrays that store the matrix of a plan, each piece of memory once."""
    signature = plan.kernel.signature
    dtypes = [signature.dtypes[signature.position[name]] for name in signature.passed]
    pairs = zip(plan._args, dtypes, strict=True)
    places = (memory(x, itemsize(d)) for x, d in pairs if is_array(x))
    return sum({at: size for at, size in places if size}.values())  # empty ones may share addresses
