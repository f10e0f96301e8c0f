"""Graphs from files of all kinds: what users have, and the matrix that is read."""

from __future__ import annotations

import gzip
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch

from sparsetir import SparseMatrix
from sparsetir.data.graphs import GraphError, graph_name, layers, load_graph
from sparsetir.runtime import file_errors

# 0 -> 1 (0.5), 1 -> 2 (2), 2 -> 0 (3), of four nodes
DENSE = np.array([[0, 0.5, 0, 0], [0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0]], "float32")
ONES = (DENSE > 0).astype("float32")
ROWS, COLUMNS, WEIGHTS = np.array([2, 0, 1]), np.array([0, 1, 2]), np.array([3, 0.5, 2])
EDGES = torch.tensor(np.stack([COLUMNS, ROWS]))
HEAD = "%%MatrixMarket matrix coordinate "


def same(matrix, dense, dtype="float32"):
    assert isinstance(matrix, sp.csr_array) and matrix.dtype == dtype
    assert matrix.indices.dtype == matrix.indptr.dtype == np.int32
    assert matrix.has_canonical_format
    assert matrix.shape == np.shape(dense) and np.array_equal(matrix.toarray(), dense)


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix.lower() == ".gz" else data)
    return path


def test_cora_by_name_and_transposed():
    cora = load_graph("cora")
    assert cora.shape == (2708, 2708) and cora.nnz == 10556 and (cora.data == 1).all()
    assert (load_graph("cora:T") != cora.T).nnz == 0


COMPRESSED = {"shape": [2, 3], "indptr": [0, 2, 3], "indices": [2, 0, 1]}
HALF = np.float16([1, 2, 4])


@pytest.mark.parametrize(
    "arrays, dense, dtype",
    [
        (COMPRESSED, [[1, 0, 1], [0, 1, 0]], "float32"),
        ({**COMPRESSED, "data": [0.0, 2.0, 3.0]}, [[2, 0, 0], [0, 3, 0]], "float64"),
        ({"shape": [1, 2], "indptr": [0, 3], "indices": [1, 1, 0], "data": HALF}, [[4, 3]], "f4"),
        ({"row": [0, 0, 1], "col": [1, 1, 0], "data": HALF}, [[0, 3], [4, 0]], "float32"),
        ({"row": ROWS, "col": COLUMNS, "data": WEIGHTS, "shape": [4, 4]}, DENSE, "float64"),
        ({"row": ROWS, "col": COLUMNS, "weight": WEIGHTS, "shape": [4, 4]}, DENSE, "float64"),
        ({**COMPRESSED, "values": [1.0, 2.0, 3.0]}, [[2, 0, 1], [0, 3, 0]], "float64"),
        ({"row": np.uint16([0, 1]), "col": np.uint16([2, 0])}, np.eye(4)[[2, 0, 3]][:, :3], "f4"),
    ],
    ids=["csr", "zeros", "half", "equal edges", "coordinates", "weight", "values", "square"],
)
@pytest.mark.parametrize("order", "<>")
def test_arrays(tmp_path, arrays, dense, dtype, order):
    """Both byte orders are read; stored zeros stay."""
    dense = np.array(dense)
    named = ((name, np.asarray(x)) for name, x in arrays.items())
    ordered = {name: x.astype(x.dtype.newbyteorder(order)) for name, x in named}
    np.savez(tmp_path / "a.npz", **ordered)
    graph = load_graph(tmp_path / "a.npz")
    same(graph, dense, dtype)
    same(load_graph(f"{tmp_path}/a.npz:T"), dense.T, dtype)
    if "indices" in arrays and dense.shape == (2, 3):
        assert graph.nnz == 3


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr", "dia"])
def test_what_scipy_saved(tmp_path, form):
    sp.save_npz(tmp_path / "a.npz", sp.csr_array(DENSE).asformat(form))
    same(load_graph(tmp_path / "a.npz"), DENSE)
    matrix = SparseMatrix.from_file(tmp_path / "a.npz")
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), DENSE)


def test_diagonals(tmp_path):
    """Zeros inside of the matrix are stored; many diagonals of a large one take no time."""
    matrix = sp.dia_array((np.arange(8, dtype="f4").reshape(2, 4), [-1, 1]), shape=(3, 5))
    sp.save_npz(tmp_path / "a.npz", matrix)
    same(load_graph(tmp_path / "a.npz"), matrix.toarray())
    assert load_graph(tmp_path / "a.npz").nnz == SparseMatrix.from_file(tmp_path / "a.npz").nnz == 5
    matrix = sp.dia_array((np.ones((10**4, 1), "f4"), np.arange(10**4)), shape=(10**6, 10**6))
    sp.save_npz(tmp_path / "b.npz", matrix)
    assert load_graph(tmp_path / "b.npz").nnz == 1


def test_one_of_several_matrices(tmp_path):
    path = tmp_path / "weights.npz"
    one = {"shape": [1, 2], "indptr": [0, 1], "indices": [1]}
    np.savez(path, **{f"conv{n}.{k}": np.array(v) for n in (1, 2) for k, v in one.items()})
    same(load_graph(f"{path}:conv2"), [[0, 1]])
    same(load_graph(f"{path}:conv2:T"), [[0], [1]])
    assert layers(path) == ["conv1", "conv2"]
    with pytest.raises(GraphError, match=r"holds 2 matrices; name one, as weights.npz:conv1"):
        load_graph(path)
    with pytest.raises(GraphError, match="has no layer 'fc': has conv1, conv2"):
        load_graph(f"{path}:fc")


@pytest.mark.parametrize(
    "name, text, dense",
    [
        ("a.txt", "# edges of a\n0 1\n1 2\n\n2 0\n", ONES[:3, :3]),
        ("a.el", "% x\n0\t1 # one\n1 2\n2 0\n", ONES[:3, :3]),
        ("a.tsv", "a title\tx\n0\t1\n1\t2\n2\t0\n", ONES[:3, :3]),
        ("a.csv.gz", "0,1\n1,2\n2, 0", ONES[:3, :3]),
        ("a.csv", "\ufeffrow;col\n0;1\n1;2\n2;0\n", ONES[:3, :3]),
        ("b.csv", "0.0,1.0\n1,2\n2,0\n", ONES[:3, :3]),
        ("c.csv", "dst,src,weight\n0,1,0.5\n1,2,1\n1,2,1\n2,0,3\n3,3,0\n", DENSE),
        ("b.txt", "0 1\n1 2\n2 0\n".encode("utf-16"), ONES[:3, :3]),
        ("c.txt", b"# caf\xe9\n0 1\n1 2\n2 0\n", ONES[:3, :3]),
        ("d.txt", b"caf\xe9 b\r0 1\r1 2\r2 0\r", ONES[:3, :3]),
        ("a.mtx", HEAD + "real general\n% c\xe9\n\n4 4 3\n1 2 5.E-1\n2 3 2\n3 1 .3e1", DENSE),
        ("b.mtx", HEAD + "real general\r\n4 4 3\r\n1\t2 .5 \r\n\r\n2  3 2\r\n3 1 3\r\n", DENSE),
        ("c.MTX.GZ", HEAD + "integer general\n2 2 2\n1 2 -3\n2 1 4\n", [[0, -3], [4, 0]]),
        ("d.mtx", HEAD + "pattern symmetric\n3 3 2\n2 1\n3 3\n", np.eye(3)[[1, 0, 2]]),
        ("e.mtx", HEAD + "pattern skew-symmetric\n2 2 1\n2 1\n", [[0, -1], [1, 0]]),
    ],
)
@pytest.mark.parametrize("piece", [2**20, 61])
def test_text(tmp_path, monkeypatch, name, text, dense, piece):
    monkeypatch.setattr(file_errors, "PIECE", piece)
    path = write(tmp_path / name, text)
    if ".mtx" in name.lower() and piece > 99:
        matrix = SparseMatrix.from_file(path)
        np.testing.assert_array_equal(matrix.to_scipy().toarray(), dense)
    same(load_graph(path), dense)


LINES = "\n0 1 0.5\n1 2 2\n2 0 3\n"
# Names of columns, the matrix of these lines, and what is ignored.
COLUMNS_BY_NAME = [
    ("", DENSE, ""),
    ("row column value", DENSE, ""),
    ("col row val", DENSE.T, ""),
    ("target source weight", DENSE, ""),
    ("source target weight", DENSE.T, ""),
    ('"Source_ID" TargetId Edge-Weight', DENSE.T, ""),
    ("# FromNodeId ToNodeId Sign", DENSE.T, ""),
    ("# nodes 3\n% dst src w\n# edges 3", DENSE, ""),
    ("src dst timestamp", ONES.T, "timestamp"),
    ("to from label", ONES, "label"),
    ("START_ID END_ID TYPE", ONES.T, "TYPE"),
    ("userId movieId rating", DENSE, ""),
    ("u v w", DENSE.T, ""),
    ("i j v", DENSE, ""),
    ("# of lists", DENSE, ""),
]


@pytest.mark.parametrize("names, dense, ignored", COLUMNS_BY_NAME)
def test_names_of_columns(tmp_path, names, dense, ignored):
    """Say which end is which, as an edge_index has them, and what are weights."""
    for ending, sign in ((".txt", " "), (".csv", ","), (".tsv.gz", "\t")):
        text = "\n".join(
            x if x[:1] in "#%" else x.replace(" ", sign) for x in (names + LINES).split("\n")
        )
        path = write(tmp_path / f"a{ending}", text.lstrip("\n"))
        with warnings.catch_warnings(record=True) as caught:
            graph = load_graph(path)
        same(graph, dense[:3, :3])
        expected = f"{path}: columns other than weights are ignored: {ignored}"
        assert [str(x.message) for x in caught] == [expected] * bool(ignored)


def test_more_columns_of_any_text(tmp_path):
    text = "Id,Source,Target,Type,Label,Weight\n8,0,1,Directed,,.5\n9,1,2,1,a b,2\n7,2,0,,x,3\n"
    with pytest.warns(UserWarning, match="other than weights are ignored: Id, Type, Label$"):
        same(load_graph(write(tmp_path / "a.csv", text)), DENSE.T[:3, :3])


def test_matrix_market_as_scipy_writes_it(tmp_path):
    scipy.io.mmwrite(tmp_path / "a.mtx", sp.coo_array(DENSE))
    same(load_graph(tmp_path / "a.mtx"), DENSE)
    write(tmp_path / "b.mtx", HEAD + "real general\n2 2 2\n1 2 NaN\n2 1 -inf\n")
    values = SparseMatrix.from_file(tmp_path / "b.mtx").values
    np.testing.assert_array_equal(values, [np.nan, -np.inf])
    lines = "".join(f"{1 + k % 7} {1 + k // 7} {k}.25\n" for k in range(49))
    write(tmp_path / "c.mtx", f"{HEAD}real general\n7 7 49\n{lines}")
    assert load_graph(tmp_path / "c.mtx").nnz == 49


def edges(**more):
    return {"edge_index": EDGES, "num_nodes": 4, **more}


def pyg_data(**more):
    data = pytest.importorskip("torch_geometric.data")
    return data.Data(edge_index=EDGES, num_nodes=4, **more)


WIDE = torch.zeros(3, 7, dtype=torch.int32)
WIDE[:, 2:4] = EDGES.T
WEIGHT = torch.tensor(WEIGHTS)


@pytest.mark.parametrize(
    "make, dense",
    [
        (lambda: EDGES, ONES[:3, :3]),
        (lambda: edges(edge_weight=WEIGHT), DENSE),
        (lambda: {"edge_index": EDGES, "x": torch.zeros(4, 2)}, ONES),
        (lambda: edges(edge_attr=torch.zeros(3, 7)), ONES),
        (lambda: edges(edge_attr=torch.nn.Parameter(WEIGHT[:, None].bfloat16())), DENSE),
        (lambda: edges(edge_weight=torch.full((1,), 4.0).expand(3)), ONES * 4),
        (lambda: edges(edge_index=WIDE[:, 2:4].t(), num_nodes=torch.tensor([4])), ONES),
        (lambda: (edges(device=torch.device("cpu")), {"edge_index": torch.tensor([0, 3])}), ONES),
        (lambda: [{"a": {("a", "to", "b"): edges(some=torch.Size([3]))}}], ONES),
        (lambda: pyg_data(edge_weight=WEIGHT), DENSE),
        (lambda: (pyg_data().to_dict(), None, type(pyg_data())), ONES),
        (lambda: edges(edge_attr=torch.tensor([7, 7, 8])), ONES),  # kinds of edges
        (lambda: edges(weight=WEIGHT, time=WEIGHT * 9), DENSE),
        (lambda: torch.tensor(DENSE).to_sparse(), DENSE),
        (lambda: {"adj_t": torch.tensor(DENSE).bfloat16().to_sparse_csr(), "x": WIDE}, DENSE),
        (lambda: torch.nn.Parameter(torch.tensor(DENSE).to_sparse_csc()), DENSE),
        (lambda: [torch.tensor(DENSE).to_sparse_bsr((2, 4))], DENSE),
        (lambda: torch.tensor(DENSE[:3]).bool().to_sparse_bsc((3, 1)), ONES[:3]),
    ],
    ids=range(18),
)
@pytest.mark.parametrize("new", [False, True], ids=["legacy", "zip"])
def test_files_of_torch(tmp_path, make, dense, new):
    """Tensors, dicts, what InMemoryDataset saves (dict, slices, class); rows are targets."""
    (tmp_path / "processed").mkdir()
    path = tmp_path / "processed" / "data.pt"
    torch.save(make(), path, _use_new_zipfile_serialization=new)
    same(load_graph(path), dense)
    same(load_graph(tmp_path), dense)


def test_objects_of_pyg_are_read_without_pyg(tmp_path, monkeypatch):
    """Graphs as objects with attributes alone."""
    torch.save(pyg_data(edge_weight=WEIGHT), tmp_path / "a.PT")
    for name in [n for n in sys.modules if n.startswith("torch_geometric")]:
        monkeypatch.setitem(sys.modules, name, None)
    same(load_graph(tmp_path / "a.PT"), DENSE)


def test_torch_is_needed_for_its_files_alone(tmp_path, monkeypatch):
    torch.save(edges(), tmp_path / "a.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(GraphError, match="a.pt: load_graph: needs PyTorch, .* run `pip install"):
        load_graph(tmp_path / "a.pt")
    assert load_graph("cora").nnz == 10556


def test_binary_file_of_dgl(tmp_path, monkeypatch):
    (tmp_path / "graph.dgl").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(GraphError, match="graph.dgl: to read binary files of DGL, install dgl"):
        load_graph(tmp_path)
    graph = SimpleNamespace(
        is_homogeneous=True, edges=lambda: (torch.tensor(COLUMNS), torch.tensor(ROWS)),
        edata={"w": torch.tensor(WEIGHTS).float()}, num_nodes=lambda: 4,
    )  # fmt: skip
    loaded = [graph]
    dgl = SimpleNamespace(load_graphs=lambda path: (loaded, {}))
    monkeypatch.setitem(sys.modules, "dgl", dgl)
    same(load_graph(tmp_path), DENSE)
    loaded.append(graph)
    with pytest.raises(GraphError, match="graph.dgl: holds 2 graphs, expected one"):
        load_graph(tmp_path)


def test_names(tmp_path):
    texts = ["cora", "cora:T", "a/b.mtx.gz", "weights.npz:conv1", "x/edges.csv:T", str(tmp_path)]
    names = ["cora", "cora:T", "b", "weights:conv1", "edges:T", tmp_path.name]
    assert [graph_name(text) for text in texts] == names
