"""Sparse matrices of all kinds for tests of operators, and what the results are to be."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

import sparsetir

warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)  # beta of torch's

SHAPE = (12, 18)
DTYPES = ("float32", "float16", "bfloat16", "float64")
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2, "float64": 1e-12}
COMPRESSED = {
    torch.sparse_csr: torch.sparse_csr_tensor,
    torch.sparse_csc: torch.sparse_csc_tensor,
    torch.sparse_bsr: torch.sparse_bsr_tensor,
    torch.sparse_bsc: torch.sparse_bsc_tensor,
}


class Case(NamedTuple):
    """A sparse matrix; rows and columns of its elements in the order of its values."""

    A: Any
    rows: torch.Tensor
    cols: torch.Tensor
    shape: tuple[int, int] = SHAPE


def dense(shape=SHAPE, seed=0, density=0.3):
    """A dense matrix with zeros; the second row is empty."""
    torch.manual_seed(seed)
    matrix = torch.randn(shape) * (torch.rand(shape) < density)
    matrix[1] = 0
    return matrix


def compressed(A, values, indices=None):
    """A torch tensor of the same layout, with other values."""
    rows_first = A.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer, inner = (
        (A.crow_indices(), A.col_indices()) if rows_first else (A.ccol_indices(), A.row_indices())
    )
    if indices is not None:
        outer, inner = outer.to(indices), inner.to(indices)
    return COMPRESSED[A.layout](outer, inner, values, A.shape)


def tensor_operand(A):
    """The type of a torch tensor's elements, by torch's own conversion of numbered ones."""
    values = A.values()
    numbers = torch.arange(1, values.numel() + 1, dtype=torch.float64).reshape(values.shape)
    if A.layout is torch.sparse_coo:
        numbered = torch.sparse_coo_tensor(A.indices(), numbers, A.shape).to_dense()
    else:
        numbered = compressed(A, numbers).to_dense()
    coords = torch.nonzero(numbered)
    order = torch.argsort(numbered[coords[:, 0], coords[:, 1]])
    return Case(A, coords[order, 0], coords[order, 1])


def cases():
    """A matrix of each kind: name -> Case."""
    D = dense()
    by_name = {
        "coo": tensor_operand(D.to_sparse()),
        "csr": tensor_operand(D.to_sparse_csr()),
        "csc": tensor_operand(D.to_sparse_csc()),
        "bsr": tensor_operand(D.to_sparse_bsr((3, 2))),
        "bsc": tensor_operand(D.to_sparse_bsc((2, 3))),
    }
    csr = by_name["csr"].A
    narrow = compressed(csr, csr.values(), torch.int32)
    by_name["csr int32"] = by_name["csr"]._replace(A=narrow)
    matrix = sparsetir.SparseMatrix(D.to_sparse())
    rows, cols = (torch.from_numpy(x).long() for x in matrix.pattern.coords)
    by_name["matrix"] = Case(matrix, rows, cols)
    m, n = SHAPE
    edges = torch.stack([torch.randint(0, n, (70,)), torch.randint(0, m, (70,))])
    edges[1][edges[1] == 1] = 0  # an empty row; parallel edges are likely
    by_name["edges"] = Case((edges, (n, m)), edges[1], edges[0])
    by_name["edges int32"] = Case((edges.int(), (n, m)), edges[1], edges[0])
    return by_name


def reduced(case, terms, reduce="sum"):
    """(nnz, ...) terms at their rows; an extremum is that of the first element that has it."""
    m, features = case.shape[0], terms.shape[1:]
    if reduce in ("sum", "mean"):
        total = terms.new_zeros(m, *features).index_add(0, case.rows, terms)
        counts = torch.bincount(case.rows, minlength=m).clamp(min=1)
        return total / counts.view(-1, *[1] * len(features)) if reduce == "mean" else total
    out = []
    for i in range(m):
        mine = terms[case.rows == i]
        if len(mine) and reduce == "logsumexp":
            out.append(mine.logsumexp(0))
        elif len(mine):
            first = mine.detach().argmax(0) if reduce == "max" else mine.detach().argmin(0)
            out.append(mine.gather(0, first[None])[0])
        else:
            out.append(mine.sum(0))
    return torch.stack(out) if out else terms[:0]


def expected_spmm(case, values, B, reduce, m=SHAPE[0]):
    """The product of float64 tensors; (m, feat)."""
    terms = B[case.cols] if values is None else values[:, None] * B[case.cols]
    return reduced(case._replace(shape=(m, len(B))), terms, reduce)


def expected_sddmm(case, X, Y):
    """The products of rows of float64 tensors; (nnz,)."""
    return (X[case.rows] * Y[case.cols]).sum(-1)


def rounded(shape, dtype, seed):
    """Random numbers that a dtype has, and the same in float64; both take gradients."""
    torch.manual_seed(seed)
    x = torch.randn(shape).to(getattr(torch, dtype))
    return x.requires_grad_(), x.detach().double().requires_grad_()


def assert_close(got, want, dtype):
    """Within some roundings."""
    got, want = got.detach().double(), want.detach()
    assert got.shape == want.shape
    if not want.numel():
        return
    scale = max(1.0, float(want.abs().max()))
    error = (got - want).abs().max()
    assert error <= TOLERANCE[dtype] * scale, float(error)
