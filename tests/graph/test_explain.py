"""What `explain` tells; the programs of two layers."""

import sys

import pytest
import torch

pytest.importorskip("torch_geometric")

import sparsetir
from graph_models import edges, made
from stage2 import golden


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="names of torch's nodes")
@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_golden(name):
    model, args = made(name)
    before = [p.clone() for p in model.parameters()]
    assert str(sparsetir.explain(model, *args)) == golden(f"regions_{name.lower()}").rstrip("\n")
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_what_is_left_and_why():
    model, args = made("CG")
    (graph,) = sparsetir.explain(model, *args).graphs
    assert [line.split(": ")[1] for line in graph.left] == 2 * ["read by aten.cat.default"]
    text = str(sparsetir.explain(model.double(), *(a.double() for a in args[:1]), edges()))
    assert "left to torch:\n" in text and "of torch.float64 on cpu, not of float32 on a CPU" in text


def test_functions_without_gradients():
    def moved(x, index):
        return torch.zeros_like(x).index_add(0, index, x[index])

    (graph,) = sparsetir.explain(moved, torch.rand(9, 3), torch.arange(9)).graphs
    assert [found.node for found in graph.found] == ["index_add"] and not graph.left


def test_a_program_that_is_refused_is_left(monkeypatch):
    monkeypatch.setattr("sparsetir.graph.programs.Program.refusal", lambda program: "no such thing")
    model, args = made("raw")
    (graph,) = sparsetir.explain(model, *args).graphs
    assert not graph.found and any("reduction index_add (30, 8): no such" in x for x in graph.left)
