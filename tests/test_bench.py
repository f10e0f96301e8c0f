"""The benchmarks run; their figures are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.extras import WITHOUT_TORCH
from sparsetir.formats import CSF, CSR, Pattern
from sparsetir.tuning.process import THREADS

ROOT = Path(__file__).parents[1]


def bench(*words):
    """The command with the environment that it wants; else it starts itself again."""
    code = f"import runpy, sys; {WITHOUT_TORCH}; runpy.run_module('bench', run_name='__main__')"
    path = os.pathsep.join([str(Path(sparsetir.__file__).parents[1]), str(ROOT)])
    threads = 1 if words[0] in ("run", "tune", "mttkrp") else len(os.sched_getaffinity(0))
    env = {**os.environ, "PYTHONPATH": path, **dict.fromkeys(THREADS, str(threads))}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], cwd=ROOT, env=env, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def record(folder):
    (path,) = folder.glob("*.json")
    out = json.loads(path.read_text())
    assert {"date", "commit", "cpu", "threads", "versions"} <= set(out)
    assert str(ROOT) not in path.read_text()
    return out


@pytest.mark.parametrize("words, threads", [
    (["steps", "--quick"], len(os.sched_getaffinity(0))),
    (["convert", "--threads", "7"], 7),
    (["run", "--threads", "7"], 1),  # of its workers
])  # fmt: skip
def test_it_starts_itself_again_where_libraries_have_read_another_environment(
    monkeypatch, words, threads
):
    from bench.__main__ import main

    class Started(Exception):
        pass

    def start(program, command, environment):
        assert program == sys.executable
        raise Started(command[1:], {n: environment[n] for n in THREADS}, environment["PATH"])

    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setenv(THREADS[-1], "99")
    with pytest.raises(Started) as started:
        main(words)
    expected = ["-m", "bench", *words], dict.fromkeys(THREADS, str(threads))
    assert started.value.args == (*expected, os.environ["PATH"])
    with pytest.raises(Started) as started:
        main(words, ("sparsetir", "bench"))
    assert started.value.args[0] == ["-m", "sparsetir", "bench", *words]


@pytest.mark.slow  # many kernels
def test_compile(tmp_path):
    printed = bench("compile", "--quick", "--out", tmp_path)
    for line in (
        "Import",
        "parse",
        "default schedule",
        "build (all from stage I)",
        "NumPy, kernel",
    ):
        assert line in printed
    results = record(tmp_path)["results"]
    assert set(results) == {"import", "spmm", "attention", "call"}
    assert all(0 < t["min"] <= t["median"] for part in results.values() for t in part.values())


@pytest.mark.slow  # its programs are those of docs/schedules.md, which run
@pytest.mark.slow
def test_calls(tmp_path):
    printed = bench("calls", "--quick", "--plot", "--out", tmp_path)
    assert "Of a call of ops.spmm" in printed and "\non " in printed
    (path,) = tmp_path.glob("calls-*.json")
    found = json.loads(path.read_text())["results"]["seconds"]["now"]
    assert found["calls"]["plan, NumPy"]["min"] > found["floors"]["kernel, NumPy"]["min"] > 0
    (picture,) = tmp_path.glob("calls-*.png")
    assert picture.stat().st_size > 1000


@pytest.mark.slow
def test_steps(tmp_path):
    printed = bench("steps", "--quick", "--feat", 128, "--plot", "--out", tmp_path)
    assert "SpMM by steps" in printed
    (cell,) = record(tmp_path)["results"]["cells"]
    assert [*cell["seconds"]][0] == "as written" and [*cell["seconds"]][-1] == "plan"
    (picture,) = tmp_path.glob("steps-*.png")
    assert picture.stat().st_size > 5000
    assert all(seconds > 0 for seconds in cell["seconds"].values())


@pytest.mark.slow  # many processes
def test_tune(tmp_path):
    printed = bench("tune", "--quick", "--feat", 8, "--threads", "one", "--out", tmp_path)
    assert "The search against a sweep of all configs" in printed
    (cell,) = record(tmp_path)["results"]["cells"]
    assert cell["problem"] == "cora" and cell["configs"] == 4 and cell["budget"] == 1
    assert set(cell["final"]["configs"]) == {"default", "sweep", "search"} == set(cell["plans"])
    assert cell["search_best_over_sweep_best"] is None or cell["search_best_over_sweep_best"] >= 1


def test_files_that_are_no_graphs(tmp_path):
    from bench.graphs import graphs
    from sparsetir.data.graphs import GraphError

    np.savez(tmp_path / "x.npz", shape=np.array([3, 3]))
    with pytest.raises(GraphError, match="has no indptr, indices"):
        graphs([tmp_path / "x.npz"])


def test_a_file_that_is_no_graph_ends_with_one_line(tmp_path, monkeypatch):
    from bench.__main__ import main

    for name in THREADS:
        monkeypatch.setenv(name, "1")  # else it starts itself again
    with pytest.raises(SystemExit) as end:
        main(["convert", "--threads", "1", "--graph", str(tmp_path / "x.txt")])
    message = str(end.value.code)  # which Python prints, and ends with status 1
    assert message.startswith(f"python -m bench convert: {tmp_path}/x.txt: no such file")
    assert "\n" not in message


@pytest.mark.slow
def test_convert(tmp_path):
    matrix = sp.random_array((60, 90), density=0.1, format="csr", dtype="float32", rng=0)
    sp.save_npz(tmp_path / "first.npz", sp.csr_matrix(matrix))
    printed = bench("convert", "--quick", "--out", tmp_path / "out",
                    "--graph", tmp_path / "first.npz")  # fmt: skip
    for line in ("CSR to BSR", "Padding of Hyb(c, k)", "2048 x 512", "Formats on cora", "Growth"):
        assert line in printed
    results = record(tmp_path / "out")["results"]
    assert set(results) == {"bsr", "hyb", "sr_bcrs", "formats", "growth", "targets"}
    assert [(c["graph"], c["block"]) for c in results["bsr"]] == [
        (g, b) for g in ("cora", "first") for b in (2, 4)
    ]
    cora = results["hyb"][0]
    assert cora["k"] == 2 and cora["paper"] == 15.9
    assert 0.15 < cora["padding"]["1"]["whole"] < 0.16 > 2 * cora["padding"]["1"]["sparsetir"]
    assert {c["size"] for c in results["growth"]} == {10**4, 10**5}
    assert all(1 < c["memory"] < 10 for c in results["growth"])


@pytest.mark.slow  # many kernels
def test_formats(tmp_path):
    weights = {}
    for layer, seed in (("first", 0), ("middle", 1), ("last", 2)):
        matrix = sp.random_array((48, 64), density=0.05, format="csr", rng=seed)
        weights[f"{layer}.shape"] = np.array(matrix.shape)
        weights[f"{layer}.indptr"], weights[f"{layer}.indices"] = matrix.indptr, matrix.indices
    np.savez(tmp_path / "weights.npz", **weights)
    src, dst, etype = np.random.default_rng(0).integers(0, 5, (3, 40))
    np.savez(tmp_path / "edges.npz", num_nodes=np.array(6), src=src, dst=dst, etype=etype)
    printed = bench("formats", "--quick", "--out", tmp_path / "out",
                    "--pruned", tmp_path / "weights.npz", f"{tmp_path}/weights.npz:middle",
                    "--layers", 2, "--hetero", tmp_path / "edges.npz", "--format",
                    "csr", "dia", "hyb_1_k", "ell_and_csr", "relational_hyb_5")  # fmt: skip
    cells = record(tmp_path / "out")["results"]["cells"]
    names = [f"weights:{layer}" for layer in ("first", "last", "middle")]
    assert list(dict.fromkeys(c["matrix"] for c in cells)) == ["cora", *names, "edges"]
    skipped = {c["format"] for c in cells if "skipped" in c}
    assert skipped == {"dia"} and "skipped: cora, spmm, dia: 95 MB" in printed
    assert len(cells) == 4 * 2 * 4 + 1
    assert all(c["error"] < 1e-5 for c in cells if "skipped" not in c)
    spmm = [c for c in cells if c["program"] == "spmm" and c["matrix"] == "weights:last"]
    assert len(spmm) == 4 and all(c["seconds"]["scipy"]["min"] > 0 for c in spmm)


@pytest.mark.slow  # many kernels
def test_mttkrp(tmp_path):
    rng = np.random.default_rng(0)
    coords = np.unique(rng.integers(6, size=(4, 90)), axis=1)
    np.savez(tmp_path / "small.npz", shape=np.array([6, 7, 8, 9]), coords=coords)
    printed = bench("mttkrp", "--quick", "--tensor", tmp_path / "small.npz", "--out",
                    tmp_path / "out")  # fmt: skip
    assert "gain: geometric mean" in printed
    cells = record(tmp_path / "out")["results"]["cells"]
    assert [(c["mode"], c["shape"][0]) for c in cells] == [(0, 6), (1, 7), (2, 8), (3, 9)]
    for cell in cells:
        assert not cell["wrong"] and cell["config"] in cell["sweep"]
        assert {"tuned", "thesis", "default", "scipy", "c++ constant"} < set(cell["seconds"])
        assert all(0 < seconds < 1 for seconds in cell["seconds"].values())


def test_mttkrp_tells_who_is_wrong():
    from bench.mttkrp import _right

    out = np.zeros(3, "float32")
    assert _right(lambda: out.fill(2), out, np.full(3, 2.0))
    assert not _right(lambda: out[:2].fill(2), out, np.full(3, 2.0))


@pytest.mark.parametrize("shape, coords, message", [
    ((3, 4), np.zeros((2, 1)), "expected a tensor of order 3 to 5"),
    ((3, 4, 5), np.zeros((2, 1)), r"coords \(2, 1\)"),
    (None, np.zeros((3, 1)), "expected an npz file of shape and coords"),
])  # fmt: skip
def test_files_that_hold_no_tensor(tmp_path, shape, coords, message):
    from bench.mttkrp import _tensor
    from sparsetir.data.graphs import GraphError

    arrays = {"coords": coords, **({} if shape is None else {"shape": np.array(shape)})}
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(GraphError, match=message):
        _tensor(tmp_path / "t.npz")


def test_places_are_counted_without_converting():
    from sparsetir.formats.library import library

    rng = np.random.default_rng(0)
    mask = rng.random((50, 70)) < np.linspace(0, 0.6, 50)[:, None]
    pattern = Pattern([c.astype("int32") for c in np.nonzero(mask)], mask.shape)
    for fmt in library(pattern):
        assert fmt.places(pattern) == fmt.convert(pattern).places, fmt


def test_formats_tells_what_is_wrong_or_fails():
    from bench import formats
    from bench.programs import SDDMM, SPMM

    matrix = sp.random_array((9, 8), density=0.4, format="csr", dtype="float32", rng=0)
    matrix = sp.csr_array((matrix.data, *(x.astype("int32") for x in (matrix.indices,
                          matrix.indptr))), shape=matrix.shape)  # fmt: skip
    for make, text in ((formats.spmm_task, SPMM), (formats.sddmm_task, SDDMM)):
        task = make("it", sparsetir.from_source(text), matrix)
        kernels = formats.Kernels()
        assert not {"wrong", "failed"} & set(formats.measure(task, CSR(), kernels, 0.0))
        task.exact.flat[3] += 0.01
        cell = formats.measure(task, CSR(), kernels, 0.0)
        assert cell["wrong"].startswith(f"1 of {task.exact.size} elements, the first at [")
        cell = formats.measure(task, CSF((0, 1, 2)), kernels, 0.0)
        assert cell["failed"].startswith("ValueError: csf_0_1_2: expected a pattern of 3 axes")


@pytest.mark.parametrize(
    "option, name, message",
    [
        ("--pruned", "x.npz", "has no arrays <layer>.indptr"),
        ("--pruned", "x.npz:fc", "has no layer 'fc'"),
        ("--hetero", "x.npz", "has no dst, etype, num_nodes, src"),
    ],
)
def test_files_that_hold_no_weights_or_relations(tmp_path, option, name, message):
    from bench.graphs import pruned, relations
    from sparsetir.data.graphs import GraphError

    arrays: dict = {"conv.indptr": np.zeros(1)} if ":" in name else {"shape": np.zeros(2)}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(GraphError, match=message):
        relations([tmp_path / name]) if option == "--hetero" else pruned([f"{tmp_path}/{name}"], 1)


@pytest.mark.slow  # equal work is computed in sparse_ir/test_positions.py
def test_equal_work(tmp_path):
    printed = bench("equal_work", "--quick", "--out", tmp_path)
    assert "equal work takes at most 1.1 times as long as row blocks" in printed
    cells = record(tmp_path)["results"]["cells"]
    assert [(c["matrix"], c["feat"]) for c in cells] == [
        ("even", 32), ("even", 128), ("skewed", 32), ("cora", 32), ("cora", 128),
    ]  # fmt: skip
    assert all(0 <= e < 1e-4 for c in cells for e in c["errors"].values())


@pytest.mark.slow  # a search; what it tunes is tuned in tuning/test_programs.py
def test_two_hop(tmp_path):
    assert "default / tuned" in bench("two_hop", "--quick", "--out", tmp_path)
    (cell,) = record(tmp_path)["results"]["cells"]
    assert (cell["graph"], cell["feat"]) == ("cora", 8) and cell["speedup"] > 0
