"""`python -m bench study`: tiny sizes; what is counted, the tables, GPUs on a stand-in."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from bench import study
from bench.names import STUDIES
from bench.studies import (
    common,
    counting,
    load_balance,
    pruned_patterns,
    relation_orders,
    relations,
    sgap_tables,
)
from bench.studies.matrices import folder, generated
from bench.studies.sgap import ONE, PART_OF_ROW, Point, points
from bench.studies.skew import SIZES, Size, lengths, skewed
from cuda_runner import requires_cuda_text
from sparsetir.data.graphs import GraphError
from sparsetir.formats import Pattern
from sparsetir.schedules.operators.rgms import Rgms

ROOT = Path(__file__).parents[1]


def run(folder, name, **options):
    """The command in this process, where libraries keep their threads; its JSON file and prints."""
    given = {
        "study": name, "quick": True, "full": False, "counts": False, "target": None, "data": None,
        "threads": 2, "out": folder, **options,
    }  # fmt: skip
    study.run(argparse.Namespace(**given))
    (path,) = folder.glob(f"study-{name}-*.json")
    out = json.loads(path.read_text())
    assert {"date", "commit", "cpu", "threads", "versions"} <= set(out)
    assert str(ROOT) not in path.read_text()
    assert path.with_suffix(".png").stat().st_size > 5000
    return out


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(common, "cuda", lambda: None)


@pytest.fixture
def data(tmp_path):
    """A folder with one matrix."""
    out = tmp_path / "data"
    out.mkdir()
    matrix = sp.random_array((30, 40), density=0.1, format="csr", dtype="float32", rng=0)
    sp.save_npz(out / "first.npz", sp.csr_matrix(matrix))
    return out


# -- load balance ---------------------------------------------------------------------------------


def test_lengths_follow_the_formula():
    size = Size(50, 10_000, 100_000)
    found = lengths(1.05, size)
    assert found.sum() == size.nnz
    np.testing.assert_allclose(found[1:] / found[:-1], 1.05, atol=2 / found.min())
    assert (lengths(1.0, size) == 2000).all()


@pytest.mark.parametrize("c", [1.0, 1.2])
def test_skewed_matrices(c):
    size = Size(50, 1_000, 5_000)
    found = skewed(c, size)
    assert found.shape == (50, 1_000) and found.nnz == 5_000
    assert sorted(np.diff(found.indptr)) == sorted(lengths(c, size))
    for row in range(50):
        columns = found.indices[found.indptr[row] : found.indptr[row + 1]]
        assert (np.diff(columns) > 0).all() and ((columns >= 0) & (columns < 1_000)).all()
    spread = np.histogram(found.indices, 10, (0, 1_000))[0] / 500
    assert spread.min() > 0.7 and spread.max() < 1.3


def test_a_row_needs_its_columns():
    with pytest.raises(ValueError, match="argument 'c': expected rows of at most 10 elements, got"):
        skewed(1.5, Size(20, 10, 100))


@requires_cuda_text
def test_load_balance_counts(tmp_path, capsys, monkeypatch):
    """Rows get out of balance with skew, positions do not."""
    few = load_balance.HybRows.for_features(1, k=2)  # which compiles faster
    monkeypatch.setattr(load_balance, "hyb_config", lambda size: few)
    out = run(tmp_path, "load-balance", counts=True)["results"]
    assert out["what"] == "counts" and out["gpu_times"] == "absent"
    assert "GPU times are absent" in capsys.readouterr().out
    size, cells = SIZES["quick"], out["cells"]
    ways = load_balance.ROWS, load_balance.POSITIONS, load_balance.ELEMENTS
    rows, positions, elements = ([c["ways"][w] for c in cells] for w in ways)
    assert all(r["shuffles"] == 5 * 32 * size.rows and r["atomics"] == 0 for r in rows)
    # An atomic for each 7 elements of a thread, and for each row that begins within these.
    chunks = -(-size.nnz // 7)
    assert all(chunks <= p["atomics"] <= chunks + size.rows for p in positions)
    assert all(w["imbalance"] <= 1.1 for w in (*positions, *elements))
    runs = -(-size.nnz // 32)
    assert all(runs <= e["atomics"] <= runs + size.rows for e in elements)
    assert rows[0]["imbalance"] <= 1.01 and rows[-1]["imbalance"] > 1.25
    assert rows[-1]["warp_imbalance"] > 8 and cells[-1]["longest_over_mean"] > 12
    assert positions[-1]["conflicts"] > positions[0]["conflicts"] > 0
    for found in (w for c in cells for w in c["ways"].values()):
        assert set(found) == set(counting.MEANINGS)
        assert 0 < found["active_lanes"] <= 1


def test_load_balance_on_a_cpu(tmp_path, capsys):
    out = run(tmp_path, "load-balance")["results"]
    printed = capsys.readouterr().out
    assert "no CUDA device: GPU times are absent" in printed and "Skewed rows, 64 rows" in printed
    assert len(out["cells"]) == 4 and out["operator"] == "SpMM, 32 features"
    for cell in out["cells"]:
        assert set(cell["ways"]) == {"row blocks", "equal work"}
        assert all(0 < t["min"] <= t["median"] for t in cell["ways"].values())


# -- locality -------------------------------------------------------------------------------------


def test_locality(tmp_path, capsys):
    out = run(tmp_path, "locality")["results"]
    assert "A.13 / A.12" in capsys.readouterr().out
    (cell,) = out["cells"]
    assert len(cell["ways"]) == 4 and all(t["min"] > 0 for t in cell["ways"].values())
    assert out["paper"]["speedup"] == 2.1


# -- groups ---------------------------------------------------------------------------------------


@requires_cuda_text
@pytest.mark.slow  # Sgap's groups are counted in schedules/test_spmm_groups.py
def test_groups_counts(tmp_path, data, capsys):
    out = run(tmp_path, "groups", counts=True, data=data)["results"]
    printed = capsys.readouterr().out
    for line in ("Counts over elements times N", "Conflicts of atomics by r", "no times"):
        assert line in printed
    for cell in out["cells"]:
        parts = {r: cell["ways"][Point(PART_OF_ROW, 32, 4, r).name] for r in (4, 8, 32)}
        # Each group of a row adds once for each column; groups of one warp meet.
        work = cell["rows"] * cell["N"]
        assert {r: p["atomics"] for r, p in parts.items()} == {4: 8 * work, 8: 4 * work, 32: 0}
        assert {r: p["conflicts"] for r, p in parts.items()} == {4: 7 * work, 8: 3 * work, 32: 0}
        segments = [cell["ways"][Point(ONE, 1, 4, r).name] for r in (4, 8, 32)]
        conflicts = [s["conflicts"] for s in segments]
        assert conflicts == sorted(conflicts, reverse=True) and conflicts[-1] == 0


def test_groups_on_a_cpu(tmp_path, data, capsys):
    out = run(tmp_path, "groups", data=data)["results"]
    assert {(c["matrix"], c["N"]) for c in out["cells"]} == {("first", 64), ("first", 128)}
    assert "N = 64, Sgap on RTX 3090" in capsys.readouterr().out


def test_names_of_points():
    assert Point(PART_OF_ROW, 32, 4, 8).name == "{<1/32 row, 4 col>, 8}"
    assert [p.name for p in points(columns=(2,))][:3] == [
        "{<8 nnz, 2 col>, 1}", "{<32 nnz, 2 col>, 1}", "{<1 row, 2 col>, 1}",
    ]  # fmt: skip
    assert points(columns=(2,))[-1].name == "{<1 nnz, 2 col>, 32}"
    for some in (points(), points(full=True)):
        assert len({p.name for p in some}) == len(some)
        assert all(p.r <= p.size for p in some if p.kind == PART_OF_ROW)


def test_generated_matrices():
    found = generated(40, 4)
    assert {m.shape for m in found.values()} == {(40, 40)}
    assert np.diff(found["one giant row"].indptr).max() == 40
    assert (np.diff(found["half empty"].indptr) == 0).sum() == 20
    assert all(m.has_canonical_format for m in found.values())


def test_a_folder_without_matrices(tmp_path):
    with pytest.raises(GraphError, match="expected a folder of .npz, .mtx, .mtx.gz files"):
        folder(tmp_path)


PRETENDED = {
    (PART_OF_ROW, 32): {4: 2.0, 8: 4.0, 32: 8.0},
    (PART_OF_ROW, 8): {4: 3.0, 8: 2.5},
    (ONE, 1): {4: 1.0, 8: 5.0, 32: 4.0},
}


def pretended():
    """Points with c = 4, and two cells: times of the second one are the other way around."""
    some = [Point(k, g, 4, r) for (k, g), times in PRETENDED.items() for r in times]
    some += [Point("g nnz", 8, 4), Point("x row", 1, 4)]
    first = {p.name: PRETENDED.get((p.kind, p.size), {}).get(p.r, 6.0) for p in some}
    cells = [
        {"matrix": name, "N": 4, "ways": {n: {"min": f(t)} for n, t in first.items()}}
        for name, f in (("a", lambda t: t), ("b", lambda t: 1 / t))
    ]
    return cells, some


def test_tables_of_pretended_times():
    cells, some = pretended()
    one, two, three, four, five = (rows for _, _, rows in sgap_tables.tables(cells, some, 4))
    # r = 8: 8 / 4 and 4 / 8; r = 4: 4 and 1 / 4.
    assert one[0] == ["here", "1.000", f"{2**0.5:.3f}", "1.000", "2.000"]
    assert one[1][0] == "Sgap on RTX 2080" and one[1][1] == "2.451"
    # r = 4: min(2, 3) / 1, and (1 / 3) / 1 counts as 1; r = 8: 1, and (1 / 4) / (1 / 5).
    assert two[0] == ["c = 4, here", "1.414", "1.118", "", "1.414"]
    assert two[1] == ["c = 4, Sgap on RTX 3090", "1.063", "1.095", "1.205", "1.381"]
    # The best of TACO's takes 6 and 1 / 6, the best new one 1 and 1 / 8.
    assert three[0] == ["here", f"{(6 * 8 / 6) ** 0.5:.3f}"]
    # g = r = 32 takes 8 and 1 / 8, the best 2 and 1 / 8.
    assert four[0] == ["N = 4, here", "2.000", "4.000"]
    assert four[1] == ["N = 4, Sgap on RTX 3090", "2.046", "7.819"]
    # All have the geometric mean 1; the best of each is 2 and 1 / 8.
    assert five[0][:2] == ["N = 4, here", "2.000"]
    assert five[-1] == ["N = 4, Sgap on Tesla V100", "1.326", ""]


# -- relations ------------------------------------------------------------------------------------


def test_patterns_of_relations():
    """Skewed relations; a kernel map with its own point in the middle, symmetric around it."""
    counts = np.bincount(relations.graph(200, 5, 2_000).coords[0])
    assert counts.max() > 2 * counts.min() > 0
    found = relations.kernel_map(12)
    offset, i, j = found.coords
    assert found.shape[0] == 27 and np.array_equal(i[offset == 13], np.arange(found.shape[1]))
    assert np.array_equal(i[offset == 13], j[offset == 13])
    pairs = set(zip(offset.tolist(), i.tolist(), j.tolist(), strict=True))
    assert {(26 - o, b, a) for o, a, b in pairs} == pairs
    assert np.bincount(offset * found.shape[1] + i).max() == 1


def test_what_unfused_steps_take():
    pattern = Pattern([np.array([0, 0, 2]), np.array([0, 1, 1]), np.array([1, 0, 0])], (3, 2, 2))
    found = relations.unfused(Rgms("float16", out="float32"), pattern, 8)
    assert found["launches"] == 7 and found["atomics"] == 24
    assert found["between"] == 2 * 2 * 3 * 8 * 2  # two arrays, written and read
    matrices, indices, result = 2 * 8 * 8 * 2, 3 * (8 + 2), (3 + 2) * 8 * 4
    assert found["bytes"] == 5 * 3 * 8 * 2 + matrices + indices + result


@pytest.mark.slow
def test_orders_of_relations(tmp_path):
    """All ways give the same, where sizes choose one too."""
    out = run(tmp_path, "relations", threads=1)["results"]
    assert {c["graph"] for c in out["cells"]} == {"6e2", "attributes", "crowded"}
    assert all({"sums first", "products first"} <= set(c["times"]) for c in out["cells"])
    graph = relation_orders.turned_too(relation_orders.attributes(4000, 60_000, 8))
    assert (graph.edges, graph.relations) == (120_000, 16)
    cell = relation_orders.measure(graph, 128, 64, 0.01)
    assert set(cell["times"]) == set(relation_orders.WAYS)
    assert 0 < cell["products"] < cell["columns"] == cell["rows"]


@requires_cuda_text
@pytest.mark.slow
def test_counts_of_relations(tmp_path):
    out = run(tmp_path, "relations", counts=True)["results"]
    assert [c["dtype"] for c in out["cells"]] == ["float32", "float16"] * 2
    for cell in out["cells"]:
        assert cell["fused"]["launches"] == 2 < cell["unfused"]["launches"]
        assert sum(e["bytes"] for e in cell["fused"]["each"]) == cell["fused"]["bytes"] > 0
        assert 0 < cell["fused"]["atomics"] <= cell["unfused"]["atomics"]


# -- panels of pruned weights ---------------------------------------------------------------------


def test_coarsen(tmp_path):
    """Random layers: each cell's ways, storage of what is there, compilation both ways."""
    out = run(tmp_path, "coarsen", threads=1)["results"]
    assert len(out["cells"]) == len(out["storage"]) == 4
    for cell in out["cells"]:
        assert {"row blocks", "panels", "dense"} <= set(cell["ways"])
        assert cell["chosen"] in ("row blocks", "panels") and cell["nnz"] > 0
    for stored in out["storage"]:
        assert stored["padding"] == 0 and 1 < stored["elements_of_an_entry"] < 4
        values, columns = 4 * stored["nnz"], 4 * stored["nnz"] / stored["elements_of_an_entry"]
        assert stored["bytes"] >= values + columns - 1
    assert [(c["rows"], c["patterns"]) for c in out["compile"]] == [(2, 3)]
    assert len(out["load"]) == 3


@requires_cuda_text
@pytest.mark.slow  # kernels are counted in schedules/test_spmm_panels_gpu.py
def test_coarsen_counts(tmp_path, capsys):
    """Panels load a row of B once for all rows of a pattern; those by atomics add."""
    out = run(tmp_path, "coarsen", counts=True)["results"]
    assert "Counted, not timed" in capsys.readouterr().out
    assert [c["sparsity"] for c in out["cells"]] == [0.6, 0.8]
    for cell in out["cells"]:
        ways = cell["ways"]
        assert ways["panels of 4"]["sectors"] < ways["panels of 2"]["sectors"]
        assert ways["panels of 2"]["sectors"] < ways["rows"]["sectors"]
        assert [w for w in ways if ways[w]["atomics"]] == [
            "panels of 4, atomics", "panels of 4, atomics, compact", "table 2"
        ]  # fmt: skip
    compiled = [(c["rows"], c["compact"], c["spill_bytes"]) for c in out["compile"]]
    assert set(compiled) <= {(2, False, 0), (2, True, 0)}


def test_layers_of_a_folder(tmp_path):
    """One of each shape and share of zeros; of 60 % by leaving out of 50 %."""
    half = np.tile(np.arange(0, 512, 2, dtype="int32"), 512)
    indptr = np.arange(513, dtype="int32") * 256
    arrays = {"a.shape": np.array([512, 512]), "a.indptr": indptr, "a.indices": half}
    others = {f"b.{k.partition('.')[2]}": v for k, v in arrays.items()}
    np.savez(tmp_path / "layers.npz", **arrays, **others)
    found = pruned_patterns.layers_of(tmp_path)
    assert list(found) == [(512, 512)] and list(found[512, 512]) == [0.5, 0.6]
    thin = found[512, 512][0.6]
    assert abs(thin.nnz / (512 * 512) - 0.4) < 0.01 and set(thin.indices % 2) == {0}
    with pytest.raises(GraphError, match="expected npz files of layers"):
        pruned_patterns.layers_of(tmp_path / "none")


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("locality", {"counts": True}, "--counts is of load-balance and groups and relations"),
        ("locality", {"target": "cuda"}, "is of CPUs"),
        ("locality", {"data": Path("x")}, "--data is of groups and relations and coarsen"),
        ("groups", {"counts": True, "full": True}, "--counts is of small sizes"),
        ("groups", {"target": "cuda"}, "study groups: no CUDA device: GPU times are absent"),
    ],
)
def test_refused(tmp_path, name, options, message):
    with pytest.raises(SystemExit, match=message):
        run(tmp_path, name, **options)


def test_words_of_the_command():
    from bench.__main__ import parser

    args = parser().parse_args(["study", "groups", "--counts", "--data", "x", "--threads", "1"])
    assert (args.command, args.study, args.counts, args.full) == ("study", "groups", True, False)
    assert args.data == Path("x") and args.target is None and args.threads == 1
    for name in STUDIES:
        assert parser().parse_args(["study", name]).study == name


def test_what_counting_takes(monkeypatch, tmp_path):
    with monkeypatch.context() as here:
        here.setattr(counting, "ROOT", tmp_path)
        with pytest.raises(SystemExit, match="takes a checkout of the repository"):
            counting.runner()
    with monkeypatch.context() as here:
        here.setattr(counting.shutil, "which", lambda _: None)
        with pytest.raises(SystemExit, match="takes g\\+\\+, which compiles the CUDA text"):
            counting.runner()
    monkeypatch.setitem(sys.modules, "cuda_stages", None)
    with pytest.raises(SystemExit, match="takes cuda_stages, which is missing"):
        counting.runner()


def test_a_wrong_result_is_told():
    exact = np.ones(3)
    with pytest.raises(SystemExit, match="study: hyb is wrong by nan"):
        common.check("hyb", np.array([1, np.nan, 1]), exact, exact)


# -- on a GPU: the CPU under its name --------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    torch = pytest.importorskip("torch")

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, other):
            return 0.5

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *words, device, **rest: empty(*words, **rest))
    properties = argparse.Namespace(L2_cache_size=1000)
    for name, value in {
        "Event": Event, "synchronize": lambda: None, "get_device_name": lambda: "Stand-in",
        "get_device_properties": lambda _: properties,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(common, "cuda", lambda: torch)
    build, plan, kernels = sparsetir.build, sparsetir.plan, {}

    def built(program, target, schedule, config=None):
        assert target == "cuda" and callable(schedule)
        name = str(program.attrs["global_symbol"])
        return kernels.setdefault(name, build(program))

    monkeypatch.setattr(sparsetir, "build", built)
    monkeypatch.setattr(
        sparsetir, "plan", lambda *words, target, config, **rest: plan(*words, **rest)
    )


def test_load_balance_on_a_gpu(device, tmp_path):
    out = run(tmp_path, "load-balance")
    assert out["gpu"] == "Stand-in" and out["results"]["gpu_times"] == "here"
    for cell in out["results"]["cells"]:
        assert list(cell["ways"]) == [
            load_balance.ROWS,
            load_balance.POSITIONS,
            load_balance.ELEMENTS,
            load_balance.HYB,
        ]
        assert all(t["min"] == 5e-4 for t in cell["ways"].values())


@pytest.mark.slow
def test_coarsen_on_a_gpu(device, tmp_path, capsys):
    out = run(tmp_path, "coarsen")
    assert out["gpu"] == "Stand-in" and out["results"]["gpu_times"] == "here"
    assert len(out["results"]["cells"]) == 4 and "Times as fast" in capsys.readouterr().out
    for cell in out["results"]["cells"]:
        assert list(cell["ways"])[-1] == "dense" and len(cell["ways"]) == 8
        assert all(t["min"] == 5e-4 for t in cell["ways"].values())


@pytest.mark.slow  # many kernels; its tables are made of pretended times above
def test_groups_on_a_gpu(device, tmp_path, data, capsys):
    out = run(tmp_path, "groups", data=data)["results"]
    printed = capsys.readouterr().out
    titles = [t["title"] for t in out["tables"]]
    assert [t.split(":")[0] for t in titles] == [f"Table {n}" for n in range(1, 6)]
    assert all(t in printed for t in titles)
    assert out["tables"][2]["rows"][0] == ["here", "1.000"]  # all calls take as long
    assert {c["N"] for c in out["cells"]} == {4, 16, 46, 64, 128}
