"""Graphs from files of all kinds, and what is said of files that hold none."""

from __future__ import annotations

import gzip
import os
import pickle
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch

from sparsetir.data.graphs import GraphError, graph_name, layers, load_graph
from sparsetir.runtime import file_errors

# 0 -> 1 (0.5), 1 -> 2 (2), 2 -> 0 (3), of four nodes
DENSE = np.array([[0, 0.5, 0, 0], [0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0]], "float32")
ROWS, COLUMNS, WEIGHTS = np.array([2, 0, 1]), np.array([0, 1, 2]), np.array([3, 0.5, 2])


def same(found, dense, dtype="float32"):
    assert isinstance(found, sp.csr_array) and found.dtype == dtype
    assert found.indices.dtype == found.indptr.dtype == np.int32
    assert found.has_canonical_format
    assert found.shape == dense.shape and np.array_equal(found.toarray(), dense)


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_cora_by_name_and_transposed():
    cora = load_graph("cora")
    assert cora.shape == (2708, 2708) and cora.nnz == 10556 and (cora.data == 1).all()
    assert (load_graph("cora:T") != cora.T).nnz == 0


def test_compressed_arrays(tmp_path):
    arrays = {"shape": [2, 3], "indptr": np.array([0, 2, 3]), "indices": np.array([2, 0, 1])}
    np.savez(tmp_path / "a.npz", **arrays)
    same(load_graph(tmp_path / "a.npz"), np.array([[1, 0, 1], [0, 1, 0]]))
    np.savez(tmp_path / "b.npz", **arrays, data=np.array([0.0, 2.0, 3.0]))
    found = load_graph(f"{tmp_path}/b.npz:T")
    same(found, np.array([[2, 0], [0, 3], [0, 0]]), "float64")
    assert found.nnz == 3  # a stored zero stays


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr"])
def test_what_scipy_saved(tmp_path, form):
    sp.save_npz(tmp_path / "a.npz", sp.csr_array(DENSE).asformat(form))
    same(load_graph(tmp_path / "a.npz"), DENSE)


def test_half_precision_and_equal_edges(tmp_path):
    np.savez(tmp_path / "a.npz", row=[0, 0, 1], col=[1, 1, 0], data=np.float16([1, 2, 4]))
    same(load_graph(tmp_path / "a.npz"), np.array([[0, 3], [4, 0]]))
    np.savez(tmp_path / "b.npz", shape=[1, 2], indptr=[0, 3], indices=[1, 1, 0],
             data=np.float16([1, 2, 4]))  # fmt: skip
    same(load_graph(tmp_path / "b.npz"), np.array([[4, 3]]))


def test_coordinates_without_a_shape_are_square(tmp_path):
    np.savez(tmp_path / "a.npz", row=np.uint16([0, 1]), col=np.uint16([3, 0]))
    assert load_graph(tmp_path / "a.npz").shape == (4, 4)


def test_one_of_several_matrices(tmp_path):
    path = tmp_path / "weights.npz"
    one = {"shape": [1, 2], "indptr": [0, 1], "indices": [1]}
    np.savez(path, **{f"conv{n}.{k}": np.array(v) for n in (1, 2) for k, v in one.items()})
    same(load_graph(f"{path}:conv2"), np.array([[0, 1]]))
    same(load_graph(f"{path}:conv2:T"), np.array([[0], [1]]))
    assert layers(path) == ["conv1", "conv2"]
    with pytest.raises(GraphError, match=r"holds 2 matrices; name one, as weights.npz:conv1"):
        load_graph(path)
    with pytest.raises(GraphError, match="has no layer 'fc': has conv1, conv2"):
        load_graph(f"{path}:fc")


@pytest.mark.parametrize("ending", [".mtx", ".mtx.gz"])
def test_matrix_market(tmp_path, ending):
    scipy.io.mmwrite(tmp_path / "a.mtx", sp.coo_array(DENSE))
    path = write(tmp_path / f"b{ending}", (tmp_path / "a.mtx").read_bytes())
    same(load_graph(path), DENSE)


def test_symmetric_pattern_of_matrix_market(tmp_path):
    text = "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 3\n"
    path = write(tmp_path / "a.mtx", text)
    same(load_graph(path), np.array([[0, 1, 0], [1, 0, 0], [0, 0, 1]]))


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.txt", "# from to\n0 1\n1 2\n\n2 0\n"),
        ("a.el", "% x\n0\t1 # one\n1 2\n2 0\n"),
        ("a.tsv", "source\ttarget\n0\t1\n1\t2\n2\t0\n"),
        ("a.csv.gz", "0,1\n1,2\n2, 0"),
        ("a.csv", "\ufefffrom;to\n0;1\n1;2\n2;0\n"),
        ("b.csv", "0.0,1.0\n1,2\n2,0\n"),
    ],
)
def test_edge_lists(tmp_path, name, text):
    same(load_graph(write(tmp_path / name, text)), (DENSE[:3, :3] > 0).astype("float32"))


def test_edge_list_with_weights(tmp_path):
    path = write(tmp_path / "a.csv", "src,dst,weight\n0,1,0.5\n1,2,1\n1,2,1\n2,0,3\n3,3,0\n")
    found = load_graph(path)
    same(found, DENSE)
    assert found.nnz == 4


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.txt", "", "the file is empty"),
        ("a.txt", "# no edges\n", "expected row, column and maybe weight; there are none"),
        ("a.txt", "a b\nc d\n", "line 2: expected row, column and maybe weight, got 'c d'"),
        ("a.txt", "# x\n\n0 1\n2 x\n", "line 4: expected row, .*, got '2 x'"),
        ("a.txt", "0 1\n2 3 4\n", "line 2: expected row, .*, got '2 3 4'"),
        ("a.txt", "0 1 2 3\n", "line 1: expected row"),
        ("a.csv", "0,1,\n", "line 1: expected row"),
        ("a.txt", "0 1\n0.5 1\n", r"expected integers as ids, got \[0.5, 1.0\] as edge 2"),
        ("a.txt", "0 nan\n", "expected integers as ids"),
        ("a.txt", "0 1\n3 -1\n", "column ids: expected 0 or more, got -1"),
        ("a.txt", "0 9999999999999\n", "at most 16,777,216 rows .*; number nodes from 0"),
        ("a.mtx", "hello\n", "Not a Matrix Market file"),
        ("a.mtx", "%%MatrixMarket matrix array real general\n1 1\n2\n", "got a dense matrix"),
        ("a.mtx", "%%MatrixMarket matrix coordinate complex general\n1 1 1\n1 1 2 3\n",
         "got complex ones"),
        ("a.mtx", "%%MatrixMarket matrix coordinate real general\n3 3 2\n2 1 5\n", "Truncated"),
        ("a.mtx", "%%MatrixMarket matrix coordinate real general\n3 3 9999999999999\n2 1 5\n",
         "GB of memory"),
        ("a.npz", "PK\x03\x04", "damaged or cut off"),
        ("a.pt", "zzz", "is no file of torch.save, or is damaged"),
        ("a.md", "text", "expected cora, .*; got the ending '.md'"),
    ],
)  # fmt: skip
def test_refused_files(tmp_path, name, text, message):
    path = write(tmp_path / name, text)
    with pytest.raises(GraphError, match=message) as raised:
        load_graph(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)


def test_cut_off_files(tmp_path):
    path = write(tmp_path / "a.txt.gz", "0 1\n1 0\n" * 999)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(GraphError, match="a.txt.gz: the file is damaged or cut off"):
        load_graph(path)
    write(tmp_path / "b.txt.gz", "").write_bytes(b"0 1\n")
    with pytest.raises(GraphError, match="b.txt.gz: the file is damaged or cut off: Not a gzip"):
        load_graph(tmp_path / "b.txt.gz")
    np.savez(tmp_path / "c.npz", row=np.arange(999), col=np.arange(999))
    data = (tmp_path / "c.npz").read_bytes()
    (tmp_path / "c.npz").write_bytes(data[:2000])
    with pytest.raises(GraphError, match="c.npz: the file is damaged or cut off"):
        load_graph(tmp_path / "c.npz")


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"shape": [3, 3]}, "has no indptr, indices, but shape"),
        ({"shape": [2, 2], "indptr": [0.0, 1, 1], "indices": [0]}, "indptr: expected integers"),
        (
            {"shape": [2], "indptr": [0, 1], "indices": [0]},
            r"shape: expected two integers from 0 to 2..60, got .2.",
        ),
        ({"shape": [2, 2], "indptr": [0, 1, 1], "indices": [2]}, "indices|index"),
        ({"shape": [2, 2], "indptr": [0, 3, 1], "indices": [0]}, "indptr|index"),
        ({"row": [0, 1], "col": [0]}, r"column ids: expected shape \(2,\), got \(1,\)"),
        ({"row": [0.5], "col": [0]}, "row ids: expected integers, got float64"),
        ({"row": [0], "col": [5], "shape": [2, 2]}, "column ids: expected less than 2, got 5"),
        ({"row": [0], "col": [0], "data": [1j]}, "weights: expected real numbers"),
        ({"row": [0], "col": [0], "data": [1, 2]}, r"weights: expected shape \(1,\)"),
    ],
)
def test_refused_arrays(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **{k: np.array(v) for k, v in arrays.items()})
    with pytest.raises(GraphError, match=message) as raised:
        load_graph(tmp_path / "a.npz")
    assert str(raised.value).startswith(str(tmp_path / "a.npz"))


def test_larger_than_memory(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1 kB\n")
    monkeypatch.setattr(file_errors, "MEMINFO", tmp_path / "meminfo")
    np.savez(tmp_path / "a.npz", row=np.arange(999), col=np.arange(999))
    with pytest.raises(GraphError, match="a.npz: needs 0.0 GB of memory, 0.0 GB free"):
        load_graph(tmp_path / "a.npz")


def test_nothing_there(tmp_path):
    with pytest.raises(GraphError, match="nope: no such file; a graph is cora, an .npz file"):
        load_graph("nope")
    with pytest.raises(GraphError, match=r"a folder of PyG \(processed/data.pt"):
        load_graph(tmp_path)


def pyg(folder, data):
    folder.mkdir()
    torch.save(data, folder / "data.pt")


def edges(**more):
    return {"edge_index": torch.tensor(np.stack([COLUMNS, ROWS])), "num_nodes": 4, **more}


def test_folder_of_pyg(tmp_path):
    """As InMemoryDataset saves: (dict, slices, class); rows are targets."""
    weights = torch.tensor(WEIGHTS)
    pyg(tmp_path / "processed", (edges(edge_weight=weights), None, SimpleNamespace))
    same(load_graph(tmp_path), DENSE)
    same(load_graph(tmp_path / "processed" / "data.pt"), DENSE)
    pattern = edges(x=torch.zeros(4, 2), edge_attr=torch.zeros(3, 7))
    del pattern["num_nodes"]
    torch.save((pattern, None), tmp_path / "processed" / "data.pt")
    same(load_graph(tmp_path), (DENSE > 0).astype("float32"))


def test_objects_of_pyg_need_not_be_importable(tmp_path, monkeypatch):
    """A Data object holds a storage that holds the object."""

    class Data:
        pass

    Data.__module__, Data.__qualname__ = "torch_geometric.data.data", "Data"
    data, storage = Data(), Data()
    storage._parent, storage._mapping = data, edges()
    data._store = storage
    with monkeypatch.context() as patch:
        names = ["torch_geometric", "torch_geometric.data", "torch_geometric.data.data"]
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[names[-1]].Data = Data
        torch.save((data, None), tmp_path / "data.pt")
    same(load_graph(tmp_path), (DENSE > 0).astype("float32"))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_files_run_no_code(tmp_path):
    torch.save(edges(other=Evil(str(tmp_path / "made"))), tmp_path / "data.pt")
    same(load_graph(tmp_path), (DENSE > 0).astype("float32"))
    raw = tmp_path / "b" / "raw"
    raw.mkdir(parents=True)
    (raw / "ind.x.graph").write_bytes(pickle.dumps({0: [1], 1: Evil(str(tmp_path / "made"))}))
    with pytest.raises(GraphError):
        load_graph(tmp_path / "b")
    assert not (tmp_path / "made").exists()


def test_refused_files_of_pyg(tmp_path):
    torch.save(({"x": torch.zeros(2)}, None), tmp_path / "a.pt")
    with pytest.raises(GraphError, match="a.pt: holds no graph: nothing named edge_index"):
        load_graph(tmp_path / "a.pt")
    slices = {"edge_index": torch.tensor([0, 1, 3])}
    torch.save((edges(), slices, dict), tmp_path / "b.pt")
    with pytest.raises(GraphError, match="b.pt: holds 2 graphs, expected one"):
        load_graph(tmp_path / "b.pt")


def test_raw_files_of_planetoid(tmp_path):
    (tmp_path / "raw").mkdir()
    graph = defaultdict(list, {0: [1, 2, 2], 1: [0], 2: [0], 3: []})
    (tmp_path / "raw" / "ind.x.graph").write_bytes(pickle.dumps(graph, protocol=2))
    wanted = np.array([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    same(load_graph(tmp_path), wanted)


def dgl_folder(folder, meta=None):
    text = (
        "dataset_name: x\nedge_data:\n- file_name: edges.csv\nnode_data:\n- file_name: nodes.csv\n"
    )
    (folder / "meta.yaml").write_text(text if meta is None else meta)
    (folder / "edges.csv").write_text("src_id,dst_id,weight\n1,0,0.5\n2,1,2\n0,2,3\n")
    (folder / "nodes.csv").write_text("node_id,label\n" + "".join(f"{n},1\n" for n in range(4)))


def test_csv_folder_of_dgl(tmp_path):
    dgl_folder(tmp_path)
    same(load_graph(tmp_path), DENSE)


@pytest.mark.parametrize(
    "meta, edge_lines, message",
    [
        ("edge_data:\n- file_name: a.csv\n- file_name: b.csv\n", "", "one file .* a.csv, b"),
        ("edge_data:\n- file_name: gone.csv\n", "", "gone.csv: no such file, though meta.yaml"),
        ("edge_data: 5\n", "", "expected one file of edges under edge_data, got none"),
        ("- file_name: e.csv\n", "", "meta.yaml: expected names with values, got list"),
        ("edge_data: [{file_name: e.csv\n", "", "meta.yaml: holds no YAML: while parsing"),
        ("[" * 9_000, "", "meta.yaml: holds no YAML"),
        (None, "from,to\n0,1\n", "has no column src_id, dst_id, but from, to"),
        (None, "src_id,dst_id\n0,x\n", "expected integers as ids"),
        (None, "src_id,dst_id,graph_id\n0,1,0\n0,1,1\n", "holds several graphs"),
    ],
)
def test_refused_folders_of_dgl(tmp_path, meta, edge_lines, message):
    dgl_folder(tmp_path, meta)
    if edge_lines:
        (tmp_path / "edges.csv").write_text(edge_lines)
    with pytest.raises(GraphError, match=message):
        load_graph(tmp_path)


def test_binary_file_of_dgl(tmp_path, monkeypatch):
    (tmp_path / "graph.dgl").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(GraphError, match="graph.dgl: to read binary files of DGL, install dgl"):
        load_graph(tmp_path)
    graph = SimpleNamespace(
        is_homogeneous=True, edges=lambda: (torch.tensor(COLUMNS), torch.tensor(ROWS)),
        edata={"w": torch.tensor(WEIGHTS).float()}, num_nodes=lambda: 4,
    )  # fmt: skip
    found = [graph]
    dgl = SimpleNamespace(load_graphs=lambda path: (found, {}))
    monkeypatch.setitem(sys.modules, "dgl", dgl)
    same(load_graph(tmp_path), DENSE)
    found.append(graph)
    with pytest.raises(GraphError, match="graph.dgl: holds 2 graphs, expected one"):
        load_graph(tmp_path)


def test_names(tmp_path):
    texts = ["cora", "cora:T", "a/b.mtx.gz", "weights.npz:conv1", "x/edges.csv:T", str(tmp_path)]
    names = ["cora", "cora:T", "b", "weights:conv1", "edges:T", tmp_path.name]
    assert [graph_name(text) for text in texts] == names
