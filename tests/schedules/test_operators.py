"""The operator records: operands, exact results, and what counts as wrong."""

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir.schedules.operators.names import DTYPES
from sparsetir.schedules.operators.operands import Check, rounded
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.operators.registry import OPERATORS

# Rows 0 and 3 are empty.
DENSE = np.array([[0, 0, 0], [1, 0, -2], [0, 3, 0], [0, 0, 0], [-1, -1, -4]], "float32")
MATRIX = sp.csr_array(DENSE)
PATTERN = CsrPattern(MATRIX.indptr, MATRIX.indices, MATRIX.shape)
B = np.array([[1, -1], [2, 0.5], [-3, 4]], "float32")


def reference(op, problem, operands, values=MATRIX.data):
    return OPERATORS[op].reference(problem, PATTERN, values, operands)


def test_sum_and_mean():
    exact, scale = reference("spmm", Spmm(), (B,))
    assert exact.dtype == scale.dtype == np.float64
    assert (exact == DENSE @ B).all() and (scale == abs(DENSE) @ abs(B)).all()
    counts = np.array([[1], [2], [1], [1], [3]])
    exact, scale = reference("spmm", Spmm(reduce="mean"), (B,))
    assert np.allclose(exact, DENSE @ B / counts) and np.allclose(
        scale, abs(DENSE) @ abs(B) / counts
    )


def test_maximum_is_zero_in_empty_rows_and_keeps_nan():
    exact, scale = reference("spmm", Spmm(reduce="max"), (B,))
    assert exact.tolist() == [[0, 0], [6, -1], [6, 1.5], [0, 0], [12, 1]]
    assert scale.tolist() == [[0, 0], [6, 8], [6, 1.5], [0, 0], [12, 16]]
    with_nan = B.copy()
    with_nan[1, 0] = np.nan
    exact, _ = reference("spmm", Spmm(reduce="max"), (with_nan,))
    assert np.isnan(exact[:, 0]).tolist() == [False, False, True, False, True]
    exact, scale = reference("spmm", Spmm(reduce="min"), (-B,))
    assert exact.tolist() == [[0, 0], [-6, 1], [-6, -1.5], [0, 0], [-12, -1]]
    assert scale.tolist() == [[0, 0], [6, 8], [6, 1.5], [0, 0], [12, 16]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most_exact", [0, 2**31])
def test_a_check_takes_right_results_and_no_wrong_ones(dtype, most_exact):
    rng = np.random.default_rng(1)
    a = sp.random_array((60, 50), density=0.2, format="csr", rng=0)
    record, problem = OPERATORS["spmm"], Spmm(dtype)
    (b,) = record.operands(problem, a.shape, 16, None, rng)
    values = record.values(problem, a.nnz, None, rng)
    pattern = CsrPattern(a.indptr, a.indices, a.shape)
    check = Check(record, problem, pattern, values, (b,), most_exact)
    right = rounded(record.reference(problem, pattern, values, (b,))[0], dtype)
    assert check.error(right) is None
    for wrong in (np.nan, right[7, 3] + 10):
        bad = right.copy()
        bad[7, 3] = wrong
        assert check.error(bad).startswith(f"1 of {check.exact.size} wrong, the first at [7")
    assert "expected shape (60, 16), got (60, 15)" in check.error(right[:, 1:])


@pytest.mark.parametrize(
    "op, heads, callers",
    [
        ("spmm", None, {"b": (3, 8), "out": (2, 8), "a": (5,)}),
        ("spmm", 4, {"b": (4, 3, 8), "out": (4, 2, 8), "a": (4, 5)}),
        ("spmv", None, {"b": (3,), "out": (2,), "a": (5,)}),
        ("spmv", 4, {"b": (4, 3), "out": (4, 2), "a": (4, 5)}),
        ("sddmm", 4, {"x": (4, 2, 8), "y": (4, 3, 8), "out": (4, 5)}),
    ],
)
def test_shapes_of_callers(op, heads, callers):
    """Sizes of a (2, 3) matrix with 5 elements, and 8 features."""
    record = OPERATORS[op]
    assert record.shapes((2, 3), 5, 8, heads) == callers
    assert record.names == tuple(n for n in ("b", "x", "y") if n in callers)
    assert record.reads_values == ("a" in callers)
