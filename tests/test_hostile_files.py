"""Files of clumsy and of hostile makers, at all readers: a right answer, or words that name them.

Short files may not ask for much: what they unpack to, ids and lengths are bounded by their sizes.
"""

from __future__ import annotations

import gzip
import os
import re
import time
import zipfile

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.lib import format as npy

from sparsetir import SparseMatrix
from sparsetir.data.graphs import GraphError, graph_name, load_graph, load_relations
from sparsetir.distributed.files import read_share
from sparsetir.runtime import file_errors
from sparsetir.runtime.file_errors import printable

DENSE = np.array([[0, 2, 0], [0, 0, 0.5], [3, 0, 0]], "float32")
TEXT = "0 1 2\n1 2 0.5\n2 0 3\n"
EDGES = {"row": [0, 1, 2], "col": [1, 2, 0], "data": [2, 0.5, 3]}
HEAD = "%%MatrixMarket matrix coordinate real general\n"
LARGE = "at most 16,777,216 rows or columns for a file of [0-9,]+ bytes, got"
MUCH = "at most 268,435,456 bytes of memory for a file of [0-9,]+ bytes, got"


def saved(path, **changes):
    """What scipy saves of DENSE, with other arrays instead; those that are None are left out."""
    sp.save_npz(path, sp.csr_array(DENSE))
    with np.load(path) as arrays:
        found = {**arrays, **changes}
    np.savez(path, **{name: x for name, x in found.items() if x is not None})
    return path


def raises(path, message, readers):
    for read in readers:
        start = time.process_time()
        with pytest.raises((GraphError, ValueError), match=message) as raised:
            read(path)
        text = str(raised.value)
        assert printable(str(path)) in text and "\n" not in text and len(text) < 700
        assert text.count("argument 'path'") <= 1
        assert time.process_time() - start < 10


# -- .npz -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [">i8", "<i4", ">u2"])
@pytest.mark.parametrize("value", [">f4", "<f8", ">f8"])
def test_numbers_of_other_byte_orders(tmp_path, kind, value):
    row, col = (np.array(EDGES[n], kind) for n in ("row", "col"))
    np.savez(tmp_path / "a.npz", row=row, col=col, data=np.array(EDGES["data"], value))
    np.testing.assert_array_equal(load_graph(tmp_path / "a.npz").toarray(), DENSE)
    indices = np.array([1, 2, 0], kind)
    path = saved(tmp_path / "b.npz", indices=indices, data=np.array(EDGES["data"], value))
    np.testing.assert_array_equal(load_graph(path).toarray(), DENSE)
    np.testing.assert_array_equal(SparseMatrix.from_file(path).to_scipy().toarray(), DENSE)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": np.array(7)}, "format: expected one of csr, .*, got 7"),
        ({"format": np.array([], "S3")}, r"format: expected one of csr, .*, got \[\]"),
        ({"format": np.array(b"dok")}, "format: expected one of csr, .*, got 'dok'"),
        ({"indices": np.array([0, 1.5, 2])}, "indices: expected integers, got float64"),
        ({"indices": np.array([0, np.nan, 2])}, "indices: expected integers, got float64"),
        ({"indices": np.array([0, 1, 7])}, r"ind(ices|ex)"),
        ({"indptr": np.array([0, 2, 1, 3])}, "indptr"),
        ({"shape": np.array([-3, 3])}, r"shape: expected two integers .*, got \[-3, 3\]"),
        ({"shape": np.array([3.0, 3.0])}, "shape: expected integers, got float64"),
        ({"shape": np.array([3, 3, 3])}, r"shape: expected two integers .*, got \[3, 3, 3\]"),
        ({"shape": None}, r"in the format csr, got one without \['shape'\]"),
        ({"data": np.array(["a", "b", "c"])}, "data: expected real numbers, got <U1"),
        ({"data": np.ones(3, "complex64")}, "data: expected real numbers, got complex64"),
        (
            {"format": np.array(b"coo"), "row": np.array([0, 1, 2.5]), "col": np.arange(3)},
            "row: expected integers, got float64",
        ),
        (
            {"format": np.array(b"bsr"), "data": np.ones((3, 0, 1), "f4")},
            r"expected blocks that divide \(3, 3\), got \(0, 1\)",
        ),
        (
            {"format": np.array(b"bsr"), "data": np.ones((3, 2, 2), "f4")},
            r"expected blocks that divide \(3, 3\), got \(2, 2\)",
        ),
        (
            {"format": np.array(b"dia"), "data": np.ones((2, 3), "f4"), "offsets": np.arange(1)},
            "offsets: expected 2 that differ, got 1",
        ),
    ],
)
def test_what_scipy_would_take_or_stumble_over(tmp_path, changes, message):
    raises(saved(tmp_path / "a.npz", **changes), message, (load_graph, SparseMatrix.from_file))


def test_diagonals_without_much_work(tmp_path):
    """As scipy reads them, offsets far outside included; many of them in a large matrix at once."""
    data, offsets = np.arange(8, dtype="f4").reshape(2, 4), np.array([-1, 1])
    found = sp.dia_array((data, offsets), shape=(3, 5))
    sp.save_npz(tmp_path / "a.npz", found)
    np.testing.assert_array_equal(load_graph(tmp_path / "a.npz").toarray(), found.toarray())
    far = {"format": np.array(b"dia"), "data": data, "offsets": np.array([2**62, 1])}
    found = sp.dia_array((data[1:], [1]), shape=(3, 3)).toarray()
    np.testing.assert_array_equal(load_graph(saved(tmp_path / "b.npz", **far)).toarray(), found)
    many = {"format": np.array(b"dia"), "data": np.ones((10**4, 1), "f4")}
    many |= {"offsets": np.arange(10**4), "shape": np.array([10**6, 10**6])}
    start = time.process_time()
    assert load_graph(saved(tmp_path / "c.npz", **many)).nnz == 1
    assert time.process_time() - start < 10


def bomb(path, **counts):
    """Arrays of zeros, int64, that unpack to a thousand times what they take."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, count in counts.items():
            with archive.open(f"{name}.npy", "w") as file:
                npy.write_array(file, np.zeros(count, np.int64))
    return path


def test_files_that_unpack_to_much(tmp_path, monkeypatch):
    """What they unpack to, and what is then made of it."""

    def share(path):
        return read_share(path, 0, 2)

    monkeypatch.setattr(file_errors, "FEW_BYTES", 2**23)
    path = bomb(tmp_path / "a.npz", row=2**20, col=1)
    raises(path, "at most 8,388,608 bytes", (load_graph, share, SparseMatrix.from_file))
    path = bomb(tmp_path / "b.npz", row=2**18 + 2**17, col=2**18 + 2**17)  # fits, its matrix not
    raises(path, "at most 8,388,608 bytes of memory .*, got 9,437,184", (load_graph,))


def test_numbers_that_ask_for_much(tmp_path):
    def share(path):
        return read_share(path, 0, 1)

    np.savez(tmp_path / "a.npz", row=[10**9, 0], col=[0, 0])
    raises(tmp_path / "a.npz", f"{LARGE} 1,000,000,001", (load_graph, share))
    np.savez(tmp_path / "b.npz", row=[1, 0], col=[0, 0], shape=[2, 10**9])
    raises(tmp_path / "b.npz", f"{LARGE} 1,000,000,000", (load_graph,))
    np.savez(tmp_path / "c.npz", indptr=[0, 1], indices=[0], shape=[1, 10**9])
    raises(tmp_path / "c.npz", f"{LARGE} 1,000,000,000", (load_graph,))
    raises(saved(tmp_path / "d.npz", shape=np.array([3, 10**9])), LARGE, (load_graph,))
    (tmp_path / "e.csv").write_text("0,1000000000\n")
    text = f"{LARGE} 1,000,000,001; number nodes from 0, without gaps"
    raises(tmp_path / "e.csv", text, (load_graph,))
    raises(tmp_path / "e.csv", LARGE, (share,))
    (tmp_path / "f.mtx").write_text(f"{HEAD}1000000000 3 1\n1 1 1\n")
    raises(tmp_path / "f.mtx", LARGE, (load_graph,))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_nodes": 3.7}, "num_nodes: expected an integer, got 3.7"),
        ({"num_nodes": np.nan}, "num_nodes: expected an integer, got nan"),
        ({"num_nodes": [3, 4]}, r"num_nodes: expected an integer, got \[3, 4\]"),
        ({"num_nodes": -3}, "expected 3 integers >= 0"),
        ({"num_nodes": 2**62}, LARGE),
        ({"etype": [2**62, 0]}, LARGE),
        ({"etype": [0, np.nan]}, r"etype: expected integers .*, got float64 of shape \(2,\)"),
        ({"etype": ["a", "b"]}, r"etype: expected integers .*, got <U1 of shape \(2,\)"),
        ({"src": 1}, r"src: expected integers of one dimension, got int64 of shape \(\)"),
    ],
)
def test_relations(tmp_path, changes, message):
    good = {"num_nodes": 3, "src": [0, 1], "dst": [1, 2], "etype": [0, 1]}
    np.savez(tmp_path / "a.npz", **{**good, **changes})
    raises(tmp_path / "a.npz", message, (load_relations,))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": np.array("csr")}, None),
        ({"format": np.array([], "S3")}, r"got format \[\]"),
        ({"format": np.array(7)}, "got format 7"),
        ({"indptr": np.array([0, 1, 2, 3, 3])}, "indptr: expected 4 elements, got 5"),
    ],
)
def test_shares_of_what_scipy_saved(tmp_path, changes, message):
    path = saved(tmp_path / "a.npz", **changes)
    if message is None:
        assert len(read_share(path, 0, 1).sources) == 3
    else:
        raises(path, message, (lambda path: read_share(path, 0, 1),))


# -- Matrix Market --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, message",
    [
        (f"{HEAD}3 3 1\n1 2 1D3\n", "expected a number, got '1D3'"),
        (f"{HEAD}3 3 1\n1 2 0x10\n", "expected a number, got '0x10'"),
        (f"{HEAD}3 3 1\n1 2 1,5\n", "expected a number, got '1,5'"),
        (f"{HEAD}3 3 1\n1 2 3 4\n", "expected 1 lines of 3 numbers, got 4 numbers"),
        (f"{HEAD.replace('real', 'integer')}3 3 1\n1 2 7.5\n", "expected an integer, got '7.5'"),
        (f"{HEAD.replace('real', 'pattern')}3 3 1\n1 2 7\n", "1 lines of 2 numbers, got 3"),
        (f"{HEAD.replace('real', 'complex')}3 3 1\n1 2 7 8\n", "expected real numbers, got compl"),
        (f"{HEAD}3 3 100000000\n1 2 3\n", MUCH),
        (f"{HEAD}3 3 1\n0 2 3\n", "Row index out of bounds"),
        (f"{HEAD}3 3 2\n1 2 3\n", "Truncated file"),
        (f"{HEAD}3 3 1\n1 2 3\n1 1 1\n", "too long"),
    ],
)
def test_words_that_scipy_reads_the_beginning_of(tmp_path, text, message):
    (tmp_path / "a.mtx").write_text(text)
    raises(tmp_path / "a.mtx", message, (load_graph, SparseMatrix.from_file))


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}% c\n\n3 3 3\n1 2 2\n2 3 5.E-1\n3 1 .3e1",
        f"{HEAD}3 3 3\n1\t2 2 \n\n2  3 0.5\n3 1 3\n".replace("\n", "\r\n"),
    ],
)
def test_numbers_as_people_write_them(tmp_path, text):
    (tmp_path / "a.mtx").write_text(text, newline="")
    np.testing.assert_array_equal(load_graph(tmp_path / "a.mtx").toarray(), DENSE)
    (tmp_path / "b.mtx").write_text(f"{HEAD}2 2 2\n1 2 NaN\n2 1 -inf\n")
    found = SparseMatrix.from_file(tmp_path / "b.mtx").values
    np.testing.assert_array_equal(found, [np.nan, -np.inf])


def test_numbers_that_lie_across_two_pieces(tmp_path, monkeypatch):
    lines = "".join(f"{1 + k % 7} {1 + k // 7} {k}.25\n" for k in range(49))
    (tmp_path / "a.mtx").write_text(f"{HEAD}7 7 49\n{lines}")
    for piece in (64, 65, 67, 200):
        monkeypatch.setattr("sparsetir.data.matrix_market.PIECE", piece)
        assert load_graph(tmp_path / "a.mtx").nnz == 49
    (tmp_path / "a.mtx").write_text(f"{HEAD}7 7 49\n{lines}".replace("30.25", "30D25"))
    raises(tmp_path / "a.mtx", "expected a number, got '30D25'", (load_graph,))


def test_skew_patterns_have_signs(tmp_path):
    text = HEAD.replace("real general", "pattern skew-symmetric")
    (tmp_path / "a.mtx").write_text(f"{text}2 2 1\n2 1\n")
    for found in (load_graph(tmp_path / "a.mtx"), SparseMatrix.from_file(tmp_path / "a.mtx")):
        dense = found.to_scipy().toarray() if isinstance(found, SparseMatrix) else found.toarray()
        np.testing.assert_array_equal(dense, [[0, -1], [1, 0]])


@pytest.mark.parametrize("line", [b"%\n", b"%x", b"1 1 1\n"])
@pytest.mark.parametrize("name", ["a.mtx.gz", "a.csv.gz"])
def test_packed_text_that_unpacks_to_much(tmp_path, monkeypatch, name, line):
    """Of comments, of one long line, and of edges."""
    monkeypatch.setattr(file_errors, "FEW_TEXT", 2**20)
    begin = HEAD + "2 2 9\n" * (b"1" in line) if name == "a.mtx.gz" else ""
    (tmp_path / name).write_bytes(gzip.compress(begin.encode() + line * 2**20))
    read = load_graph if name == "a.csv.gz" else SparseMatrix.from_file
    raises(tmp_path / name, "at most 1,048,576 bytes unpacked for a file", (read,))


# -- edge lists -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode("utf-16"),
        b"# caf\xe9\n" + TEXT.encode(),
        b"caf\xe9 b c\n" + TEXT.encode(),
        TEXT.replace("\n", "\r").encode(),
    ],
)
def test_text_of_other_encodings(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    np.testing.assert_array_equal(load_graph(tmp_path / "a.txt").toarray(), DENSE)


# -- folders of DGL and PyG ------------------------------------------------------------------------

META = "edge_data:\n- file_name: e.csv\n"


def dataset(folder, meta=META, edges=b"src_id,dst_id,weight\n1,0,2\n2,1,0.5\n0,2,3\n"):
    (folder / "meta.yaml").write_text(meta)
    (folder / "e.csv").write_bytes(edges)
    return folder


def nested(line, levels):
    """Names that each stand for nine of the one before."""
    return "".join(line.format(k + 1, ", ".join([f"*a{k}"] * 9)) for k in range(levels))


@pytest.mark.parametrize(
    "meta, edges",
    [
        (META, b"\xef\xbb\xbfsrc_id,dst_id,weight\r\n1,0,2\r\n2,1,0.5\r\n0,2,3\r\n"),
        (META, b"src_id,dst_id,weight,caf\xe9\n1,0,2,\xe9\n2,1,0.5,\n0,2,3,\n"),
        (f'\ufeff{META}separator: "\\t"\n', b"src_id\tdst_id\tweight\n1\t0\t2\n2\t1\t.5\n0\t2\t3"),
        ("a0: &a0 [x]\n" + nested("a{0}: &a{0} [{1}]\n", 30) + META, None),
        ("a0: &a0 {x: y}\n" + nested("a{0}: &a{0}\n  <<: [{1}]\n", 30) + META, None),
        (f"a: {':'.join(['59'] * 9999)}\nb: 2001-99-99\n{META}", None),
    ],
    ids=range(6),
)
def test_datasets_as_people_write_them(tmp_path, meta, edges):
    """Also those that stand for more than fits into memory, or are no numbers and dates."""
    start = time.process_time()
    found = load_graph(dataset(tmp_path, meta, *([edges] if edges else [])))
    np.testing.assert_array_equal(found.toarray(), DENSE)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "meta, edges, message",
    [
        (META.replace("e.csv", "/etc/passwd"), b"", "meta.yaml: expected files of its folder, got"),
        (META.replace("e.csv", "../../x"), b"", "meta.yaml: expected files of its folder, got"),
        (META + "# " + "x" * 2**16, b"", "meta.yaml: expected at most 65,536 bytes, got"),
        ("[" * 5000, b"", "meta.yaml: holds no YAML: maximum recursion"),
        ('!!python/object/apply:os.mkdir ["made"]', b"", "meta.yaml: expected names with values"),
        (META, b"src_id,dst_id\n0\n", "e.csv: expected 2 values in each line, got fewer"),
        (META, b"src_id,dst_id,weight\n0,1,a\n", "e.csv: expected numbers as weights: could not"),
        (META, b"src_id,dst_id,x\n0,1," + b"x" * 200_000, "e.csv: line [0-9]: field larger than"),
        (META, b"src_id,dst_id\n1000000000,0\n", f"e.csv: expected {LARGE} 1,000,000,001"),
        (META, b"x\x1b[31m\n", "e.csv: has no column src_id, dst_id, but x.x1b.31m"),
    ],
)
def test_datasets_that_are_none(tmp_path, monkeypatch, meta, edges, message):
    monkeypatch.chdir(tmp_path)
    raises(dataset(tmp_path, meta, edges), message, (load_graph,))
    assert not (tmp_path / "made").exists()


def test_what_is_no_file_in_folders(tmp_path):
    (tmp_path / "raw").mkdir()
    os.mkfifo(tmp_path / "raw" / "ind.x.graph")
    (tmp_path / "ind.x.graph").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "graph.bin")
    os.mkfifo(tmp_path / "data.pt")
    os.mkfifo(tmp_path / "meta.yaml")
    raises(tmp_path, "expected a folder of PyG .*, got one with none of these", (load_graph,))


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "with space",
        "ünï❤",
        "new\nline",
        "esc\x1b[31m",
        "quote'\"",
        "a:T",
        "c:x",
        "\udcff",
        "-d",
        "%s{0}",
    ],
)
def test_names_of_all_kinds(tmp_path, name):
    """Errors and names for people have no codes that a terminal obeys."""
    path = tmp_path / f"{name}.txt"
    path.write_text(TEXT)
    np.testing.assert_array_equal(load_graph(path).toarray(), DENSE)
    assert graph_name(path).isprintable()
    assert graph_name(path) == printable(name)
    path.write_text("0 x\n")
    raises(path, "line 1: expected row", (load_graph,))


def test_text_that_can_be_printed():
    assert printable("aé❤ b") == "aé❤ b"
    assert printable("\x1b[2J\n\r\x9b\u202e\udc80") == "\\x1b[2J\\n\\r\\x9b\\u202e\\udc80"


def test_files_that_are_no_files(tmp_path):
    """No reader waits for what never comes, or reads what never ends."""
    readers = [load_graph, lambda path: read_share(path, 0, 1), load_relations]
    for ending in (".npz", ".mtx", ".txt", ".pt", ".bin", ".csv.gz"):
        os.mkfifo(tmp_path / f"a{ending}")
        (tmp_path / f"b{ending}").symlink_to("/dev/zero")
        (tmp_path / f"c{ending}").symlink_to(tmp_path / f"c{ending}")
        for name in "abc":
            raises(tmp_path / f"{name}{ending}", "expected a file or folder|no such file", readers)
        if ending in (".npz", ".mtx"):
            for name in "abc":
                with pytest.raises(FileNotFoundError, match=re.escape(f"{name}{ending}")):
                    SparseMatrix.from_file(tmp_path / f"{name}{ending}")


def test_paths_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text(TEXT)
    saved(tmp_path / "a.npz")
    np.testing.assert_array_equal(load_graph("~/a.txt").toarray(), DENSE)
    assert read_share("~/a.txt", 0, 1).nodes == 3
    assert SparseMatrix.from_file("~/a.npz").nnz == 3
    for read, who in (
        (load_graph, "load_graph: argument 'source'"),
        (load_relations, "load_relations: argument 'source'"),
        (SparseMatrix.from_file, "SparseMatrix.from_file: argument 'path'"),
        (lambda path: read_share(path, 0, 1), "DistGraph.from_file: argument 'path'"),
    ):
        for wrong in (None, 5, b"a.npz", [1]):
            with pytest.raises(TypeError, match=f"^{who}: expected a path, got "):
                read(wrong)
        with pytest.raises(ValueError, match=f"^{who}: expected a path, got an empty text"):
            read("")
        with pytest.raises((ValueError, OSError), match="x{99}"):
            read("x" * 5000 + ".npz")
        with pytest.raises((ValueError, OSError), match="a.x00b"):
            read("a\0b.npz")
        with pytest.raises((ValueError, OSError), match="~nobody_at_all"):
            read("~nobody_at_all/a.npz")
