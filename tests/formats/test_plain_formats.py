"""CSR, CSC, COO, DCSR, ELL, RowELL, CSF, Ragged and DIA: their arrays, and what they refuse.

What all formats have in common is in `test_library.py`.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from zoo import MATRICES, values

from sparsetir.formats import CSC, CSF, CSR, DIA, Operand, Pattern


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


def test_all_diagonals_have_a_number() -> None:
    rule = DIA().rules(Operand())[0]
    last, length = 2**30 - 1, int(rule.axis("JD").length)
    assert rule.to_new((0, last)) == (0, 0, 0)
    assert rule.to_new((last, 0)) == (0, length - 1, last)
    assert rule.to_old((0, length - 1, last)) == (last, 0)
    assert length == np.iinfo(np.int32).max
