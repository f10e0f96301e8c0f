"""What was prepared is what it was, whoever writes to the memory that it came from."""

import gc
import pickle

import numpy as np
import pytest
import torch

import sparsetir
from sparsetir import nn, ops
from sparsetir.ops import structure
from sparsetir.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

N, F = 12, 4
DENSE = (torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.3).float()
ROWS, COLUMNS = DENSE.nonzero().T
KINDS = {
    "edges": lambda: torch.stack([COLUMNS, ROWS]),
    "csr": DENSE.to_sparse_csr,
    "coo": lambda: DENSE.to_sparse().coalesce(),
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "matrix": lambda: sparsetir.SparseMatrix(DENSE.to_sparse()),
    "NumPy": lambda: (np.stack([COLUMNS, ROWS]), N),
}


@pytest.fixture(autouse=True)
def _empty_cache():
    torch.manual_seed(0)
    ops.clear_cache()


@pytest.mark.parametrize("kind", KINDS)
def test_all_operators_take_it(kind):
    A, x = KINDS[kind](), torch.rand(N, F, requires_grad=True)
    g = ops.prepare(A, N) if kind == "edges" else ops.prepare(A)
    assert g.shape == (N, N) and g.nnz == ops.resolve(A, shape=(N, N)).col.shape[-1]
    for call in (
        ops.spmm,
        lambda A, x: ops.spmm(A, x, "mean"),
        lambda A, x: ops.spmm(A, x, "amin"),
        lambda A, x: ops.sddmm(A, x, x),
        lambda A, x: ops.gspmm(A, "copy_u_max", u=x),
        lambda A, x: ops.gsddmm(A, "u_sub_v", x, x),
        lambda A, x: ops.attention(A, x[:, None], x[:, None], x[:, None]),
    ):
        found, wanted = call(g, x), call(A, x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        got = [torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted)]
        torch.testing.assert_close(*got, rtol=0, atol=1e-6)


def test_writing_unseen_changes_nothing():
    edges = torch.stack([COLUMNS, ROWS])
    g, x = ops.prepare(edges, N), torch.rand(N, F)
    for _ in range(3):
        torch.testing.assert_close(ops.spmm(g, x), DENSE @ x)
        edges.numpy()[:] = 0  # which torch does not count
        torch.testing.assert_close(ops.gspmm(g, "copy_u", "sum", x), DENSE @ x)
    csr = DENSE.to_sparse_csr()
    g = ops.prepare(csr)
    csr.col_indices().numpy()[:] = 0
    torch.testing.assert_close(ops.spmm(g, x), DENSE @ x)


def test_it_needs_no_cache(monkeypatch):
    """Nothing is made anew for it when the caches are emptied, and it goes with the handle."""
    g, x = ops.prepare(torch.stack([COLUMNS, ROWS]), N), torch.rand(N, F, requires_grad=True)
    ops.spmm(g, x).sum().backward()
    gc.collect()
    others = len(structure.pinned) - 1
    taken, made, repeat = [], [], Plan.repeat
    monkeypatch.setattr(Plan, "repeat", lambda self, *a: taken.append(self) or repeat(self, *a))
    monkeypatch.setattr(structure.Structure, "__init__", lambda *a: made.append(a))
    for _ in range(2):
        ops.clear_cache()
        ops.spmm(g, x).sum().backward()
        torch.testing.assert_close(ops.gspmm(g, "copy_u", "sum", x.detach()), DENSE @ x.detach())
    assert len(taken) >= 4 and not made and len(structure.pinned) == others + 1
    del g
    gc.collect()
    assert len(structure.pinned) == others


def test_values():
    edges, values = torch.stack([COLUMNS, ROWS]), torch.rand(len(ROWS), requires_grad=True)
    g, x = ops.prepare(edges, N, values), torch.rand(N, F)
    weighted = torch.zeros(N, N).index_put((ROWS, COLUMNS), values.detach())
    torch.testing.assert_close(ops.spmm(g, x), weighted @ x)
    ops.spmm(g, x).sum().backward()
    torch.testing.assert_close(values.grad, x.sum(1)[COLUMNS])
    with torch.no_grad():
        values.mul_(2)
    torch.testing.assert_close(ops.spmm(g, x).detach(), 2 * weighted @ x)
    ones = g.with_values(None)
    del g
    gc.collect()
    ops.clear_cache()
    torch.testing.assert_close(ops.spmm(ones, x), DENSE @ x)
    assert ops.prepare(ones) is ones and ops.prepare(ones, values=values).values is values


@pytest.mark.parametrize(
    "layer", [lambda: nn.GCNConv(F, 3), lambda: nn.SAGEConv(F, 3), lambda: nn.GATConv(F, 3)]
)
def test_layers_take_it(layer):
    layer, edges, x = layer(), torch.stack([COLUMNS, ROWS]), torch.rand(N, F)
    wanted, g = layer(x, edges), ops.prepare(edges, N)
    edges.numpy()[:] = 0
    for _ in range(2):
        torch.testing.assert_close(layer(x, g), wanted)


def test_made_in_inference_mode():
    with torch.inference_mode():
        g = ops.prepare(torch.stack([COLUMNS, ROWS]), N)
    x = torch.rand(N, F, requires_grad=True)
    ops.spmm(g, x).sum().backward()
    torch.testing.assert_close(x.grad, DENSE.sum(0)[:, None].expand(N, F))


def test_what_is_refused():
    with pytest.raises(TypeError, match="prepare: argument 'size': expected None beside Sparse"):
        ops.prepare(sparsetir.SparseMatrix(DENSE.to_sparse()), N)
    with pytest.raises(ValueError, match="prepare: "):
        ops.prepare(torch.tensor([[0], [5]]), 3)
    g = ops.prepare(torch.stack([COLUMNS, ROWS]), N)
    with pytest.raises(TypeError, match="Prepared: cannot be pickled"):
        pickle.dumps(g)
    with pytest.raises(ValueError, match=f"argument 'B': expected {N} rows"):
        ops.spmm(g, torch.rand(N + 1, F))
