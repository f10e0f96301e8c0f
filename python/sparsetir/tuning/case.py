"""Measured operators: their operands, exact results, and configs made ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import tvm

from sparsetir.data.sources import Stored
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats.pattern import Pattern
from sparsetir.planning.plan import plan_of
from sparsetir.planning.request import Request
from sparsetir.planning.run_plan import Plan
from sparsetir.planning.sparse_results import csr, result_of
from sparsetir.records.task import Config
from sparsetir.runtime.arrays import CACHE_LINE, is_array, itemsize, memory
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules.operators.operands import TOLERANCES, Check, first_wrong
from sparsetir.schedules.operators.sparse_results import KRON
from sparsetir.schedules.targets import TargetLike

SEED = 0
OPS = {"spgemm": "matmul"}  # names of immediate operators that differ from those of plans
Array: TypeAlias = np.ndarray | tvm.runtime.Tensor


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
    """Convert a result of :func:`array` to NumPy: integers, float64, or else float32."""
    values = result if isinstance(result, np.ndarray) else result.numpy()
    kept = values.dtype == np.float64 or values.dtype.kind in "iub"
    return values if kept else values.astype("float32")


@dataclass(frozen=True)
class Candidate:
    """A config ready to be measured.

    call : runs it once; wrong : returns an error in the first call's result, or None
    kernel : its kernel; about : fields of its Outcome
    """

    call: Callable[[], None]
    wrong: Callable[[], str | None]
    kernel: Kernel
    about: dict[str, Any]


class Case:
    """The subject of a worker's measurements: arguments, expected result, prepared configs."""

    target: TargetLike

    def prepared(self, config: Config, device: object = None) -> Candidate:
        """Make a config ready, with the arguments on a device (None: this CPU)."""
        raise NotImplementedError

    def release(self) -> None:
        """Free the data of single candidates, if any is kept."""


class OperatorCase(Case):
    """A request with random values and operands, and a check of results.

    Values are random as ones, which many graphs have, would hide a wrong order.
    """

    def __init__(self, request: Request) -> None:
        operator, problem, matrix = request.operator, request.problem, request.matrix
        values = operator.values(problem, matrix.nnz, None, np.random.default_rng(SEED))
        self.matrix: SparseMatrix = matrix.with_values(values)
        self.request, self.target = replace(request, matrix=self.matrix), request.target
        sizes = matrix.shape, request.feat, request.callers["heads"]
        self.operands = operator.operands(problem, *sizes, np.random.default_rng(1))
        self.check = Check(operator, problem, self.request.pattern, values, self.operands)
        self._placed: list[Array] | None = None

    def prepared(self, config: Config, device: object = None) -> Candidate:
        plan, dtype = plan_of(self.request, config), self.request.problem.dtype
        about = {**costs(plan), "bytes": stored_bytes(plan)}
        if self._placed is None:  # moved once for all configs
            self._placed = [array(x, dtype, device) for x in self.operands]
        operands, out = self._placed, array(np.full(self.check.shape, np.nan), dtype, device)

        def call() -> None:
            plan(*operands, out=out)

        return Candidate(call, lambda: self.check.error(numbers(out)), plan.kernel, about)

    def release(self) -> None:
        self.matrix.clear_cache()  # of conversions


class SparseCase(Case):
    """A request of sparse matrices with random values, and its exact result.

    It is computed by the immediate operator: integers in their type, which wrap, others in float64.
    """

    def __init__(self, request: Request) -> None:
        rng, dtype = np.random.default_rng(SEED), np.dtype(request.problem.result)
        least, most = (-1.0, 1.0) if dtype.kind in "fcV" else (-2 * (dtype.kind == "i"), 3)
        self.each = [
            x.with_values(rng.uniform(least, most, x.nnz).astype(dtype))
            for x in request.matrix.each
        ]
        matrices = request.matrix._replace(each=tuple(self.each))
        self.request, self.target = replace(request, matrix=matrices), request.target
        how = request.problem.how
        exact, kept = ("float64",) * 2 if dtype.kind in "fcV" else (request.problem.dtype, dtype)
        values = [x.values.astype(exact) for x in self.each]
        self.expected = self._exact(how, values).astype(kept)
        # The largest sum of absolute values of a result's terms, the unit of errors.
        sums = self._exact("add" if how == "subtract" else how, [np.abs(x) for x in values]).values
        self.scale = float(np.abs(sums[np.isfinite(sums)]).max(initial=1.0))

    def _exact(self, how: str, values: Sequence[np.ndarray]) -> SparseMatrix:
        """The result of a semiring or one of `COMBINED` with these values."""
        op, (each, mask) = self.request.name, self.request.matrix
        op = KRON if how == KRON else OPS.get(op, op)
        operands = [csr(x)._replace(values=v) for x, v in zip(each, values, strict=True)]
        result = result_of(op, how, operands, None if mask is None else csr(mask))
        pattern = Pattern.from_csr(result.indptr, result.indices, result.shape, check=False)
        return SparseMatrix.of_stored(Stored(pattern, result.values))

    def prepared(self, config: Config, device: object = None) -> Candidate:
        del device
        plan = plan_of(self.request, config)
        results = [plan()]

        def call() -> None:
            results[0] = plan()

        size = sum(x.nnz * (x.values.itemsize + 4) for x in self.each)
        about = {**costs(plan), "bytes": size}
        return Candidate(call, lambda: self.error(results[0]), plan.kernel, about)

    def error(self, result: SparseMatrix) -> str | None:
        """The first error in a result, or None."""
        expected = self.expected
        for ours, right in zip(csr(result)[:2], csr(expected)[:2], strict=True):
            if not np.array_equal(ours, right):
                return f"other elements are stored: {result.nnz}, not {expected.nnz}"
        got = np.asarray(result.values, "float64")
        want = np.asarray(expected.values, "float64")
        tolerance = TOLERANCES.get(str(result.dtype), 0.0) * self.scale
        return first_wrong(np.isclose(got, want, 0, tolerance, equal_nan=True), got, want)


def costs(plan: Plan) -> dict[str, Any]:
    """Fields of an Outcome from a plan."""
    names = ("compile_seconds", "convert_seconds", "padding", "launches")
    return {name: getattr(plan, name) for name in names}


def stored_bytes(plan: Plan) -> int:
    """Bytes of the arrays that store the matrix of a plan, each piece of memory once."""
    signature = plan.kernel.signature
    dtypes = [signature.dtypes[signature.position[name]] for name in signature.passed]
    pairs = zip(plan._args, dtypes, strict=True)
    places = (memory(x, itemsize(d)) for x, d in pairs if is_array(x))
    return sum({at: size for at, size in places if size}.values())  # empty ones may share addresses
