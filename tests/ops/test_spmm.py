"""Sparse times dense, sparse times vector and sampled products: values and gradients."""

import torch

from ops_common import Case, assert_close, expected_spmm
from sparsetir import ops
from sparsetir.reductions import REDUCERS

F = 3  # for all, so that kernels are shared


def test_extremum_takes_the_first_of_equals_and_keeps_nan():
    edges = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 2]])
    nan, inf = torch.nan, torch.inf
    B = torch.tensor([[1.0, 5, 0], [1, nan, 0], [1, 7, 0], [-inf, 2, 0]]).requires_grad_()
    for reduce in ("max", "min"):
        out = ops.spmm((edges, (4, 3)), B, reduce)
        want = torch.tensor([[1.0, nan, 0], [0, 0, 0], [-inf, 2, 0]])
        torch.testing.assert_close(out, want, equal_nan=True)
        (grad,) = torch.autograd.grad(out, B, torch.ones(3, 3))
        assert grad.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]
        rowptr, col = ops.resolve((edges, (4, 3)))[:2]
        u = B[:, None]
        _, place = torch.ops.sparsetir.gspmm_arg(rowptr, col, u, None, 4, "copy_u", reduce)
        assert place[:, 0].tolist() == [[0, 1, 0], [-1, -1, -1], [3, 3, 3]]


def test_results_are_the_same_in_each_run():
    torch.manual_seed(0)
    edges = torch.randint(0, 300, (2, 5_000))
    A, X = (edges, 300), torch.randn(300, 64)
    values = torch.randn(5_000)

    def run(reduce):
        x, v = X.clone().requires_grad_(), values.clone().requires_grad_()
        out = ops.spmm(A, x, reduce, values=v)
        return out, *torch.autograd.grad(out.sin().sum(), (x, v))

    for reduce in ("sum", "max"):
        first = run(reduce)
        for _ in range(5):
            assert all(map(torch.equal, first, run(reduce)))


def test_parallel_edges_have_values_of_their_own():
    edges = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]])
    case = Case((edges, (2, 1)), edges[1], edges[0])
    values = torch.tensor([1.0, 10.0, 100.0, -5.0], dtype=torch.float64)
    B = torch.tensor([[2.0] * F, [3.0] * F], dtype=torch.float64)
    for reduce in REDUCERS:
        result = ops.spmm(case.A, B, reduce, values=values)
        assert_close(result, expected_spmm(case, values, B, reduce, m=1), "float64")
    assert ops.sddmm(case.A, torch.ones(1, F), B.float()).tolist() == [9, 9, 6, 9]


def hub(degree):
    """A row of so many elements."""
    columns = torch.arange(degree)
    return torch.stack([columns, torch.zeros_like(columns)]), (degree, 1)


def test_gradient_of_the_mean_of_a_row_longer_than_float16_counts():
    count = 70_000
    x = torch.ones(count, 1, dtype=torch.float16, requires_grad=True)
    ops.spmm(hub(count), x, "mean").backward(torch.full((1, 1), 7000, dtype=torch.float16))
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.1))


def test_the_least_of_negative_zeros_is_one():
    A = torch.tensor([[0, 1], [0, 0]]), (2, 2)
    for values in (None, torch.ones(2)):
        result = ops.spmm(A, torch.full((2, 3), -0.0), "min", values=values)
        assert result[0].signbit().all() and not result[1].signbit().any()  # which is empty
