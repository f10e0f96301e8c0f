"""Operators on sparse tensors of torch whose result is sparse, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetir.data.scipy_patterns import adopt_matrix, known_stored
from sparsetir.data.sources import is_sparse
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.ops.operands import Prepared, pattern_and_values, resolve, tensor_of
from sparsetir.ops.registry import Context, is_plain_eager, wants_gradient
from sparsetir.ops.structure import Structure, structure_of
from sparsetir.ops.tensors import plain_tensor
from sparsetir.planning.sparse_results import (
    OF_BOOLS,
    PRODUCTS,
    Csr,
    check_shapes,
    combined,
    csr,
    csr_of,
    product,
    product_gradient,
    result_of,
)
from sparsetir.reductions import check_semiring
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.sparse_results import KRON


def spgemm(A: object, B: object, semiring: str = "plus_times", mask: object = None) -> Tensor:
    """The product of two sparse matrices, which is sparse.

    Parameters
    ----------
    A, B : sparse (m, l) and (l, n) matrices
        Any kind that :func:`resolve` accepts, on the CPU; each element once. Without values they
        have ones.
    semiring : str
        A semiring of :meth:`sparsetir.SparseMatrix.matmul`.
    mask : sparse (m, n) matrix, optional
        The pattern of the result: only its elements are computed. Where the product stores nothing,
        they are the semiring's zero.

    Returns
    -------
    (m, n) Tensor
        In CSR, with sorted columns, each once. Differentiable with respect to values of A and B for
        "plus_times"; once, like the values of torch's sparse tensors.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.
    NotImplementedError
        For gradients of another semiring.

    Notes
    -----
    Not traced by torch.compile: it breaks the graph. With an earlier result as the mask, only the
    numeric phase runs.
    """
    return _computed("matmul", {"A": A, "B": B}, semiring, mask)


def inner(A: object, B: object, semiring: str = "plus_times", mask: object = None) -> Tensor:
    """The inner products of rows of two sparse matrices, A @ B.T, which is sparse.

    Parameters
    ----------
    A, B : sparse (m, n) and (p, n) matrices
        Matrices as in :func:`spgemm`.
    semiring : str
        A semiring of :meth:`sparsetir.SparseMatrix.matmul`.
    mask : sparse (m, p) matrix, optional
        The pairs of rows to compute, as in :func:`spgemm`.

    Returns
    -------
    (m, p) Tensor
        In CSR, with gradients, as in :func:`spgemm`.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.
    NotImplementedError
        For gradients of another semiring.
    """
    return _computed("inner", {"A": A, "B": B}, semiring, mask)


def vecdot(A: object, B: object) -> Tensor:
    """The inner product of each row of a sparse matrix with that of another one.

    Parameters
    ----------
    A, B : sparse (m, n) matrices
        Matrices as in :func:`spgemm`.

    Returns
    -------
    (m,) Tensor
        Dense, like `torch.linalg.vecdot`. Differentiable with respect to values of A and B, once.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.
    """
    return _computed("vecdot", {"A": A, "B": B})


def kron(A: object, B: object) -> Tensor:
    """The Kronecker product of two sparse matrices: blocks of B, each times an element of A.

    Parameters
    ----------
    A, B : sparse (m, n) and (p, q) matrices
        Matrices as in :func:`spgemm`.

    Returns
    -------
    (m * p, n * q) Tensor
        In CSR, as in :func:`spgemm`. Differentiable with respect to values of A and B, once.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.
    """
    return _computed(KRON, {"A": A, "B": B})


def sub(A: object, B: object) -> Tensor:
    """The difference of sparse matrices; like :func:`add`.

    Parameters
    ----------
    A, B : sparse (m, n) matrices
        Matrices as in :func:`spgemm`.

    Returns
    -------
    (m, n) Tensor
    """
    return _elementwise("subtract", A, B)


def _by_element(name: str, op: str, what: str, stored: str) -> Callable[..., Tensor]:
    """Make a function that combines sparse matrices element by element."""

    def function(*matrices: object) -> Tensor:
        return _elementwise(op, *matrices)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""The {what} of two to eight sparse matrices, in one pass.

    Parameters
    ----------
    *matrices : sparse (m, n) matrices
        Matrices as in :func:`spgemm`.

    Returns
    -------
    (m, n) Tensor
        In CSR; stores the elements that {stored} store. Differentiable with respect to all values.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.
    """
    return function


add = _by_element("add", "add", "sum", "any of them")
mul = _by_element("mul", "multiply", "elementwise product", "all of them")
maximum, minimum = (
    _by_element(name, name, f"elementwise {name}, with 0 for missing elements,", "any of them")
    for name in ("maximum", "minimum")
)


DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip
OF_VALUES = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "maximum": torch.maximum,
    "minimum": torch.minimum,
}  # fmt: skip


# Names of operators that differ from those of kernels.
NAMES = {"matmul": "spgemm", "subtract": "sub", "multiply": "mul"}


class _Matrix:
    """A matrix with sorted columns: `csr`, `structure` and tensors are in the same order.

    Values in `csr` are NumPy's if the matrix is not in tensors, and so has no gradient.
    """

    csr: Csr

    def __init__(self, caller: str, name: str, A: object, undisturbed: bool) -> None:
        stored = None if isinstance(A, Tensor) else known_stored(A)
        if stored is not None and len(stored.pattern.shape) == 2:
            self.csr, self._made_from = csr_of(stored.pattern, stored.values), A
            self.dtype: torch.dtype = getattr(torch, dtype_name(stored.values))
        elif isinstance(A, SparseMatrix) or (
            not isinstance(A, (Tensor, Prepared)) and is_sparse(A)
        ):
            self.csr, self._made_from = csr(adopt_matrix(caller, name, A)), A
            self.dtype = getattr(torch, dtype_name(self.csr.values))
        else:
            seen, values = pattern_and_values(caller, name, A, undisturbed)
            structure = seen.structure
            if not structure.col.is_cpu:
                device = structure.device
                raise wrong(caller, name, "a CPU tensor", device)
            self.structure, order, twice, indptr, indices = structure.derived("in order", _in_order)
            if twice is not None:
                raise wrong(
                    caller, name, "each element once", f"{twice} more than once; coalesce it"
                )
            values = torch.ones(structure.nnz) if values is None else values
            if values.dim() != 1:
                raise wrong(
                    caller,
                    name,
                    "one value of each element",
                    f"values of shape {tuple(values.shape)}",
                )
            values = values if order is None else values.index_select(0, order)
            self.csr, self.dtype = Csr(indptr, indices, values, structure.shape), values.dtype
        if self.dtype not in DTYPES:
            expected = f"values of {', '.join(map(str, DTYPES))}"
            raise wrong(caller, name, expected, self.dtype, TypeError)

    @cached_property
    def structure(self) -> Structure:
        """The structure, which gradients need."""
        rowptr, col, _, n, _ = resolve(self._made_from)
        return structure_of(rowptr, col, n)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """The values as a tensor of a type."""
        values = self.csr.values
        return _cast(values if isinstance(values, Tensor) else tensor_of(values), dtype)


def _in_order(
    structure: Structure,
) -> tuple[Structure, Tensor | None, tuple[int, int] | None, np.ndarray, np.ndarray]:
    """The structure with sorted columns, the positions of its elements in the caller's order,
    (row, column) of a duplicate element or None, and indptr and indices."""
    ready = structure if _steps(structure).min(initial=1) >= 0 else structure.with_columns_in_order
    twice = _steps(ready) == 0
    place = None
    if twice.any():
        at = int(twice.argmax())
        place = int(ready.rows[at]), int(ready.col[at])
    sorted_ = Structure(ready.rowptr, ready.col, ready.shape)
    return sorted_, ready.order, place, *sorted_.pattern[:2]


def _steps(structure: Structure) -> np.ndarray:
    """Differences of successive columns within rows; 1 between rows."""
    indptr, indices, _ = structure.pattern
    steps = np.diff(indices)
    ends = indptr[1:-1]
    steps[ends[(ends > 0) & (ends < len(indices))] - 1] = 1
    return steps


def _transposed(structure: Structure) -> tuple[Structure, Tensor]:
    """The transposed structure, and the positions of its elements in the original."""

    def make(known: Structure) -> tuple[Structure, Tensor]:
        turned = known.transposed
        assert turned.order is not None
        return Structure(turned.rowptr, turned.col, turned.shape), turned.order

    return structure.derived("transposed in order", make)


def _csr(structure: Structure, values: Tensor) -> Csr:
    indptr, indices, shape = structure.pattern
    return Csr(indptr, indices, plain_tensor(values), shape)


def _values(matrix: Csr, dtype: torch.dtype) -> Tensor:
    return _cast(torch.from_numpy(matrix.values), dtype)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype is dtype else values.to(dtype)  # `to` takes a microsecond


def _elementwise(op: str, *matrices: object) -> Tensor:
    if len(matrices) < 2:
        caller = NAMES.get(op, op)
        raise TypeError(f"{caller}: expected two sparse matrices or more, got {len(matrices)}")
    return _computed(op, {f"matrices[{q}]": x for q, x in enumerate(matrices)})


def _computed(*args: Any) -> Tensor:
    """:func:`_run` outside graphs of torch.compile, as the result's nnz depends on data."""
    run: Any = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run
    return run(*args)


def _run(
    op: str, named: dict[str, object], semiring: str = "plus_times", mask: object = None
) -> Tensor:
    """Compute one of `PRODUCTS` or `COMBINED`, or a Kronecker product, of named matrices."""
    caller = NAMES.get(op, op)
    check_semiring(caller, semiring)
    undisturbed = any(isinstance(x, Tensor) for x in named.values()) and is_plain_eager()
    each = [_Matrix(caller, name, x, undisturbed) for name, x in named.items()]
    where = None if mask is None else _Matrix(caller, "mask", mask, undisturbed)
    other = "matrices" if op in OF_VALUES else "B"
    check_shapes(caller, op, [x.csr.shape for x in each], where and where.csr.shape, other)
    dtype = reduce(torch.promote_types, {x.dtype for x in each})
    how, bools = (semiring if op in PRODUCTS else op), dtype is torch.bool
    computed = torch.int8 if bools else dtype
    operands, wanted = [], False
    for x in each:
        indptr, indices, values, shape = x.csr
        if x.dtype is not computed:
            values = x.tensor(computed)
        if isinstance(values, Tensor):
            wanted = wanted or wants_gradient(values)
            values = plain_tensor(values)
        operands.append(Csr(indptr, indices, values, shape))
    if wanted and semiring != "plus_times":
        raise NotImplementedError(f"{caller}: gradients of semiring '{semiring}' are not supported")
    how = OF_BOOLS.get(how, how) if bools else how
    result = result_of(op, how, operands, None if where is None else where.csr)
    if where is None:
        index = torch.from_numpy(result.indptr), torch.from_numpy(result.indices)
    else:
        index = where.structure.rowptr, where.structure.col
    result_values = _values(result, computed)
    if wanted:
        out = where.structure if where else Structure(*index, (result.shape[0], result.shape[1]))
        sides, tensors = [x.structure for x in each], [x.tensor(computed) for x in each]
        result_values = _differentiable(op, tensors, sides, out, result_values, mask is not None)
    result_values = _cast(result_values, dtype)
    if op == "vecdot":
        return result_values
    return compressed(torch.sparse_csr, index, result_values, result.shape)


def compressed(
    layout: torch.layout, index: Sequence[Tensor], values: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """A sparse tensor in CSR or CSC; index : its pointers and indices, which are valid."""
    (pointers, indices), options = index, {"layout": layout, "check_invariants": False}
    if values.requires_grad and torch.is_grad_enabled():
        return _Compressed.apply(values, pointers, indices, shape, options)
    return torch.sparse_compressed_tensor(pointers, indices, values, shape, **options)


def coordinates(index: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A sparse tensor in COO; index : its coordinates, sorted and distinct, in columns."""
    if values.requires_grad and torch.is_grad_enabled():
        return _Coordinates.apply(values, index, shape)
    return torch.sparse_coo_tensor(index, values, shape, is_coalesced=True, check_invariants=False)


class _Coordinates(torch.autograd.Function):
    """A tensor in COO, for whose gradient torch itself looks coordinates up in a hash table."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.others = shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        return coordinates(index, values.detach(), shape)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        (grad,), (index,) = grads, ctx.saved_tensors
        if grad is None:
            return None, None, None
        there = grad.coalesce() if grad.layout is torch.sparse_coo else grad
        if there.layout is not torch.sparse_coo or not torch.equal(there.indices(), index):
            ones = torch.ones(index.shape[1], dtype=grad.dtype)
            there = grad.sparse_mask(coordinates(index, ones, tuple(ctx.others)))
        return there.values(), None, None


class _Compressed(torch.autograd.Function):
    """A sparse tensor, whose gradient torch itself makes dense, with room for m n elements."""

    @staticmethod
    def forward(
        ctx: Context, values: Tensor, pointers: Tensor, indices: Tensor, shape: Any, options: Any
    ) -> Tensor:
        ctx.others = shape, options
        ctx.set_materialize_grads(False)  # zeros in CSR are dense to torch
        ctx.save_for_backward(pointers, indices)
        return torch.sparse_compressed_tensor(pointers, indices, values, shape, **options)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        (grad,), (pointers, indices), (shape, options) = grads, ctx.saved_tensors, ctx.others
        if grad is None:
            return None, None, None, None, None
        names = ("crow", "col") if options["layout"] is torch.sparse_csr else ("ccol", "row")
        if grad.layout is not options["layout"] or not all(
            torch.equal(getattr(grad, f"{name}_indices")(), x)
            for name, x in zip(names, (pointers, indices), strict=True)
        ):
            ones = torch.ones(len(indices), dtype=grad.dtype)
            mask = torch.sparse_compressed_tensor(pointers, indices, ones, shape, **options)
            grad = grad.sparse_mask(mask)
        return grad.values(), None, None, None, None


def _differentiable(
    op: str, values: list[Tensor], sides: list[Structure], out: Structure, known: Tensor,
    masked: bool,
) -> Tensor:  # fmt: skip
    """The computed values `known`, made differentiable."""
    if op in OF_VALUES:
        sampled = (_Sampled.apply(v, x, out) for v, x in zip(values, sides, strict=True))
        return reduce(OF_VALUES[op], sampled)
    (a, b), (left, right) = values, sides
    if op in ("inner", "vecdot"):
        right, order = _transposed(right)
        b = b.index_select(0, order)
    if masked or op == "vecdot":
        return _MaskedProduct.apply(a, b, (left, right, out), known)
    how = op if op == KRON else "matmul"
    return _Product.apply(how, "c", (left, right, out), known, a, b)


class _MaskedProduct(torch.autograd.Function):
    """Values of A B at a pattern; known : these values, if computed before.

    Its gradients are masked products, too; those derived from the program visit all terms, not only
    those of the mask.
    """

    @staticmethod
    def forward(
        ctx: Context, a: Tensor, b: Tensor, sides: tuple[Structure, ...], known: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.others = A, B, C = sides
        if known is not None:
            return known.detach()  # as a given tensor it would be a view
        mask = _csr(C, a.new_empty(0))
        return _values(product(_csr(A, a), _csr(B, b), mask=mask), a.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        (grad,) = grads
        a, b = ctx.saved_tensors
        A, B, C = ctx.others
        for_a = for_b = None
        if ctx.needs_input_grad[0]:
            turned, order = _transposed(B)
            permuted = b.index_select(0, order)
            for_a = _MaskedProduct.apply(grad, permuted, (C, turned, A), None)
        if ctx.needs_input_grad[1]:
            turned, order = _transposed(A)
            permuted = a.index_select(0, order)
            for_b = _MaskedProduct.apply(permuted, grad, (turned, C, B), None)
        return for_a, for_b, None, None


class _Product(torch.autograd.Function):
    """The values of A, B or C from those of the other two: of a product C = A B, or of its gradient
    for A or B, where C holds that of the result. Gradients are derived from the operator's program.

    op : "matmul" or `KRON`
    which : "a", "b" or "c"
    known : these values, if computed before
    """

    @staticmethod
    def forward(
        ctx: Context, op: str, which: str, sides: tuple[Structure, ...], known: Tensor | None,
        *values: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(*values)
        ctx.others = op, which, sides
        if known is not None:
            return known.detach()
        wide = torch.promote_types(values[0].dtype, torch.float32)
        named = dict(zip("abc".replace(which, ""), values, strict=True))
        A, B, C = (
            _csr(x, _cast(named.get(name, values[0]), wide))
            for name, x in zip("abc", sides, strict=True)
        )
        if which != "c":
            computed = product_gradient(op, which, A, B, C)
        else:
            computed = result_of(op, "plus_times", [A, B], None if op == KRON else C).values
        return _cast(torch.from_numpy(computed), values[0].dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        op, which, sides = ctx.others
        names = "abc".replace(which, "")
        values = dict(zip(names, ctx.saved_tensors, strict=True)) | {which: grads[0]}
        gradients = [
            _Product.apply(op, x, sides, None, *(values[y] for y in "abc".replace(x, "")))
            if wanted
            else None
            for x, wanted in zip(names, ctx.needs_input_grad[4:], strict=True)
        ]
        return None, None, None, None, *gradients


class _Sampled(torch.autograd.Function):
    """Values of a matrix at another pattern, 0 where it stores nothing."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, X: Structure, out: Structure) -> Tensor:
        ctx.others = X, out
        return _values(combined("add", [_csr(X, x)], _csr(out, x.new_empty(0))), x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        X, out = ctx.others
        return _Sampled.apply(grads[0], out, X), None, None
