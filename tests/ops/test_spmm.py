"""Sparse times dense, sparse times vector and sampled products: values and gradients."""

import pytest
import torch

from ops_common import (
    DTYPES,
    SHAPE,
    Case,
    assert_close,
    cases,
    dense,
    expected_sddmm,
    expected_spmm,
    rounded,
)
from sparsetir import ops

CASES = cases()
M, N = SHAPE
SMALL = (torch.tensor([[0, 1, 3, 3, 0, 2, 0, 1], [2, 0, 0, 2, 2, 0, 0, 2]]), (4, 3))
F = 3  # for all, so that kernels are shared
REDUCTIONS = ("sum", "mean", "max", "min")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_spmm(reduce, dtype):
    for name, case in CASES.items():
        for weighted in (True, False):
            b, B = rounded((N, F), dtype, 1)
            a, A = rounded((len(case.rows),), dtype, 2)
            if not weighted:
                if name not in ("edges", "edges int32"):
                    continue
                a = A = None
            got = ops.spmm(case.A, b, reduce, values=a)
            want = expected_spmm(case, A, B, reduce)
            assert got.dtype == b.dtype
            assert_close(got, want, dtype)
            assert not got[torch.bincount(case.rows, minlength=M) == 0].any()
            g, G = rounded((M, F), dtype, 3)
            inputs, exact = ((b, a), (B, A)) if weighted else ((b,), (B,))
            grads = torch.autograd.grad(got, inputs, g)
            for x, y in zip(grads, torch.autograd.grad(want, exact, G)):
                assert_close(x, y, dtype)
            with torch.no_grad():
                assert torch.equal(ops.spmm(case.A, b, reduce, values=a), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sddmm(dtype):
    for case in CASES.values():
        (x, X), (y, Y) = rounded((M, F), dtype, 1), rounded((N, F), dtype, 2)
        got, want = ops.sddmm(case.A, x, y), expected_sddmm(case, X, Y)
        assert got.dtype == x.dtype
        assert_close(got, want, dtype)
        g, G = rounded(got.shape, dtype, 3)
        grads = torch.autograd.grad(got, (x, y), g)
        for have, exact in zip(grads, torch.autograd.grad(want, (X, Y), G)):
            assert_close(have, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_spmv(dtype):
    for case in CASES.values():
        b, B = rounded((N,), dtype, 1)
        a, A = rounded((len(case.rows),), dtype, 2)
        got = ops.spmv(case.A, b, values=a)
        want = expected_spmm(case, A, B[:, None], "sum")[:, 0]
        assert_close(got, want, dtype)
        grads = torch.autograd.grad(got.sum(), (b, a))
        for have, exact in zip(grads, torch.autograd.grad(want.sum(), (B, A))):
            assert_close(have, exact, dtype)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradcheck(reduce):
    """Once and twice; numbers are far enough apart for an extremum to stay where it is."""
    torch.manual_seed(0)
    values = (torch.randperm(8).double() / 8 + 1).requires_grad_()
    B = (torch.randperm(4 * F).double().reshape(4, F) / 4 + 0.3).requires_grad_()

    def run(values, B):
        return ops.spmm(SMALL, B, reduce, values=values)

    assert torch.autograd.gradcheck(run, (values, B))
    assert torch.autograd.gradgradcheck(run, (values, B))


def test_gradcheck_sddmm():
    X, Y = (torch.randn(s, F, dtype=torch.float64).requires_grad_() for s in (3, 4))
    assert torch.autograd.gradcheck(lambda X, Y: ops.sddmm(SMALL, X, Y), (X, Y))
    assert torch.autograd.gradgradcheck(lambda X, Y: ops.sddmm(SMALL, X, Y), (X, Y))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_heads(reduce):
    """Of values, of the dense operand, or of both; gradients too."""
    case = CASES["edges"]
    nnz, heads = len(case.rows), 3
    b, B = rounded((heads, N, F), "float64", 1)
    a, A = rounded((heads, nnz), "float64", 2)
    forms = [
        (b, a, B, A),
        (b, a[0], B, [A[0]] * 3),
        (b[0], a, [B[0]] * 3, A),
        (b, None, B, [None] * 3),
    ]
    for b_, a_, B_, A_ in forms:
        second = [
            x if x is None or x.dim() < d else x.transpose(0, 1) for x, d in ((b_, 3), (a_, 2))
        ]
        got = ops.spmm(case.A, second[0], reduce, values=second[1]).transpose(0, 1)
        want = torch.stack([expected_spmm(case, v, x, reduce) for v, x in zip(A_, B_)])
        assert_close(got, want, "float64")
        inputs, exact = ((b,), (B,)) if a_ is None else ((b, a), (B, A))
        grads = torch.autograd.grad(got.sin().sum(), inputs)
        for x, y in zip(grads, torch.autograd.grad(want.sin().sum(), exact)):
            assert_close(x, y, "float64")


def test_heads_of_sddmm_and_spmv():
    case = CASES["edges"]
    (x, X), (y, Y) = rounded((3, M, F), "float64", 1), rounded((3, N, F), "float64", 2)
    want = torch.stack([expected_sddmm(case, *pair) for pair in zip(X, Y)])
    u, v = x.transpose(0, 1), y.transpose(0, 1)
    assert_close(ops.sddmm(case.A, u, v).t(), want, "float64")
    want = torch.stack([expected_sddmm(case, X[0], each) for each in Y])
    assert_close(ops.sddmm(case.A, x[0], v).t(), want, "float64")
    a, A = rounded((3, len(case.rows)), "float64", 3)
    want = [expected_spmm(case, v, z[:, :1], "sum")[:, 0] for v, z in zip(A, Y)]
    assert_close(ops.spmv(case.A, y[:, :, 0].t(), values=a.t()).t(), torch.stack(want), "float64")


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
        _, place = torch.ops.sparsetir.spmm_arg(rowptr, col, None, B, reduce == "max")
        assert place.tolist() == [[0, 1, 0], [-1, -1, -1], [3, 3, 3]]


def test_gradient_of_an_extremum_by_the_operator_alone():
    """`sparsetir::spmm` finds out where the extremum is when it is asked for a gradient."""
    case = CASES["edges"]
    rowptr, col, *_ = ops.resolve(case.A)
    b, B = rounded((N, F), "float64", 1)
    for reduce in ("max", "min"):
        got = torch.ops.sparsetir.spmm(rowptr, col, None, b, reduce)
        want = expected_spmm(case, None, B, reduce)
        assert_close(got, want, "float64")
        grads = [torch.autograd.grad(c.sin().sum(), x)[0] for c, x in ((got, b), (want, B))]
        assert_close(*grads, "float64")


def test_operands_that_are_not_contiguous():
    case = CASES["csc"]
    B = torch.randn(F, N, dtype=torch.float64).t()
    values = torch.randn(2 * len(case.rows), dtype=torch.float64)[::2]
    assert_close(
        ops.spmm(case.A, B, values=values), expected_spmm(case, values, B, "sum"), "float64"
    )
    X, Y = torch.randn(M, 2 * F, dtype=torch.float64)[:, ::2], torch.randn(F, N).double().t()
    assert_close(ops.sddmm(case.A, X, Y), expected_sddmm(case, X, Y), "float64")
    wide = torch.ones(1, F, dtype=torch.float64).expand(N, F).requires_grad_()
    out = ops.spmm(case.A, wide, values=values)
    assert_close(out, expected_spmm(case, values, wide, "sum"), "float64")
    out.sum().backward()  # with a gradient of strides 0


@pytest.mark.parametrize(
    "m, n, nnz, feat", [(0, 3, 0, 4), (3, 0, 0, 4), (3, 4, 0, 2), (3, 4, 5, 0)]
)
def test_nothing(m, n, nnz, feat):
    edges = torch.zeros(2, nnz, dtype=torch.int64)
    A = (edges, (n, m))
    for reduce in REDUCTIONS:
        for heads in ((), (2,), (0,)):
            B = torch.ones(n, *heads, feat, requires_grad=True)
            values = torch.ones(nnz, *heads, requires_grad=True)
            out = ops.spmm(A, B, reduce, values=values)
            assert out.shape == (m, *heads, feat) and not out.any()
            out.sum().backward()
            assert not B.grad.any() and not values.grad.any()
    found = ops.sddmm(A, torch.ones(m, feat), torch.ones(n, feat))
    assert found.shape == (nnz,) and not found.any()
    assert ops.spmv(A, torch.ones(n)).shape == (m,)


def test_bfloat16_on_a_sparse_tensor_of_its_own():
    D = dense()
    A = D.bfloat16().to_sparse_csr()
    B = torch.randn(N, F).bfloat16()
    assert_close(ops.spmm(A, B), D.bfloat16().double() @ B.double(), "bfloat16")


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
    for reduce in REDUCTIONS:
        got = ops.spmm(case.A, B, reduce, values=values)
        assert_close(got, expected_spmm(case, values, B, reduce, m=1), "float64")
    assert ops.sddmm(case.A, torch.ones(1, F), B.float()).tolist() == [9, 9, 6, 9]


def hub(degree):
    """A row of so many elements."""
    columns = torch.arange(degree)
    return torch.stack([columns, torch.zeros_like(columns)]), (degree, 1)


def test_mean_of_a_long_row():
    """It is scaled once, so that it is as good as the sum, which 16 bits may not hold."""
    count = 100_000
    A = hub(count)
    assert ops.spmm(A, torch.ones(count, 1), "mean").item() == pytest.approx(1, abs=1e-6)
    assert ops.spmm(A, torch.ones(count, 1, dtype=torch.float16), "mean").item() == 1
    x = torch.rand(count, 3, generator=torch.Generator().manual_seed(0))
    in_turn = torch.from_numpy(x.numpy().cumsum(0, dtype="float32")[-1] / count)
    exact = x.double().mean(0)
    error = (ops.spmm(A, x, "mean")[0] - exact).abs().max()
    assert error <= 2 * (in_turn - exact).abs().max() + 1e-6


def test_gradient_of_the_mean_of_a_row_longer_than_float16_counts():
    count = 70_000
    x = torch.ones(count, 1, dtype=torch.float16, requires_grad=True)
    ops.spmm(hub(count), x, "mean").backward(torch.full((1, 1), 7000, dtype=torch.float16))
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.1))


def test_the_least_of_negative_zeros_is_one():
    A = torch.tensor([[0, 1], [0, 0]]), (2, 2)
    for values in (None, torch.ones(2)):
        found = ops.spmm(A, torch.full((2, 3), -0.0), "min", values=values)
        assert found[0].signbit().all() and not found[1].signbit().any()  # which is empty
