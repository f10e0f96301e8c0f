"""Factors of nodes are taken out of sums over their edges, and two sums become one."""

import pytest
import torch

pytest.importorskip("torch_geometric")

from graph_models import FEATURES, NODES, edges, gradients, made
from sparsetir.graph.backend import Backend


class Messages(torch.nn.Module):
    """Sums at targets of a function of both ends' features, a parameter and weights."""

    def __init__(self, message):
        super().__init__()
        self.message, self.a = message, torch.nn.Parameter(torch.rand(FEATURES) + 0.5)

    def forward(self, x, edge_index, w):
        source, target = edge_index
        values = self.message(x[target], x[source], self.a, w[:, None])
        return torch.zeros_like(x).scatter_add(0, target[:, None].expand_as(values), values)


MESSAGES = {
    "tanh": lambda i, j, a, w: torch.tanh(i * a - j) * w,
    "one number for all features": lambda i, j, a, w: w * i,
    "negative, divided": lambda i, j, a, w: -(w / (i * i)) * 3,
    "quotients": lambda i, j, a, w: torch.sigmoid(i * a + j) / (i + 2) / 2,
    "under operators that are linear": lambda i, j, a, w: torch.relu(i * a + j) * w * i,
    "true or false for all edges": lambda i, j, a, w: i * (a > 1),
    "of weights and nodes": lambda i, j, a, w: torch.nn.functional.leaky_relu(i * j * a) * i * a,
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.slow
def test_both_directions(name):
    model, (_, edge_index, w) = Messages(MESSAGES[name]), made("raw")[1]
    x = torch.randn(NODES, FEATURES)
    # What these nodes are is no factor of any edge: it is not in the sums, not even as NaN.
    edge_index = edge_index.clone()
    edge_index[1, edge_index[1] % 7 == 0] = 1
    x[7], x[14], x[21] = float("nan"), float("inf"), 0
    edge_index[0, torch.isin(edge_index[0], torch.tensor([7, 14, 21]))] = 1
    grads = gradients(torch.compile(model, backend=Backend()), model, x, edge_index, w)
    for a, b in zip(grads, gradients(model, model, x, edge_index, w), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, equal_nan=True)


def regions(name):
    backend, (model, args) = Backend(), made(name)
    gradients(torch.compile(model, backend=backend), model, *args)
    return [region for graph in backend.graphs for region in graph.found]


def test_the_gradients_of_a_gate_at_its_targets_are_of_one_sum():
    sums = [region for region in regions("gate") if region.program.reduce == "sum"]
    assert len(sums) == 3  # of messages, and in the backward one at each end


def test_a_sum_of_numbers_for_edges_serves_all_features():
    backend, model = Backend(), Messages(MESSAGES["one number for all features"])
    x, edge_index = torch.randn(NODES, FEATURES), edges()
    torch.compile(model, backend=backend)(x, edge_index, torch.rand(edge_index.shape[1]))
    (region,) = backend.graphs[0].found
    assert region.shape == f"({NODES}, 1)"


def test_without_edges():
    model = Messages(MESSAGES["one number for all features"])
    x = torch.full((NODES, FEATURES), float("nan"))
    none = torch.empty(2, 0, dtype=torch.int64)
    assert not torch.compile(model, backend="sparsetir")(x, none, torch.empty(0)).any()


def test_a_gradient_that_is_not_selected_is_none_of_the_sum(quick_kernels):
    """Where relu is 0 for all edges of a node, NaN does not spread to its gradient."""
    model = Messages(lambda i, j, a, w: torch.relu(i * a + j) * w)
    x, edge_index = torch.randn(NODES, FEATURES), edges()
    x[edge_index[0, edge_index[1] == 5]], x[5] = -9.0, -9.0
    w, gradient = torch.rand(edge_index.shape[1]), torch.ones(NODES, FEATURES)
    gradient[5] = float("nan")
    grads = []
    for call in (torch.compile(model, backend="sparsetir"), model):
        leaf = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(call(leaf, edge_index, w), [leaf, model.a], gradient))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, equal_nan=True)


def test_sums_at_nodes_that_are_selected_later(plain):
    """A sum over all edges is not made of sums by an index that comes after it."""

    def model(x, edge_index, w):
        values = w[:, None] * x[edge_index[0]]
        values = values * values.sum(0)
        return values.sum(0), torch.zeros_like(x).index_add(0, edge_index[1], values)

    args = torch.randn(NODES, FEATURES), edges(), torch.rand(edges().shape[1])
    result, expected = torch.compile(model, backend="sparsetir")(*args), model(*args)
    torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-5)
