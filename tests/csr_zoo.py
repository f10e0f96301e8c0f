"""Matrices that divide nothing, among them the extremes, and SpMM on them, for CPU templates."""

import numpy as np
import scipy.sparse as sp
import torch

import sparsetir

RNG = np.random.default_rng(0)

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
# Half a unit of the last bit of a result.
ROUNDED = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-11, "bfloat16": 2**-8}


COMBINED = {"max": np.maximum, "min": np.minimum, "logsumexp": np.logaddexp}


def expected(a, values, b, reduce="sum"):
    """(m, feat) result and sums of absolute values, in float64."""
    rows = np.repeat(np.arange(a.shape[0]), np.diff(a.indptr))
    with np.errstate(invalid="ignore"):
        products = values.astype("float64")[:, None] * b.astype("float64")[a.indices]
        out, size = np.zeros((2, a.shape[0], b.shape[1]))
        if reduce in COMBINED:
            out[np.diff(a.indptr) > 0] = np.inf if reduce == "min" else -np.inf
            COMBINED[reduce].at(out, rows, products)
        else:
            np.add.at(out, rows, products)
            if reduce == "mean":
                out /= np.maximum(np.diff(a.indptr), 1)[:, None]
        np.add.at(size, rows, np.abs(products))
    return out, size


def check_spmm(
    matrix, config, feat, dtype="float32", reduce="sum", threads=2, special=False, idtype="int32"
):
    """A plan's result of the values that it is made with, and of others; the plan.

    Sums are in float32 or wider, in any order, and rounded once.

    special : B has a row of infinities and a column of NaN
    """
    kind = getattr(torch, dtype)
    b = torch.from_numpy(RNG.standard_normal((matrix.shape[1], feat))).to(kind)
    if special:
        b[2:3], b[:, :1] = float("inf"), float("nan")
    first, other = (torch.from_numpy(RNG.standard_normal(matrix.nnz)).to(kind) for _ in range(2))
    index = matrix.indptr.astype(idtype), matrix.indices.astype(idtype)
    sparse = sparsetir.SparseMatrix.from_csr(*index, first, shape=matrix.shape)
    how = {"dtype": dtype, "config": config, "threads": threads, "reduce": reduce}
    plan = sparsetir.plan("spmm", sparse, feat, **how)
    unit = ROUNDED["float64" if dtype == "float64" else "float32"]
    for values, run in ((first, {}), (other, {"values": other})):
        out = torch.full((matrix.shape[0], feat), float("nan"), dtype=kind)
        assert plan(b, out=out, **run) is out
        wanted, size = expected(matrix, values.double().numpy(), b.double().numpy(), reduce)
        values_of, finite = out.double().numpy(), np.isfinite(wanted)
        np.testing.assert_array_equal(values_of[~finite], wanted[~finite])
        close = ROUNDED[dtype] * abs(wanted) + 100 * unit * (size + 1)
        assert (abs(values_of[finite] - wanted[finite]) <= close[finite]).all()
    return plan
