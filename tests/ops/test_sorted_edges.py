"""Edges of PyG's EdgeIndex, whose order it knows."""

import pytest
import torch

from sparsetir import ops

EdgeIndex = pytest.importorskip("torch_geometric").EdgeIndex

M, N, NNZ = 30, 40, 400
ORDERS = ["row", "col"]


def edges(order, m=M, n=N):
    generator = torch.Generator().manual_seed(3)
    sources, targets = (torch.randint(0, k, (NNZ,), generator=generator) for k in (n, m))
    plain = torch.stack([sources, targets])
    plain = plain[:, torch.argsort(plain[0 if order == "row" else 1], stable=True)]
    index = EdgeIndex(plain, sparse_size=(n, m), sort_order=order)
    return plain, index.fill_cache_()


@pytest.mark.parametrize("order", ORDERS)
def test_sums_and_gradients(order):
    plain, index = edges(order)
    ours = ops.Operand(*ops.resolve((plain.clone(), (N, M)))[:4])
    values, x = torch.rand(NNZ, dtype=torch.float64), torch.rand(N, 5, dtype=torch.float64)
    expected, *of_expected = gradients(ours, values, x)
    result, *of_found = gradients(index, values, x)
    for a, b in zip([result, *of_found], [expected, *of_expected]):
        torch.testing.assert_close(a, b)
    dense = torch.zeros(M, N, dtype=torch.float64)
    dense.index_put_((plain[1], plain[0]), values, accumulate=True)
    torch.testing.assert_close(result, dense @ x)


def gradients(A, values, x):
    values, x = values.clone().requires_grad_(), x.clone().requires_grad_()
    out = ops.spmm(A, x, values=values)
    return out, *torch.autograd.grad(out.square().sum(), (values, x))


@pytest.mark.parametrize("order", ORDERS)
def test_written_to_since(order):
    """The order that PyG knows is of other edges by now."""
    plain, index = edges(order)
    new = torch.stack([torch.randint(0, N, (NNZ,)), torch.randint(0, M, (NNZ,))])
    index.as_tensor().copy_(new)
    x = torch.rand(N, 5, dtype=torch.float64)
    values = torch.rand(NNZ, dtype=torch.float64)
    result, *of_found = gradients(index, values, x)
    expected, *of_expected = gradients((new, (N, M)), values, x)
    for a, b in zip([result, *of_found], [expected, *of_expected]):
        torch.testing.assert_close(a, b)
