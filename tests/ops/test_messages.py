"""gspmm, gsddmm and segment_reduce against torch's gather and scatter, with gradients."""

# pyright: reportAttributeAccessIssue=false

import pytest
import torch

import sparsetir
from ops_common import Case, reduced
from refusals import refusals
from sparsetir import ops

M, N, NNZ = 6, 5, 14


def graph(seed=0, m=M, n=N, nnz=NNZ, dtype=torch.int64):
    """(2, nnz) edges in no order, some parallel, into all targets but the first and the last."""
    rng = torch.Generator().manual_seed(seed)
    source = torch.randint(0, n, (nnz,), generator=rng)
    target = torch.randint(1, m - 1, (nnz,), generator=rng)
    return torch.stack([source, target]).to(dtype)


def randn(*shape, dtype=torch.float64, seed=1, grad=False):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).requires_grad_(grad)


def test_names():
    edges, u, v = graph(), randn(N, 3), randn(M, 3)
    A = (edges, (N, M))
    assert torch.equal(ops.gsddmm(A, "v_sub_u", v, u), ops.gsddmm(A, "sub", v, u, "v", "u"))
    assert torch.equal(ops.gsddmm(A, "copy_v", v), v[edges[1]])
    assert torch.equal(ops.gspmm(A, "add", "sum", u, u[edges[0]]), ops.gspmm(A, "copy_u", u=2 * u))
    values, matrix = randn(NNZ), ops.resolve(A, randn(NNZ))  # a matrix's own values are the edges'
    expected = ops.gspmm(A, "u_add_e", "sum", u, values[:, None])
    assert torch.equal(ops.gspmm(matrix, "u_add_e", "sum", u), expected)


def test_logsumexp_of_extreme_numbers():
    """Extreme values give torch's results, except rows without elements, which are zero."""
    inf, nan = float("inf"), float("nan")
    rows = [[], [1000, 1001], [-1000, -1001], [-inf, -inf], [-inf, 2], [inf, 1], [inf, -inf],
            [nan, 1], [65504, 65504], [1e-3] * 70]  # fmt: skip
    rowptr = torch.tensor([0, *map(len, rows)]).cumsum(0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        parts = [torch.tensor(row, dtype=dtype) for row in rows]
        x = torch.cat(parts)[:, None].requires_grad_()
        result = ops.segment_reduce(x, rowptr, "logsumexp")
        want = [part.double().logsumexp(0) if len(part) else torch.zeros(()) for part in parts]
        torch.testing.assert_close(
            result[:, 0], torch.stack([w.to(dtype) for w in want]), equal_nan=True
        )
        assert result.dtype == dtype
        result[:5].sum().backward()
        want = torch.cat([part.double().softmax(0) for part in parts[1:5]]).nan_to_num(0)
        torch.testing.assert_close(x.grad[: len(want), 0].double(), want, atol=4e-3, rtol=0)


def test_logsumexp_goes_along_with_the_others():
    """Names, no elements, compiled calls, and plans."""
    A, u = (graph(), (N, M)), randn(N, 3)
    named = ops.gspmm(A, "copy_u_logsumexp", u=u)
    assert torch.equal(named, ops.gspmm(A, "copy_u", "logsumexp", u=u))
    assert torch.equal(named, ops.spmm(A, u, "logsumexp"))
    nothing = ops.spmm((torch.empty(2, 0, dtype=torch.int64), (N, M)), u, "logsumexp")
    assert torch.equal(nothing, torch.zeros(M, 3, dtype=torch.float64))
    each_once = torch.unique(graph(), dim=1), (N, M)
    for op, reduce in (("spmm", "logsumexp"), ("copy_u_logsumexp", "sum")):
        run = sparsetir.plan(op, each_once, u, reduce=reduce)
        torch.testing.assert_close(run(u), ops.spmm(each_once, u, "logsumexp"))
    compiled = torch.compile(ops.spmm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A, u, "logsumexp"), named)


def test_nan_inf_and_whose_the_maximum_is():
    edges = torch.tensor([[0, 1, 2, 0], [1, 1, 2, 3]])
    u = torch.tensor([[float("-inf")], [float("nan")], [float("-inf")]])
    e = torch.ones(4, 1, requires_grad=True)
    result = ops.gspmm((edges, (3, 5)), "u_add_e", "max", u, e)
    assert result[1].isnan() and result[2].isneginf() and not result[0] and not result[4]
    result[2].backward()
    assert e.grad.flatten().tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_segment_reduce(reduce):
    rowptr = torch.tensor([0, 0, 3, 4, 9, 9])
    values = randn(9, 3, grad=True)
    result = ops.segment_reduce(values, rowptr, reduce)
    rows = torch.tensor([1, 1, 1, 2, 3, 3, 3, 3, 3])
    expected = reduced(Case(None, rows, rows, (5, 9)), values, reduce)
    torch.testing.assert_close(result, expected)
    for one, other in zip(
        *(torch.autograd.grad(x.pow(2).sum(), values) for x in (result, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert ops.segment_reduce(values.detach()[:, 0], rowptr, reduce).shape == (5,)


A, U, E = (graph(), (N, M)), randn(N, 3, 4), randn(NNZ, 3, 4)
test_refusals = refusals(
    """
ops.gspmm(A, "u_pow_e", "sum", U, E)  # ValueError: 'op' .. 'u_pow_e'
ops.gspmm(A, "u_mul_e", "prod", U, E)  # ValueError: 'reduce' .. 'prod'
ops.gspmm(A, "u_mul_e", "sum", U)  # TypeError: 'e' .. without values
ops.gspmm(A, "copy_u", "sum")  # TypeError: 'u' .. NoneType
ops.gspmm(A, "u_mul_e", "sum", U, E[:, :2])  # ValueError: 'e' .. broadcast
ops.gsddmm(A, "pow", U, E)  # ValueError: 'op' .. 'pow'
ops.gsddmm(A, "add", U, E, "u", "x")  # ValueError: 'rhs_target' .. 'x'
ops.gsddmm(A, "u_dot_e", U, E[:, :, :2])  # ValueError: 'rhs' .. last
ops.segment_reduce(U, torch.tensor([0, 2]))  # ValueError: rowptr
ops.gspmm(A, "copy_u_sum", "max", U)  # ValueError: 'reduce': expected none with .. got 'max'
ops.gspmm(A, "copy_u", u=U, lhs_data=U)  # TypeError: 'lhs_data': expected none with 'u', which is
ops.gspmm(A, "copy_u", "sum", U, reduce_op="sum")  # TypeError: 'reduce_op': expected none with
ops.gspmm(A, "u_mul_e_x", u=U)  # ValueError: copy_u, copy_lhs, .. as 'u_mul_e_sum', got 'u_mul_e_x'
""",
    globals(),
)


@pytest.mark.parametrize("name", ["u_mul_e_sum", "copy_u_add", "u_sub_e_amin", "copy_e_mean"])
def test_names_of_dgl_hold_the_reduction(name):
    edges = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 1]])
    u, e = torch.rand(3, 2), torch.rand(4, 2)
    op, _, reduce = name.rpartition("_")
    expected = ops.gspmm(edges, op, reduce, u, e)
    operands = {"copy_u": {"lhs_data": u}, "copy_e": {"rhs_data": e}}
    operands = operands.get(op, {"lhs_data": u, "rhs_data": e})
    assert torch.equal(ops.gspmm(edges, name, **operands), expected)
    assert torch.equal(ops.gspmm(edges, op, reduce_op=reduce, **operands), expected)
    assert torch.equal(
        ops.gsddmm(edges, "add", lhs_data=u, rhs_data=u), ops.gsddmm(edges, "add", u, u)
    )
