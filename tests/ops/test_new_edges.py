"""Products over edges that are new, which are not sorted, and sorts by counting."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from ops_common import Case, reduced
from sparsetir import SparseMatrix, ops
from sparsetir.ops import compress, operands, products, structure
from sparsetir.sparse_ir.errors import StructureError


@pytest.fixture(autouse=True)
def from_the_first_on(monkeypatch):
    """Counts as in a process that has seen many patterns."""
    monkeypatch.setattr(products, "_sorted", products.PLANNED)


def graph(m, n, nnz, seed=0, dtype=torch.int64):
    rng = torch.Generator().manual_seed(seed)
    ends = (torch.randint(0, size, (nnz,), generator=rng) for size in (n, m))
    return torch.stack([*ends]).to(dtype)


def expected(edges, m, b, values=None, reduce="sum"):
    source, target = edges.long()
    messages = b.double()[source] * (1 if values is None else values.double()[:, None])
    return reduced(Case(None, target, source, (m, len(b))), messages, reduce)


@pytest.fixture
def counted(monkeypatch):
    """Counts the sums that are not sorted for."""
    calls, summed = [], products._summed

    def count(*args, **kwargs):
        calls.append(args)
        return summed(*args, **kwargs)

    monkeypatch.setattr(products, "_summed", count)
    return calls


def test_the_second_pattern_of_a_process_is_the_first_that_is_not_sorted(counted, monkeypatch):
    monkeypatch.setattr(products, "_sorted", 0)
    first, second = graph(30, 40, 200), graph(30, 40, 200, seed=1)
    b, counts = torch.randn(40, 8), []
    for edges in (first, first, second, first):
        result = ops.spmm((edges, (40, 30)), b)
        torch.testing.assert_close(result.double(), expected(edges, 30, b), rtol=1e-5, atol=1e-5)
        counts.append(len(counted))
    assert counts == [0, 0, 1, 1]


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(30, 40, 200, 8), (1, 1, 3, 1), (50, 3, 7, 33)])
def test_sums_and_gradients(counted, sizes, weighted, reduce, dtype, idtype):
    m, n, nnz, feat = sizes
    edges, b = graph(m, n, nnz, dtype=idtype), torch.randn(n, feat, dtype=dtype, requires_grad=True)
    values = torch.randn(nnz, dtype=dtype) if weighted else None
    out = ops.spmm((edges, (n, m)), b, reduce, values)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    wanted = expected(edges, m, b, values, reduce)
    torch.testing.assert_close(out.double(), wanted, **tolerance)
    grad = torch.randn(m, feat, dtype=dtype)
    (grad_b,) = torch.autograd.grad(out, b, grad)
    (of_wanted,) = torch.autograd.grad(wanted, b, grad.double())
    torch.testing.assert_close(grad_b, of_wanted.to(dtype), **tolerance)
    assert len(counted) == 2


def test_second_gradients_are_of_the_sorted_way():
    edges = graph(20, 20, 90)
    b = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda b: ops.spmm((edges.clone(), 20), b, "mean"), b)


def test_as_many_sums_as_sorting_would_have_taken(counted):
    edges, b = graph(100, 100, 500), torch.randn(100, 8)
    results = [ops.spmm((edges, 100), b) for _ in range(products.MOST_SUMS + 3)]
    assert len(counted) == products.MOST_SUMS
    assert structure.known_edges(edges, 100, 100) is not None
    for x in results:
        torch.testing.assert_close(x, results[0])
    wide, edges = torch.randn(100, 4096), graph(100, 100, 50_000)
    ops.spmm((edges, 100), wide)
    assert len(counted) == products.MOST_SUMS  # each edge would write a long row


def test_edges_that_were_written_are_new(counted):
    edges, b = graph(40, 40, 100), torch.randn(40, 8)
    for seed in range(2 * products.MOST_SUMS):
        edges.copy_(graph(40, 40, 100, seed))
        out = ops.spmm((edges, 40), b)
        torch.testing.assert_close(out.double(), expected(edges, 40, b), rtol=1e-5, atol=1e-5)
    assert len(counted) == 2 * products.MOST_SUMS


@pytest.mark.parametrize("number", [-1, 40])
@pytest.mark.parametrize("row", [0, 1])
def test_out_of_range(row, number):
    edges, b = graph(40, 40, 100), torch.randn(40, 8)
    edges[row, 7] = number
    end = "source" if row == 0 else "target"
    message = f"argument 'A': expected each {end} .* got {number}"
    with pytest.raises(StructureError, match=message):
        ops.spmm((edges, 40), b)
    sizes = (40, 90) if row == 0 else (90, 40)  # the other end has room for the number
    with pytest.raises(StructureError, match=message):
        ops.spmm((edges, sizes), torch.randn(sizes[0], 8))


def test_a_pattern_that_is_kept_is_known_by_both_sizes():
    """PyG's layers pass both in each step, on the same edges."""
    edges, kept = graph(30, 40, 200), (40, 30)
    ops.prepare(edges, kept)
    assert operands.known((edges, kept), 0) is not None
    assert operands.known((edges, (30, 40)), 0) is None
    assert operands.known((edges, [40, 30]), 0) is None  # left to the checks of the full path
    edges[0, 0] = 39 - edges[0, 0]
    assert operands.known((edges, kept), 0) is None


def test_the_gradient_is_that_of_what_was_computed():
    edges, b = graph(40, 40, 100), torch.randn(40, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad(expected(edges, 40, b).sin().sum(), b)
    out = ops.spmm((edges, 40), b)
    edges.numpy()[0] = 10**6  # which torch does not see
    (grad_b,) = torch.autograd.grad(out.sin().sum(), b)
    torch.testing.assert_close(grad_b, wanted, rtol=1e-5, atol=1e-5)


def test_a_gradient_with_the_negative_bit():
    """Memory that holds the negatives of the numbers."""
    edges, b = graph(40, 40, 100), torch.randn(40, 8, requires_grad=True)
    grad = torch._neg_view(torch.randn(40, 8))
    assert grad.is_neg() and grad.is_contiguous()
    (grad_b,) = torch.autograd.grad(ops.spmm((edges, 40), b), b, grad)
    (wanted,) = torch.autograd.grad(expected(edges, 40, b), b, grad.double())
    torch.testing.assert_close(grad_b, wanted, rtol=1e-5, atol=1e-5)


def test_what_others_take(counted, monkeypatch):
    edges, b = graph(40, 40, 100), torch.randn(40, 8)
    other = [
        lambda: ops.spmm((edges, 40), b, "max"),
        lambda: ops.spmm((edges, 40), b.half()),
        lambda: ops.spmm((edges, 40), b[:, None]),
        lambda: ops.spmm((edges, 40), b, values=torch.rand(100, requires_grad=True)),
        lambda: ops.spmm((edges[:, :0], 40), b),
        lambda: torch.func.vmap(lambda x: ops.spmm((edges, 40), x))(b[None]),
    ]
    for product in other:
        product()
    assert not counted
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    ops.spmm((graph(40, 40, 100), 40), b)
    assert not counted


# -- matrices in rows ------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch):
    """Counts the products that plans compute."""
    calls, run = [], structure.Structure.run
    monkeypatch.setattr(structure.Structure, "run", lambda *a: calls.append(a) or run(*a))
    return calls


def in_rows(kind, edges, m, n, values):
    """A matrix of a kind, with elements at edges, whose duplicates are added."""
    coo = torch.sparse_coo_tensor(edges.flip(0), values, (m, n)).coalesce()
    csr = coo.to_sparse_csr()
    arrays = (x.numpy() for x in (csr.values(), csr.col_indices(), csr.crow_indices()))
    matrix = sp.csr_matrix(tuple(arrays), (m, n))
    others = {"coo": coo, "csr": csr, "scipy": matrix, "SparseMatrix": SparseMatrix(matrix)}
    if kind == "csr32":
        csr = (csr.crow_indices().int(), csr.col_indices().int(), csr.values())
        return torch.sparse_csr_tensor(*csr, (m, n)), coo
    return others[kind], coo


KINDS = ["coo", "csr", "csr32", "scipy", "SparseMatrix"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_product_with_a_matrix_makes_no_plan(kind, dtype, planned):
    edges, values = graph(30, 40, 200), torch.randn(200, dtype=dtype)
    for b in (torch.randn(40, 8, dtype=dtype), torch.randn(40, dtype=dtype)):
        A, dense = in_rows(kind, edges, 30, 40, values)
        product, before, results = ops.spmm if b.dim() == 2 else ops.spmv, len(planned), []
        for count in (0, 1, 1):
            results.append(product(A, b))
            assert (len(planned) > before) == bool(count)
            torch.testing.assert_close(results[-1], dense.to_dense() @ b, rtol=1e-4, atol=1e-4)


def test_the_first_matrices_of_a_process_have_plans(planned, monkeypatch):
    monkeypatch.setattr(products, "_sorted", 0)
    b, counts = torch.randn(40, 8), []
    for seed in range(products.PLANNED + 2):
        A, coo = in_rows("csr", graph(30, 40, 200, seed), 30, 40, torch.randn(200))
        torch.testing.assert_close(ops.spmm(A, b), coo.to_dense() @ b, rtol=1e-4, atol=1e-4)
        counts.append(len(planned))
    assert counts == [*range(1, products.PLANNED + 1), products.PLANNED, products.PLANNED]


@pytest.mark.parametrize("number", [-1, 40])
@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_a_column_out_of_range(kind, number):
    A, _ = in_rows(kind, graph(30, 40, 200), 30, 40, torch.randn(200))
    (A.indices()[1] if kind == "coo" else A.col_indices())[7] = number
    with pytest.raises(StructureError, match=f"less than 40, got {number}"):
        ops.spmm(A, torch.randn(40, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_first_products_that_need_a_plan(kind, planned, monkeypatch):
    edges, values, b = graph(30, 40, 200), torch.randn(200), torch.randn(40, 8)
    new = lambda: in_rows(kind, edges, 30, 40, values)[0]  # noqa: E731
    ops.spmm(new(), b.clone().requires_grad_()).sum().backward()
    ops.spmm(new(), b, "max")
    with pytest.raises(ValueError, match="expected 40 rows"):
        ops.spmm(new(), b[1:])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    ops.spmm(new(), b)
    assert len(planned) >= 4


# -- sorting by counting --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("sizes", [(30, 40, 200), (1, 1, 5), (7, 9, 0), (1000, 2, 30)])
def test_counting_gives_what_torch_sorts(monkeypatch, sizes, dtype):
    m, n, nnz = sizes
    edges = graph(m, n, nnz, dtype=dtype)
    ways = []
    for counts in (True, False):
        if not counts:
            monkeypatch.setattr(compress, "DTYPES", {})
            monkeypatch.setattr(compress, "csr_tocsc", None)
        rowptr, col, order = compress.compress(edges, m, n)
        turned = compress.transpose(rowptr, col, n, order)
        plain = compress.transpose(rowptr, col, n)
        ways.append([rowptr, col, order, *turned, *plain, *compress.sorted_by(edges[1], m)])
    for x, y in zip(*ways):
        assert (x is None and y is None) or (x.dtype == y.dtype and torch.equal(x, y))
    by_row = np.argsort(edges[1].numpy(), kind="stable")
    np.testing.assert_array_equal(col.numpy(), edges[0].numpy()[by_row])


def test_edges_in_order_have_no_order():
    rowptr, col, order = compress.compress(torch.tensor([[4, 0, 3], [0, 0, 2]]), 3, 5)
    assert order is None and col.tolist() == [4, 0, 3] and rowptr.tolist() == [0, 2, 2, 3]
