"""Arguments of operators, each with values that matter: as eager, left to torch, or refused.

A row is an expression of `a`, `b` (edges, 4), truths `k` and `q` of them, features `x` (nodes, 4),
the ends `i` and `j` of edges, `J` as wide as `a`, a row `v`, a number `s`, and weights `W`.
"""

import re

import pytest
import torch
import tvm
from tvm import relax

from pairs import by_default
from sparsetir.graph.backend import Backend
from sparsetir.graph.export import export
from sparsetir.graph.rest import has_compiler
from sparsetir.sparse_ir.errors import LoweringError

NODES, EDGES, FEATURES = 7, 12, 4
aten, F = torch.ops.aten, torch.nn.functional

# Values of edges, in regions and in programs of pointwise operators.
BOTH = """
a * True + 2
(k == False) * a + (k == True) * b + (k != q) * a
torch.where(k, a, 2.0) + torch.where(k[:, :1], 1.0, b)
a.masked_fill(k, True) + a.masked_fill(k[:, :1], 2) + a.masked_fill(k, s)
torch.where(torch.ones(12, 4, dtype=torch.bool) & k, a, b)
torch.full((12, 4), 2.7, dtype=torch.int64) * a + torch.full((12, 1), 5, dtype=torch.bool) * b
torch.full_like(a, 2) * b + torch.full_like(k, 3) * a + a.new_full((12, 1), 0.5)
a.clamp(min=0.1) + a.clamp(max=0.1) * a.clamp(0.3, 0.1) + a.clamp_max(-0.1)
F.leaky_relu(a) + F.leaky_relu(a, 0.3) + F.leaky_relu(a, -0.5) + F.elu(b, 0.3)
F.threshold(a, 0.1, 7.0) + a.pow(3) + a.pow(True) + a.abs().pow(-0.5) + a.pow(0)
a.sum(-1, keepdim=True) * b + a.sum(1)[:, None] + a.sum((-1,))[:, None] / s
a.view(-1, 2, 2).sum(-1).repeat(1, 2) + v * a - x[:1] + (a > s) + (b > True)
(a > 0).to(torch.float32) * b + b.log1p().relu().unsqueeze(-1).squeeze(-1)
torch.where(k, a, b[:, :1]).maximum(torch.full((12, 4), 0.3)) + a.expand(12, 4)
"""
EDGE_ROWS = """
torch.add(a, b, alpha=2) + torch.sub(a, 3, alpha=2)
aten.add.Scalar(a, 3, 2) + aten.sub.Scalar(a, 3, 2) + torch.rsub(a, b, alpha=2)
torch.div(a, b, rounding_mode="floor") + torch.div(a, 0.3, rounding_mode="trunc")
((k + q) * a) + ((k * q) * b) + torch.maximum(k, q) * a + (k ^ q) * b
torch.where(k, q, a > 0) * a + k.masked_fill(q, True) * b
a.clamp(min=float("nan")) + b.clamp_max(float("nan"))
a.clamp(b, b + 0.1) + a.clamp(min=s) + a.abs().pow(1.5)
F.gelu(a) + F.gelu(a, approximate="tanh") + F.softplus(a, 2.0, 0.1)
a.sum(1, keepdim=True, dtype=torch.float64).float() + k.sum(1, keepdim=True) * a
a.var(1, keepdim=True) + a.var(1, keepdim=True, unbiased=False) + a.std(1, True, keepdim=True)
(i[:, None] >= 2.5) * a + a.amax(1, keepdim=True) + a[:, -1:] + a[:, ::2].repeat(1, 2)
a.to(torch.int64) * b + torch.arange(4.0) * a + torch.arange(1, 25, 2)[:, None] * b
"""
# Values of nodes, in regions.
NODE_ROWS = """
x.scatter_reduce(0, J, a, "sum", include_self=False)
x.scatter_reduce(-2, J, a, "sum")
x.scatter_reduce(0, J, a, "amax") + x.scatter_reduce(0, J, a, "amin", include_self=False)
x.new_zeros(7, 4).scatter_reduce(0, J, a, "amax") + x.scatter_reduce(0, J, a, "mean")
x.new_zeros(7, 4).scatter_reduce(0, J, a, "amin", include_self=False)
x.index_add(0, j, a, alpha=2) + x.index_add(-2, j, b)
x.scatter_add(0, J[:5], a) + x.t().scatter_add(1, J.t(), a.t()).t()
x.index_put((j,), a, accumulate=True) + x.index_put((j[:1],), a[:1], accumulate=False)
x.index_put((j,), a[0], accumulate=True) + x.index_put((j,), s, accumulate=True)
x + (a * b).sum(0, keepdim=True) + (a * b).sum((-2, -1)) + (a * b).sum([], keepdim=True)
x.index_add(0, j, a).add(x.new_zeros(7, 4).index_add(0, j, b), alpha=2)
x.index_select(0, i[0]) + x[i[0]] + x.gather(-2, J)[:7] + x.t().index_select(1, j).t()[:7]
torch.addmm(x * 2, x, W, beta=3, alpha=2) + (x * 2).add(x @ W, alpha=3)
"""
# Other results of an export.
EXPORTED = """
x[-1] + x + x.select(0, -2) + x[:, -1:]
x[-3:] * 2
x[:-2, -3:-1] * 2
x[2:100] * 2
x[5:3] * 2
torch.arange(0.5, 4.5)
torch.cat([x, x.new_ones(x.shape[0], 1)], -1)
torch.cat([e, e], dim=-2)
e[-1]
e[:, -3:]
e.permute(-1, 0)
i[j]
i == 3
i < j
i[i > 2]
torch.full((3,), 2.7, dtype=torch.int64)
torch.addmm(v, x, W)
x.new_ones(x.shape[0], 4).scatter_reduce(0, J, a, "sum")
x.amax(-1, keepdim=True) + x.mean(-1)[:, None] + F.layer_norm(x, (4,), v, None, 0.3)
"""
REFUSED = """
torch.addmm(v, x, W, beta=2)  # aten.addmm.default with beta=2
i >= 2.5  # aten.ge.Scalar
i == s  # aten.eq.Tensor
x[:, 0].index_put((x[:, 0] > 0,), x[:, 0][x[:, 0] > 0])  # aten.index_put.default
x[:, 0].index_put((j,), a[:1, 0])  # aten.index_put.default
x.scatter_reduce(0, J, a, "sum", include_self=False)  # aten.scatter_reduce.two
torch.full((3,), x.shape[0])  # aten.full.default
torch.cat([i, j.int()])  # aten.cat.default
s * 2  # aten.mul.Tensor of one number
s.sum()  # aten.sum.dim_IntList
x.sum(0)  # aten.sum.dim_IntList over the dimensions [0]
torch.add(a, b, alpha=2)  # aten.add.Tensor
e[:, ::2]  # aten.slice.Tensor
torch.div(a, b, rounding_mode="floor")  # aten.div.Tensor_mode
"""


def rows(text):
    return [line.split("  # ") for line in text.strip().split("\n")]


class Rows(torch.nn.Module):
    """The values of all rows; those of edges are reduced at nodes."""

    def __init__(self, of_edges, others):
        super().__init__()
        torch.manual_seed(0)
        self.W, self.v = (torch.nn.Parameter(torch.randn(*n)) for n in ((4, 4), (4,)))
        sums = [
            f"x.new_zeros(x.shape[0], 4).index_add(0, j, ({row}).expand(len(j), 4))"
            for row, *_ in of_edges
        ]
        text = f"[{', '.join([*sums, *(row for row, *_ in others)])}]"
        names = "x, e, s, W, v, i, j, J, a, b, k, q, z"
        self.call = eval(f"lambda {names}: {text}", {"torch": torch, "aten": aten, "F": F})

    def forward(self, x, e, s):
        i, j = e[0], e[1]
        a, b = x[i], x[j] * 1.5
        J = j[:, None].expand(-1, FEATURES)
        z = x.new_zeros(x.shape[0], FEATURES)
        return self.call(x, e, s, self.W, self.v, i, j, J, a, b, a > b, a > 0.2, z)


def inputs():
    generator = torch.Generator().manual_seed(0)
    e = torch.randint(0, NODES - 1, (2, EDGES), generator=generator)
    return torch.randn(NODES, FEATURES, generator=generator), e, torch.tensor(0.4)


def assert_equal(results, expected, texts):
    for a, b, text in zip(results, expected, texts, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, t=text: f"{t}: {m}"
        )


def test_regions(plain):
    edges, nodes = rows(BOTH + EDGE_ROWS.strip()), rows(NODE_ROWS)
    model, backend = Rows(edges, nodes), Backend()
    with torch.no_grad():
        results = torch.compile(model, backend=backend)(*inputs())
        assert_equal(results, model(*inputs()), edges + nodes)
    assert sum(len(graph.found) for graph in backend.graphs) > len(edges)


SHARES = pytest.mark.parametrize(
    "of", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)


@SHARES
@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
@pytest.mark.slow
def test_exported(tmp_path, of):
    edges, others = rows(BOTH)[of::3], rows(EXPORTED)[of::3]
    model, path = Rows(edges, others), tmp_path / "rows.so"
    export(model, inputs(), path)
    vm = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    results = vm["main"](*(tvm.runtime.tensor(x.numpy()) for x in inputs()))
    with torch.no_grad():
        expected = model(*inputs())
    assert_equal([torch.from_numpy(x.numpy()) for x in results], expected, edges + others)


@pytest.mark.parametrize("of", by_default(range(5), 0))
@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
def test_refused(tmp_path, of):
    for row, words in rows(REFUSED)[of::5]:
        with pytest.raises(LoweringError, match=re.escape(words)):
            export(Rows([], [[row]]), inputs(), tmp_path / "row.so")
            pytest.fail(row)
