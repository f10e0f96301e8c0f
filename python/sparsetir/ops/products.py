"""Sparse products of torch tensors with gradients, as operators and as functions that take matrices
of all kinds.

In the operators, `torch.ops.sparsetir.*`, `rowptr` and `col` are a pattern as
:func:`sparsetir.ops.structure.structure_of` takes it, values of elements are read and returned in
the order of `col`, and heads are a first dimension. The functions have heads second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import torch
from scipy.sparse import issparse
from torch import Tensor

from sparsetir.data.scipy_patterns import adopt_matrix
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.ops.cache import memory_key
from sparsetir.ops.messages_library import (
    as_messages,
    gradients_in_steps,
    gradients_of_product,
    gspmm_arg,
    heads_first,
    mean_gradient,
    nodes_first,
    product_gradients,
)
from sparsetir.ops.operands import Operand, arrays_of, known, resolve, row_pointers, tensor_of
from sparsetir.ops.registry import (
    PLAIN,
    Context,
    Gradients,
    Operation,
    Operator,
    is_plain_eager,
    wants_gradient,
)
from sparsetir.ops.structure import PatternCopy, Structure, structure_of
from sparsetir.ops.tensors import (
    INDEX_DTYPES,
    check_csr,
    check_dense,
    check_edges,
    check_rows,
    check_tensor,
    check_values,
    launch,
    may_be_recorded,
    plain_tensor,
    target_of,
)
from sparsetir.planning.plan import multiply_once
from sparsetir.planning.request import reduction
from sparsetir.planning.run_plan import finder
from sparsetir.reductions import EXTREMA, LINEAR, REDUCERS
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.edge_sums import EdgeSums
from sparsetir.schedules.targets import l2_bytes, l3_bytes
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.errors import StructureError


def _checked_product(
    caller: str,
    structure: Structure,
    name: str,
    b: Tensor,
    values: Tensor | None,
    reduce: str = "sum",
) -> Tensor:
    """The product with a matrix, checked unless a call like it was made before."""
    out = structure.fast_path("spmm", (b,), values, reduce)
    if out is not None:
        return out
    check_dense(caller, name, b, structure, structure.n)
    if values is not None:
        check_values(caller, values, b, structure)
    return structure.run("spmm", (b,), values, reduce)


@dataclass
class Spmm(Operation[Tensor]):
    """C[i, k] = reduce over the elements (i, j) of A[i, j] * B[j, k]."""

    rowptr: Tensor
    col: Tensor
    values: Tensor | None
    b: Tensor
    reduce: str

    @property
    def copies(self) -> bool:
        return REDUCERS[self.reduce].steps is not None

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.b.shape[-2], "spmm")
        return _checked_product("spmm", structure, "b", self.b, self.values, self.reduce)

    def fake(self) -> Tensor:
        b = self.b
        return b.new_empty((*b.shape[:-2], self.rowptr.shape[0] - 1, b.shape[-1]))

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, values, b, reduce = self.rowptr, self.col, self.values, self.b, self.reduce
        if reduce in EXTREMA:
            u, e, op = as_messages(values, b)
            _, place = gspmm_arg(rowptr, col, u, e, b.shape[-2], op, reduce)
            return gradients_of_product(col, values, b, heads_first(place, b), grad)
        if REDUCERS[reduce].steps is not None:
            u, e, op = as_messages(values, b)
            by_rows = map(nodes_first, (self.results, grad))
            of = gradients_in_steps(rowptr, col, u, e, b.shape[-2], op, reduce, *by_rows)
            return product_gradients(of, b)
        if REDUCERS[reduce].is_scaled:
            grad = mean_gradient(grad, (rowptr[1:] - rowptr[:-1])[:, None])
        return {
            "values": lambda: SDDMM(rowptr, col, grad, b),
            "b": lambda: SPMM_TRANSPOSED(rowptr, col, values, grad, b.shape[-2]),
        }


SPMM = Operator("spmm", Spmm)


@dataclass
class SpmmTransposed(Operation[Tensor]):
    """B = A^T C."""

    rowptr: Tensor
    col: Tensor
    values: Tensor | None
    c: Tensor
    n: int

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.n).transposed
        return _checked_product("spmm_transposed", structure, "c", self.c, self.values)

    def fake(self) -> Tensor:
        return self.c.new_empty((*self.c.shape[:-2], self.n, self.c.shape[-1]))

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, values, c = self.rowptr, self.col, self.values, self.c
        return {
            "values": lambda: SDDMM(rowptr, col, c, grad),
            "c": lambda: SPMM(rowptr, col, values, grad, "sum"),
        }


SPMM_TRANSPOSED = Operator("spmm_transposed", SpmmTransposed)


@dataclass
class Sddmm(Operation[Tensor]):
    """OUT[e] = X[i] . Y[j] for each element e = (i, j) of A."""

    rowptr: Tensor
    col: Tensor
    x: Tensor
    y: Tensor

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.y.shape[-2], "sddmm")
        out = structure.fast_path("sddmm", (self.x, self.y))
        if out is not None:
            return out
        check_dense("sddmm", "x", self.x, structure, structure.m)
        check_dense("sddmm", "y", self.y, structure, structure.n, like=self.x)
        return structure.run("sddmm", (self.x, self.y))

    def fake(self) -> Tensor:
        return self.x.new_empty((*self.x.shape[:-2], self.col.shape[-1]))

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, x, y = self.rowptr, self.col, self.x, self.y
        return {
            "x": lambda: SPMM(rowptr, col, grad, y, "sum"),
            "y": lambda: SPMM_TRANSPOSED(rowptr, col, grad, x, y.shape[-2]),
        }


SDDMM = Operator("sddmm", Sddmm)


# -- functions -----------------------------------------------------------------------------------


def spmm(A: object, B: Tensor, reduce: str = "sum", values: Tensor | None = None) -> Tensor:
    """C[i, k] = reduce over the stored j of A[i, j] * B[j, k].

    Parameters
    ----------
    A : sparse (m, n) matrix
        Any kind that :func:`resolve` accepts; without values of its own, such as an edge_index, it
        has ones.
    B : (n, feat) or (n, heads, feat) Tensor
        float16, bfloat16, float32 or float64.
    reduce : str
        "sum" or "add", "mean" (the sum over the number of stored elements of the row), "max" or
        "amax", "min" or "amin", or "logsumexp", whose gradient stores those of terms. A row without
        elements gives zero; NaN is both the greatest and the least.
    values : (nnz,) or (nnz, heads) Tensor, optional
        Values of B's dtype in the order of A's elements, instead of its own. With B (n, feat),
        (nnz, 1) is refused: flatten weights of PyG; for one head pass B as (n, 1, feat).

    Returns
    -------
    (m, feat) or (m, heads, feat) Tensor
        With heads if B or the values have them. Differentiable with respect to B and the values
        any number of times; the gradient of a maximum goes to the first element that has it.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.

    Notes
    -----
    Sums are in float32, for float64 in float64, and in the same order: on a CPU results are the
    same in each run. Once a process has multiplied by some matrices, the first products with other
    edges visit them unsorted, and the first product with another matrix makes no plan, so that
    their last bits may differ from those of later products with the same matrix; not under
    `torch.use_deterministic_algorithms(True)`.
    (SparseTIR, section 4.2.1.)
    """
    if not isinstance(B, Tensor) or B.dim() == 2:
        seen = _seen(A, B)
        if seen is None:
            out = _product_of_new("spmm", A, B, reduce, values)
        else:
            out = _product_of_seen(seen, B, reduce, values)
        if out is not None:
            return out
    named = reduction("spmm", reduce)
    if named != reduce:
        return spmm(A, B, named, values)
    _check_operand("spmm", "B", B, (2, 3))
    return _product("spmm", _operand("spmm", A, values, B), B, reduce, values is None)


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
    seen, passed = _seen(A, B), values is not None
    out = _product_of_new("spmv", A, B, reduce, values) if seen is None else None
    if out is None:
        if seen is None:
            operand = _operand("spmv", A, values, B)
        else:  # its tensors are not compared again
            (rowptr, col, structure), own_values = seen
            if values is None and own_values is not None:
                values = own_values.to(B.dtype) if _is_outside_torch(A) else own_values
            operand = Operand(rowptr, col, *structure.shape, values)
        out = _product("spmv", operand, B, reduce, not passed)
    return out.squeeze(-1)


def sddmm(A: object, X: Tensor, Y: Tensor) -> Tensor:
    """OUT[e] = sum over k of X[i, k] * Y[j, k] for each element e = (i, j) of A.

    Parameters
    ----------
    A : sparse (m, n) matrix
        As for :func:`spmm`; its values are ignored.
    X : (m, feat) or (m, heads, feat) Tensor
        Features of the rows.
    Y : (n, feat) or (n, heads, feat) Tensor
        Features of the columns.

    Returns
    -------
    (nnz,) or (nnz, heads) Tensor
        In the order of A's elements, as for `values` of other operators. Differentiable with
        respect to X and Y any number of times.

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
    out = SDDMM(operand.rowptr, operand.col, X, Y)
    return out.t() if heads else out


def spmm_by_heads(A: Operand, x: Tensor, reduce: str, values: Tensor | None = None) -> Tensor:
    """:func:`spmm` with heads first, as in layers: x (n, feat) or (heads, n, feat),
    values (nnz,) or (heads, nnz), and the result likewise."""
    if x.dim() == 2 and (values is None or values.dim() == 1):
        return spmm(A, x, reduce, values)
    out = fast_path(A, x, reduce, values)
    if out is not None:
        return out
    values = A.values if values is None else values
    if values is not None and values.dim() == 2 and x.dim() == 2:
        x = x.expand(values.shape[0], *x.shape)
    elif values is not None and values.dim() == 1:
        values = values.expand(x.shape[0], *values.shape)
    return _multiplied(A._replace(values=values), x, reduce)


def _operand(caller: str, A: object, values: Tensor | None, B: Tensor) -> Operand:
    """Resolve A for a product with B; edges without a size make a square matrix."""
    return operand_like(caller, A, values, (B.shape[0], B.shape[0]), B)


def operand_like(
    caller: str,
    A: object,
    values: Tensor | None,
    shape: tuple[int, int] | None,
    like: Tensor | None,
) -> Operand:
    """Resolve A; values from outside torch get the device and dtype of `like`."""
    operand = resolve(A, values, shape, caller)
    own_values = operand.values
    if values is None and own_values is not None and like is not None and _is_outside_torch(A):
        operand = operand._replace(values=own_values.to(like.device, like.dtype))
    return operand


def _is_outside_torch(A: object) -> bool:
    """Whether A's values are outside torch, and so have no gradients."""
    return isinstance(A, (SparseMatrix, str, PathLike)) or issparse(A)


def _product(
    caller: str, operand: Operand, B: Tensor, reduce: str, of_matrix: bool = False
) -> Tensor:
    """The product of an operand; of_matrix : whether its values are those of the argument 'A'."""
    rowptr, col, _, n, values = operand
    check_rows(caller, "x" if caller == "spmv" else "B", B, col.device, n)
    if values is not None:
        check_tensor(caller, "A" if of_matrix else "values", values, B)
        _check_values(caller, values, B, col.shape[-1])
    if values is not None and values.dim() == 2:
        heads = values.shape[1]
        operand = operand._replace(values=values.t())
        return _multiplied(operand, _heads_first(B, heads), reduce).transpose(0, 1)
    if B.dim() == 2:
        return _multiplied(operand, B, reduce)
    out = _multiplied(operand, B.flatten(1), reduce)  # heads that share the values are features
    return out.reshape(out.shape[0], *B.shape[1:])


def _heads_first(x: Tensor, *heads: int) -> Tensor:
    """Transpose x (rows, heads, feat) to (heads, rows, feat), or expand (rows, feat) by `heads`."""
    if x.dim() == 3:
        return x.transpose(0, 1)
    return x.expand(*heads, *x.shape) if heads else x


def _multiplied(operand: Operand, B: Tensor, reduce: str) -> Tensor:
    """The product of values and B whose heads, if any, come first."""
    rowptr, col, _, _, values = operand
    if reduce in EXTREMA and wants_gradient(B, values):
        u, e, op = as_messages(values, B)
        out, _ = gspmm_arg(rowptr, col, u, e, B.shape[-2], op, reduce)
        return heads_first(out, B)
    return SPMM(rowptr, col, values, B, reduce)


def _check_operand(
    caller: str, name: str, x: object, dims: tuple[int, int], like: Tensor | None = None
) -> None:
    x = check_tensor(caller, name, x, like)
    if x.dim() not in dims:
        raise wrong(
            caller,
            name,
            f"{dims[0]} dimensions, or {dims[1]} with heads",
            f"shape {tuple(x.shape)}",
        )


def _check_values(caller: str, values: Tensor, B: Tensor, nnz: int) -> None:
    if values.device != B.device:
        raise wrong(caller, "values", f"to be on {B.device} as the pattern", values.device)
    dims = values.dim()
    fits = dims in (1, 2) and values.shape[0] == nnz
    if not fits or (dims == 2 and B.dim() == 3 and values.shape[1] != B.shape[1]):
        heads = B.shape[1:-1]
        expected = f"({nnz},) or ({nnz}, {heads[0] if heads else 'heads'})"
        raise wrong(caller, "values", f"shape {expected}", tuple(values.shape))
    if dims == B.dim() == 2 and values.shape[1] == 1:  # edge_attr of PyG, or one head?
        name, one = ("x", "(n, 1)") if caller == "spmv" else ("B", "(n, 1, feat)")
        expected = f"shape ({nnz},), as values.flatten(), or for one head '{name}' of shape {one}"
        raise wrong(caller, "values", expected, tuple(values.shape))


# -- calls like earlier ones ---------------------------------------------------------------------


def fast_path(A: object, B: Any, reduce: str, values: Any) -> Tensor | None:
    """The result of :func:`sparsetir.ops.spmm` on a short path, if a call like it was made before.

    The checks of a first call depend on sizes, types and the pattern alone: if these are those of
    an earlier call, the checks need not be repeated, and the kernel itself refuses tensors that do
    not fit. Nothing is remembered by the identity of an object alone.

    None for other calls, and for any that may be invalid, which the full path reports.
    """
    seen = _seen(A, B)
    return None if seen is None else _product_of_seen(seen, B, reduce, values)


def _product_of_seen(
    seen: tuple[PatternCopy, Tensor | None], B: Any, reduce: str, values: Any
) -> Tensor | None:
    """:func:`fast_path`, from the result of :func:`_seen`."""
    (rowptr, col, structure), own_values = seen
    if values is None:
        values = own_values
    gradient = B.requires_grad
    if values is not None:
        if type(values) not in PLAIN or values.is_nested:
            return None
        gradient = gradient or values.requires_grad
    if gradient and torch.is_grad_enabled():
        if reduce != "sum":
            return None
        if structure.has_run("spmm", (B,), values, reduce):
            return _Product.apply(structure, rowptr, col, values, B)
        return None
    return structure.fast_path("spmm", (B,), values, reduce)


def _seen(A: object, B: Any) -> tuple[PatternCopy, Tensor | None] | None:
    """The result of :func:`known` for a product with B, unless something observes operations."""
    if not is_plain_eager() or type(B) not in PLAIN or B.dim() < 2:
        return None
    try:
        return known(A, B.shape[-2])
    except RuntimeError:  # tensors without memory
        return None


class _Product(torch.autograd.Function):
    """C = A B and its gradients on a structure seen before."""

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
        # Torch raises if one of them is written before the backward pass.
        ctx.save_for_backward(rowptr, col, values, b)
        out = structure.fast_path("spmm", (b,), values)
        return SPMM.kernel(rowptr, col, values, b, "sum") if out is None else out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        rowptr, col, values, b = ctx.saved_tensors
        for_values, for_b = ctx.needs_input_grad[3:]
        (grad,), (structure,) = grads, ctx.others
        of_values = of_b = None
        if not torch.is_grad_enabled() and is_plain_eager():
            grad = grad if grad.is_contiguous() else grad.contiguous()
            if for_values:
                of_values = structure.fast_path("sddmm", (grad, b))
            if for_b:
                of_b = structure.transposed.fast_path("spmm", (grad,), values)
        if for_values and of_values is None:
            of_values = SDDMM(rowptr, col, grad, b)
        if for_b and of_b is None:
            of_b = SPMM_TRANSPOSED(rowptr, col, values, grad, b.shape[-2])
        return None, None, None, of_values, of_b


# -- products with new patterns --------------------------------------------------------------------
#
# Edges of mini-batches are new in each step. Sorting edges and keeping their structure takes as
# long as several sums over unsorted edges. So the first products with a tensor of edges visit them
# unsorted, until the time lost by that reaches the time of sorting. The first product with a matrix
# in rows, which may be the last, makes no plan.

SUMMED = (torch.float32, torch.float64)
CPU = torch.device("cpu")
MOST = 1 << 20  # edges; beyond, sorting pays as products then use all threads
# Patterns that a process sorts, or makes a plan for, at once: if there are no others, the kernel
# for unsorted edges, or for all matrices in rows, is not worth compiling.
SORTED, PLANNED = 1, 4
# The time of sorting, by call and by edge, and the extra time of an unsorted sum, forward and
# backward, by feature of an edge while B and C fit the L2 cache; nanoseconds on Zen 3.
SORT, SORT_EDGE, FEATURE = 500_000, 25, 0.2
MOST_SUMS = 8  # with the same edges
MOST_COUNTED = 256


# Numbers of calls with edges, by their place and version, while their memory lives.
_call_counts: WeakKeyDictionary[torch.UntypedStorage, dict[object, int]] = WeakKeyDictionary()
_sorted = 0


def _product_of_new(caller: str, A: Any, B: Any, reduce: str, values: Any) -> Tensor | None:
    """A product with a pattern that is not worth preparing.

    None for other calls, and for any that may be invalid, which the full path reports. The pattern
    is none that :func:`_seen` knows.
    """
    if not is_plain_eager() or type(B) not in PLAIN or B.is_nested or B.dim() != 2:
        return None
    if not _is_plain(B, SUMMED) or torch.are_deterministic_algorithms_enabled():
        return None
    out = _sum_of_new(A, B, reduce, values)
    return _rows_of_new(caller, A, B, reduce, values) if out is None else out


def _sum_of_new(A: Any, B: Any, reduce: str, values: Any) -> Tensor | None:
    """:func:`_product_of_new` for edges, which are not sorted."""
    if reduce not in LINEAR:
        return None
    edges, size = A if type(A) is tuple and len(A) == 2 else (A, len(B))
    n, m = size if type(size) is tuple and len(size) == 2 else (size, size)
    in_rows = False  # whether rows come first
    if type(A) is Tensor and A.layout is torch.sparse_coo and A.dim() == 2 and A.is_coalesced():
        in_rows = True
        edges, (m, n), values = A.indices(), A.shape, A.values() if values is None else values
    if type(edges) is not Tensor or edges.layout is not torch.strided or edges.is_nested:
        return None
    if edges.dim() != 2:
        return None
    (ends, nnz), (rows, feat) = edges.shape, B.shape
    if type(m) is not int or type(n) is not int or m < 1 or n != rows or ends != 2:
        return None
    if not 0 < nnz <= MOST or not feat:
        return None
    if not _is_plain(edges, INDEX_DTYPES):
        return None
    if values is not None:
        if type(values) not in PLAIN or not _is_plain(values, (B.dtype,)):
            return None
        if values.shape != (nnz,) or values.requires_grad:
            return None
    if in_rows and wants_gradient(B):
        return None
    counts = (1, PLANNED) if in_rows else (_most_sums(nnz, m + n, B), SORTED)
    if not _is_new(edges, *counts):
        return None
    options = {"dtype": dtype_name(B), "reduce": reduce, "heads": None, "target": target_of(CPU)}
    if may_be_recorded("spmm", (m, n), nnz, feat, **options):
        return None
    try:
        check_edges("spmm", edges, *((n, m) if in_rows else (m, n)))
    except StructureError:
        return None
    if B.requires_grad and torch.is_grad_enabled():
        # A copy, so that writes to the edges meanwhile do not change the gradient.
        return _Sum.apply(edges.clone(), values, B, m, reduce)
    return _summed(edges, values, B, m, reduce == "mean", in_rows)[0]


def _is_plain(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether x's memory on the host holds its numbers unmodified, in one of the types."""
    plain = x.is_cpu and x.dtype in dtypes and not x.is_nested  # nested tensors have no shape
    return plain and not x.is_neg() and not x._is_zerotensor()


def _rows_of_new(caller: str, A: Any, B: Any, reduce: str, values: Any) -> Tensor | None:
    """:func:`_product_of_new` for a matrix in rows, of which it is the first product."""
    if reduce != "sum":
        return None
    rows = _rows_of(caller, A, B.dtype)
    if rows is None:
        return None
    rowptr, col, own_values = rows
    values = own_values if values is None else values
    (m, n), nnz, feat = A.shape, len(col), B.shape[1]
    fits = type(values) in PLAIN and _is_plain(values, (B.dtype,)) and values.shape == col.shape
    if not fits or n != len(B) or not nnz * feat or wants_gradient(B, values):
        return None
    if rowptr.dtype != col.dtype or not _is_new(col, 1, PLANNED):
        return None
    options = {"dtype": dtype_name(B), "reduce": reduce, "heads": None, "target": target_of(CPU)}
    if may_be_recorded("spmm", (m, n), nnz, feat, **options):
        return None
    check_csr(caller, rowptr, col, n)
    out = B.new_empty(m, feat)
    rowptr, col, values, B = map(plain_tensor, (rowptr, col, values, B))
    multiply_once(rowptr, col, values, B, out)
    return out


def _rows_of(caller: str, A: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
    """Row pointers, columns and values of a matrix in rows on the host; None for other kinds."""
    if type(A) is Tensor:
        in_rows = A.layout is torch.sparse_csr and A.dim() == 2 and A.is_cpu
        return (A.crow_indices(), A.col_indices(), A.values()) if in_rows else None
    if issparse(A) and len(A.shape) == 2:
        A = adopt_matrix(caller, "A", A)
    if not isinstance(A, SparseMatrix):
        return None
    return *arrays_of(A), tensor_of(A.values).to(dtype)


def _most_sums(nnz: int, nodes: int, b: Tensor) -> float:
    """The number of sums over edges after which sorting them would have taken less time."""
    row = b.shape[1] * b.itemsize
    more = FEATURE / 4 * row * (1 + (nodes * row > l2_bytes()) + 2 * (nodes * row > l3_bytes()))
    return min(MOST_SUMS, (SORT + SORT_EDGE * nnz) / (more * nnz))


def _is_new(pattern: Tensor, most: float, prepared: int) -> bool:
    """Whether a pattern was seen at most `most` times, with this call, which is counted.

    pattern : the tensor that it is recognised by, for which nothing is kept
    prepared : number of a process's first patterns that are prepared at once
    """
    global _sorted
    counts = _call_counts.setdefault(pattern.untyped_storage(), {})
    key = memory_key(pattern), -1 if pattern.is_inference() else pattern._version
    if key not in counts:
        if _sorted < prepared:
            _sorted += 1
            return False
        if len(counts) >= MOST_COUNTED:
            counts.clear()
    counts[key] = count = counts.get(key, 0) + 1
    return count <= most


def _summed(
    edges: Tensor, values: Tensor | None, b: Tensor, m: int, mean: bool, at_first: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Sums at targets, (m, feat), and their edge counts if `mean`; at_first : sum at `edges[0]`."""
    sources, targets = edges.unbind()
    if at_first:
        sources, targets = targets, sources
    out, count = b.new_empty(m, b.shape[1]), b.new_empty(m) if mean else None
    types = dtype_name(b), dtype_name(edges)
    kernel = _finder(b.shape[1], *types, values is not None, mean)()
    arrays = {"source": sources, "target": targets, "b": b, "c": out, "count": count, "w": values}
    launch(kernel, {**arrays, "m": m, "n": len(b), "nnz": edges.shape[1], "feat": b.shape[1]})
    return out, count


@lru_cache(256)
def _finder(feat: int, *problem: Any) -> Callable[[], Kernel]:
    return finder(Choices({"zero.size": feat}), EdgeSums(*problem), target_of(CPU))


class _Sum(torch.autograd.Function):
    """The sums, and their gradient with respect to B."""

    @staticmethod
    def forward(
        ctx: Context, edges: Tensor, values: Tensor | None, b: Tensor, m: int, reduce: str
    ) -> Tensor:
        out, count = _summed(edges, values, b, m, reduce == "mean")
        ctx.save_for_backward(edges, values, count)
        ctx.others = (len(b),)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        (grad,), (edges, values, count) = grads, ctx.saved_tensors
        m, (n,) = len(grad), ctx.others
        if count is not None:
            grad = mean_gradient(grad, count[:, None])
        if torch.is_grad_enabled() or not is_plain_eager():
            rowptr = row_pointers(edges, m, n)
            of_b = SPMM_TRANSPOSED(rowptr, edges, values, grad, n)
        else:
            of_b, _ = _summed(edges, values, grad, n, False, at_first=True)
        return None, None, of_b, None, None
