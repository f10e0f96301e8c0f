"""torch.func: gradients and vmap of operators and of layers; and torch.jit.trace."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from sparsetir import nn, ops

N, NNZ, F = 12, 30, 5
torch.manual_seed(0)
EDGES = torch.randint(0, N, (2, NNZ))
A = (EDGES, N)
X = torch.randn(N, F, dtype=torch.float64)
VALUES = torch.rand(NNZ, dtype=torch.float64)


def by_autograd(loss, *arguments):
    leaves = [x.clone().requires_grad_() for x in arguments]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_inside_and_outside_of_grad():
    def loss(x):
        return ops.spmm(A, x, values=VALUES).sin().sum()

    many = torch.stack([X, 2 * X, X.cos()])
    expected = torch.stack([by_autograd(loss, x)[0] for x in many])
    torch.testing.assert_close(vmap(grad(loss))(many), expected)
    torch.testing.assert_close(grad(lambda many: vmap(loss)(many).sum())(many), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_second_derivatives():
    def loss(x):
        return ops.spmm(A, x, values=VALUES).sin().sum()

    expected = torch.autograd.functional.hessian(loss, X)
    torch.testing.assert_close(jacrev(jacrev(loss))(X), expected)


def dual():
    with forward_ad.dual_level():
        ops.spmm(A, forward_ad.make_dual(X, X))


@pytest.mark.parametrize(
    "call",
    [dual, lambda: jvp(lambda x: ops.spmm(A, x), (X,), (X,)),
     lambda: hessian(lambda x: ops.spmm(A, x).sin().sum())(X)],
    ids=["dual", "jvp", "hessian"],
)  # fmt: skip
def test_derivatives_taken_forward_are_refused(call):
    with pytest.raises(NotImplementedError, match="sparsetir.spmm: has no derivatives taken forw"):
        call()


LAYERS = pytest.mark.parametrize(
    "layer",
    [lambda: nn.GCNConv(F, 3, cached=True), lambda: nn.SAGEConv(F, 3), lambda: nn.GATConv(F, 3)],
    ids=["gcn", "sage", "gat"],
)


@LAYERS
def test_layers(layer):
    """Transformed first, so that what they keep must be fit for what comes after."""
    layer, edges = layer().double(), EDGES.clone()
    parameters = dict(layer.named_parameters())

    def loss(parameters):
        return functional_call(layer, parameters, (X, edges)).sin().sum()

    found = grad(loss)(parameters)
    layer(X, edges).sin().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced():
    """What is traced is the operator, and not its result as a constant."""
    operand = ops.resolve(A, VALUES)
    traced = torch.jit.trace(lambda x: ops.spmm(operand, x), X, check_trace=False)
    torch.testing.assert_close(traced(X.cos()), ops.spmm(operand, X.cos()))
