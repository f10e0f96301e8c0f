"""Graphs kept in files: those loaded equal those compiled, and what may change is not kept."""

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

pytest.importorskip("torch_geometric")

import torch_geometric.nn as pyg

from graph_models import Wrapped, gradients
from sparsetir.graph import ahead, kept
from sparsetir.runtime import kernel_cache

pytestmark = pytest.mark.skipif(not kept.HAS_CACHE, reason="needs torch's cache")
MODELS = {
    "GAT": lambda: Wrapped(pyg.GATConv(6, 4, heads=2)),  # self loops: a prelude
    "GINE": lambda: Wrapped(pyg.GINEConv(torch.nn.Linear(6, 4), edge_dim=3)),  # products at edges
    "GCN": lambda: Wrapped(pyg.GCNConv(6, 8)),
    "numbers": lambda: Numbers(),  # with constants in the graph
    "SAGE": lambda: Wrapped(pyg.SAGEConv(6, 8, aggr="max")),
}


class Numbers(torch.nn.Module):
    def forward(self, x, edges):
        first = torch.tensor(2.5)
        values = torch.where(x[edges[0]] > 0, x[edges[0]] * first, torch.tensor(0.5).to(x.dtype))
        return torch.zeros_like(x).index_add(0, edges[1], values)


class Constant(torch.nn.Module):
    def forward(self, x, index):
        return torch.zeros_like(x).index_add(0, index, x[index] * torch.tensor([1.0, 2.0]))


@pytest.fixture
def folder(tmp_path, monkeypatch, quick_kernels):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("SPARSETIR_KERNELS", str(folder))
    monkeypatch.setattr(ahead, "LEAST", 1000)  # no processes
    return folder


def again(model, dynamic=True):
    """A model as another process compiles it, and the number of graphs that it has loaded."""
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(model, backend="sparsetir", dynamic=dynamic)
    return call, lambda: counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.default("GINE-True", "GCN-True", "numbers-True", "SAGE-True", "numbers-False")
def test_loaded_graphs_equal_eager(name, dynamic, folder):
    model = MODELS[name]()
    for step, size in enumerate([20, 31] if dynamic else [20, 20]):
        args = torch.randn(size, 6), torch.randint(0, size, (2, 5 * size))
        if name == "GINE":
            args += (torch.randn(5 * size, 3),)
        call, loaded = again(model, dynamic)
        expected = gradients(model, model, *args)
        for a, b in zip(gradients(call, model, *args), expected, strict=True):
            torch.testing.assert_close(a, b)
        assert loaded() == step
        with torch.no_grad():
            torch.testing.assert_close(call(*args), model(*args))
        assert loaded() == 2 * step


def test_loaded_backward_runs_again_and_batched(folder):
    model, args = MODELS["GAT"](), (torch.randn(20, 6), torch.randint(0, 20, (2, 90)))
    for _ in range(2):
        call, loaded = again(model)
        out, weights = call(*args), torch.randn(3, 20, 8)
        parameters = list(model.parameters())
        each = [torch.autograd.grad(out, parameters, w, retain_graph=True) for w in weights]
        together = torch.autograd.grad(out, parameters, weights, is_grads_batched=True)
        for a, b in zip(together, map(torch.stack, zip(*each, strict=True)), strict=True):
            torch.testing.assert_close(a, b)
    assert loaded() == 1


def test_loaded_backward_in_compiled_autograd(folder):
    model, args = MODELS["SAGE"](), (torch.randn(20, 6), torch.randint(0, 20, (2, 90)))
    expected = torch.autograd.grad(model(*args).sum(), list(model.parameters()))
    for step in range(2):
        call, loaded = again(model)
        out = call(*args).sum()
        with compiled_autograd._enable(torch.compile(backend="eager", dynamic=True)):
            model.zero_grad()
            out.backward()
        for x, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(x.grad, grad)
        assert loaded() == step


def test_graphs_of_other_circumstances_are_not_loaded(folder, monkeypatch):
    model, args = MODELS["numbers"](), (torch.randn(20, 6), torch.randint(0, 20, (2, 90)))
    again(model)[0](*args)
    monkeypatch.setattr(kernel_cache, "_package", lambda: "another version")
    call, loaded = again(model)
    call(*args)
    assert loaded() == 0


@torch.library.custom_op("test_kept::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def test_what_may_change_is_not_kept(folder):
    x, index = torch.randn(9, 2), torch.randint(0, 9, (30,))
    add = lambda x, y: torch.zeros_like(x).index_add(0, index, y[index])  # noqa: E731
    for call, args in (
        (Constant(), (x, index)), (lambda x: add(x, twice(x)), (x,)), (add, (x[:, :1], x[:, 1:])),
    ):  # fmt: skip
        for _ in range(2):
            compiled, loaded = again(call)
            torch.testing.assert_close(compiled(*args), call(*args))
            assert loaded() == 0
    assert not list(folder.glob("*.graph/*"))


def test_nothing_is_kept_without_a_folder(tmp_path, monkeypatch, quick_kernels):
    monkeypatch.setenv("SPARSETIR_KERNELS", "")
    model, args = MODELS["numbers"](), (torch.randn(20, 6), torch.randint(0, 20, (2, 90)))
    for _ in range(2):
        call, loaded = again(model)
        call(*args)
    assert loaded() == 0
