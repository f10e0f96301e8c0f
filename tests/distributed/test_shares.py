"""Shares of files, each read by a process: together they are the file."""

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir.data.graphs import GraphError, load_graph
from sparsetir.distributed import files
from sparsetir.distributed.files import read_share

GRAPH = sp.random_array((23, 23), density=0.2, rng=np.random.default_rng(0), dtype="float32")
ONES = sp.coo_array((np.ones(GRAPH.nnz, "float32"), GRAPH.coords), GRAPH.shape)


def write_arrays(save, graph):
    def write(path):
        csr = graph.tocsr()
        arrays = {"shape": csr.shape, "indptr": csr.indptr, "indices": csr.indices}
        save(path, **arrays, data=csr.data)
        return path

    return write


def write_text(line, head=""):
    def write(path):
        lines = [line.format(i, j, v) for i, j, v in zip(*GRAPH.coords, GRAPH.data)]
        path = path.with_suffix(".csv" if "," in line else ".txt")
        path.write_bytes((head + "\n".join(lines)).encode())
        return path

    return write


def scipys(kind, **options):
    def write(path):
        sp.save_npz(path, sp.csr_matrix(GRAPH).asformat(kind), **options)
        return path

    return write


def write_coordinates(path):
    np.savez(path, row=GRAPH.coords[0].astype("int32"), col=GRAPH.coords[1], data=GRAPH.data > 0.5)
    return path


def write_layer(path):
    csr = GRAPH.tocsr()
    arrays = {"shape": csr.shape, "indptr": csr.indptr.astype("int64"), "indices": csr.indices}
    np.savez(path, **{f"b.{k}": v for k, v in arrays.items()}, **{"a.indptr": [0]})
    return f"{path}:b"


FILES = {
    "arrays": write_arrays(np.savez, GRAPH),
    "compressed": write_arrays(np.savez_compressed, GRAPH),
    "ones": write_arrays(np.savez, ONES),
    "csr": scipys("csr"),
    "csc": scipys("csc", compressed=False),
    "coo": scipys("coo"),
    "coordinates": write_coordinates,
    "layer": write_layer,
    "text": write_text("{}\t{}", "% a graph\n# of SNAP\n"),
    "weights": write_text("{} {} {}"),
    "csv": write_text("{},x,{},{}", "\ufefffrom,type,to,weight\n"),
    "windows": write_text("{};{}\r", "\r\n"),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "graph.npz"


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("transposed", ["", ":T"])
@pytest.mark.default("-coordinates", "-text", "-weights", "-csv", "-windows", ":T-compressed")
def test_parts_are_the_whole(path, kind, transposed, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 4)  # row pointers in several pieces
    name = f"{FILES[kind](path)}{transposed}"
    whole = load_graph(name)
    for parts in (1, 2, 5, 300):  # of 300 most are empty
        shares = [read_share(name, part, parts) for part in range(parts)]
        assert sum(len(s.sources) for s in shares) == GRAPH.nnz
        assert max(len(s.sources) for s in shares) <= 2 + 2 * GRAPH.nnz / parts
        rows, cols = (np.concatenate([s[field] for s in shares]) for field in (1, 0))
        values = np.concatenate(
            [np.ones(len(s.sources), "float32") if s.values is None else s.values for s in shares]
        )
        nodes = max(s.nodes for s in shares)
        matrix = sp.csr_array((values, (rows, cols)), (nodes, nodes))
        assert nodes == whole.shape[0] and (matrix != whole).nnz == 0
    assert read_share(name, 0, 1).values is None or kind not in ("ones", "layer", "text")


def test_a_shipped_graph():
    shares = [read_share("cora", part, 3) for part in range(3)]
    assert [len(s.sources) for s in shares] == [3518, 3519, 3519]
    assert all(s.nodes == 2708 and s.told and s.values is None for s in shares)


def text(path, content):
    path = path.with_suffix(".txt")
    path.write_text(content)
    return path


def arrays(path, **changes):
    csr = GRAPH.tocsr()
    fields = {"shape": csr.shape, "indptr": csr.indptr, "indices": csr.indices}
    fields |= changes
    np.savez(path, **{k: v for k, v in fields.items() if v is not None})
    return path


def cut(path):
    data = arrays(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


@pytest.mark.parametrize("write, message", [
    (lambda p: p, "no such file; a graph in shares is an .npz file"),
    (lambda p: text(p, ""), "expected row, column and maybe weight; there are none"),
    (lambda p: text(p, "0 1\n2 3\n4 x\n"), "at byte 8: expected row, column and maybe weight, got"),
    (lambda p: text(p, "0 1\n2 3 4\n"), "at byte 4: expected row, column"),
    (lambda p: text(p, "0 1\n2 3.5\n"), "expected integers as ids"),
    (lambda p: text(p, "0 1\n2 -3\n"), "expected ids of 0 or more, got -3"),
    (lambda p: text(p, "0 1 2 3\n"), "expected row, column and maybe weight, got '0 1 2 3'"),
    (lambda p: text(p, "0 1").rename(p.with_suffix(".txt.gz")), "expected an .npz file"),
    (lambda p: text(p, "0 1").rename(p.with_suffix(".npz")), "damaged or cut off"),
    (cut, "damaged or cut off"),
    (lambda p: arrays(p, shape=(23, 24)), "expected a square matrix, got 23 x 24"),
    (lambda p: arrays(p, shape=(7, 7)), "expected ids less than 7"),
    (lambda p: arrays(p, indices=None), "has no indices"),
    (lambda p: arrays(p, shape=None), "has no shape"),
    (lambda p: arrays(p, indptr=np.zeros(24, "int64")), "expected to end with"),
    (lambda p: arrays(p, indptr=np.arange(24)[::-1]), "indptr: expected to begin with 0"),
    (lambda p: arrays(p, indptr=[0, 5, 3]), "indptr: expected not to decrease"),
    (lambda p: arrays(p, indices=np.zeros(GRAPH.nnz)), "indices: expected integers, got float64"),
    (lambda p: arrays(p, indices=np.zeros((2, 2), int)), "expected numbers of one dimension"),
    (lambda p: arrays(p, data=np.zeros(3)), "data: expected"),
    (lambda p: arrays(p, data=np.zeros(GRAPH.nnz, "complex64")), "expected real numbers"),
    (lambda p: arrays(p, format=np.array(b"bsr")), "got format 'bsr'"),
])  # fmt: skip
def test_what_is_refused(path, write, message):
    name = write(path)
    with pytest.raises(GraphError) as error:
        for part in range(2):
            read_share(name, part, 2)
    assert message in str(error.value) and str(path.parent) in str(error.value)
