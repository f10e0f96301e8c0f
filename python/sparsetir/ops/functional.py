"""Sparse products of torch tensors, with gradients."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from scipy.sparse import issparse
from torch import Tensor

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.ops import library
from sparsetir.ops.library import sum_of_new
from sparsetir.ops.messages_library import as_messages, gspmm_arg, heads_first
from sparsetir.ops.operands import Operand, known, resolve
from sparsetir.ops.registry import PLAIN, Context, is_undisturbed, wants_gradient
from sparsetir.ops.structure import Structure
from sparsetir.ops.tensors import check_rows, check_tensor
from sparsetir.planning.vocabulary import reduction
from sparsetir.runtime.refusals import wrong


def spmm(A: object, B: Tensor, reduce: str = "sum", values: Tensor | None = None) -> Tensor:
    """C[i, k] = reduce over the stored j of A[i, j] * B[j, k].

    Parameters
    ----------
    A : sparse (m, n) matrix
        Of any kind that :func:`resolve` takes; without values of its own, such as an edge_index, it
        has ones.
    B : (n, feat) or (n, heads, feat) Tensor
        float16, bfloat16, float32 or float64.
    reduce : str
        "sum" or "add", "mean" (the sum over the number of stored elements of the row), "max" or
        "amax", "min" or "amin"; a row without elements is zero in all of them, and NaN is greater
        and less than all else.
    values : (nnz,) or (nnz, heads) Tensor, optional
        Of B's dtype in the order of A's elements, instead of its own.

    Returns
    -------
    (m, feat) or (m, heads, feat) Tensor
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
    if not isinstance(B, Tensor) or B.dim() == 2:
        found = again(A, B, reduce, values)
        if found is None:
            found = sum_of_new(A, B, reduce, values)
        if found is not None:
            return found
    named = reduction("spmm", reduce)
    if named != reduce:
        return spmm(A, B, named, values)
    _check_operand("spmm", "B", B, (2, 3))
    return _product("spmm", _operand("spmm", A, values, B), B, reduce)


def spmv(A: object, x: Tensor, reduce: str = "sum", values: Tensor | None = None) -> Tensor:
    """y[i] = reduce over the stored j of A[i, j] * x[j]; :func:`spmm` for vectors.

    Parameters
    ----------
    A, reduce, values
        As for :func:`spmm`.
    x : (n,) or (n, heads) Tensor
        The vector, or one for each head.

    Returns
    -------
    (m,) or (m, heads) Tensor
    """
    reduce = reduction("spmv", reduce)
    _check_operand("spmv", "x", x, (1, 2))
    B = x.unsqueeze(-1)
    return _product("spmv", _operand("spmv", A, values, B), B, reduce).squeeze(-1)


def sddmm(A: object, X: Tensor, Y: Tensor) -> Tensor:
    """OUT[e] = sum over k of X[i, k] * Y[j, k] for each element e = (i, j) of A.

    Parameters
    ----------
    A : sparse (m, n) matrix
        As for :func:`spmm`; its values play no part.
    X : (m, feat) or (m, heads, feat) Tensor
        For the rows.
    Y : (n, feat) or (n, heads, feat) Tensor
        For the columns.

    Returns
    -------
    (nnz,) or (nnz, heads) Tensor
        In the order of A's elements, to be `values` of other operators. Differentiable with respect
        to X and Y any number of times.

    Notes
    -----
    SparseTIR, section 4.2.2.
    """
    _check_operand("sddmm", "X", X, (2, 3))
    _check_operand("sddmm", "Y", Y, (2, 3), like=X)
    operand = resolve(A, None, (X.shape[0], Y.shape[0]), "sddmm")
    check_rows("sddmm", "X", X, operand.col.device, operand.m)
    check_rows("sddmm", "Y", Y, operand.col.device, operand.n)
    heads = {x.shape[1] for x in (X, Y) if x.dim() == 3}
    if X.shape[-1] != Y.shape[-1] or len(heads) > 1:
        expected = (operand.n, *X.shape[1:])
        raise wrong("sddmm", "Y", f"shape {expected} as 'X'", tuple(Y.shape))
    X, Y = (_heads_first(x, *heads) for x in (X, Y))
    found = library.sddmm(operand.rowptr, operand.col, X, Y)
    return found.t() if heads else found


def spmm_by_heads(A: Operand, x: Tensor, reduce: str, values: Tensor | None = None) -> Tensor:
    """:func:`spmm` where heads come first, as layers have them: x (n, feat) or (heads, n, feat),
    values (nnz,) or (heads, nnz), and the result likewise."""
    if x.dim() == 2 and (values is None or values.dim() == 1):
        return spmm(A, x, reduce, values)
    found = again(A, x, reduce, values)
    if found is not None:
        return found
    values = A.values if values is None else values
    if values is not None and values.dim() == 2 and x.dim() == 2:
        x = x.expand(values.shape[0], *x.shape)
    elif values is not None and values.dim() == 1:
        values = values.expand(x.shape[0], *values.shape)
    return _multiplied(A._replace(values=values), x, reduce)


def _operand(who: str, A: object, values: Tensor | None, B: Tensor) -> Operand:
    """A for a product with B; edges without a size are of a square matrix."""
    return operand_like(who, A, values, (B.shape[0], B.shape[0]), B)


def operand_like(
    who: str, A: object, values: Tensor | None, shape: tuple[int, int] | None, like: Tensor | None
) -> Operand:
    """A as :func:`resolve` gives it; values that no tensor holds are as the dense operand is."""
    operand = resolve(A, values, shape, who)
    own = operand.values
    if values is None and own is not None and like is not None and _is_of_host(A):
        operand = operand._replace(values=own.to(like.device, like.dtype))
    return operand


def _is_of_host(A: object) -> bool:
    """Whether it is a matrix whose values no tensor holds, and have no gradients."""
    return isinstance(A, SparseMatrix | str | PathLike) or issparse(A)


def _product(who: str, operand: Operand, B: Tensor, reduce: str) -> Tensor:
    rowptr, col, _, n, values = operand
    check_rows(who, "x" if who == "spmv" else "B", B, col.device, n)
    if values is not None:
        _check_values(who, values, B, col.shape[-1])
    if values is not None and values.dim() == 2:
        heads = values.shape[1]
        operand = operand._replace(values=values.t())
        return _multiplied(operand, _heads_first(B, heads), reduce).transpose(0, 1)
    if B.dim() == 2:
        return _multiplied(operand, B, reduce)
    found = _multiplied(operand, B.flatten(1), reduce)  # heads that share the values are features
    return found.reshape(found.shape[0], *B.shape[1:])


def _heads_first(x: Tensor, *heads: int) -> Tensor:
    """(heads, rows, feat) of (rows, heads, feat), or of (rows, feat) where there are heads."""
    if x.dim() == 3:
        return x.transpose(0, 1)
    return x.expand(*heads, *x.shape) if heads else x


def _multiplied(operand: Operand, B: Tensor, reduce: str) -> Tensor:
    """The product, where heads of values and B, if any, come first."""
    rowptr, col, _, _, values = operand
    if reduce in ("max", "min") and wants_gradient(B, values):
        u, e, op = as_messages(values, B)
        found, _ = gspmm_arg(rowptr, col, u, e, B.shape[-2], op, reduce)
        return heads_first(found, B)
    return library.spmm(rowptr, col, values, B, reduce)


def _check_operand(
    who: str, name: str, x: object, dims: tuple[int, int], like: Tensor | None = None
) -> None:
    x = check_tensor(who, name, x, like)
    if x.dim() not in dims:
        raise wrong(
            who, name, f"{dims[0]} dimensions, or {dims[1]} with heads", f"shape {tuple(x.shape)}"
        )


def _check_values(who: str, values: Tensor, B: Tensor, nnz: int) -> None:
    check_tensor(who, "values", values, like=B)
    dims = values.dim()
    fits = dims in (1, 2) and values.shape[0] == nnz
    if not fits or (dims == 2 and B.dim() == 3 and values.shape[1] != B.shape[1]):
        heads = B.shape[1:-1]
        expected = f"({nnz},) or ({nnz}, {heads[0] if heads else 'heads'})"
        raise wrong(who, "values", f"shape {expected}", tuple(values.shape))


def again(A: object, B: Any, reduce: str, values: Any) -> Tensor | None:
    """What :func:`sparsetir.ops.spmm` gives, where one like it was made before.

    All checks of a first call go by sizes, types and the pattern: where they are those of an
    earlier call, they need not be made again, and the kernel itself refuses tensors that do not
    fit. Nothing is remembered by the identity of an object alone.

    None for all else, and where anything might be wrong: the other way then says what it is.
    """
    if not is_undisturbed() or type(B) not in PLAIN or B.dim() < 2:
        return None
    try:
        found = known(A, B.shape[-2])
    except RuntimeError:  # of tensors without memory
        return None
    if found is None:
        return None
    (rowptr, col, structure), own = found
    if values is None:
        values = own
    gradient = B.requires_grad
    if values is not None:
        if type(values) not in PLAIN:
            return None
        gradient = gradient or values.requires_grad
    if gradient and torch.is_grad_enabled():
        if reduce != "sum":
            return None
        if structure.has_run("spmm", (B,), values, reduce):
            return _Product.apply(structure, rowptr, col, values, B)
        return None
    return structure.again("spmm", (B,), values, reduce)


class _Product(torch.autograd.Function):
    """C = A B and its gradients on a structure that is known."""

    @staticmethod
    def forward(
        ctx: Context,
        structure: Structure,
        rowptr: Tensor,
        col: Tensor,
        values: Tensor | None,
        b: Tensor,
    ) -> Tensor:
        ctx.others = (structure,)
        # Torch tells when one of them was written before the backward pass.
        ctx.save_for_backward(rowptr, col, values, b)
        found = structure.again("spmm", (b,), values)
        return library.spmm.kernel(rowptr, col, values, b, "sum") if found is None else found

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        rowptr, col, values, b = ctx.saved_tensors
        for_values, for_b = ctx.needs_input_grad[3:]
        (grad,), (structure,) = grads, ctx.others
        of_values = of_b = None
        if not torch.is_grad_enabled() and is_undisturbed():
            grad = grad if grad.is_contiguous() else grad.contiguous()
            if for_values:
                of_values = structure.again("sddmm", (grad, b))
            if for_b:
                of_b = structure.transposed.again("spmm", (grad,), values)
        if for_values and of_values is None:
            of_values = library.sddmm(rowptr, col, grad, b)
        if for_b and of_b is None:
            of_b = library.spmm_transposed(rowptr, col, values, grad, b.shape[-2])
        return None, None, None, of_values, of_b
