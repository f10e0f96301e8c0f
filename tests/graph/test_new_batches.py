"""Steps of a model whose edges are new: how often it is traced, what layers share."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as pyg

from graph_models import FEATURES, NODES, Wrapped, edges, gradients
from sparsetir.graph import operator
from sparsetir.graph.backend import Backend
from sparsetir.graph.programs import GIVEN, Operand, Program
from sparsetir.graph.regions import _merge_equal
from sparsetir.ops.cache import private
from sparsetir.runtime.kernel import Kernel

aten = torch.ops.aten


class Scaled(torch.nn.Module):
    """Sums at nodes, with a slope, which needs its value, and a factor, which does not."""

    slope = 0.3

    def forward(self, x, index, factor):
        sums = torch.zeros_like(x).index_add(0, index, x[index] * factor)
        return torch.nn.functional.leaky_relu(sums, self.slope)


def test_floats_are_constants_until_they_change(quick_kernels):
    model, backend = Scaled(), Backend()
    call = torch.compile(model, backend=backend, dynamic=True)
    traced = []
    for step, factor in enumerate([0.5, 0.5, 0.6, 0.7, 0.8, 0.9]):
        x, index = torch.randn(NODES + step, 3), torch.randint(0, NODES, (40 + step,))
        torch.testing.assert_close(call(x, index, factor), model(x, index, factor))
        traced.append(len(backend.graphs))
    assert traced[:2] == [1, 1] and len(set(traced[3:])) == 1
    assert torch._dynamo.config.specialize_float is False
    model.slope = 0.1
    torch.testing.assert_close(call(x, index, factor), model(x, index, factor))


def test_equal_values_are_computed_once():
    def traced(x, y):
        a, b, c = x * 0.0, x * 0.0, x * -0.0
        noise = torch.rand_like(x) + torch.rand_like(x)
        empty = torch.empty_like(x), torch.empty_like(x)
        y.add_(x + 1)
        rest = (x + 1) * (x + 1), y.sum(), x.sum() + x.sum(dtype=torch.float64)
        return a + b, c + noise, x * 2, x * 2, *rest, *empty

    args = torch.randn(5), torch.randn(5)
    module = torch.fx.experimental.proxy_tensor.make_fx(traced, tracing_mode="fake")(*args)
    _merge_equal(module.graph)
    module.graph.lint()
    module.recompile()
    count = [n.target for n in module.graph.nodes].count
    assert count(aten.rand_like.default) == 2 and count(aten.empty_like.default) == 2
    assert count(aten.mul.Tensor) == 5  # 0.0, -0.0, two results, and the square
    assert count(aten.add.Tensor) == 6  # once before and once after what is written
    assert count(aten.sum.default) == 3  # of two types
    ours, plain = ([args[0], args[1].clone()] for _ in range(2))
    torch.manual_seed(0)
    results = module(*ours)
    torch.manual_seed(0)
    for a, b in zip(results[:-2], traced(*plain)[:-2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert results[2].data_ptr() != results[3].data_ptr()


COMPILED = """
import sys, torch, sparsetir
call = lambda x, i: torch.zeros_like(x).index_add(0, i, x[i])
torch.compile(call, backend="sparsetir")(torch.ones(4, 3), torch.tensor([0, 2, 1]))
print("torch._inductor.lowering" in sys.modules)
"""


@pytest.mark.slow
def test_inductor_is_not_imported():
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("many", [False, True], ids=["few edges", "many edges"])
def test_estimates_are_computed_for_edges_that_stay(monkeypatch, many):
    computed, before = [], Kernel.compute_passed

    def compute_passed(kernel, arguments, estimate=False):
        result = before(kernel, arguments, estimate)
        computed.append((estimate, result["J_indices_reuse"]))
        return result

    monkeypatch.setattr(Kernel, "compute_passed", compute_passed)
    monkeypatch.setattr(operator, "CALLS", 3)
    monkeypatch.setattr(operator, "MANY", 1 if many else 1000)
    x = torch.randn(NODES, 8)
    call = torch.compile(Wrapped(pyg.SimpleConv()), backend=Backend(), dynamic=True)
    for step in (1, 2):
        pairs = edges(step)
        for _ in range(6):
            torch.testing.assert_close(call(x, pairs), pyg.SimpleConv()(x, pairs))
    exact = False, len(pairs[0]) // 8
    assert computed == ([exact] * 2 if many else [(True, 2**62), exact] * 2)


def test_layers_that_are_alike_take_turns_on_edges(monkeypatch):
    """Each call has what was prepared for its own edges, which is freed with them."""
    prepared, before = [], operator._prepare

    def prepare(*args):
        result = before(*args)
        prepared.append(weakref.ref(result.arrays["indptr"]))
        return result

    monkeypatch.setattr(operator, "_prepare", prepare)
    layers = (Wrapped(pyg.SimpleConv()) for _ in range(2))
    first, second = (torch.compile(x, backend=Backend(), dynamic=True) for x in layers)
    x, others = torch.randn(NODES, FEATURES), edges(7)
    given = [edges(3), others, edges(3) + 1]
    for n in (0, 1, 1, 0, 2, 0):
        for call in (first, second):
            torch.testing.assert_close(call(x, given[n]), pyg.SimpleConv()(x, given[n]))
    assert len(prepared) == 3  # both models share a copy of the edges
    del given, others, first, second, call
    torch._dynamo.reset()
    gc.collect()
    assert all(ref() is None for ref in prepared)


def test_degrees_are_counted_once_for_all_layers(quick_kernels):
    layers = (pyg.SAGEConv(FEATURES, FEATURES) for _ in range(3))
    model, backend = pyg.Sequential("x, e", [(x, "x, e -> x") for x in layers]), Backend()
    call = torch.compile(model, backend=backend, dynamic=True)
    x, pairs = torch.randn(NODES, FEATURES), edges()
    for a, b in zip(
        gradients(call, model, x, pairs), gradients(model, model, x, pairs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    (graph,) = backend.graphs
    computed = [name for p in graph.preludes for part in p.parts for name in part.computed]
    assert sum(name.startswith("scatter_add") for name in computed) == 1


def test_models_share_what_follows_from_edges():
    """Layers that are compiled one by one copy and sort edges once."""

    def call(x, pairs, at):
        pairs = pairs[:, pairs[0] != pairs[1]]
        return torch.zeros_like(x).index_add(0, pairs[1], x[pairs[0]]) + at

    backends, x, pairs = [Backend(), Backend(), Backend()], torch.randn(NODES, 3), edges()
    for at, backend in enumerate(backends):
        torch._dynamo.reset()
        if at == 2:  # another pair of edges counts
            edited = lambda x, pairs, at: call(x, pairs.flip(0), at)  # noqa: E731
        else:
            edited = call
        run = torch.compile(edited, backend=backend, dynamic=True)
        y = x.clone().requires_grad_()
        torch.testing.assert_close(run(y, pairs, at), edited(y, pairs, at))
    parts = [p for b in backends for g in b.graphs for prelude in g.preludes for p in prelude.parts]
    assert [part.runs for part in parts] == [1, 0, 1]
    pairs[0, :5] = 0
    for part in parts:
        part.runs = 0
    torch.testing.assert_close(run(y, pairs, at), edited(y, pairs, at))
    assert sum(part.runs for part in parts) == 1


def test_private_indices_that_were_written_to_are_prepared_again():
    region = operator.Region(operator.PROGRAMS[operator.number_of(sums())])
    x, rows = torch.randn(5, 8), private(torch.tensor([0, 1, 1, 4]))
    values = x[[0, 1, 2, 3]]
    for _ in range(2):
        expected = torch.zeros(5, 8).index_add(0, rows, values)
        torch.testing.assert_close(region([values], [rows], [5, 8], 5, False), expected)
        rows[0] = 3


def sums():
    """The program of a sum of values of edges at nodes."""
    return Program("{0}", (Operand("edge", GIVEN, (0,)),), (0,), (8,), 0)


def test_a_number_for_all_edges_is_a_scalar_in_calls_for_tuning():
    def scaled(x, index, factor):
        return torch.zeros_like(x).index_add(0, index, x[index] * factor)

    x, index, factor = torch.randn(NODES, 8), torch.randint(0, NODES, (90,)), torch.tensor(0.7)
    backend = Backend(noted=True)
    call = torch.compile(scaled, backend=backend)
    torch.testing.assert_close(call(x, index, factor), scaled(x, index, factor))
    (graph,) = backend.graphs
    assert [call.shapes["out"] for call in graph.calls] == [(NODES, 8)]
