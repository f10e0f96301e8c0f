"""Files of graphs that were written by others: no code in them runs, and none keeps us busy."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from sparsetir import SparseMatrix
from sparsetir.cli.arguments import UsageError, named_values
from sparsetir.data.graphs import GraphError, load_graph
from sparsetir.data.plain_pickle import Made, Named, read_pickle

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
FACTS = {"protocol_version": VERSION, "little_endian": True, "type_sizes": {}}
DENSE = np.array([[0, 2, 0], [0, 0, 0.5], [3, 0, 0]], "float32")
EDGES = np.array([[1, 2, 0], [0, 1, 2]])  # columns, rows


def edges(**more):
    weights = torch.tensor([2, 0.5, 3])
    return {"edge_index": torch.tensor(EDGES), "edge_weight": weights, "num_nodes": 3, **more}


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class EvilState(Evil):
    def __reduce__(self):
        return list, (), Evil(self.path), iter([Evil(self.path)])


def zipped(path, data, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", data)
        for name, content in entries.items():
            archive.writestr(f"x/{name}", content)


@pytest.mark.parametrize("new", [False, True], ids=["legacy", "zip"])
def test_both_layouts_of_torch(tmp_path, new):
    """Offsets, strides, parameters, types that NumPy lacks, and what else may be beside them."""
    wide = torch.zeros(3, 7, dtype=torch.int32)
    wide[:, 2:4] = torch.tensor(EDGES.T)
    data = {
        "edge_index": wide[:, 2:4].t(), "num_nodes": torch.tensor([3]),
        "edge_weight": torch.nn.Parameter(torch.tensor([2, 0.5, 3], dtype=torch.bfloat16)),
        "device": torch.device("cpu"), "size": torch.Size([3]), ("a", "to", "b"): {1, 2},
    }  # fmt: skip
    torch.save((data, None), tmp_path / "data.pt", _use_new_zipfile_serialization=new)
    np.testing.assert_array_equal(load_graph(tmp_path).toarray(), DENSE)
    data["edge_weight"] = torch.full((1,), 4.0, dtype=torch.float64).expand(3)
    torch.save(data, tmp_path / "data.pt", _use_new_zipfile_serialization=new)
    np.testing.assert_array_equal(load_graph(tmp_path).toarray(), (DENSE > 0) * 4)
    data["edge_index"] = torch.tensor(EDGES, dtype=torch.uint16)
    torch.save(data, tmp_path / "data.pt", _use_new_zipfile_serialization=new)
    np.testing.assert_array_equal(load_graph(tmp_path).toarray(), (DENSE > 0) * 4)


@pytest.mark.parametrize("kind", [Evil, EvilState, None])
def test_no_code_of_a_file_runs(tmp_path, monkeypatch, kind):
    """In every pickle of every layout; without a kind it is a module that a pickle names."""
    made, path = tmp_path / "made", tmp_path / "data.pt"
    (tmp_path / "loaded.py").write_text(f"import os; os.mkdir({str(made)!r})")
    monkeypatch.syspath_prepend(tmp_path)
    evil = b"\x80\x02cloaded\nanything\n." if kind is None else pickle.dumps(kind(made), 2)
    for new in (False, True):
        if kind is None:
            continue
        torch.save(edges(other=kind(made)), path, _use_new_zipfile_serialization=new)
        np.testing.assert_array_equal(load_graph(path).toarray(), DENSE)
    for at in range(5):
        parts = [pickle.dumps(x, 2) for x in (MAGIC, VERSION, FACTS, {}, [])]
        path.write_bytes(b"".join([*parts[:at], evil, *parts[at + 1 :]]))
        with pytest.raises(GraphError, match="data.pt"):
            load_graph(path)
    zipped(path, evil)
    with pytest.raises(GraphError, match="data.pt: holds no graph"):
        load_graph(path)
    path.unlink()
    (tmp_path / "ind.x.graph").write_bytes(evil)
    with pytest.raises(GraphError, match=r"ind.x.graph: expected a dict of neighbours"):
        load_graph(tmp_path)
    if kind is not None:
        pickled = np.array([kind(made)], object)
        np.savez(tmp_path / "a.npz", indptr=pickled, indices=pickled, shape=pickled)
        with pytest.raises(GraphError, match="a.npz: .*allow_pickle"):
            load_graph(tmp_path / "a.npz")
    assert not made.exists()


def test_pickles_of_all_protocols():
    """As Python reads them, but for sets and objects."""
    deep = {"a": [1, -2, 2**70, 1.5, None, True, "ü", b"x\xff", (), (1,), (1, 2, 3, 4)]}
    deep["itself"] = deep["a"]
    for protocol in range(6):
        found = read_pickle(io.BytesIO(pickle.dumps(deep, protocol)))
        if protocol >= 3:  # before, bytes are a call
            assert found == deep
        assert found["itself"] is found["a"] and found["a"][:7] == deep["a"][:7]
        assert sorted(read_pickle(io.BytesIO(pickle.dumps({3, 4}, protocol)))) == [3, 4]
        evil = read_pickle(io.BytesIO(pickle.dumps(Evil("x"), protocol)))
        assert isinstance(evil, Made) and evil.parts == ["x"]
        assert evil.by == Named(os.mkdir.__module__ if protocol else "posix", "mkdir")


def test_short_files_that_ask_for_much_are_refused_at_once(tmp_path):
    """Of some hundred bytes each; one that is read as it asks never ends."""
    path = tmp_path / "data.pt"
    doubled = b"\x80\x02]q\x00" + b"".join(  # lists of lists, 2**60 places deep
        b"h%c\x86q%c" % (n, n + 1) if n % 2 else b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60)
    )
    hashed = doubled + b"}h<K\x01s."
    bombs = {
        "memory": b"\x80\x02K\x01r\xff\xff\xff\xff.",
        "text": b"\x80\x02X\xff\xff\xff\xffabc.",
        "bytes": b"\x80\x05\x8e" + struct.pack("<Q", 2**62) + b"abc.",
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc.",
        "digits": b"L" + b"9" * 300 + b"L\n.",
        "hash": hashed,
        "set": doubled + b"\x8f(h<\x90.",
    }
    for data in bombs.values():
        zipped(path, data)
        with pytest.raises(GraphError, match=r"data.pt: "):
            load_graph(path)
        path.write_bytes(pickle.dumps(MAGIC, 2) + data)
        with pytest.raises(GraphError, match=r"data.pt: "):
            load_graph(path)
        (tmp_path / "ind.x.graph").write_bytes(data)
        path.unlink()
        with pytest.raises(GraphError, match="ind.x.graph: "):
            load_graph(tmp_path)


def tensor_file(path, shape=(2, 3), strides=(3, 1), offset=0, bytes=48, nodes=3, kind="Long"):
    """A legacy file of one graph, with what its tensor says of itself."""
    objects = (
        b"\x80\x02}(X\x0a\x00\x00\x00edge_indexctorch._utils\n_rebuild_tensor_v2\n("
        b"(X\x07\x00\x00\x00storagectorch\n%sStorage\nX\x01\x00\x00\x00kX\x03\x00\x00\x00cpuK\x06Ntq"
        b"\x40Q" % kind.encode()
    )
    # The rest of the arguments, taken out of their tuple.
    rest = b"".join(pickle.dumps(x, 2)[2:-1] for x in (offset, shape, strides, False, {}))
    objects += rest + b"tRX\x09\x00\x00\x00num_nodes" + pickle.dumps(nodes, 2)[2:-1] + b"u."
    head = b"".join(pickle.dumps(x, 2) for x in (MAGIC, VERSION, FACTS))
    data = struct.pack("<q", bytes // 8) + EDGES.astype("int64").tobytes()
    path.write_bytes(head + objects + pickle.dumps(["k"], 2) + data)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"shape": (2, 4)}, r"a tensor of shape \(2, 4\) in a storage of 6 elements"),
        ({"offset": 1}, r"a tensor of shape \(2, 3\) in a storage of 6 elements"),
        ({"offset": -1}, r"a tensor of shape \(2, 3\)$"),
        ({"strides": (-3, 1)}, r"a tensor of shape \(2, 3\)$"),
        ({"shape": (2, 2**40), "strides": (0, 0)}, r"a tensor of shape \(2, 1099511627776\) in"),
        ({"shape": (2, 2**70), "strides": (0, 0)}, r"a tensor of shape \(2, 1180591620717411303"),
        ({"shape": (2, 3, 4)}, "holds no graph: nothing named edge_index"),
        ({"strides": (1,)}, r"a tensor of shape \(2, 3\)$"),
        ({"bytes": 2**40}, "it ends within a storage"),
        ({"bytes": -8}, "it ends within a storage"),
        ({"nodes": 2**30}, r"expected at most 16,777,216 rows or columns .*, got 1,073,741,824"),
        ({"nodes": 2**70}, r"shape: expected two integers from 0 to"),
        ({"kind": "Evil"}, "it has a storage that is not read here: EvilStorage"),
        ({"kind": "Double"}, "row ids: expected integers, got float64"),
    ],
)
def test_tensors_that_are_not_what_they_say(tmp_path, wrong, message):
    path = tmp_path / "data.pt"
    tensor_file(path)
    assert load_graph(path).nnz == 3
    tensor_file(path, **wrong)
    with pytest.raises(GraphError, match=f"data.pt: .*{message}"):
        load_graph(path)


@pytest.mark.parametrize("new", [False, True], ids=["legacy", "zip"])
def test_damaged_files_are_named(tmp_path, new):
    """Each of many changes of a file is read, or refused by name."""
    path, rng = tmp_path / "data.pt", np.random.default_rng(0)
    torch.save((edges(x=torch.zeros(3, 2)), None), path, _use_new_zipfile_serialization=new)
    whole = path.read_bytes()
    for n in range(300):
        data = bytearray(whole)
        if n % 3 == 0:
            del data[int(rng.integers(len(data))) :]
        else:
            for at in rng.integers(len(data), size=n % 3):
                data[at] = int(rng.integers(256))
        path.write_bytes(data)
        try:
            load_graph(path)
        except GraphError as error:
            assert str(error).startswith(str(path))


@pytest.mark.parametrize(
    "graph, message",
    [
        ({0: [2**70]}, "expected integers from 0 to 2\\*\\*63 as ids, got 1180591620717411303424"),
        ({0: [-1]}, "expected integers from 0 to 2\\*\\*63 as ids, got -1"),
        ({0: ["a"]}, "expected integers from 0 to 2\\*\\*63 as ids, got str"),
        ({0: [2**40]}, "expected at most 16,777,216 rows or columns .*, got 1,099,511,627,777"),
        ({0: 1}, "expected a list of neighbours of each node"),
        ([[0, 1]], "expected a dict of neighbours, got list"),
    ],
)
def test_raw_files_that_are_no_graph(tmp_path, graph, message):
    (tmp_path / "ind.x.graph").write_bytes(pickle.dumps(graph))
    with pytest.raises(GraphError, match=f"ind.x.graph: {message}"):
        load_graph(tmp_path)


def test_one_list_under_many_names(tmp_path):
    near = list(range(3000))
    (tmp_path / "ind.x.graph").write_bytes(pickle.dumps(dict.fromkeys(range(3000), near)))
    with pytest.raises(GraphError, match="expected fewer neighbours than the file has bytes"):
        load_graph(tmp_path)


def test_compressed_and_foreign_zip_files(tmp_path):
    path = tmp_path / "data.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02K\x01." + bytes(10**6))
    with pytest.raises(GraphError, match="it has compressed entries"):
        load_graph(path)
    zipped(path, pickle.dumps({}), byteorder="big")
    with pytest.raises(GraphError, match="it was written on a big-endian machine"):
        load_graph(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(GraphError, match="a zip file without the objects of torch.save"):
        load_graph(path)
    path.write_bytes(b"storages" + bytes(600))
    with pytest.raises(GraphError, match="is no file of torch.save, or is damaged"):
        load_graph(path)
    torch.save({"edge_index": torch.tensor(EDGES).to(torch.complex64).conj().imag.long()}, path)
    load_graph(path)


def test_sparse_tensors_in_files_are_no_edges(tmp_path):
    torch.save({"edge_index": torch.tensor(EDGES).to_sparse()}, tmp_path / "data.pt")
    with pytest.raises(GraphError, match="holds no graph"):
        load_graph(tmp_path)


def test_negative_bits_are_refused(tmp_path):
    weights = torch.tensor([2, 0.5, 3]).to(torch.complex64).conj().imag
    assert weights.is_neg()
    torch.save(edges(edge_weight=weights), tmp_path / "data.pt")
    with pytest.raises(GraphError, match="it has a tensor with the negative or conjugate bit"):
        load_graph(tmp_path)


def header(shape, dtype="<i8"):
    """Of an .npy file, which ends behind it."""
    out = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, about)
    return out.getvalue()


def damaged_files(folder):
    """Files by name, and what is said of them."""
    np.savez(folder / "a.npz", row=[0], col=[1])
    whole = (folder / "a.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[:-60])
    (folder / "other.npz").write_bytes(b"no zip file")
    with zipfile.ZipFile(folder / "huge.npz", "w") as archive:
        archive.writestr("format.npy", header((), "|S3") + b"csr")
        for name in ("row", "shape", "indptr", "indices", "data"):
            archive.writestr(f"{name}.npy", header((2**44,)))
    begin = "%%MatrixMarket matrix coordinate real general\n"
    (folder / "many.mtx").write_text(begin + f"9 9 {10**15}\n1 1 1\n")
    (folder / "large.mtx").write_text(begin + f"9 9 1\n{2**70} 1 1\n")
    return {
        "cut.npz": "the file is damaged or cut off: File is not a zip file",
        "other.npz": "the file is damaged or cut off: File is not a zip file",
        "huge.npz": "does not fit into memory",
        "many.mtx": r"needs [\d,.]* GB of memory, [\d,.]* GB free",
        "large.mtx": "a number in it is too large: Line 3: Integer out of range",
    }


def test_all_readers_name_what_is_damaged(tmp_path):
    for name, message in damaged_files(tmp_path).items():
        path = tmp_path / name
        with pytest.raises(GraphError, match=f"^{path}: {message}"):
            load_graph(path)
        who = "SparseMatrix.from_file: argument 'path'"
        with pytest.raises(ValueError, match=f"^{who}: '{path}': {message}"):
            SparseMatrix.from_file(path)
        if name.endswith(".npz"):
            with pytest.raises(UsageError, match=f"^argument --arg: row: {path}: {message}"):
                named_values([f"row={path}"])
    (tmp_path / "huge.npy").write_bytes(header((2**70,)))
    with pytest.raises(UsageError, match="row: .*huge.npy: a number in it is too large: "):
        named_values([f"row={tmp_path / 'huge.npy'}"])


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"row": [2**63 + 1], "col": [0]}, "row ids: expected less than 2\\*\\*60, got 9223372036"),
        ({"row": [[0]], "col": [[0]]}, r"row ids: expected one dimension, got shape \(1, 1\)"),
        ({"indptr": [[0]], "indices": [0], "shape": [1, 1]}, "indptr: expected one dimension"),
        ({"indptr": [0, 1], "indices": [[0]], "shape": [1, 1]}, "indices: expected one dimension"),
        ({"indptr": [0, 1], "indices": [0], "shape": 1}, "shape: expected two integers from 0 to"),
        ({"indptr": [0, 1], "indices": [0], "shape": [1, 2**62]}, "shape: expected two integers"),
        ({"indptr": [0, 1], "indices": [0], "shape": [1, 1], "data": ["x"]}, "expected real num"),
    ],
)
def test_arrays_of_other_ranks_and_sizes(tmp_path, arrays, message):
    large = {n: np.array(x, "uint64" if n == "row" else None) for n, x in arrays.items()}
    np.savez(tmp_path / "a.npz", **large)
    with pytest.raises(GraphError, match=f"^{tmp_path / 'a.npz'}: {message}"):
        load_graph(tmp_path / "a.npz")


def test_ids_that_are_too_large_in_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"0,1\n{2**53 + 1},1\n")
    with pytest.raises(
        GraphError, match="a.csv: expected ids below 2\\*\\*53, got 9007199254740992"
    ):
        load_graph(path)
    (tmp_path / "meta.yaml").write_text("edge_data:\n- file_name: e.csv\n")
    (tmp_path / "e.csv").write_text(f"src_id,dst_id\n0,{2**70}\n")
    with pytest.raises(GraphError, match="e.csv: expected ids below 2\\*\\*63, got a larger one"):
        load_graph(tmp_path)
