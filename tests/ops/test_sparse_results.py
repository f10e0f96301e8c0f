"""Sparse results of torch's tensors: of any kind of matrix, and their gradients."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from refusals import refusals
from sparsetir import SparseMatrix, ops
from sparsetir.data import scipy_patterns
from sparsetir.ops.sparse_results import _Product, compressed
from sparsetir.ops.structure import structure_of

OPS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum}
OPS["minimum"] = torch.minimum


def matrix(seed: int, shape: tuple[int, int], density: float = 0.4) -> Any:
    sparse = sp.random_array(shape, density=density, format="csr", rng=np.random.default_rng(seed))
    sparse.sort_indices()
    return sparse


def tensor(a: Any, values: Tensor | None = None, dtype: Any = torch.float64) -> Tensor:
    values = torch.from_numpy(a.data).to(dtype) if values is None else values
    index = torch.from_numpy(a.indptr), torch.from_numpy(a.indices)
    return torch.sparse_csr_tensor(*index, values, a.shape)


A, B, D = matrix(0, (6, 7)), matrix(1, (7, 5)), matrix(2, (6, 7))


@pytest.mark.parametrize("mask", [None, matrix(3, (6, 5))])
def test_gradients_of_products(mask: Any) -> None:
    values = [torch.from_numpy(x.data).requires_grad_() for x in (A, B)]
    pattern = None if mask is None else tensor(mask)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return ops.spgemm(tensor(A, a), tensor(B, b), mask=pattern).values()

    torch.autograd.gradcheck(run, values)
    result = ops.spgemm(tensor(A), tensor(B), mask=pattern)
    torch.testing.assert_close(result.values(), run(*values).detach())
    dense = (A @ B).toarray()
    kept = dense if mask is None else np.where(mask.toarray() != 0, dense, 0)
    np.testing.assert_allclose(result.to_dense().numpy(), kept, rtol=1e-12)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_gradients_for_values_of_compressed_tensors(layout: torch.layout) -> None:
    """Those of torch's own tensors, by gradients of the same pattern, another or none."""
    index = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])
    options: Any = {"layout": layout, "check_invariants": False}
    other: Any = torch.sparse_compressed_tensor(
        torch.tensor([0, 1, 1]), torch.tensor([1]), torch.ones(1).double(), (2, 2), **options
    )
    uses: list[Any] = [
        lambda x: x.values(), lambda x: x.to_dense(), lambda x: (x * 2).values(),
        lambda x: x @ torch.ones(2, 3).double(),
    ]  # fmt: skip
    # Torch does not add others, nor on ARM.
    if layout is torch.sparse_csr and torch.backends.mkl.is_available():
        uses.append(lambda x: (x + other).to_dense())
    for use in uses:
        results = []
        for make in (compressed, None):
            values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
            x = (
                torch.sparse_compressed_tensor(*index, values, (2, 2), **options)
                if make is None
                else make(layout, index, values, (2, 2))
            )
            results += torch.autograd.grad((use(x) ** 2).sum(), values)
        assert torch.equal(*results)


@pytest.mark.parametrize(("op", "result"), [("matmul", A @ B), ("kron", sp.kron(A, B, "csr"))])
def test_second_gradients_of_products(op: str, result: Any) -> None:
    """Torch's own tensors cut them off at their values."""
    result.sort_indices()
    sides = tuple(
        structure_of(*(torch.from_numpy(i) for i in (x.indptr, x.indices)), x.shape[1])
        for x in (A, B, result)
    )
    values = [torch.from_numpy(x.data).requires_grad_() for x in (A, B)]

    def run(a: Tensor, b: Tensor) -> Any:
        return _Product.apply(op, "c", sides, None, a, b)

    torch.testing.assert_close(run(*values).detach(), torch.from_numpy(result.data))
    assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


@pytest.mark.parametrize("mask", [None, matrix(3, (6, 5))])
def test_gradients_of_inner_products(mask: Any) -> None:
    """Products of all pairs, of some, and of rows with the same number."""
    values = [torch.from_numpy(x.data).requires_grad_() for x in (A, B.T.tocsr(), D)]
    pattern = None if mask is None else tensor(mask)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return ops.inner(tensor(A, a), tensor(B.T.tocsr(), b), mask=pattern).values()

    def dots(a: Tensor, d: Tensor) -> Tensor:
        return ops.vecdot(tensor(A, a), tensor(D, d))

    torch.autograd.gradcheck(run, values[:2])
    torch.autograd.gradcheck(dots, values[::2])
    dots(values[0], values[2]).mul_(2).sum().backward()  # a result may be written to
    expected = ops.spgemm(tensor(A), tensor(B), mask=pattern)
    torch.testing.assert_close(ops.inner(tensor(A), tensor(B.T.tocsr()), mask=pattern), expected)
    dense = torch.linalg.vecdot(*(torch.from_numpy(x.toarray()) for x in (A, D)))
    torch.testing.assert_close(dots(*values[::2]).detach(), dense)


@pytest.mark.slow
def test_gradients_of_kronecker_products() -> None:
    values = [torch.from_numpy(x.data).requires_grad_() for x in (A, B)]
    torch.autograd.gradcheck(lambda a, b: ops.kron(tensor(A, a), tensor(B, b)).values(), values)
    result = ops.kron(tensor(A, values[0]), tensor(B))
    np.testing.assert_array_equal(result.detach().to_dense().numpy(), sp.kron(A, B).toarray())
    half = [torch.ones(x.nnz, dtype=torch.float16, requires_grad=True) for x in (A, B)]
    product = ops.kron(tensor(A, half[0]), tensor(B, half[1])).values()
    product.sum().backward()
    assert half[0].grad.dtype is product.dtype is torch.float16
    assert (half[0].grad == B.nnz).all() and (half[1].grad == A.nnz).all()


def test_kinds_of_matrices() -> None:
    """Edges in any order, other layouts, and what is no tensor."""
    edge_index = torch.tensor([[2, 0, 1, 2], [1, 1, 0, 0]])  # columns, then rows
    dense = torch.zeros(3, 3)
    dense[edge_index[1], edge_index[0]] = 1
    weights = torch.arange(1.0, 5.0)
    weighted = torch.zeros(3, 3).index_put((edge_index[1], edge_index[0]), weights)
    operand = ops.resolve((edge_index, 3), weights)
    kinds = [(edge_index, 3), dense.to_sparse_csr(), dense.to_sparse(), dense.to_sparse_csc()]
    kinds += [
        sp.csr_array(dense.numpy()),
        SparseMatrix.from_dense(dense),
        ops.prepare((edge_index, 3)),
    ]
    for kind in kinds:
        torch.testing.assert_close(ops.spgemm(kind, operand).to_dense(), dense @ weighted)
        torch.testing.assert_close(ops.add(kind, operand, kind).to_dense(), 2 * dense + weighted)


CALLS = {
    "add": lambda a: (ops.add(a, a), a + a),
    "spgemm": lambda a: (ops.spgemm(a, a), a @ a),
    "spmm": lambda a: (ops.spmm(a, EYE), a),
    "matrices": lambda a: (SparseMatrix(EYE.to_sparse()) + a, EYE.numpy() + a),
}
EYE = torch.eye(9, dtype=torch.float64)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("format", ["csr", "csc", "coo", "dia"])
def test_operands_of_scipy_are_as_they_are_now(format: str, call: Any) -> None:
    """Their patterns are kept between calls, until an index is another one."""
    a = matrix(0, (9, 9)).asformat(format)
    for change in ("", "data", "indices", "row", "offsets"):
        if change and hasattr(a, change):
            getattr(a, change)[:] = getattr(a, change)[::-1].copy()
        for _ in range(2):
            found, exact = call(a)
            dense = found.to_dense() if isinstance(found, Tensor) else found.toarray()
            exact = exact if isinstance(exact, np.ndarray) else exact.toarray()
            np.testing.assert_allclose(dense, exact, rtol=1e-12)


def test_operands_of_scipy_are_checked_and_let_go() -> None:
    a, bad = matrix(0, (9, 9)), matrix(1, (9, 9))
    bad.indices[3] = 9
    for _ in range(2):
        with pytest.raises(ValueError, match=r"add: argument 'indices'.*\[0, 9\), got 9"):
            ops.add(a, bad)
    a.indices[3] = -1  # after calls with it
    with pytest.raises(ValueError, match=r"add: argument 'indices'.*\[0, 9\), got -1"):
        ops.add(a, a)
    held, key = weakref.ref(a), id(a)
    assert key in scipy_patterns._copied
    del a
    gc.collect()
    assert held() is None and key not in scipy_patterns._copied


@pytest.mark.parametrize("make", [SparseMatrix, lambda a: a, lambda a: tensor(a).to_sparse_coo()])
def test_gradients_beside_other_kinds(make: Any) -> None:
    """Operands other than tensors have no gradient, and change none."""
    a, b = matrix(0, (6, 6)), matrix(1, (6, 6))
    values = torch.from_numpy(b.data).requires_grad_()
    for op in (ops.add, ops.mul, ops.spgemm, ops.inner, ops.kron):
        for each in (lambda x: (make(a), tensor(b, x)), lambda x: (tensor(b, x), make(a))):
            torch.autograd.gradcheck(lambda x: op(*each(x)).values(), values)


def test_values_of_a_matrix_are_those_of_now() -> None:
    a = SparseMatrix(matrix(0, (6, 6)))
    for _ in range(2):
        np.testing.assert_array_equal(ops.add(a, a).to_dense(), 2 * a.toarray())
        a.values[:] *= 3


def test_bools() -> None:
    dense = torch.tensor([[False, True], [True, True]])
    a = dense.to_sparse_csr()
    for result in (ops.spgemm(a, a), ops.add(a, a), ops.mul(a, a), ops.kron(a, a)):
        assert result.dtype is torch.bool and (result.values() == True).all()  # noqa: E712


def test_semirings_have_no_gradients() -> None:
    values = torch.from_numpy(A.data).requires_grad_()
    with pytest.raises(NotImplementedError, match="gradients of semiring 'min_plus'"):
        ops.spgemm(tensor(A, values), tensor(B), "min_plus")
    with torch.no_grad():
        assert ops.spgemm(tensor(A, values), tensor(B), "min_plus").values().isfinite().all()


@pytest.mark.slow
def test_between_other_operators() -> None:
    """A model with sparse results, also where torch.compile breaks its graph there."""
    weights = torch.rand(A.nnz, dtype=torch.float64, requires_grad=True)
    x = torch.rand(7, 3, dtype=torch.float64)

    def run(w: Tensor) -> Tensor:
        two = ops.spgemm(tensor(A, w), tensor(matrix(4, (7, 7))))
        return ops.spmm(two, x).sum()

    run(weights).backward()
    dense = torch.zeros(6, 7, dtype=torch.float64)
    rows = torch.from_numpy(np.repeat(np.arange(6), np.diff(A.indptr)))
    dense = dense.index_put((rows, torch.from_numpy(A.indices).long()), weights)
    (expected,) = torch.autograd.grad(
        (dense @ torch.from_numpy(matrix(4, (7, 7)).toarray()) @ x).sum(), weights
    )
    torch.testing.assert_close(weights.grad, expected)
    torch.testing.assert_close(torch.compile(run, backend="eager")(weights), run(weights))


TA, TB = tensor(A), tensor(B)
TWICE = (torch.tensor([[0, 0], [1, 1]]), 2)
test_refusals = refusals(
    """
ops.spgemm(TA, TA)  # ValueError: spgemm: argument 'B': expected 7 rows
ops.spgemm(TA, TB, "x")  # ValueError: spgemm: argument 'semiring': expected
ops.add(TA, TA.to(torch.complex64))  # TypeError: 'matrices[1]': expected va
ops.inner(TA, TB)  # ValueError: inner: argument 'B': expected 7 columns
ops.vecdot(TA, TB)  # ValueError: vecdot: argument 'B': expected shape
ops.add(TA)  # TypeError: add: expected two sparse matrices or more, got 1
ops.sub(TA, TB)  # ValueError: sub: argument 'matrices': expected shape
ops.add(TA, torch.rand(6, 7))  # ValueError: add: argument 'matrices[1]'
ops.spgemm(TWICE, TA)  # ValueError: 'A': expected each element once, got (1, 0) more than once
ops.spgemm(ops.resolve(TA)._replace(values=torch.rand(A.nnz, 2)), TB)
    # ValueError: spgemm: argument 'A': expected one value of each element
""",
    globals(),
)
