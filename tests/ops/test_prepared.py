"""Prepared patterns stay as they were, whoever writes to the memory they came from."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

import sparsetir
from refusals import refuse
from sparsetir import nn, ops
from sparsetir.ops import structure
from sparsetir.planning.run_plan import Plan

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
        result, wanted = call(g, x), call(A, x)
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in (result, wanted)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


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
    """Emptying the caches rebuilds nothing for it, and it is freed with the handle."""
    g, x = ops.prepare(torch.stack([COLUMNS, ROWS]), N), torch.rand(N, F, requires_grad=True)
    ops.spmm(g, x).sum().backward()
    kept = weakref.ref(g.structure)
    taken, structures, repeat = [], [], Plan.repeat
    monkeypatch.setattr(Plan, "repeat", lambda self, *a: taken.append(self) or repeat(self, *a))
    monkeypatch.setattr(structure.Structure, "__init__", lambda *a: structures.append(a))
    for _ in range(2):
        ops.clear_cache()
        ops.spmm(g, x).sum().backward()
        torch.testing.assert_close(ops.gspmm(g, "copy_u", "sum", x.detach()), DENSE @ x.detach())
    assert len(taken) >= 4 and not structures
    del g, taken
    gc.collect()
    assert kept() is None


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


def test_a_model_that_holds_one_can_be_copied_and_saved():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.rand(len(ROWS)))
            self.graph = ops.prepare(torch.stack([COLUMNS, ROWS]), N, self.weights)

        def forward(self, x):
            return ops.spmm(self.graph, x)

    model, x = Model(), torch.rand(N, F)
    duplicate = copy.deepcopy(model)
    assert duplicate.graph.structure is model.graph.structure
    assert duplicate.graph.values is duplicate.weights is not model.weights
    restored = pickle.loads(pickle.dumps(model.graph))
    torch.testing.assert_close(ops.spmm(restored, x), model(x))
    with torch.no_grad():
        duplicate.weights *= 2
    torch.testing.assert_close(duplicate(x), 2 * model(x))


def test_what_is_refused():
    g, matrix = ops.prepare(torch.stack([COLUMNS, ROWS]), N), KINDS["matrix"]()
    refuse(
        """
        ops.prepare(matrix, N)  # TypeError: prepare: argument 'size': expected None for Sparse
        ops.prepare(torch.tensor([[0], [5]]), 3)  # ValueError: prepare:
        ops.spmm(g, torch.rand(N + 1, F))  # ValueError: argument 'B': expected 12 rows
        """,
        locals(),
        globals(),
    )


# -- relations ------------------------------------------------------------------------------------

TYPES = torch.arange(len(ROWS)) % 3


def related():
    edges, types = torch.stack([COLUMNS, ROWS]), TYPES.clone()
    return edges, types, ops.prepare(edges, N, edge_type=types, num_relations=4)


def test_relations():
    edges, types, g = related()
    x = torch.rand(N, F, requires_grad=True)
    w = torch.rand(4, F, 3, requires_grad=True)
    for reduce in ("sum", "mean"):
        out, wanted = ops.rgms(x, w, g, reduce=reduce), ops.rgms(x, w, edges, types, None, reduce)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
        for a, b in zip(
            *(torch.autograd.grad(y.sum(), (x, w)) for y in (out, wanted)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    edges[:] = 0  # its copies stay
    torch.testing.assert_close(ops.rgms(x, w, g), ops.rgms(x, w, g.edge_index, g.edge_type))
    assert (
        repr(g)
        == f"<sparsetir.ops.PreparedRelations 4 relations, ({N}, {N}), {len(ROWS)} edges, cpu>"
    )
    assert copy.deepcopy(g) is g
    torch.testing.assert_close(ops.rgms(x, w, pickle.loads(pickle.dumps(g))), ops.rgms(x, w, g))


def test_relations_are_made_once_and_live_as_long_as_their_handle():
    _, _, g = related()
    ops.clear_cache()
    x, w = torch.rand(N, F), torch.rand(4, F, 3)
    ops.rgms(x, w, g)
    plans = g.structure.by_target.made
    assert plans and ops.cache_info()["entries"] == 0
    ops.rgms(x, w, g)
    assert g.structure.by_target.made is plans
    kept = weakref.ref(g.structure)
    del g
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"num_blocks": 2}, {"aggr": "max"}])
def test_rgcn_takes_prepared_relations(options):
    edges, types, g = related()
    layer, x = nn.RGCNConv(F, 6, 4, **options), torch.rand(N, F)
    torch.testing.assert_close(layer(x, g), layer(x, edges, types), rtol=0, atol=0)
    if "num_blocks" not in options:
        rows = nn.RGCNConv(N, 6, 4, **options)
        torch.testing.assert_close(rows(None, g), rows(None, edges, types), rtol=0, atol=0)


def test_relations_that_are_refused():
    edges, types, g = related()
    x, w = torch.rand(N, F), torch.rand(4, F, 3)
    csr = DENSE.to_sparse_csr()
    refuse(
        """
        ops.rgms(x, w, g, types)  # TypeError: rgms: argument 'edge_type': expected None
        ops.rgms(x, w[:3], g)  # ValueError: prepared for 12 sources, 12 targets and 3
        ops.rgms(x[:5], w, g)  # ValueError: prepared for 5 sources
        ops.rgms(x, w, edges)  # TypeError: 'edge_type': expected a dense tensor
        nn.RGCNConv(F, 3, 4)(x, g, types)  # TypeError: RGCNConv: argument 'edge_type'
        nn.RGCNConv(F, 3, 5)(x, g)  # ValueError: RGCNConv: .. prepared for 12 .. 5
        nn.RGCNConv(F, 3, 4, flow="target_to_source")(x, g)  # ValueError: with flow=
        ops.prepare(edges, N, edge_type=types[1:])  # ValueError: 'edge_type': expected
        ops.prepare(edges, N, edge_type=types, num_relations=2)  # ValueError: relation
        ops.prepare(edges, 3, edge_type=types)  # ValueError: edge_index
        ops.prepare(edges, N, num_relations=2)  # TypeError: None without 'edge_type'
        ops.prepare(csr, edge_type=types)  # TypeError: 'A': .. a dense tensor, got torch.sparse_csr
        ops.prepare(edges, N, TYPES, edge_type=types)  # TypeError: 'values': expected
        """,
        locals(),
        globals(),
    )
