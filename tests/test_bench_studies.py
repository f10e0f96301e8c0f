"""`python -m bench study`: tiny sizes; what is counted, the tables, GPUs on a stand-in."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from bench import distributed, distributed_worker, study
from bench.distributed_model import Local, Network, Share, counted_halos, epoch, expected_share
from bench.studies import common, counting, load_balance, relation_orders, relations, sgap_tables
from bench.studies.sgap import ONE, PART_OF_ROW, Point
from bench.studies.skew import SIZES, Size, lengths, skewed
from cuda_runner import requires_cuda_text
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


def test_groups_on_a_cpu(tmp_path, data, capsys):
    out = run(tmp_path, "groups", data=data)["results"]
    assert {(c["matrix"], c["N"]) for c in out["cells"]} == {("first", 64), ("first", 128)}
    assert "N = 64, Sgap on RTX 3090" in capsys.readouterr().out


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


# -- several processes ----------------------------------------------------------------------------


def test_generated_graphs_are_the_same_in_any_parts(monkeypatch):
    monkeypatch.setattr(distributed_worker, "BLOCK", 16)
    whole = distributed_worker.generated(150, 3, 0.3, 0, 1)
    assert whole.shape == (2, 450) and (torch.bincount(whole[1]) == 3).all()
    assert 0 <= int(whole.min()) and int(whole.max()) < 150
    for parts in (2, 7, 20):  # of 20 some have nothing
        found = [distributed_worker.generated(150, 3, 0.3, part, parts) for part in range(parts)]
        assert torch.equal(torch.cat(found, 1), whole)


def test_halos_are_counted():
    random = np.random.default_rng(0)
    sources, targets = random.integers(0, 40, (2, 200))
    one = counted_halos(sources, targets, 40, 1)
    assert one == Share(200, 40, 0, 0)
    share = counted_halos(sources, targets, 40, 3)
    work = np.bincount(targets, minlength=40) + 1
    owner = np.searchsorted(work.cumsum(), [80, 160], side="right")
    owner = np.repeat(np.arange(3), np.diff([0, *owner, 40]))
    far = owner[sources] != owner[targets]
    wanted = [set(sources[far & (owner[targets] == p)]) for p in range(3)]
    assert share.halo == max(map(len, wanted)) and share.far == far.mean()
    assert share.own == np.bincount(owner).max()
    assert share.nnz == np.bincount(owner[targets]).max()


def test_expected_shares_are_those_of_generated_graphs():
    nodes, degree, far = 20_000, 8, 0.2
    source, target = distributed_worker.generated(nodes, degree, far, 0, 1).numpy()
    for parts in (1, 4, 16):
        counted = counted_halos(source, target, nodes, parts)
        expected = expected_share(nodes, degree, far, 50, parts)
        np.testing.assert_allclose(expected, counted, rtol=0.06, atol=0.01)


def test_model_of_time():
    local, share = Local(1e-6, 1e-5, 1e-6, 0.5e-3), Share(1000, 100, 50, 0.25)
    alone = epoch(local, share, Network(0, 1), 1, 10, 100)
    assert alone["epoch"] == pytest.approx(1e-3 + 1e-3 + 0.5e-3)
    found = epoch(local, share, Network(1e-4, 1e6), 4, 10, 100)
    exchange = 4 * (1e-4 + 2e-5) + 4 * 10 * 50 / 1e6
    reduce = 2 * 6 * 1e-4 + 4 * 100 * 6 / 4 / 1e6
    assert found["exchange"] == pytest.approx(exchange)
    assert found["hidden"] == pytest.approx(0.75e-3)  # all of the local edges' time
    assert found["reduce"] == pytest.approx(reduce)
    whole = 1e-3 + 1e-3 + 50e-6 + 0.5e-3 + exchange - 0.75e-3 + reduce
    assert found["epoch"] == pytest.approx(whole)
    crowded = epoch(local, share, Network(1e-4, 1e6), 4, 10, 100, crowding=2)
    assert crowded["compute"] == pytest.approx(2 * found["compute"])


def process(size, share, memory):
    split = dict.fromkeys((*distributed_worker.STEPS, "exchange", "reduce"), 1e-4)
    return {
        "own": share, "nnz": 10 * share, "halo": 5 if size > 1 else 0, "nodes": 100,
        "edges": 1000, "features": 8, "weights": 200, "losses": [2.0, 1.0],
        "epoch": {"min": 0.01 / size, "median": 0.02 / size},
        "split": {"epoch, profiled": 0.02 / size, **split}, "bytes needed": 400 * (size > 1),
        "bytes sent": 404 * (size > 1), "bytes that came": 408 * (size > 1),
        "memory": memory, "memory to build": memory, "memory of kernels": 10, "bytes": 4,
        "memory as malloc keeps it": 2 * memory,
        "memory of graph and features": memory // 2, "seconds to build": 1.0,
        "network": {"latency": 1e-4, "speed": 1e9}, "epoch of a small graph": 1e-3,
    }  # fmt: skip


def arguments(tmp_path, **more):
    given = {
        "graph": ["generated"], "model": ["sage"], "partition": ["rows"], "processes": [1, 2],
        "epochs": 3, "hidden": 16, "quick": True, "out": tmp_path, "most_difference": 1e-5,
        "orders": 1, "dtype": "float32",
    }  # fmt: skip
    return argparse.Namespace(**{**given, **more})


def test_tables_of_processes(tmp_path, capsys, monkeypatch):
    runs = {1: [process(1, 100, 10_000)], 2: [process(2, 50, 6_000), process(2, 50, 5_000)]}
    other = [{"losses": [2.0, 1.001]}]  # of one process, nodes in another order
    monkeypatch.setattr(
        distributed, "launch", lambda spec, size: other if spec["order"] else runs[size]
    )
    distributed.run(arguments(tmp_path))
    said = capsys.readouterr().out
    assert re.search(r"sage, generated, rows +2 +5.0 +10.0 +0.00 +1.010 +1.020 +1.163 +1.181", said)
    (path,) = tmp_path.glob("distributed-*.json")
    results = json.loads(path.read_text())["results"]
    (cell,) = results["cells"]
    two = cell["runs"]["2"]
    assert two["bytes sent / needed"] == 1.01 and two["bytes needed"] == 800
    # Half of what one process takes, and a row of 8 float32 for each of 5 nodes.
    assert two["memory, share and halo"] == [5160, 5160]
    assert two["memory / share and halo"] == pytest.approx(6000 / 5160, rel=1e-4)
    check = cell["model of time"]["check"]["2"]
    assert check["model / measured"] == pytest.approx(check["model"] / 0.005, rel=1e-3)
    assert set(results["large"]["10 Gbit/s, 50 us"]) == {str(2**i) for i in range(1, 11)}
    assert two["memory as malloc keeps it, share and halo"] == [10160, 10160]
    assert cell["rounding"] == pytest.approx(1e-3)
    for losses in ([2.0, 1.003], [2.0, 1.005]):
        runs[2][0]["losses"] = runs[2][1]["losses"] = losses
        if losses[1] < 1.004:  # no more than rounding may do
            distributed.run(arguments(tmp_path))
    with pytest.raises(SystemExit, match="losses differ: generated"):
        distributed.run(arguments(tmp_path))
