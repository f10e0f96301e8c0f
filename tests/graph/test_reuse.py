"""Memory that is written to in place of new memory: no value that is read later changes."""

import random

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sparsetir.graph.expressions import aten
from sparsetir.graph.reuse import reuse_memory

SIZE = 4
PRODUCTS = [torch.mm, lambda a, b: torch.addmm(b[0], a, b), lambda a, b: a + a.t() @ b]
BINARY = [torch.add, torch.sub, torch.mul, torch.div, lambda a, b: a + 2 * b[:1], *PRODUCTS]
UNARY = [
    torch.relu, torch.tanh, torch.neg, lambda a: a.reshape(SIZE * SIZE).view(SIZE, SIZE) * 0.5,
    lambda a: a.clamp_min(0.1), lambda a: a.t(), lambda a: torch.sigmoid(a[:1]) - a,
]  # fmt: skip


def drawn(seed):
    """A function of matrices, some of whose values are read several times and returned."""

    def run(*inputs):
        draw, values = random.Random(seed), list(inputs)
        for _ in range(draw.randint(2, 12)):
            if draw.random() < 0.4:
                values.append(draw.choice(UNARY)(draw.choice(values)))
            else:
                values.append(draw.choice(BINARY)(draw.choice(values[-3:]), draw.choice(values)))
        return [values[-1], *draw.sample(values[len(inputs) :], draw.randint(0, 2))]

    return run


def rewritten(function, inputs):
    module = make_fx(function, tracing_mode="fake")(*inputs)
    reuse_memory(module.graph)
    module.graph.lint()
    module.recompile()
    return module, [n.target for n in module.graph.nodes if n.op == "call_function"]


def test_random_functions():
    written = 0
    for seed in range(60):
        torch.manual_seed(seed)
        inputs = [torch.randn(SIZE, SIZE, dtype=torch.float64) for _ in range(3)]
        module, targets = rewritten(drawn(seed), inputs)
        before = [x.clone() for x in inputs]
        expected = drawn(seed)(*inputs)
        results = module(*inputs)
        torch.testing.assert_close(results, expected, equal_nan=True)
        # Callers may write to a result, which torch refuses for views.
        views = [x._is_view() and not y._is_view() for x, y in zip(results, expected, strict=True)]
        assert not any(views), seed
        assert all(map(torch.equal, inputs, before)), seed
        written += sum(str(t).split(".")[1].endswith("_") for t in targets)
    assert written > 50


def test_sums_of_products():
    inputs = [torch.randn(SIZE, SIZE) for _ in range(4)]
    _, targets = rewritten(lambda a, b, c, d: torch.relu(a @ b + c @ d), inputs)
    assert targets == [aten.mm.default, aten.addmm_.default, aten.relu_.default]


def test_gradients_of_relu():
    def function(a, b, c):
        return aten.threshold_backward(a @ b, c, 0)

    inputs = [torch.randn(SIZE, SIZE, dtype=torch.float64) for _ in range(3)]
    module, targets = rewritten(function, inputs)
    assert targets[-1] == aten.threshold_backward.grad_input
    torch.testing.assert_close(module(*inputs), function(*inputs))
