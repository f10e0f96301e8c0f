"""CSR, CSC, COO, DCSR, ELL, RowELL, CSF, Ragged and DIA: their arrays, and what they refuse.

What all formats have in common is in `test_library.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from zoo import MATRICES, values

import sparsetir
from sparsetir.formats import (
    COO,
    CSC,
    CSF,
    CSR,
    DCSR,
    DIA,
    ELL,
    Format,
    Operand,
    Pattern,
    Ragged,
    RowELL,
)


def test_csr_and_csc_are_scipys() -> None:
    pattern = MATRICES["random"]
    data = values(pattern)
    for fmt, kind in ((CSR(), "csr"), (CSC(), "csc"), (CSF((0, 1)), "csr"), (CSF((1, 0)), "csc")):
        want = sp.coo_array((data, tuple(pattern.coords)), pattern.shape).asformat(kind)
        args = fmt.convert(pattern).arguments(A=data)
        have = {n.split("_")[0]: v for n, v in args.items() if isinstance(v, np.ndarray)}
        np.testing.assert_array_equal(have["indptr"], want.indptr)
        np.testing.assert_array_equal(have["indices"], want.indices)
        np.testing.assert_array_equal(have["a"], want.data)


def test_diagonals_are_scipys() -> None:
    """Of the same number, but that scipy has a place for every column and not for every row."""
    dense = np.diag(np.arange(1.0, 7.0)) + np.diag([7.0, 0, 8, 9], -2)[:6, :6]
    pattern = Pattern(np.nonzero(dense), (6, 6))
    args = DIA().convert(pattern).arguments(A=dense[dense != 0].astype("float32"))
    np.testing.assert_array_equal(2**30 - 1 - args["indices_jd_dia"], [0, -2])
    np.testing.assert_array_equal(args["a_dia"], [[1, 2, 3, 4, 5, 6], [0, 0, 7, 0, 8, 9]])


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [0, -1, 2.0, True, "2", None])
def test_parameters_of_row_ell(cols: Any) -> None:
    with pytest.raises(ValueError, match=r"RowELL: argument 'cols': expected a positive integer"):
        RowELL(cols)


@pytest.mark.parametrize(
    "axes", [(), (0,), (1, 2), (0, 0), (0, 2), (0, True), (0.0, 1.0), 2, "01", None]
)
def test_parameters_of_csf(axes: Any) -> None:
    with pytest.raises(ValueError, match=r"CSF: argument 'axes': expected a permutation of 0"):
        CSF(axes)


def test_all_diagonals_have_a_number() -> None:
    rule = DIA().rules(Operand())[0]
    last, length = 2**30 - 1, int(rule.axis("JD").length)
    assert rule.to_new((0, last)) == (0, 0, 0)
    assert rule.to_new((last, 0)) == (0, length - 1, last)
    assert rule.to_old((0, length - 1, last)) == (last, 0)
    assert length == np.iinfo(np.int32).max


@pytest.mark.parametrize("shape", [(2**30 + 1, 2), (2, 2**30 + 1)])
def test_diagonals_that_are_too_long(shape: Any) -> None:
    pattern = Pattern([np.array([0]), np.array([1])], shape)
    with pytest.raises(
        ValueError, match=r"DIA: argument 'pattern': expected at most 1073741824 ro"
    ):
        DIA().convert(pattern)


@pytest.mark.parametrize("fmt", [CSR(), CSC(), COO(), DCSR(), CSF((0, 1))], ids=lambda f: f.name)
def test_what_indices_cannot_count(fmt: Format) -> None:
    pattern = Pattern([np.array([0]), np.array([2**31])], (1, 2**31 + 1))
    message = rf"rule '{fmt.name}': length of axis 'J' = 2147483649 does not fit int32"
    with pytest.raises(sparsetir.StructureError, match=message):
        fmt.convert(pattern, Operand())


def test_padding_that_indices_cannot_count() -> None:
    rows, shape = np.zeros(70_000, np.int32), (40_000, 70_000)
    pattern = Pattern([rows, np.arange(70_000, dtype=np.int32)], shape)
    message = r"number of places = 2800000000 does not fit int32"
    with pytest.raises(sparsetir.StructureError, match=message):
        ELL().convert(pattern)
    last = Pattern([np.arange(40_000, dtype=np.int32), np.full(40_000, 69_999)], shape)
    with pytest.raises(sparsetir.StructureError, match=message):
        Ragged().convert(last)
    with pytest.raises(sparsetir.StructureError, match=r"number of places = 4294967294 does not"):
        RowELL(2**31 - 1).convert(Pattern([np.arange(2), np.arange(2)], (2, 2)))
