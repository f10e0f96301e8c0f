"""Exact products and sums of sparse matrices, in float64, by scipy and NumPy alone."""

from __future__ import annotations

from functools import reduce

import numpy as np
import scipy.sparse as sp

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.request import Request
from sparsetir.planning.sparse_results import csr, term_pairs
from sparsetir.schedules.operators.sparse_results import KRON, SEMIRINGS, first_value

HOW = {"sum": np.add, "min": np.minimum, "max": np.maximum}
TIMES = {"times": np.multiply, "plus": np.add, "and": np.logical_and}
BY_ELEMENT = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum,
}  # fmt: skip


def exact_result(wanted: Request) -> tuple[SparseMatrix, float]:
    """The result with values in float64; and the largest sum of absolute values of its terms."""
    each, how = [_plain(x) for x in wanted.matrices.each], wanted.problem.how
    if wanted.name == "inner":
        each[1] = each[1].T.tocsr()
    if how == KRON:
        found = sp.csr_array(sp.kron(*each))
        found.sort_indices()
        return SparseMatrix(found), float(np.abs(found.data).max(initial=1.0))
    marks = [_with(x, np.ones(x.nnz)) for x in each]
    product = wanted.problem.is_product
    if wanted.matrices.mask is not None:
        there = _plain(wanted.matrices.mask)
    elif product:
        there = marks[0] @ marks[1]
    else:
        meet = sp.csr_array.multiply if how == "multiply" else lambda a, b: a + b
        there = reduce(meet, marks).tocsr()
    there.sort_indices()
    if not product:
        stored = [_at(x, there) for x in each]
        values = reduce(BY_ELEMENT[how], stored)
        scale = np.abs(stored).sum(axis=0)
    elif how == "plus_times":
        values, scale = (_at(f(each[0]) @ f(each[1]), there) for f in (lambda x: x, abs))
    else:
        values = _of_terms(each, there, how)
        scale = np.abs(values[np.isfinite(values)])
    return SparseMatrix(_with(there, values)), float(scale.max(initial=1.0))


def _of_terms(each: list[sp.csr_array], there: sp.csr_array, semiring: str) -> np.ndarray:
    """Values of a product at a pattern, of all of its terms."""
    how, times = SEMIRINGS[semiring]
    a, b, mask = (csr(SparseMatrix(x)) for x in (*each, there))
    begins, of_a, of_b = term_pairs(a, b, mask)
    terms = TIMES[times](a.values[of_a], b.values[of_b]).astype("float64")
    values = np.full(there.nnz, float(first_value(semiring, "float64")))
    full = np.diff(begins) > 0
    if full.any():
        values[full] = HOW[how].reduceat(terms, begins[:-1][full])
    return values


def _plain(matrix: SparseMatrix) -> sp.csr_array:
    """In float64, by scipy."""
    found = csr(matrix)
    given = found.values.astype("float64"), found.indices, found.indptr
    return sp.csr_array(given, shape=found.shape)


def _with(matrix: sp.csr_array, values: np.ndarray) -> sp.csr_array:
    return sp.csr_array((values, matrix.indices, matrix.indptr), shape=matrix.shape)


def _at(matrix: sp.csr_array, there: sp.csr_array) -> np.ndarray:
    """Values at a pattern, 0 where a matrix stores nothing."""
    rows, columns = there.tocoo().coords
    return np.asarray(sp.csr_matrix(matrix)[rows, columns]).ravel()
