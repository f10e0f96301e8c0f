"""Sparse products of torch tensors, with gradients."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from scipy.sparse import issparse
from torch import Tensor

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.ops import library
from sparsetir.ops.checks import check_tensor
from sparsetir.ops.new_edges import sum_of_new
from sparsetir.ops.operands import Operand, resolve
from sparsetir.ops.quick import again
from sparsetir.planning.vocabulary import reduction


def spmm(A: Any, B: Tensor, reduce: str = "sum", values: Tensor | None = None) -> Tensor:
    """C[i, k] = reduce over the stored j of A[i, j] * B[j, k].

    Parameters
    ----------
    A : sparse (m, n) matrix
        Of any kind that :func:`resolve` takes; without values of its own, such as an edge_index, it
        has ones.
    B : (n, feat) or (heads, n, feat) Tensor
        float16, bfloat16, float32 or float64.
    reduce : str
        "sum" or "add", "mean" (the sum over the number of stored elements of the row), "max" or
        "amax", "min" or "amin"; a row without elements is zero in all of them, and NaN is greater
        and less than all else.
    values : (nnz,) or (heads, nnz) Tensor, optional
        Of B's dtype in the order of A's elements, instead of its own.

    Returns
    -------
    (m, feat) or (heads, m, feat) Tensor
        With heads where B or the values have them. Differentiable with respect to B and the values
        any number of times; the gradient of a maximum goes to the first element that has it.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.

    Notes
    -----
    Sums are in float32, for float64 in float64, and in the same order: on a CPU results are the
    same in each run. Where a process has seen many new edges, the first products with others go
    through them as they come, so that their last bits may differ from those of later products with
    the same edges; not under `torch.use_deterministic_algorithms(True)`.
    (SparseTIR, section 4.2.1.)
    """
    found = again(A, B, reduce, values)
    if found is None:
        found = sum_of_new(A, B, reduce, values)
    if found is not None:
        return found
    named = reduction("spmm", reduce)
    if named != reduce:
        return spmm(A, B, named, values)
    _check_operand("spmm", "B", B, (2, 3))
    operand = _operand("spmm", A, values, B)
    return _product("spmm", operand, B, reduce)


def spmv(A: Any, x: Tensor, reduce: str = "sum", values: Tensor | None = None) -> Tensor:
    """y[i] = reduce over the stored j of A[i, j] * x[j]; :func:`spmm` for vectors.

    Parameters
    ----------
    A, reduce, values
        As for :func:`spmm`.
    x : (n,) or (heads, n) Tensor
        The vector, or one for each head.

    Returns
    -------
    (m,) or (heads, m) Tensor
    """
    reduce = reduction("spmv", reduce)
    _check_operand("spmv", "x", x, (1, 2))
    B = x.unsqueeze(-1)
    return _product("spmv", _operand("spmv", A, values, B), B, reduce).squeeze(-1)


def sddmm(A: Any, X: Tensor, Y: Tensor) -> Tensor:
    """OUT[e] = sum over k of X[i, k] * Y[j, k] for each element e = (i, j) of A.

    Parameters
    ----------
    A : sparse (m, n) matrix
        As for :func:`spmm`; its values play no part.
    X : (m, feat) or (heads, m, feat) Tensor
        For the rows.
    Y : (n, feat) or (heads, n, feat) Tensor
        For the columns.

    Returns
    -------
    (nnz,) or (heads, nnz) Tensor
        In the order of A's elements, to be `values` of other operators. Differentiable with respect
        to X and Y any number of times.

    Notes
    -----
    SparseTIR, section 4.2.2.
    """
    _check_operand("sddmm", "X", X, (2, 3))
    _check_operand("sddmm", "Y", Y, (2, 3), like=X)
    operand = resolve(A, None, (X.shape[-2], Y.shape[-2]), "sddmm")
    _check_rows("sddmm", "X", X, operand.m, operand.col.device)
    _check_rows("sddmm", "Y", Y, operand.n, operand.col.device)
    if X.dim() != Y.dim():
        heads = X.shape[:-2] or Y.shape[:-2]
        X, Y = (x.expand(*heads, *x.shape[-2:]) for x in (X, Y))
    if X.shape[-1] != Y.shape[-1] or (X.dim() == 3 and X.shape[0] != Y.shape[0]):
        expected = (*X.shape[:-2], operand.n, X.shape[-1])
        raise ValueError(
            f"sddmm: argument 'Y': expected shape {expected} as 'X', got {tuple(Y.shape)}"
        )
    return library.sddmm(operand.rowptr, operand.col, X, Y)


def _operand(who: str, A: Any, values: Tensor | None, B: Tensor) -> Operand:
    """A for a product with B; edges without a size are of a square matrix."""
    n = B.shape[-2]
    operand = resolve(A, values, (n, n), who)
    own = operand.values
    if values is None and own is not None and _is_of_host(A):
        operand = operand._replace(values=own.to(B.device, B.dtype))
    return operand


def _is_of_host(A: Any) -> bool:
    """Whether it is a matrix whose values no tensor holds, and have no gradients."""
    return isinstance(A, SparseMatrix | str | PathLike) or issparse(A)


def _product(who: str, operand: Operand, B: Tensor, reduce: str) -> Tensor:
    rowptr, col, _, n, values = operand
    _check_rows(who, "x" if who == "spmv" else "B", B, n, col.device)
    if values is not None:
        _check_values(who, values, B, col.shape[-1])
        if values.dim() == 2 and B.dim() == 2:
            B = B.expand(values.shape[0], *B.shape)
        elif values.dim() == 1 and B.dim() == 3:
            values = values.expand(B.shape[0], *values.shape)
    if reduce in ("max", "min") and _has_gradient(B, values):
        return library.spmm_arg(rowptr, col, values, B, reduce == "max")[0]
    return library.spmm(rowptr, col, values, B, reduce)


def _check_operand(
    who: str, name: str, x: Any, dims: tuple[int, int], like: Tensor | None = None
) -> None:
    check_tensor(who, name, x, like)
    if x.dim() not in dims:
        raise ValueError(
            f"{who}: argument '{name}': expected {dims[0]} dimensions, or {dims[1]} with heads, "
            f"got shape {tuple(x.shape)}"
        )


def _check_values(who: str, values: Any, B: Tensor, nnz: int) -> None:
    check_tensor(who, "values", values, like=B)
    dims = values.dim()
    fits = dims in (1, 2) and values.shape[-1] == nnz
    if not fits or (dims == 2 and B.dim() == 3 and values.shape[0] != B.shape[0]):
        heads = B.shape[:-2]
        expected = f"({nnz},) or ({heads[0] if heads else 'heads'}, {nnz})"
        raise ValueError(
            f"{who}: argument 'values': expected shape {expected}, got {tuple(values.shape)}"
        )


def _check_rows(who: str, name: str, x: Tensor, rows: int, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(
            f"{who}: argument '{name}': expected to be on {device} as the sparse matrix, "
            f"got {x.device}"
        )
    if x.shape[-2] != rows:
        raise ValueError(
            f"{who}: argument '{name}': expected {rows} rows to fit the sparse matrix, got shape "
            f"{tuple(x.shape)}"
        )


def _has_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
