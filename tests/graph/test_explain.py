"""The report of `explain`; the programs of two layers."""

import math
import re
import sys

import pytest
import torch

pytest.importorskip("torch_geometric")

import sparsetir
from graph_models import EDGES, made
from pairs import by_default
from stage2 import golden


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="names of torch's nodes")
@pytest.mark.parametrize("name", by_default(["GCN", "GAT"], "GAT"))
def test_golden(name):
    model, args = made(name)
    before = [p.clone() for p in model.parameters()]
    report = sparsetir.explain(model, *args)
    assert report.programs() == golden(f"regions_{name.lower()}").rstrip("\n")
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_regions_name_their_modules(quick_kernels):
    model = torch.nn.ModuleDict({"a": made("GCN")[0], "b": made("GCN")[0]})
    _, (x, edges) = made("GCN")

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x, edges):
            return self.parts["a"](x, edges) + self.parts["b"](x, edges)

    report = sparsetir.explain(Two(), x, edges)
    (graph,) = report.graphs
    names = [region.module for region in graph.found]
    assert all(name.startswith("parts.") for name in names)
    assert {name.split(".")[1] for name in names} == {"a", "b"}
    lines = str(report).splitlines()
    (begin,) = [n for n, line in enumerate(lines) if line.startswith("module ")]
    shown = re.findall(r"(?<=[ ,])\d+(?=,|$)", "\n".join(lines[begin:]), re.MULTILINE)
    assert sorted(map(int, shown)) == list(range(len(names)))
    assert f" of {names[0]}:" in report.programs()


def test_parameters_that_a_function_closes_over(quick_kernels):
    model, (x, edges) = made("GCN")
    (graph,) = sparsetir.explain(lambda x, edges: model(x, edges), x, edges).graphs
    assert {measured.costs.popitem()[1].direction for measured in graph.measured} == {
        "forward", "backward"
    }  # fmt: skip
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_what_takes_how_long():
    model, args = made("Transformer")
    report = sparsetir.explain(model, *args)
    (graph,) = report.graphs
    costs = [cost for measured in graph.measured for cost in measured.costs.values()]
    assert {cost.direction for cost in costs} == {"forward", "backward"}
    assert all(0 < cost.seconds < 10 for cost in costs)
    regions = [cost.region for cost in costs if cost.region is not None]
    assert sorted(map(id, regions)) == sorted(map(id, graph.found))
    assert all(cost.bytes == 4 * math.prod(cost.shape) for cost in costs if cost.what == "mm")
    by_edges = [cost for cost in costs if cost.edges]
    assert by_edges and all(cost.shape[0] == EDGES and cost.shape[1] > 1 for cost in by_edges)
    lines = str(report).splitlines()
    assert sum("  stored" in line for line in lines) <= len(by_edges)
    assert any(" all " in line and "100%" in line for line in lines)
    assert "T.prim_func" not in str(report)


def test_what_is_left_and_why(quick_kernels):
    model, args = made("CG")
    report = sparsetir.explain(model, *args)
    (graph,) = report.graphs
    assert [line.split(": ")[1] for line in graph.left] == 2 * ["read by aten.cat.default"]
    assert "left to torch:\n" in str(report)


@pytest.mark.parametrize("ordered", [False, True])
def test_copies_back_to_the_order_of_the_edges(ordered):
    """Edges in order have no copies."""

    def messages(x, rows, others):
        values = x[rows] * x[others]
        return torch.zeros_like(x).index_add(0, rows, values), values.cumsum(1)

    rows = torch.tensor([0, 2, 2, 5] if ordered else [5, 0, 2, 2])
    x, others = torch.rand(9, 3), torch.tensor([1, 3, 0, 8])
    report = sparsetir.explain(messages, x, rows, others)
    (graph,) = report.graphs
    costs = [cost for measured in graph.measured for cost in measured.costs.values()]
    (values,) = [cost for cost in costs if cost.region is not None and cost.shape == (4, 3)]
    assert values.edges and values.copied != ordered
    assert ("stored, copied back" in str(report)) != ordered


def test_functions_without_gradients():
    def moved(x, index):
        return torch.zeros_like(x).index_add(0, index, x[index])

    (graph,) = sparsetir.explain(moved, torch.rand(9, 3), torch.arange(9)).graphs
    assert [region.node for region in graph.found] == ["index_add"] and not graph.left


def test_a_program_that_is_refused_is_left(monkeypatch):
    monkeypatch.setattr("sparsetir.graph.programs.Program.refusal", lambda program: "no such thing")
    model, args = made("raw")
    (graph,) = sparsetir.explain(model, *args).graphs
    assert not graph.found and any("reduction index_add (30, 8): no such" in x for x in graph.left)


def test_compiled_models_and_functions(quick_kernels):
    """They are explained as what they were compiled from."""
    edges = torch.randint(0, 20, (2, 90))

    def summed(x):
        rows = edges[1][:, None].expand(-1, x.shape[1])
        first = torch.full((20, 3), -torch.inf).scatter_reduce(0, rows, x[edges[0]], "amax")
        return torch.zeros(20, 3).scatter_add(0, rows, x[edges[0]].exp()), first

    x = torch.rand(20, 3)
    for compiled in (torch.compile(summed, backend="sparsetir"), summed):
        (graph,) = sparsetir.explain(compiled, x).graphs
        (_, left) = graph.left
        assert left.endswith(
            "'amax' with initial values, not of torch.zeros with include_self=False"
        )
        assert len(graph.found) == 1
    model = torch.compile(torch.nn.Linear(3, 3), backend="sparsetir")
    assert "addmm" in str(sparsetir.explain(model, x))
