"""Measured products and sums of sparse matrices."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import scipy.sparse as sp

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of
from sparsetir.planning.request import Request
from sparsetir.planning.sparse_results import csr, term_pairs
from sparsetir.records.task import Config
from sparsetir.reductions import SEMIRINGS
from sparsetir.schedules.operators.operands import TOLERANCES, first_wrong
from sparsetir.schedules.operators.sparse_results import KRON, first_value
from sparsetir.tuning.case import SEED, Candidate, Case, costs

COMBINE = {"sum": np.add, "min": np.minimum, "max": np.maximum}
TIMES = {"*": np.multiply, "+": np.add, "and": np.logical_and}
BY_ELEMENT = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum,
}  # fmt: skip


class SparseCase(Case):
    """A request of sparse matrices with random values, and its result, in float64 by scipy."""

    def __init__(self, request: Request) -> None:
        rng, dtype = np.random.default_rng(SEED), np.dtype(request.problem.result)
        least, most = (-1.0, 1.0) if dtype.kind in "fcV" else (-2 * (dtype.kind == "i"), 3)
        self.each = [
            x.with_values(rng.uniform(least, most, x.nnz).astype(dtype))
            for x in request.matrix.each
        ]
        matrices = request.matrix._replace(each=tuple(self.each))
        self.request, self.target = replace(request, matrix=matrices), request.target
        self.expected, self.scale = exact_result(self.request)

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
        for name in ("indptr", "columns"):
            if not np.array_equal(getattr(result.pattern, name), getattr(expected.pattern, name)):
                return f"other elements are stored: {result.nnz}, not {expected.nnz}"
        got = np.asarray(result.values, "float64")
        want = _as_held(np.asarray(expected.values, "float64"), result.dtype)
        tolerance = TOLERANCES.get(str(result.dtype), 0.0) * self.scale
        return first_wrong(np.isclose(got, want, 0, tolerance, equal_nan=True), got, want)


def _as_held(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert numbers as a result type holds them: integers wrap, and have no infinity."""
    if dtype.kind not in "iub":
        return values
    if dtype.kind == "b":
        return values != 0
    info, finite = np.iinfo(dtype), np.isfinite(values)
    wrapped = np.where(finite, values, 0).astype("int64").astype(dtype)
    return np.where(finite, wrapped, np.clip(values, float(info.min), float(info.max)))


def exact_result(wanted: Request) -> tuple[SparseMatrix, float]:
    """The exact result in float64, and the largest sum of absolute values of its terms."""
    each, how = [_plain(x) for x in wanted.matrix.each], wanted.problem.how
    if wanted.name == "inner":
        each[1] = each[1].T.tocsr()
    if how == KRON:
        result = sp.kron(*each, format="csr")  # the default format would store whole blocks
        result.sort_indices()
        return SparseMatrix(result), float(np.abs(result.data).max(initial=1.0))
    marks = [_with(x, np.ones(x.nnz)) for x in each]
    product = wanted.problem.is_product
    if wanted.matrix.mask is not None:
        pattern = _plain(wanted.matrix.mask)
    elif product:
        pattern = marks[0] @ marks[1]
    else:
        meet = sp.csr_array.multiply if how == "multiply" else lambda a, b: a + b
        pattern = reduce(meet, marks).tocsr()
    pattern.sort_indices()
    if not product:
        stored = [_at(x, pattern) for x in each]
        values = reduce(BY_ELEMENT[how], stored)
        scale = np.abs(stored).sum(axis=0)
    elif how == "plus_times":
        values, scale = (_at(f(each[0]) @ f(each[1]), pattern) for f in (lambda x: x, abs))
    else:
        values = _sum_terms(each, pattern, how)
        scale = np.abs(values[np.isfinite(values)])
    return SparseMatrix(_with(pattern, values)), float(scale.max(initial=1.0))


def _sum_terms(each: list[sp.csr_array], pattern: sp.csr_array, semiring: str) -> np.ndarray:
    """The values of a product at a pattern, from all of its terms."""
    how, times = SEMIRINGS[semiring]
    a, b, mask = (csr(SparseMatrix(x)) for x in (*each, pattern))
    begins, of_a, of_b = term_pairs(a, b, mask)
    terms = TIMES[times](a.values[of_a], b.values[of_b]).astype("float64")
    values = np.full(pattern.nnz, float(first_value(semiring, "float64")))
    full = np.diff(begins) > 0
    if full.any():
        values[full] = COMBINE[how].reduceat(terms, begins[:-1][full])
    return values


def _plain(matrix: SparseMatrix) -> sp.csr_array:
    """Convert to scipy in float64."""
    arrays = csr(matrix)
    parts = arrays.values.astype("float64"), arrays.indices, arrays.indptr
    return sp.csr_array(parts, shape=arrays.shape)


def _with(matrix: sp.csr_array, values: np.ndarray) -> sp.csr_array:
    return sp.csr_array((values, matrix.indices, matrix.indptr), shape=matrix.shape)


def _at(matrix: sp.csr_array, pattern: sp.csr_array) -> np.ndarray:
    """The values of a matrix at a pattern, 0 where it stores nothing."""
    rows, columns = pattern.tocoo().coords
    if not len(rows):  # SciPy would return a matrix
        return np.zeros(0)
    return np.asarray(sp.csr_matrix(matrix)[rows, columns]).ravel()
