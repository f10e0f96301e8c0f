"""Matrices that divide nothing, among them the extremes, for the tests of CPU templates."""

import numpy as np
import scipy.sparse as sp

# Of results, relative to the sum of absolute values of an element.
CLOSE = {"float32": 1e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 2e-2}


def random(m, n, density):
    rng = np.random.default_rng(0)
    return sp.random_array((m, n), density=density, format="csr", dtype="float32", rng=rng)


def one_dense_row():
    a = sp.lil_array((9, 70), dtype="float32")
    a[4] = np.arange(1, 71)
    return sp.csr_array(a)


ZOO = {
    "random": random(61, 47, 0.1),
    "empty rows": sp.vstack([sp.csr_array((5, 47), dtype="float32"), random(30, 47, 0.03)]).tocsr(),
    "empty": sp.csr_array((6, 5), dtype="float32"),
    "no rows": sp.csr_array((0, 5), dtype="float32"),
    "no columns": sp.csr_array((5, 0), dtype="float32"),
    "one dense row": one_dense_row(),
    "one column": random(40, 1, 0.5),
    "one element": sp.csr_array(([2.0], ([0], [0])), shape=(1, 1), dtype="float32"),
}
