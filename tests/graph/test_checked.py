"""`options={"check": True}`: the first run of each graph beside torch's operators."""

from __future__ import annotations

import pytest
import torch

from graph_models import EDGES, FEATURES, NODES, edges
from sparsetir.graph import expressions
from sparsetir.graph.expressions import aten


class Gate(torch.nn.Module):
    """A message with dropout, which needs random functions in both directions."""

    def forward(self, x, index):
        source, target = index
        message = torch.nn.functional.dropout(torch.tanh(x[source] - x[target]), 0.3, self.training)
        return torch.zeros_like(x).index_add(0, target, message)


def trained(model, check):
    """A result and its gradient."""
    torch._dynamo.reset()
    call = torch.compile(model, backend="sparsetir", options={"check": check})
    torch.manual_seed(0)
    x = torch.randn(NODES, FEATURES, requires_grad=True)
    out = call(x, edges(1, NODES, EDGES))
    out.square().sum().backward()
    return out.detach(), x.grad


@pytest.mark.slow
def test_what_is_right_passes_and_stays_as_it_is():
    for a, b in zip(trained(Gate(), True), trained(Gate(), False), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        trained_once = torch.compile(Gate().eval(), backend="sparsetir", options={"check": True})
        trained_once(torch.randn(NODES, FEATURES), edges(1, NODES, EDGES))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.default(1)
def test_backward_is_compared_for_the_run_before_it(order, quick_kernels):
    """A mistake of an earlier run is not noticed."""
    torch._dynamo.reset()
    call = torch.compile(Gate().eval(), backend="sparsetir", options={"check": True})
    edge_index = edges(1, NODES, EDGES)
    given_x = [torch.randn(NODES, FEATURES, requires_grad=True) for _ in order]
    results = [call(x, edge_index) for x in given_x]
    for n in order:
        results[n].square().sum().backward()
    for x in given_x:
        (again,) = torch.autograd.grad(call(x, edge_index).square().sum(), x)
        assert torch.equal(again, x.grad)


@pytest.mark.parametrize(
    ("operator", "formula", "direction"),
    [(aten.tanh.default, "({0} * {0})", "forward"),
     (aten.tanh_backward.default, "({0} * {1})", "backward")],
)  # fmt: skip
@pytest.mark.default("tanh.default-({0} * {0})-forward")
def test_what_is_wrong_is_told(operator, formula, direction, monkeypatch):
    monkeypatch.setitem(expressions.FORMULAS, operator, formula)
    with pytest.raises(RuntimeError, match=f"of a {direction} graph is not that .* it is off by"):
        trained(Gate(), True)


def test_options():
    for options, message in (({"check": 1}, "True or False, got 1"), ({"test": True}, "'test'")):
        call = torch.compile(Gate(), backend="sparsetir", options=options)
        with pytest.raises(Exception, match=message):
            call(torch.randn(NODES, FEATURES), edges(1, NODES, EDGES))
