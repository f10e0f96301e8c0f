"""The same sparse operands in all entrances: ops, plan, tune, SparseMatrix."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from sparsetir import SparseMatrix, ops
from sparsetir.planning.plan import requested
from sparsetir.tuning.sought import operator_search

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")

N = 12
RNG = torch.Generator().manual_seed(0)
EDGES = torch.unique(torch.randint(0, N, (2, 40), generator=RNG), dim=1).contiguous()
SOURCES, TARGETS = EDGES
WEIGHTS = torch.rand(len(SOURCES), generator=RNG)
B = torch.rand(N, 5, generator=RNG)
ONES, WEIGHTED = torch.zeros(N, N), torch.zeros(N, N)
ONES[TARGETS, SOURCES], WEIGHTED[TARGETS, SOURCES] = 1, WEIGHTS
MATRIX = WEIGHTED.numpy()


KEPT = []


class Graph:
    """The part of DGL's interface that we use; it is not installed here."""

    def __init__(self, *kinds):
        self.canonical_etypes = list(kinds) or [("_N", "_E", "_N")]

    def edges(self, order):
        assert order == "eid"
        return SOURCES, TARGETS

    def num_src_nodes(self):
        return N

    num_dst_nodes = num_src_nodes


def torch_sparse():
    csr = WEIGHTED.to_sparse_csr()
    parts = csr.crow_indices(), csr.col_indices(), csr.values()
    return SimpleNamespace(csr=lambda: parts, sparse_sizes=lambda: (N, N))


def tvm_operand():
    import tvm

    return tvm.runtime.tensor(EDGES.numpy())


def pyg_operand(kind):
    data = pytest.importorskip("torch_geometric.data")
    if kind == "EdgeIndex":
        return pytest.importorskip("torch_geometric").EdgeIndex(EDGES, sparse_size=(N, N))
    if kind == "HeteroData":
        hetero = data.HeteroData()
        hetero["a"].num_nodes = N
        hetero["a", "to", "a"].edge_index = EDGES
        hetero["a", "to", "a"].edge_weight = WEIGHTS
        KEPT.append(hetero)  # its parts refer to it weakly
        return hetero["a", "to", "a"]
    weights = {"edge_weight": WEIGHTS} if kind == "weighted" else {}
    return data.Data(edge_index=EDGES, num_nodes=N, **weights)


KINDS = {
    "edges": (lambda: EDGES, ONES),
    "edges and a size": (lambda: (EDGES, N), ONES),
    "NumPy": (lambda: EDGES.numpy(), ONES),
    "NumPy of 16 bits": (lambda: (EDGES.numpy().astype("int16"), (N, N)), ONES),
    "TVM": (tvm_operand, ONES),
    "lists": (lambda: (EDGES.tolist(), N), ONES),
    "rows and columns": (lambda: (TARGETS, SOURCES), ONES),
    "rows and columns of NumPy": (lambda: (TARGETS.numpy(), SOURCES.numpy()), ONES),
    "Data": (lambda: pyg_operand(""), ONES),
    "Data with weights": (lambda: pyg_operand("weighted"), WEIGHTED),
    "HeteroData": (lambda: pyg_operand("HeteroData"), WEIGHTED),
    "EdgeIndex": (lambda: pyg_operand("EdgeIndex"), ONES),
    "torch_sparse": (torch_sparse, WEIGHTED),
    "DGL": (Graph, ONES),
    "dgl.sparse": (
        lambda: SimpleNamespace(coo=lambda: (TARGETS, SOURCES), val=WEIGHTS, shape=(N, N)),
        WEIGHTED,
    ),
    "file": (lambda: "graph.npz", WEIGHTED),
    "scipy": (lambda: sp.coo_array(MATRIX), WEIGHTED),
    "scipy CSC of float64": (lambda: sp.csc_array(MATRIX.astype("float64")), WEIGHTED),
    "COO": (lambda: WEIGHTED.to_sparse(), WEIGHTED),
    "CSR": (lambda: WEIGHTED.to_sparse_csr(), WEIGHTED),
    "CSC": (lambda: WEIGHTED.to_sparse_csc(), WEIGHTED),
    "BSR": (lambda: WEIGHTED.to_sparse_bsr((2, 3)), WEIGHTED),
    "SparseMatrix": (lambda: SparseMatrix(sp.csr_array(MATRIX)), WEIGHTED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_entrances_take_it(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sp.save_npz("graph.npz", sp.csr_array(MATRIX))
    make, expected = KINDS[kind]
    matrix, wanted = SparseMatrix(make()), requested("spmm", make(), 5, dtype="float32")
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), expected)
    np.testing.assert_array_equal(wanted.matrix.to_scipy().toarray(), expected)
    task = operator_search("spmm", make(), 5, target="llvm", device=None, dtype="float32")[0].task
    np.testing.assert_array_equal(task.matrix.to_scipy().toarray(), expected)
    torch.testing.assert_close(ops.spmm(make(), B), expected @ B)


def test_foreign_values_keep_their_gradients():
    weights = WEIGHTS.clone().requires_grad_()
    A = SimpleNamespace(coo=lambda: (TARGETS, SOURCES), val=weights, shape=(N, N))
    assert ops.resolve(A).col is ops.resolve(A).col  # made once, as its tensors are the same
    ops.spmm(A, B).sum().backward()
    torch.testing.assert_close(weights.grad, B.sum(1)[SOURCES])


def test_sizes_and_shapes():
    assert SparseMatrix((EDGES, (20, 30))).shape == (30, 20)
    assert SparseMatrix(EDGES).shape == (int(EDGES.max()) + 1,) * 2
    assert SparseMatrix(EDGES, shape=(40, 50)).shape == (40, 50)
    assert SparseMatrix(([0, 3], [1, 5])).shape == (4, 6)
    matrix = SparseMatrix((EDGES, N), values=WEIGHTS)
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), WEIGHTED)


TOLD = "expected a sparse matrix of scipy or torch, a SparseMatrix, an edge_index (2, E) or a pair"
REFUSED = {
    "a number": (lambda: 3, TypeError, f"{TOLD} (edge_index, size), "),
    "a list": (lambda: [1, 2], TypeError, "; got a pair of "),
    "no file": (lambda: "gone.mtx", ValueError, "gone.mtx: no such file; a graph is cora, "),
    "many relations": (
        lambda: Graph("x", "y"), ValueError,
        "expected a graph with one relation, as graph['x'], got 2",
    ),
    "a graph without edges": (
        lambda: SimpleNamespace(edge_index=None), TypeError, "; got a SimpleNamespace without an"
    ),
    "a dense array": (lambda: np.eye(3), ValueError, "expected a sparse matrix or an edge_index"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_none_is_refused_by_name(kind):
    make, error, message = REFUSED[kind]
    entrances = {
        "SparseMatrix: argument 'data': ": SparseMatrix,
        "plan: argument 'matrix': ": lambda A: sparsetir.plan("spmm", A, 4),
        "spmm: argument 'A': ": lambda A: ops.spmm(A, B),
    }
    for prefix, entrance in entrances.items():
        with pytest.raises(error) as raised:
            entrance(make())
        assert str(raised.value).startswith(prefix) and message in str(raised.value)


def test_a_graph_of_many_relations_names_them():
    data = pytest.importorskip("torch_geometric.data").HeteroData()
    data["a", "to", "b"].edge_index = EDGES
    with pytest.raises(ValueError, match=r"expected one relation, as data\[\('a', 'to', 'b'\)\]"):
        SparseMatrix(data)
    with pytest.raises(ValueError, match="'values': expected none for a graph with weights"):
        SparseMatrix(pyg_operand("weighted"), values=WEIGHTS)
