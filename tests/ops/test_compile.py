"""torch.compile, torch.export, fake tensors, autocast, torch.func and torch.jit.trace."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp

from ops_common import rounded
from sparsetir import nn, ops
from sparsetir.ops import products

SIZE = (6, 5)  # sources, targets
EDGES = torch.tensor([[0, 1, 2, 2, 5, 3, 0], [4, 0, 1, 4, 3, 0, 4]])
ROWPTR = ops.resolve((EDGES, SIZE)).rowptr
F = 3


def test_compile_once_for_patterns_of_all_sizes():
    """Number of edges, nodes and features are symbols of one graph."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def layer(edges, X):
        return ops.spmm((edges, X.shape[0]), X, "mean")

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for n, nnz, f in ((6, 7, 3), (9, 20, 4), (30, 11, 5)):
        edges, X = torch.randint(0, n, (2, nnz)), torch.randn(n, f)
        torch.testing.assert_close(compiled(edges, X), layer(edges, X))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "layout", ["csr", "coo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("csc", "bsr"))]
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_compile_with_a_sparse_tensor(layout):
    """torch breaks the graph at sparse tensors; their values have gradients all the same."""
    torch.compiler.reset()
    block = {"blocksize": (2, 3)} if layout == "bsr" else {}
    dense, X = (torch.arange(36.0).view(6, 6) % 5).relu(), torch.randn(6, F)
    A = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **block)

    def layer(A, X):
        return ops.spmm(A, X).relu()

    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(A, X), (dense @ X).relu())
    dense.requires_grad_()
    grads = []
    for call in (compiled, layer):
        out = call(dense.to_sparse(layout=A.layout, **block), X)
        grads += torch.autograd.grad(out.sum(), dense)
    torch.testing.assert_close(*grads)


class Layer(torch.nn.Module):
    """A graph convolution."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(F, 4)

    def forward(self, X, edges):
        return ops.spmm((edges, X.shape[0]), self.linear(X))


def test_export():
    layer, X = Layer(), torch.randn(6, F)
    edges = torch.randint(0, 6, (2, 9))
    shapes = {"X": {0: torch.export.Dim("nodes", min=2)}, "edges": {1: torch.export.Dim("edges")}}
    program = torch.export.export(layer, (X, edges), dynamic_shapes=shapes)
    names = {str(node.target) for node in program.graph.nodes}
    assert {"sparsetir.row_pointers.default", "sparsetir.spmm.default"} <= names
    exported = program.module()
    torch.testing.assert_close(exported(X, edges), layer(X, edges))
    X, edges = torch.randn(20, F), torch.randint(0, 20, (2, 50))
    torch.testing.assert_close(exported(X, edges), layer(X, edges))


def test_the_dispatcher_and_the_short_way_agree():
    """A call by name has gradients of all orders."""
    X, values = (rounded(s, "float64", 5)[0] for s in ((6, F), (7,)))
    results = []
    for call in (products.SPMM, torch.ops.sparsetir.spmm):
        out = call(ROWPTR, EDGES, values, X, "sum")
        first = torch.autograd.grad(out.sin().sum(), (X, values), create_graph=True)
        second = torch.autograd.grad(sum(g.cos().sum() for g in first), (X, values))
        results.append((out, *first, *second))
    assert all(map(torch.equal, *results))


N, NNZ, FEAT = 12, 30, 5
torch.manual_seed(0)
SQUARE = torch.randint(0, N, (2, NNZ))
A = (SQUARE, N)
X = torch.randn(N, FEAT, dtype=torch.float64)
VALUES = torch.rand(NNZ, dtype=torch.float64)


def dual():
    with forward_ad.dual_level():
        ops.spmm(A, forward_ad.make_dual(X, X))


@pytest.mark.parametrize(
    "call",
    [dual, lambda: jvp(lambda x: ops.spmm(A, x), (X,), (X,)),
     lambda: hessian(lambda x: ops.spmm(A, x).sin().sum())(X)],
    ids=["dual", "jvp", "hessian"],
)  # fmt: skip
def test_forward_mode_derivatives_are_refused(call):
    with pytest.raises(NotImplementedError, match="spmm: has no forward-mode derivatives"):
        call()


LAYERS = pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.GCNConv(FEAT, 3, cached=True),
        lambda: nn.SAGEConv(FEAT, 3),
        lambda: nn.GATConv(FEAT, 3),
    ],
    ids=["gcn", "sage", "gat"],
)


@LAYERS
def test_layers(layer):
    """Transformed first, so that what they keep must be fit for what comes after."""
    layer, edges = layer().double(), SQUARE.clone()
    parameters = dict(layer.named_parameters())

    def loss(parameters):
        return functional_call(layer, parameters, (X, edges)).sin().sum()

    grads = grad(loss)(parameters)
    layer(X, edges).sin().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(grads[name], parameter.grad)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced():
    """The trace holds the operator, and not its result as a constant."""
    operand = ops.resolve(A, VALUES)
    traced = torch.jit.trace(lambda x: ops.spmm(operand, x), X, check_trace=False)
    torch.testing.assert_close(traced(X.cos()), ops.spmm(operand, X.cos()))
