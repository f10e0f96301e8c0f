"""sort_rows_by_length: what it makes, that it means the same, and what it refuses."""

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from schedule_common import keeps_meaning, opened, program
from sparsetir.sparse_ir.recipes import slices as recipes


def by_length(func, window=4):
    sch, ref, (rows, columns, *_) = opened(func)
    return sch, ref, sch.sort_rows_by_length(rows, columns, window)


@pytest.mark.parametrize("name", ["spmv", "spmm", "row_sum", "row_max"])
def test_the_result_stays(name):
    keeps_meaning(by_length(program(name))[0], name)


def test_rows_are_sorted_in_windows():
    """Up in one window and down in the next; each row once, those of a length in their order."""
    lengths = np.array([3, 0, 3, 1, 0, 5, 2, 2, 9, 1])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    order = recipes.rows_by_length(indptr, 4)
    assert order.tolist() == [1, 3, 0, 2, 5, 6, 7, 4, 9, 8]
    whole = recipes.rows_by_length(indptr, 100)
    assert whole.tolist() == np.argsort(lengths, kind="stable").tolist()
    assert recipes.rows_by_length(np.zeros(1, "int32"), 4).tolist() == []


def test_elements_lie_in_the_order_of_visits():
    """And loops over rows, each of which is written once, are free of races."""
    sch, ref, (rows, _) = by_length(program(), 1000)
    a = sp.csr_array(np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [0, 1, 1]], "float32"))
    kernel = sparsetir.build(sch)
    found = kernel.compute({
        "indptr": a.indptr, "indices": a.indices, "m": 4, "n": 3, "feat": 2, "nnz": a.nnz
    })  # fmt: skip
    assert found["i_order"].tolist() == [2, 1, 3, 0]
    assert found["i_slots"].tolist() == [3, 4, 5, 0, 1, 2]
    assert found["j_slots"].tolist() == [1, 1, 2, 0, 1, 2]
    sch.parallelize(rows)  # which asks for the proof
    sch.pack("A", ref)
    assert "A_packed[i_sorted, i_element]" in sch.func.script()
