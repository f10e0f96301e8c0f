"""What is no region, by Inductor."""

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


@inductor
def test_a_layer():
    model, args = made("gate")
    call, backend = compiled(model)
    for _ in range(2):
        found, expected = gradients(call, model, *args), gradients(model, model, *args)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    with torch.no_grad():
        torch.testing.assert_close(call(*args), model(*args), rtol=2e-4, atol=2e-5)
    assert [graph.rest for graph in backend.graphs] == [
        {"forward": "", "backward": ""},
        {"inference": ""},
    ]


@inductor
def test_sizes_that_edges_tell():
    """Compiled for the edges that came first; others have other numbers of loops."""

    def model(x, given):
        source, target = given[:, given[0] != given[1]]
        near = torch.zeros(NODES).index_add(0, target, torch.ones(len(target)))
        return torch.zeros_like(x).index_add(0, target, x[source].sin()) * near[:, None]

    call, backend = compiled(model)
    first, other = edges(), edges(seed=2)
    other[:, :9] = 1
    for given in (first, first, other, first):
        found, expected = [], []
        for f, into in ((call, found), (model, expected)):
            x = torch.linspace(0, 1, NODES * FEATURES).view(NODES, FEATURES).requires_grad_()
            out = f(x, given)
            (
                out * torch.rand(out.shape, generator=torch.Generator().manual_seed(1))
            ).sum().backward()
            into += [out.detach(), x.grad]
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    (graph,) = backend.graphs
    assert graph.rest == {"forward": "", "backward": ""} and graph.found


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
    found, expected = gradients(call, model, *args), gradients(model, model, *args)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
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
