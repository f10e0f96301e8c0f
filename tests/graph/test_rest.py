"""Nodes outside of regions, compiled by Inductor."""

import pytest
import torch

pytest.importorskip("torch_geometric")

import sparsetir
from graph_models import FEATURES, NODES, edges, gradients, made
from sparsetir.graph.backend import Backend

inductor = pytest.mark.parametrize("rest", ["inductor"], indirect=True)


def compiled(model, **options):
    backend = Backend()
    return torch.compile(model, backend=backend, **options), backend


class Near(torch.nn.Linear):
    """Messages between different nodes, as often as there are, through weights."""

    def forward(self, x, edge_index):
        source, target = edge_index[:, edge_index[0] != edge_index[1]]
        near = torch.zeros(NODES).index_add(0, target, torch.ones(len(target)))
        summed = torch.zeros_like(x).index_add(0, target, x[source].sin())
        return super().forward(summed * near[:, None]).tanh()


@inductor
@pytest.mark.slow
def test_a_layer():
    """Compiled for the edges that came first; others have other numbers of loops."""
    model, x = Near(FEATURES, 8), torch.randn(NODES, FEATURES)
    call, backend = compiled(model)
    first, other = edges(), edges(seed=2)
    other[:, :9] = 1
    for graph in (first, first, other, first):
        result, expected = gradients(call, model, x, graph), gradients(model, model, x, graph)
        torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-5)
    with torch.no_grad():
        torch.testing.assert_close(call(x, other), model(x, other), rtol=2e-4, atol=2e-5)
    assert [graph.rest for graph in backend.graphs] == [
        {"forward": "", "backward": ""},
        {"inference": ""},
    ]
    assert all(graph.found for graph in backend.graphs)


@inductor
def test_sizes_that_change_are_left_to_torch():
    model, args = made("raw")
    call, backend = compiled(model, dynamic=True)
    torch.testing.assert_close(call(*args), model(*args), rtol=2e-4, atol=2e-5)
    assert backend.graphs[0].rest == {"forward": "its sizes change"}


@inductor
def test_a_graph_that_inductor_does_not_take(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such thing\nas this")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fail)
    model, args = made("raw")
    call, _ = compiled(model)
    result, expected = gradients(call, model, *args), gradients(model, model, *args)
    torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-5)
    text = str(sparsetir.explain(model, *args))
    for direction in ("forward", "backward"):
        assert f"{direction}, without Inductor: no such thing\n" in text + "\n"


@pytest.mark.parametrize(
    "options, wrong",
    [({"rest": "mine"}, "got 'mine'"), ({"more": 1}, "got 'more'"),
     ({"rest": "inductor"}, "none is found")],
)  # fmt: skip
def test_options_that_are_wrong(options, wrong, monkeypatch):
    monkeypatch.setattr("sparsetir.graph.backend.has_compiler", lambda: False)
    model, args = made("raw")
    with pytest.raises(Exception, match=wrong):
        torch.compile(model, backend="sparsetir", options=options)(*args)


def test_modes_are_refused():
    model, args = made("raw")
    with pytest.raises(Exception, match="argument 'mode': expected None .*, got 'reduce-overhead'"):
        torch.compile(model, backend="sparsetir", mode="reduce-overhead")(*args)
