"""SpMM over rows in the order of their lengths on a CPU, against float64 sums."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from csr_zoo import check_spmm
from sparsetir.schedules.templates.spmm_sorted import SortedRows

RNG = np.random.default_rng(0)


def graph(m: int, n: int, mean: int = 3) -> Any:
    """A pattern with empty rows, a full one, and an empty column."""
    mask = RNG.random((m, n)) < mean / max(1, n)
    mask[1:3], mask[4:5], mask[:, 3:4] = False, True, False
    return sp.csr_array(mask.astype("float32"))


@pytest.mark.parametrize(
    ("dtype", "config", "feat", "idtype", "reduce"),
    [
        ("float32", SortedRows(32, 16, 32, window=7), 32, np.int32, "sum"),
        ("float32", SortedRows(16, 8, blocks=3, ahead=9), 48, np.int32, "mean"),
        ("float64", SortedRows(9, 4, 9, parallel=False), 9, np.int64, "sum"),
        ("float16", SortedRows(8, 8, 11), 11, np.int32, "sum"),
        ("bfloat16", SortedRows(4, 4, blocks=2), 4, np.int32, "max"),
    ],
    ids=str,
)
def test_types_and_tails(dtype, config, feat, idtype, reduce):
    """Values that are planned with, and those of a run; infinities and NaN as sums say."""
    nothing: Any = sp.csr_array((6, 9), dtype="float32")
    for matrix in (graph(41, 23), nothing, graph(0, 5), graph(5, 1)):
        check_spmm(matrix, config, feat, dtype, reduce, 2, reduce != "max", idtype)


def test_edges_of_torch_take_values_by_their_places():
    """In any order, and more than once; with heads, too."""
    config = SortedRows(16, 16, 16)
    assert config.unpacked == SortedRows(16, 16, 16, packed=False)
    pattern = sparsetir.schedules.operators.problems.CsrPattern(
        np.array([0, 3, 3, 4], "int32"), np.array([2, 0, 2, 1], "int32"), (3, 4)
    )
    plan = sparsetir.plan("spmm", pattern, 16, dtype="float32", heads=2, config=config.unpacked)
    values, b = RNG.random((4, 2), "float32"), RNG.random((4, 2, 16), "float32")
    wanted = np.zeros((3, 2, 16))
    for head, row, column, e in ((h, r, c, e) for h in (0, 1) for e, (r, c) in enumerate(
        [(0, 2), (0, 0), (0, 2), (2, 1)]
    )):  # fmt: skip
        wanted[row, head] += values[e, head] * b[column, head].astype("float64")
    np.testing.assert_allclose(plan(b, values=values), wanted, rtol=1e-5)
    assert not plan.arranges_values
