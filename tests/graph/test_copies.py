"""Copies that nothing writes to, gradients of parts of a tensor: fewer operators, equal results."""

import random
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout

from sparsetir.graph.backend import Backend
from sparsetir.graph.copies import remove_copies
from sparsetir.graph.expressions import aten


def rewritten(function, *inputs, mode: Any = "symbolic"):
    """The results of a function's graph without copies, which are as before, and its operators."""
    module = make_fx(function, tracing_mode=mode)(*inputs)
    remove_copies(module.graph)
    module.graph.lint()
    module.recompile()
    before = [x.clone() for x in inputs]
    expected, results = function(*inputs), module(*inputs)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    strides = [[x.stride() for x in of] for of in (results, expected)]
    assert strides[0] == strides[1]
    assert all(map(torch.equal, inputs, before))
    return results, [n.target for n in module.graph.nodes if n.op == "call_function"]


def test_a_copy_of_a_value():
    _, targets = rewritten(lambda x: [dropout(x.relu(), 0.0) * 2], torch.randn(3, 4))
    assert targets == [aten.relu.default, aten.mul.Tensor]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [(y := x.relu()), y.clone()],
        lambda x: [(y := x.relu()).view(-1), y.clone() * 2],
        lambda x: [x.clone(), x.clone().view(-1) * 2],
        lambda x: [x.relu().t().clone(memory_format=torch.contiguous_format) * 2],
        lambda x: [x.relu().expand(5, 3, 4).clone() * 2],
    ],
    ids=["result", "view of a result", "argument", "other strides", "expanded"],
)
def test_copies_that_stay(function):
    results, targets = rewritten(function, torch.randn(3, 4))
    assert aten.clone.default in targets
    assert len({x.untyped_storage().data_ptr() for x in results}) == len(results)


def parts(x, sizes, dim, at, backward):
    return sum_of([backward(x[n], sizes, dim, *of) for n, of in enumerate(at)])


def sum_of(terms):
    first, *others = terms
    for term in others:
        first = first + term
    return first


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_elements_are_concatenated(order, dim):
    sizes = [4, 5]
    sizes.insert(dim % 3, 3)

    def function(x):
        at = [(n - 3 if n == 2 else n,) for n in order]
        return [parts(x, sizes, dim, at, aten.select_backward) * 2]

    _, targets = rewritten(function, torch.randn(3, 4, 5))
    assert targets.count(aten.cat.default) == 1
    assert not {aten.select_backward.default, aten.add.Tensor} & set(targets)


def test_gradients_of_elements_of_whole_slices_are_concatenated():
    def function(x):
        def gradient(part, n):
            element = aten.select_backward(part * 2, [4, 3], 1, n)
            return aten.slice_backward(element, [4, 3], 0, 0, 2**63 - 1, 1)

        return [sum_of([gradient(part, n) for n, part in enumerate(x)]) * 2]

    _, targets = rewritten(function, torch.randn(3, 4))
    assert targets.count(aten.cat.default) == 1
    assert not {aten.slice_backward.default, aten.clone.default} & set(targets)


def test_gradients_of_whole_slices_are_copies_of_results_and_arguments():
    def function(x, y):
        whole = lambda z: aten.slice_backward(z, list(z.shape), 1, 0, 2**63 - 1, 1)  # noqa: E731
        return [double := y * 2, whole(double), whole(x), whole(y.t() * 2)]

    results, _ = rewritten(function, torch.randn(3, 4), torch.randn(3, 4))
    assert len({x.untyped_storage().data_ptr() for x in results}) == 4


def test_gradients_of_slices_are_concatenated():
    def function(x, y, z):
        at = [(3, 2**63 - 1, 1), (0, 1, 1), (1, 3, 1)]
        terms = [
            aten.slice_backward(g, [2, 5], 1, *of) for g, of in zip((x, y, z), at, strict=True)
        ]
        return [sum_of(terms)]

    inputs = torch.randn(2, 2), torch.randn(2, 1), torch.randn(2, 2)
    _, targets = rewritten(function, *inputs)
    assert aten.cat.default in targets and aten.slice_backward.default not in targets


@pytest.mark.parametrize(
    "at, backward",
    [
        ([(0,), (1,)], aten.select_backward),
        ([(0,), (1,), (1,)], aten.select_backward),
        ([(0, 3, 2), (1, 2, 1)], aten.slice_backward),
        ([(0, 2, 1), (1, 3, 1)], aten.slice_backward),
    ],
    ids=["one is missing", "one is twice", "in steps", "overlapping"],
)
def test_parts_that_do_not_fill_are_added(at, backward):
    whole = torch.empty(3, 4)
    sizes = [whole[of[0]].shape if len(of) == 1 else whole[slice(*of)].shape for of in at]
    inputs = [torch.randn(size) for size in sizes]
    _, targets = rewritten(lambda *x: [parts(x, [3, 4], 0, at, backward)], *inputs)
    assert aten.cat.default not in targets and aten.add.Tensor in targets


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [first_two(x, 2) + 1.5],
        lambda x: [first_two(x, 2) + first_two(x, 1, [0])],
        lambda x: [torch.add(first_two(x, 2, [0]), first_two(x, 2, [1]), alpha=2)],
    ],
    ids=["a number", "broadcast", "scaled"],
)
def test_sums_with_other_terms(function):
    rewritten(function, torch.randn(2, 4))


def first_two(x, size, places=(0, 1)):
    return parts(x, [size, 4], 0, [(n,) for n in places], aten.select_backward)


def test_empty_vectors_among_pieces():
    def function(x):
        whole = torch.cat([x * 2, x.new_empty(0)], 0)
        return [whole.t().clone(memory_format=torch.contiguous_format) * 2]

    rewritten(function, torch.randn(2, 3), mode="fake")


def test_a_sum_that_is_read_is_kept():
    def function(x):
        first = aten.select_backward(x[0], [2, 4], 0, 0) + aten.select_backward(x[1], [2, 4], 0, 1)
        return [first, first + aten.select_backward(x[2], [2, 4], 0, 0)]

    rewritten(function, torch.randn(3, 4))


@pytest.mark.parametrize("seed", range(20))
def test_concatenated_in_the_order_of_the_reader(seed):
    draw = random.Random(seed)

    def function(x, y):
        of = random.Random(seed)
        z = torch.cat([x * 2, y * 3], of.randrange(-3, 3))
        for _ in range(of.randint(1, 4)):
            kind, rank = of.randrange(4), z.dim()
            if kind == 0:
                z = z.unsqueeze(of.randrange(-rank - 1, rank + 1))
            elif kind == 1:
                z = z.transpose(of.randrange(-rank, rank), of.randrange(-rank, rank))
            elif kind == 2:
                z = z.permute(of.sample(range(rank), rank))
            elif 1 in z.shape:
                z = z.squeeze(of.choice([n for n, size in enumerate(z.shape) if size == 1]))
        return [z.clone(memory_format=torch.contiguous_format) * 2]

    shape = (2, 3, 4) if draw.random() < 0.5 else (1, 3, 1)
    try:
        function(torch.randn(shape), torch.randn(shape))
    except RuntimeError:
        pytest.skip("no such concatenation")
    _, targets = rewritten(function, torch.randn(shape), torch.randn(shape), mode="fake")
    assert targets.count(aten.cat.default) == 1


class Net(torch.nn.Module):
    """Attention between all nodes of a graph, with a dropout of probability 0."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, edge_index):
        x = x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        h = x.unsqueeze(0)
        h, _ = self.attention(h, h, h, need_weights=False)
        return dropout(x + h.squeeze(0), 0.0).relu()


def test_attention_between_all_nodes():
    torch.manual_seed(0)
    net, backend = Net(), Backend(noted=True)
    run = torch.compile(net, backend=backend, dynamic=True)
    for size in (11, 7):
        x, edge_index = torch.randn(size, 8, requires_grad=True), torch.randint(0, size, (2, 20))
        inputs = x, *net.parameters()
        expected, result = net(x, edge_index), run(x, edge_index)
        torch.testing.assert_close(result, expected)
        weights = torch.randn_like(expected)
        gradients = [torch.autograd.grad((y * weights).sum(), inputs) for y in (expected, result)]
        torch.testing.assert_close(gradients[1], gradients[0])
    measured = backend.graphs[-1].measured
    operators = {cost.what for of in measured for cost in of.costs.values()}
    assert any("cat" in what for what in operators)
    assert not any("select_backward" in what for what in operators)
