"""Random functions of messages through the backend, in both directions, against eager."""

import random

import pytest
import torch

from sparsetir.graph.backend import Backend

FEW, ALL, CHUNK = 4, 2000, 100
NODES, OTHERS, EDGES = 9, 7, 40

UNARY = [
    torch.tanh, torch.sigmoid, torch.relu, torch.neg, lambda x: torch.exp(-x.abs()),
    lambda x: (x.abs() + 0.1).sqrt(), lambda x: x.pow(2), lambda x: x.clamp(-0.5, 0.7),
    lambda x: torch.nn.functional.leaky_relu(x, 0.2), lambda x: x.clamp_min(0.1),
    lambda x: x * 3 + 1,    lambda x: 1 / (1.5 + x.abs()), lambda x: (0.5 + x.abs()).log(),
    lambda x: torch.nn.functional.silu(x), lambda x: (x.abs() + 1).rsqrt(), lambda x: 2 - x,
]  # fmt: skip
BINARY = [
    torch.add, torch.sub, torch.mul, torch.mul, lambda x, y: x / (1 + y.abs()), torch.maximum,
    torch.minimum, lambda x, y: torch.where(x > y, x, y * 0.5),
    lambda x, y: torch.where((x > 0) & (y < 0.3), x, y), lambda x, y: x * (y > 0),
]  # fmt: skip


class Drawn:
    """Numbers that were drawn before, which torch can trace."""

    def __init__(self, numbers):
        self.left = iter(numbers)

    def random(self):
        return next(self.left)

    def choice(self, values):
        return values[int(next(self.left) * len(values))]


class Messages(torch.nn.Module):
    """A random function of features at both ends, edges and parameters, and a reduction of it."""

    def __init__(self, seed):
        super().__init__()
        self.draw = draw = random.Random(seed)
        self.numbers = [draw.random() for _ in range(400)]
        self.shape = draw.choice([(), (1,), (3,), (8,), (19,), (2, 5), (1, 4), (3, 1), (2, 3, 2)])
        torch.manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(self.shape))
        narrow = [s if draw.random() < 0.5 else 1 for s in self.shape]
        self.second = torch.nn.Parameter(torch.randn(narrow))
        self.narrow = narrow

    def inputs(self):
        """Features of two kinds of nodes, of edges, and indices."""
        wide, narrow = self.shape, self.narrow
        x, y = torch.randn(NODES, *wide), torch.randn(OTHERS, *wide)
        w = torch.randn(EDGES, *self.draw.choice([wide, narrow]))
        index = [torch.randint(0, n - 1, (EDGES,)) for n in (NODES, OTHERS)]
        return [x, y, w], index

    def forward(self, x, y, w, index, other):
        draw = Drawn(self.numbers)
        values = [x[index], y.index_select(0, other), w, self.first, self.second]
        if draw.random() < 0.5:
            values.append(x[index].sum(-1, keepdim=True) if self.shape else y[other])
        message = self.made(draw, values, draw.choice([1, 2, 3, 4]))
        out = self.reduced(draw, message, index, len(x))
        if draw.random() < 0.4:  # a second round, of what came of the first
            again = self.made(draw, [*values, out[index]], 2)
            if draw.random() < 0.5:
                return out, self.reduced(draw, again, other, len(y))
            return out, again
        return (out,)

    def made(self, draw, values, depth):
        """An expression of some of the values, as wide as messages are."""
        if not depth:
            return draw.choice(values)
        if draw.random() < 0.3:
            return draw.choice(UNARY)(self.made(draw, values, depth - 1))
        left, right = self.made(draw, values, depth - 1), self.made(draw, values, depth - 1)
        value = draw.choice(BINARY)(left, right)
        if self.shape and value.dim() > len(self.shape) and draw.random() < 0.15:
            value = value.sum(-1, keepdim=True)
        return value

    def reduced(self, draw, message, target, nodes):
        message = (
            message.expand(EDGES, *self.shape) if message.dim() <= len(self.shape) else message
        )
        message = message + torch.zeros(EDGES, *[1] * (message.dim() - 1))
        index = target.view(-1, *[1] * (message.dim() - 1)).expand_as(message)
        zeros = message.new_zeros(nodes, *message.shape[1:])
        kind = draw.choice(["index_add", "scatter", "index_put", "sum", "amax", "amin", "softmax"])
        if kind == "index_add":
            return zeros.index_add(0, target, message)
        if kind == "index_put":
            return zeros.index_put((target,), message, accumulate=True)
        if kind == "softmax":
            top = zeros.scatter_reduce(0, index, message.detach(), "amax", include_self=False)
            message = (message - top[target]).exp()
            total = zeros.index_add(0, target, message) + 1e-16
            return zeros.index_add(0, target, message / total[target] * (message + 1))
        if kind == "scatter":
            return zeros.scatter_add(0, index, message)
        return zeros.scatter_reduce(0, index, message, kind, include_self=False)


def gradients(call, model, floats, index):
    floats = [x.clone().requires_grad_() for x in floats]
    model.zero_grad()
    outs = call(*floats, *index)
    sum((o * torch.linspace(0.5, 1, o.numel()).view_as(o)).sum() for o in outs).backward()
    return [*(o.detach() for o in outs), *(x.grad for x in [*floats, *model.parameters()])]


def check(seed, dtype=torch.float32):
    torch._dynamo.reset()
    model = Messages(seed).to(dtype)
    floats, index = model.inputs()
    floats = [x.to(dtype) for x in floats]
    expected = gradients(model, model, floats, index)
    backend = Backend()
    grads = gradients(torch.compile(model, backend=backend), model, floats, index)
    for n, (a, b) in enumerate(zip(grads, expected, strict=True)):
        assert (a is None) == (b is None), (seed, n)
        if a is not None:
            scale = max(1.0, b.abs().max().item()) * torch.finfo(dtype).eps
            torch.testing.assert_close(
                a, b, rtol=840 * torch.finfo(dtype).eps, atol=168 * scale,
                msg=lambda m, n=n: f"seed {seed}, {n}: {m}",
            )  # fmt: skip
    return backend


def test_messages():
    assert check(13).graphs[0].found  # of 8 features, which are quickly compiled


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_messages_without_a_schedule(dtype, plain):
    for seed in range(1, FEW):
        check(seed, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_more_messages_with_schedules(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, ALL, CHUNK))
def test_more_messages(start, plain):
    for seed in range(start, start + CHUNK):
        check(seed)
