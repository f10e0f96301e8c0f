"""Files of clumsy and of hostile makers, at all readers: words that name them.

No code in a file runs, none keeps us busy, and a short one may not ask for much.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import struct
import time
import zipfile

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from numpy.lib import format as npy

from sparsetir import SparseMatrix
from sparsetir.cli.arguments import UsageError, named_values
from sparsetir.data.graphs import GraphError, graph_name, load_graph, load_relations
from sparsetir.distributed.files import read_share
from sparsetir.runtime import file_errors
from sparsetir.runtime.file_errors import printable

DENSE = np.array([[0, 2, 0], [0, 0, 0.5], [3, 0, 0]], "float32")
EDGES = torch.tensor([[1, 2, 0], [0, 1, 2]])  # columns, rows
GRAPH = {"edge_index": EDGES, "num_nodes": 3}
TEXT = "0 1 2\n1 2 0.5\n2 0 3\n"
HEAD = "%%MatrixMarket matrix coordinate real general\n"
MUCH = "expected at most 268,435,456 bytes of memory for a file of [0-9,]+ bytes, got"
GAPS = r"with \d elements \(are nodes numbered from 0, without gaps\?\): " + MUCH
DAMAGED = "the file is damaged or cut off: "


def share(path):
    return read_share(path, 0, 1)


def argument(path):
    return named_values([f"row={path}"])


def raises(path, message, *readers):
    for read in readers:
        start = time.process_time()
        with pytest.raises((ValueError, UsageError), match=message) as raised:
            read(path)
        text = str(raised.value)
        assert printable(str(path)) in text and "\n" not in text and len(text) < 700
        assert text.count("argument 'path'") <= 1
        assert time.process_time() - start < 10


def torch_file(data, new=True):
    out = io.BytesIO()
    torch.save(data, out, _use_new_zipfile_serialization=new)
    return out.getvalue()


def zipped(objects):
    """A file of `torch.save` with another pickle of its objects."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_file(GRAPH))) as usual, zipfile.ZipFile(out, "w") as made:
        for name in usual.namelist():
            made.writestr(name, objects if name.endswith("data.pkl") else usual.read(name))
    return out.getvalue()


def legacy(**others):
    """A file of before torch 1.6: five pickles, some of which are replaced."""
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    usual = [pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, facts, {}, [])]
    return b"".join(others.get(f"at{n}", part) for n, part in enumerate(usual))


def header(shape, dtype="<i8"):
    """An .npy file's header and shape, without its data."""
    out = io.BytesIO()
    npy.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue()


def archive(**entries):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(f"{name}.npy", content)
    return out.getvalue()


def arrays(**changes):
    out = io.BytesIO()
    np.savez(out, **{name: np.asarray(x) for name, x in changes.items() if x is not None})
    return out.getvalue()


def saved(**changes):
    """A file of DENSE as SciPy saves it, with some arrays replaced, or left out where None."""
    csr = sp.csr_array(DENSE)
    usual = {"format": b"csr", "shape": csr.shape, "data": csr.data}
    return arrays(**{**usual, "indices": csr.indices, "indptr": csr.indptr, **changes})


CSR = {"indptr": [0, 1], "indices": [0], "shape": [1, 1]}
PAIR = {"row": [0], "col": [0]}
DOUBLED = b"\x80\x02]q\x00" + b"".join(  # lists of lists, 2**60 places deep
    b"h%c\x86q%c" % (n, n + 1) if n % 2 else b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60)
)
BOMBS = {
    "memory": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "text": b"\x80\x02X\xff\xff\xff\xffabc.",
    "bytes": b"\x80\x05\x8e" + struct.pack("<Q", 2**62) + b"abc.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc.",
    "digits": b"L" + b"9" * 300 + b"L\n.",
    "hash": DOUBLED + b"}h<K\x01s.",
    "set": DOUBLED + b"\x8f(h<\x90.",
}
# Bytes of a legacy file, and others: of offset, shape and strides, the storage's class and length.
LIES = [
    (b"QK\x00K\x02K\x03\x86", b"QK\x00K\x02K\x04\x86"),
    (b"QK\x00K\x02K\x03\x86", b"QK\x01K\x02K\x03\x86"),
    (b"QK\x00K\x02K\x03\x86", b"QJ\xff\xff\xff\xffK\x02K\x03\x86"),
    (b"K\x03K\x01\x86", b"J\xfd\xff\xff\xffK\x01\x86"),
    (b"K\x03K\x01\x86", b"K\x01\x85"),
    (b"K\x02K\x03\x86", b"K\x02\x8a\x09" + (2**70).to_bytes(9, "little") + b"\x86"),
    (b"LongStorage", b"EvilStorage"),
    (struct.pack("<q", 6), struct.pack("<q", 2**40)),
    (struct.pack("<q", 6), struct.pack("<q", -8)),
]
NEGATIVE = torch.tensor([2, 0.5, 3]).to(torch.complex64).conj().imag
MARKET = [
    ("3 3 1\n1 2 1D3\n", "expected a number, got '1D3'"),
    ("3 3 1\n1 2 0x10\n", "expected a number, got '0x10'"),
    ("3 3 1\n1 2 1,5\n", "expected a number, got '1,5'"),
    ("3 3 1\n1 2 1.5-100\n", "expected a number, got '1.5-100'"),
    ("3 3 1\n1 2 1e\n", "expected a number, got '1e'"),
    ("3 3 1\n1 2 3 4\n", "expected 1 lines of 3 numbers, got 4 numbers"),
    ("integer 3 3 1\n1 2 7.5\n", "expected an integer, got '7.5'"),
    ("pattern 3 3 1\n1 2 7\n", "expected 1 lines of 2 numbers, got 3"),
    ("complex 3 3 1\n1 2 7 8\n", "expected real numbers, got complex ones"),
    ("array 1 1\n2\n", "got a dense matrix"),
    ("symmetric 2 3 1\n1 2 3\n", "as many rows as columns for a symmetric matrix, got 2 x 3"),
    ("3 3 100000000\n1 2 3\n", f"a matrix with 100,000,000 elements: {MUCH}"),
    (f"9 9 1\n{2**70} 1 1\n", "a number in it is too large: Line 3: Integer out of range"),
    ("3 3 1\n0 2 3\n", "Row index out of bounds"),
    ("3 3 2\n1 2 3\n", "Truncated file"),
    ("3 3 1\n1 2 3\n1 1 1\n", "too long"),
]
SAVED = [
    ({"format": 7}, f"{DAMAGED}'int' object"),
    ({"format": np.array([], "S3")}, "size 1"),
    ({"format": b"dok"}, "not implemented for sparse matrix of format dok"),
    ({"indices": [0, 1.5, 2]}, "indices: expected integers, got float64"),
    ({"indices": [0, np.nan, 2]}, "indices: expected integers, got float64"),
    ({"indices": [0, 1, 7]}, r"ind(ices|ex)"),
    ({"indptr": [0, 2, 1, 3]}, "indptr|index pointer"),
    ({"format": b"csc", "indices": [0, 1, 10**8]}, "ind(ices|ex values) must be < 3"),
    ({"format": b"csc", "indices": [0, 1, -(10**8)]}, "ind(ices|ex values) must be >= 0"),
    ({"shape": [-3, 3]}, "'shape' elements cannot be negative"),
    ({"shape": [3.0, 3.0]}, "shape: expected integers, got float64"),
    ({"shape": [3, 3, 3]}, "shape|dimension"),
    ({"shape": None}, f"{DAMAGED}'shape is not a file in the archive'"),
    ({"data": ["a", "b", "c"]}, "<U1"),
    ({"data": np.ones(3, "complex64")}, "expected real numbers, got complex64"),
    ({"format": b"coo", "row": [0, 1, 2.5], "col": [0, 1, 2]}, "row: expected integers"),
    ({"format": b"bsr", "data": np.ones((3, 0, 1), "f4")}, DAMAGED),
    ({"format": b"bsr", "data": np.ones((3, 2, 2), "f4")}, "index pointer"),
    ({"format": b"dia", "data": np.ones((2, 3), "f4"), "offsets": [0]}, "offsets"),
]
ARRAYS = [
    ({"shape": [3, 3]}, "has no indptr, indices, but shape"),
    ({"row": [0, 1], "col": [0]}, r"column ids: expected shape \(2,\), got shape \(1,\)"),
    ({**PAIR, "row": [0.5]}, "row ids: expected integers, got float64"),
    ({"row": [[0]], "col": [[0]]}, r"row ids: expected one dimension, got shape \(1, 1\)"),
    ({**PAIR, "col": [5], "shape": [2, 2]}, "column ids: expected .* less than 2, got 5"),
    ({**PAIR, "data": [1j]}, "weights: expected real numbers"),
    ({**PAIR, "data": [1, 2]}, r"weights: expected shape \(1,\)"),
    ({**PAIR, "row": np.uint64([2**63 + 1])}, r"row ids: expected .* 2\*\*60, got 922337203685477"),
    ({**PAIR, "row": [10**9]}, f"1,000,000,001 {GAPS}"),
    ({**PAIR, "shape": [2, 10**9]}, GAPS),
    ({**CSR, "indptr": [0.0, 1]}, "indptr: expected integers"),
    ({**CSR, "indptr": [[0]]}, "indptr: expected integers of one dim"),
    ({**CSR, "indptr": [0, 3]}, "indptr|index"),
    ({**CSR, "indices": [0, 0]}, "indptr: expected to end with all indices, got 1 of 2"),
    ({**CSR, "indices": [[0]]}, "indices: expected integers of one dim"),
    ({**CSR, "indices": [2]}, "indices|index"),
    ({**CSR, "shape": [2]}, r"shape: expected two integers from 0 to 2..60, got .2."),
    ({**CSR, "shape": 1}, "shape: expected two integers from 0 to"),
    ({**CSR, "shape": [1, 2**62]}, "shape: expected two integers"),
    ({**CSR, "shape": [1, 10**9]}, GAPS),
    ({**CSR, "data": ["x"]}, "expected real numbers"),
]
EDGE_TYPES = {"num_nodes": 3, "src": [0, 1], "dst": [1, 2], "etype": [0, 1]}
RELATIONS = [
    ({"num_nodes": 3.7}, "num_nodes: expected an integer, got 3.7"),
    ({"num_nodes": np.nan}, "num_nodes: expected an integer, got nan"),
    ({"num_nodes": [3, 4]}, r"num_nodes: expected an integer, got \[3, 4\]"),
    ({"num_nodes": -3}, "expected 3 integers >= 0"),
    ({"num_nodes": 2**62}, GAPS),
    ({"etype": [2**62, 0]}, GAPS),
    ({"etype": [0, np.nan]}, r"etype: expected integers .*, got float64 of shape \(2,\)"),
    ({"etype": ["a", "b"]}, r"etype: expected integers .*, got <U1 of shape \(2,\)"),
    ({"src": 1}, r"src: expected integers of one dimension, got int64 of shape \(\)"),
]
SHARES = [
    ("s.npz", saved(format=np.array([], "S3")), r"got format \[\]"),
    ("s.npz", saved(format=7), "got format 7"),
    ("s.npz", saved(indptr=[0, 1, 2, 3, 3]), "indptr: expected 4 elements, got 5"),
    ("s.npz", arrays(row=[10**9, 0], col=[0, 0]), f"1,000,000,001 .*{MUCH}"),
    ("s.csv", "0,1000000000\n", f"1,000,000,001 .*{MUCH}"),
]
LISTS = [
    ("a.txt", "", "the file is empty"),
    ("a.txt", "# no edges\n", "expected row, column and maybe weight; there are none"),
    ("a.txt", "a b\nc d\n", "line 2: expected row, column and maybe weight, got 'c d'"),
    ("a.txt", "# x\n\n0 1\n2 x\n", "line 4: expected row, .*, got '2 x'"),
    ("a.txt", "0 1\n2 3 4\n", "line 2: expected row, .*, got '2 3 4'"),
    ("a.txt", "0 1 2 3\n", "line 1: expected row"),
    ("a.csv", "0,1,\n", "line 1: expected row"),
    ("a.csv", ",src,dst\n0,7,1\n", "line 1: expected row, .*, got a column without a name"),
    (
        "a.csv",
        "src,dst,score,w\n0,7,1,1\n",
        "expected 4 names .* one of weights .*, got src, dst, score, w",
    ),
    ("a.csv", "src,dst,foo\n0,7,1\n", "expected 3 names of columns: .*, got src, dst, foo"),
    ("a.csv", "x,y,z\n0,7,1\n", "expected 3 names of columns: .*, got x, y, z"),
    ("a.csv", "src,from\n0,7\n", "expected 2 names of columns: .*, got src, from"),
    ("a.csv", "src,x\n0,7\n", "expected 2 names of columns: .*, got src, x"),
    ("a.csv", "time,a,w\n0,7,1\n", "expected 3 names of columns: .*, got time, a, w"),
    ("a.csv", "src,dst\n0,7,1\n", "expected 3 names of columns: .*, got src, dst"),
    ("a.csv", "src,dst,type\n0,1,a\n0,1,a,b\n", "line 3: expected row, .*, got '0,1,a,b'"),
    ("a.txt", "0 1\n0.5 1\n", r"expected integers as ids, got \[0.5, 1.0\] as edge 2"),
    ("a.txt", "0 nan\n", "expected integers as ids"),
    ("a.txt", "0 1\n3 -1\n", r"column ids: expected 0 or more, less than 2\*\*60, got -1"),
    ("a.txt", "0 9999999999999\n", GAPS),
    ("a.csv", f"0,1\n{2**53 + 1},1\n", "expected ids below 2..53, got 9007199254740992"),
]
ONE = torch.ones(1)
SPARSE = torch.eye(3).to_sparse()
MANY = EDGES[:, :1].expand(2, 2**40), ONE.expand(2**40)


def compressed(begin, indices):
    begin, indices = torch.tensor(begin), torch.tensor(indices)
    return torch.sparse_csr_tensor(begin, indices, ONE, (3, 3), check_invariants=False)


TENSORS = [
    (SPARSE.unsqueeze(0), r"expected a sparse matrix, got coo of shape \(1, 3, 3\)"),
    (compressed([0, 9, 1, 1], [0]), "holds no|indptr|indices"),
    (compressed([0, 1, 1, 1], [7]), "indices must be < 3"),
    (compressed([0, 1, 1, 1], [0] * 9), "same size"),
    (
        torch.sparse_coo_tensor(EDGES + 1, ONE.expand(3), (3, 3), check_invariants=False),
        "less than 3",
    ),
    (torch.sparse_coo_tensor(*MANY, (3, 3), check_invariants=False), MUCH),
    ([SPARSE, SPARSE * 2], "holds 2 graphs, expected one"),
    ({"edge_index": EDGES, "w": torch.ones(3), "value": torch.ones(3)}, "one name, got w, value"),
    ({"x": EDGES}, "holds no graph: nothing named edge_index"),
    ({"edge_index": EDGES.T}, "holds no graph: nothing named edge_index"),
    ({"edge_index": EDGES.to_sparse()}, "expected a dense array, got a sparse one"),
    ({"edge_index": EDGES.double()}, "row ids: expected integers, got float64"),
    ({"edge_index": EDGES - 1}, "row ids: expected 0 or more, .* got -1"),
    ({**GRAPH, "edge_weight": NEGATIVE}, "without the negative bit"),
    ((GRAPH, {"edge_index": EDGES[0]}), "holds 2 graphs, expected one"),
    ([GRAPH, {**GRAPH}], "holds 2 graphs, expected one"),
    ((GRAPH, {**GRAPH}), "holds 2 graphs, expected one"),
    ({**GRAPH, "edge_weight": torch.ones(2)}, r"weights: expected shape \(3,\), got \(2,\)"),
    ({**GRAPH, "edge_weight": torch.ones(3) * 1j}, "weights: expected real numbers, got complex64"),
    ({**GRAPH, "num_nodes": 2**30}, f"1,073,741,824 x 1,073,741,824 {GAPS}"),
    ({**GRAPH, "num_nodes": 2**70}, GAPS),
    ({"edge_index": EDGES[:1, :1].expand(2, 2**40)}, rf"\(2, 1099511627776\): {MUCH}"),
]


REPLACED = {"array": "coordinate", "symmetric": "general"}


def market(text):
    word, _, rest = text.partition(" ")
    if not word.isalpha():
        return HEAD + text
    return HEAD.replace(REPLACED.get(word, "real"), word) + rest


def damaged():
    """Files by name, and what is said of them."""
    whole, lists = arrays(row=np.arange(999), col=np.arange(999)), gzip.compress(TEXT.encode() * 99)
    huge = dict.fromkeys(("row", "shape", "indptr", "indices", "data"), header((2**44,)))
    graph = torch_file(GRAPH, new=False)
    yield "a.npz", whole[:-60], f"{DAMAGED}File is not a zip file"
    yield "a.npz", b"PK\x03\x04", f"{DAMAGED}File is not a zip file"
    yield "a.npz", archive(format=header((), "|S3") + b"csr", **huge), "does not fit into memory"
    yield "a.mtx.gz", gzip.compress(HEAD.encode() * 99)[:-12], f"{DAMAGED}Compressed file ended"
    yield "a.mtx.gz", HEAD, f"{DAMAGED}Not a gzip"
    yield "a.mtx", "hello\n", "Line 1: Not a Matrix Market file"
    yield "a.txt.gz", lists[:-12], f"{DAMAGED}Compressed file ended"
    yield "a.txt.gz", TEXT, f"{DAMAGED}Not a gzip"
    yield "a.pt", archive(x=b""), DAMAGED
    yield "a.pt", b"storages" + bytes(600), DAMAGED
    yield "a.pt", b"zzz", "is not a file of torch.save, or is damaged"
    yield "a.pt", graph[:-9], DAMAGED
    for old, new in LIES:
        assert old in graph
        yield "a.pt", graph.replace(old, new), f"{DAMAGED}|Overflow|got torch.EvilStorage"
    for data in BOMBS.values():
        yield "a.pt", zipped(data), ""
        yield "a.pt", legacy(at1=data), ""
    for name in ("a.md", "meta.yaml", "ind.x.graph"):
        yield (
            name,
            "edge_data:\n- file_name: e.csv\n",
            "expected cora, .*; got the ending '.[a-z]+'",
        )


FILES = [
    *damaged(),
    *LISTS,
    *SHARES,
    *(("a.mtx", market(text), words) for text, words in MARKET),
    *(("a.npz", saved(**changes), words) for changes, words in SAVED),
    *(("a.npz", arrays(**changes), words) for changes, words in ARRAYS),
    *(("r.npz", arrays(**{**EDGE_TYPES, **changes}), words) for changes, words in RELATIONS),
    *(("a.pt", torch_file(data), words) for data, words in TENSORS),
]


@pytest.mark.parametrize("name, data, words", FILES, ids=range(len(FILES)))
def test_refused(tmp_path, monkeypatch, name, data, words):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    read = {"r": load_relations, "s": share}.get(path.stem, load_graph)
    raises(path, f"^{re.escape(str(path))}: .*({words})", read)
    if ".mtx" in name or (name == "a.npz" and "numbered from 0" not in words):
        words = f"^SparseMatrix.from_file: .*({words}|does not contain a sparse|expected integers)"
        raises(path, words, SparseMatrix.from_file)
    if name == "a.npz" and ("zip file" in words or "does not fit" in words):
        raises(path, f"^argument --arg: row: {path}: ({DAMAGED}|does not fit)", argument)
    if ".mtx" in name:
        monkeypatch.setattr(file_errors, "PIECE", 65)
        raises(path, words, SparseMatrix.from_file)


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class EvilState(Evil):
    def __reduce__(self):
        return list, (), Evil(self.path), iter([Evil(self.path)])


@pytest.mark.parametrize("kind", [Evil, EvilState, None])
def test_no_code_of_a_file_runs(tmp_path, monkeypatch, kind):
    """Code in every pickle of every layout; without a kind it is a module that a pickle names."""
    folder, path = tmp_path / "made", tmp_path / "data.pt"
    (tmp_path / "loaded.py").write_text(f"import os; os.mkdir({str(folder)!r})")
    monkeypatch.syspath_prepend(tmp_path)
    evil = b"\x80\x02cloaded\nanything\n." if kind is None else pickle.dumps(kind(folder), 2)
    files = [zipped(evil), *(legacy(**{f"at{n}": evil}) for n in range(5))]
    if kind is not None:
        files += [torch_file({**GRAPH, "other": kind(folder)}, new) for new in (False, True)]
    for data in files:
        path.write_bytes(data)
        raises(
            path, "data.pt: (.*got (posix.mkdir|loaded.anything|list), of which no|.*)", load_graph
        )
    for form in ({}, {"format": b"csr"}, {"format": np.array([kind and kind(folder)], object)}):
        pickled = np.array([kind and kind(folder)], object)
        names = ("indptr", "indices", "shape", "row", "col", "data")
        (tmp_path / "a.npz").write_bytes(arrays(**dict.fromkeys(names, pickled), **form))
        raises(tmp_path / "a.npz", "allow_pickle|expected integers", load_graph, argument)
        raises(tmp_path / "a.npz", "expected numbers|allow_pickle|Object arrays", share)
        raises(tmp_path / "a.npz", "expected integers|format", SparseMatrix.from_file)
    np.save(tmp_path / "a.npy", pickled)
    raises(tmp_path / "a.npy", "allow_pickle", argument)
    assert not folder.exists()


@pytest.mark.parametrize("new", [False, True], ids=["legacy", "zip"])
def test_damaged_files_are_named(tmp_path, new):
    """Each of many changes of a file is read, or refused by name."""
    path, rng = tmp_path / "data.pt", np.random.default_rng(0)
    whole = torch_file(({**GRAPH, "x": torch.zeros(3, 2)}, None), new)
    for n in range(300):
        data = bytearray(whole)
        if n % 3 == 0:
            del data[int(rng.integers(len(data))) :]
        else:
            for place in rng.integers(len(data), size=n % 3):
                data[place] = int(rng.integers(256))
        path.write_bytes(data)
        try:
            load_graph(path)
        except GraphError as error:
            assert str(error).startswith(str(path))


def test_files_that_unpack_to_much(tmp_path, monkeypatch):
    """Arrays of zeros, and text: of comments, of one long line, of edges."""
    monkeypatch.setattr(file_errors, "FEW_BYTES", 2**23)
    less = MUCH.replace("268,435,456", "8,388,608")
    path, zeros = tmp_path / "a.npz", header((2**20,)) + bytes(2**23)
    path.write_bytes(archive(row=zeros, col=header((1,)) + bytes(8)))
    raises(path, less, load_graph, share, SparseMatrix.from_file, argument)
    zeros = header((3 * 2**17,)) + bytes(3 * 2**20)
    path.write_bytes(archive(row=zeros, col=zeros))  # fits, its matrix does not
    raises(path, less, load_graph)
    (tmp_path / "a.pt").write_bytes(archive(x=zeros * 3))
    raises(tmp_path / "a.pt", f"its arrays: {less}", load_graph)
    for line in (b"%\n", b"%x", b"1 1 1\n"):
        for name, begin in (("a.mtx.gz", HEAD + "2 2 9\n" * (line[:1] == b"1")), ("a.csv.gz", "")):
            (tmp_path / name).write_bytes(gzip.compress(begin.encode() + line * 2**20))
            readers = (load_graph, SparseMatrix.from_file) if begin else (load_graph,)
            raises(tmp_path / name, f"its text, unpacked: {less}", *readers)
    (tmp_path / "huge.npy").write_bytes(header((2**70,)))
    raises(tmp_path / "huge.npy", "huge.npy: a number in it is too large: ", argument)


@pytest.mark.parametrize(
    "name",
    ["with space", "ünï❤", "new\nline", "esc\x1b[31m", "quote'\"", "a:T", "c:x", "\udcff", "%s{0}"],
)
def test_names_of_all_kinds(tmp_path, name):
    """Errors and names for people have no codes that a terminal obeys."""
    path = tmp_path / f"{name}.txt"
    path.write_text(TEXT)
    np.testing.assert_array_equal(load_graph(path).toarray(), DENSE)
    assert graph_name(path).isprintable()
    assert graph_name(path) == printable(name)
    path.write_text("0 x\n")
    raises(path, "line 1: expected row", load_graph)


def test_text_that_can_be_printed():
    assert printable("aé❤ b") == "aé❤ b"
    assert printable("\x1b[2J\n\r\x9b\u202e\udc80") == "\\x1b[2J\\n\\r\\x9b\\u202e\\udc80"


def test_files_that_are_no_files(tmp_path):
    """No reader waits forever, or reads without end."""
    for ending in (".npz", ".mtx", ".txt", ".pt", ".bin", ".csv.gz"):
        os.mkfifo(tmp_path / f"a{ending}")
        (tmp_path / f"b{ending}").symlink_to("/dev/zero")
        (tmp_path / f"c{ending}").symlink_to(tmp_path / f"c{ending}")
        for name in "abc":
            words = "expected a file or folder|no such file"
            raises(tmp_path / f"{name}{ending}", words, load_graph, share, load_relations)
            if ending in (".npz", ".mtx"):
                with pytest.raises(FileNotFoundError, match=re.escape(f"{name}{ending}")):
                    SparseMatrix.from_file(tmp_path / f"{name}{ending}")
    (tmp_path / "processed").mkdir()
    for name in ("data.pt", "graph.bin", "meta.yaml", "processed/data.pt"):
        os.mkfifo(tmp_path / name)
    raises(tmp_path, "expected a folder of PyG or DGL, .*; got one with none of these", load_graph)
    raises("nope", "nope: no such file; a graph is cora, an .npz file", load_graph)


@pytest.mark.parametrize(
    "read, caller",
    [
        (load_graph, "load_graph: argument 'source'"),
        (load_relations, "load_relations: argument 'source'"),
        (SparseMatrix.from_file, "SparseMatrix.from_file: argument 'path'"),
        (share, "DistGraph.from_file: argument 'path'"),
    ],
)
def test_paths_of_all_kinds(tmp_path, monkeypatch, read, caller):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.npz").write_bytes(
        saved(num_nodes=3, src=[0, 1, 2], dst=[1, 2, 0], etype=[0] * 3)
    )
    matrix = read("~/a.npz")
    assert len(matrix.sources) if read is share else matrix.nnz == 3
    for wrong in (None, 5, b"a.npz", [1]):
        with pytest.raises(TypeError, match=f"^{caller}: expected a path, got "):
            read(wrong)
    with pytest.raises(ValueError, match=f"^{caller}: expected a path, got an empty text"):
        read("")
    for path in ("x" * 5000 + ".npz", "a\0b.npz", "~nobody_at_all/a.npz"):
        with pytest.raises((ValueError, OSError), match="x{99}|a.x00b|~nobody_at_all"):
            read(path)
