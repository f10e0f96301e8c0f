"""SpMM over rows in the order of their lengths on a CPU, against float64 sums."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from sparsetir.schedules.templates.spmm_sorted import SortedRows

RNG = np.random.default_rng(0)
EXACT = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-11, "bfloat16": 2**-8}


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
    kind = getattr(torch, dtype)
    nothing: Any = sp.csr_array((6, 9), dtype="float32")
    for matrix in (graph(41, 23), nothing, graph(0, 5), graph(5, 1)):
        b = torch.from_numpy(RNG.standard_normal((matrix.shape[1], feat))).to(kind)
        b[2:3], b[:, :1] = float("inf"), float("nan")
        first, other = (torch.from_numpy(RNG.random(matrix.nnz)).to(kind) for _ in range(2))
        index = matrix.indices.astype(idtype), matrix.indptr.astype(idtype)
        given = sparsetir.SparseMatrix.from_csr(index[1], index[0], first, shape=matrix.shape)
        how = {"dtype": dtype, "config": config, "threads": 2, "reduce": reduce}
        plan = sparsetir.plan("spmm", given, feat, **how)
        for values, run in ((first, {}), (other, {"values": other})):
            out = torch.full((matrix.shape[0], feat), float("nan"), dtype=kind)
            assert plan(b, out=out, **run) is out
            wanted, size = exact(matrix, values.double().numpy(), b.double().numpy(), reduce)
            found, finite = out.double().numpy(), np.isfinite(wanted)
            np.testing.assert_array_equal(found[~finite], wanted[~finite])
            close = EXACT[dtype] * abs(wanted) + 100 * EXACT["float32"] * (size + 1)
            assert (abs(found[finite] - wanted[finite]) <= close[finite]).all()


def exact(matrix, values, b, reduce):
    """The result, and the sum of the absolute values that its elements are made of."""
    out, size = np.zeros((2, matrix.shape[0], b.shape[1]))
    with np.errstate(invalid="ignore"):
        for row in range(matrix.shape[0]):
            at = slice(matrix.indptr[row], matrix.indptr[row + 1])
            terms = values[at, None] * b[matrix.indices[at]]
            if len(terms):
                by = {"sum": np.sum, "mean": np.mean, "max": np.max}[reduce]
                out[row], size[row] = by(terms, axis=0), abs(terms).sum(axis=0)
    return out, size


def test_edges_of_torch_take_values_by_their_places():
    """In any order, and more than once; with heads, too."""
    config = SortedRows(16, 16, 16)
    assert config.unpacked == SortedRows(16, 16, 16, packed=False)
    pattern = sparsetir.schedules.operators.problems.CsrPattern(
        np.array([0, 3, 3, 4], "int32"), np.array([2, 0, 2, 1], "int32"), (3, 4)
    )
    plan = sparsetir.plan("spmm", pattern, 16, dtype="float32", heads=2, config=config.unpacked)
    values, b = RNG.random((2, 4), "float32"), RNG.random((2, 4, 16), "float32")
    wanted = np.zeros((2, 3, 16))
    for head, row, column, e in ((h, r, c, e) for h in (0, 1) for e, (r, c) in enumerate(
        [(0, 2), (0, 0), (0, 2), (2, 1)]
    )):  # fmt: skip
        wanted[head, row] += values[head, e] * b[head, column].astype("float64")
    np.testing.assert_allclose(plan(b, values=values), wanted, rtol=1e-5)
    assert not plan.arranges_values
