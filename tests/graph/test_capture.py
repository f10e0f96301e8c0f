"""The flag of torch's that this backend alone is traced with."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo import config
from torch._dynamo.exc import UserError

from sparsetir.graph.backend import Backend


def without_loops(edges):
    rows, columns = edges
    return edges[:, rows != columns].sum(1)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.default("True-True")
def test_other_backends_are_traced_as_before(before, reset):
    def other(graph, inputs):
        settings.append(config.capture_dynamic_output_shape_ops)
        return graph.forward

    torch._dynamo.reset()
    settings, own = [], Backend()
    edges = torch.tensor([[0, 1, 2, 2], [0, 2, 2, 1]])
    with config.patch(capture_dynamic_output_shape_ops=before):
        ours, theirs = (torch.compile(lambda x: without_loops(x), backend=b) for b in (own, other))
        for _ in range(2):
            assert ours(edges).tolist() == theirs(edges).tolist() == [3, 3]
            assert config.capture_dynamic_output_shape_ops is before
            if reset:
                torch._dynamo.reset()
    times = 1 + reset
    assert len(own.graphs) == times
    assert settings == [before] * len(settings) and len(settings) == times * (1 if before else 2)


def test_sizes_that_are_asked_for_are_left_to_python():
    def lists(edges):
        return without_loops(edges), edges[:, edges[0] != edges[1]].tolist()

    torch._dynamo.reset()
    edges = torch.tensor([[0, 1, 2, 2], [0, 2, 2, 1]])
    for _ in range(2):
        sums, listed = torch.compile(lists, backend=Backend())(edges)
        assert sums.tolist() == [3, 3] and listed == [[1, 2], [2, 1]]
    torch._dynamo.reset()
    with pytest.raises(UserError, match="data-dependent"):
        torch.compile(lists, backend=Backend(), fullgraph=True)(edges)


# In a separate process, since a failure waits for a lock forever.
STEP = """
import torch
import sparsetir.graph.backend

def step(x, w):
    loss = (x @ w).relu().sum()
    torch._dynamo.graph_break()
    loss.backward()
    return w.grad

x, w = torch.ones(3, 4), torch.ones(4, 4, requires_grad=True)
print(torch.compile(step, backend=BACKEND)(x, w).sum().item())
"""


@pytest.mark.parametrize(
    "backend", ["sparsetir", pytest.param("aot_eager", marks=pytest.mark.slow)]
)
def test_backward_passes_inside_of_compiled_functions(backend):
    text = STEP.replace("BACKEND", repr(backend))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout == "48.0\n", done.stderr
