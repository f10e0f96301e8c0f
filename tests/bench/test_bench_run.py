"""The bench of operators: its peers, turns and verdicts are not fooled."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from bench.__main__ import parser
from bench.judge import judge
from bench.judge import run as run_judge
from bench.peers import libraries
from bench.peers.cases import make, save
from bench.peers.turns import Failed, Times, Worker, compare
from bench.problems import matrix_of
from bench.run import thread_counts
from bench.summary import summarise
from bench.synthetic import LAWS, generate
from sparsetir.data.graphs import GraphError
from sparsetir.schedules.operators.operands import rounded

ROOT = Path(__file__).parents[2]


def random_matrix(m=40, n=30, seed=0):
    matrix = sp.random_array((m, n), density=0.2, format="csr", dtype="float32", rng=seed)
    matrix.sort_indices()
    arrays = matrix.data, matrix.indices.astype("int32"), matrix.indptr.astype("int32")
    return sp.csr_array(arrays, shape=(m, n))


def case(op="spmm", feat=16, dtype="float32"):
    return make(op, random_matrix(), feat, dtype)


def exact_result(it):
    a = it.matrix.toarray()
    if it.op == "sddmm":
        x, y = it.operands
        return (x @ y.T)[a != 0]
    return a @ it.operands[0]


class Pretender:
    """A stand-in for a worker: returns preset results."""

    def __init__(self, name, results):
        self.name, self.results = name, results

    def ask(self, op, **request):
        if op == "prepare":
            for name, result in self.results.items():
                if isinstance(result, str):
                    raise Failed(result, missing=result.startswith("has no"))
                np.save(f"{request['folder']}/result-{name}.npy", result)
            return {"variants": list(self.results), "about": {}, "refused": {}}
        slow = request.get("variant") == "slow"
        return {"times": [3000, 2000, 2500] if slow else [1000, 1100], "switches": 0}


@pytest.mark.parametrize("op", ["spmm", "sddmm", "spmv"])
def test_a_wrong_peer_is_caught(tmp_path, op):
    it = case(op)
    right = exact_result(it)
    wrong, forgotten = right.copy(), right.copy()
    wrong.flat[3] += 0.01
    forgotten.flat[5] = np.nan
    workers = [
        Pretender("good", {"fast": right, "slow": right}),
        Pretender("bad", {"way": wrong}),
        Pretender("forgets", {"way": forgotten}),
        Pretender("half", {"fast": wrong, "slow": right}),
        Pretender("shape", {"way": right[:-1]}),
        Pretender("absent", {"way": "has no such thing"}),
        Pretender("broken", {"way": "ValueError: oh"}),
    ]
    result = compare(it, workers, tmp_path, 8, 0.01, it.check())
    assert list(result["peers"]) == ["good", "half"]
    good = result["peers"]["good"]
    assert (good["min"], good["median"]) == pytest.approx((1e-6, 1.05e-6))
    assert good["variant"] == "fast"
    assert (good["turns"], good["variants"]["slow"]["turns"]) == (8, 3)
    assert result["peers"]["half"]["variant"] == "slow"
    assert set(result["wrong"]) == {"bad", "forgets", "half", "shape"}
    assert result["wrong"]["bad"].startswith(f"way: 1 of {right.size} wrong, the first at [")
    assert result["wrong"]["half"].startswith("fast: 1 of ")
    assert "expected shape" in result["wrong"]["shape"]
    assert result["missing"] == {"absent": "has no such thing"}
    assert result["failed"] == {"broken": "ValueError: oh"}


def test_turns_that_others_disturbed_count_only_where_there_are_no_quiet_ones(tmp_path):
    timed = Times()
    for times, switches in [([9], 1), ([5], 0), ([3], 2), ([6], 0)]:
        timed.add(times, switches)
    assert timed.least == 3 and timed.summary()["quiet"] == 2
    timed.add([7], 0)
    timed.add([8], 0)
    summary = timed.summary()
    assert (summary["min"], summary["median"]) == pytest.approx((5e-9, 6.5e-9))
    assert (summary["turns"], summary["quiet"]) == (6, 4)
    # Rounds go on where turns were disturbed, though not for ever.
    it = case()
    worker = Pretender("noisy", {"way": exact_result(it)})
    worker.ask = lambda op, ask=worker.ask, **request: {**ask(op, **request), "switches": 1}
    peers = compare(it, [worker], tmp_path, 5, 0.01, it.check())["peers"]
    assert (peers["noisy"]["turns"], peers["noisy"]["quiet"]) == (10, 0)


def test_many_features_are_checked_by_a_projection():
    it = case(feat=128)
    reference, right = it.check(most_exact=0), exact_result(it)
    assert reference.exact.shape == (40,) and reference.error(right) is None
    right[7, 100] += 0.1
    assert "the first at [7]" in reference.error(right)
    assert "expected shape (40, 128)" in reference.error(right[:, :3])


@pytest.mark.parametrize("op", ["spmm", "sddmm", "spmv"])
def test_half_precision_has_its_own_tolerance(op):
    it = case(op, dtype="float16")
    assert all((x == x.astype("float16")).all() for x in (*it.operands, it.matrix.data))
    right = exact_result(it)
    assert it.check().error(rounded(right, "float16")) is None
    assert it.check().error(right * 1.05) is not None
    values = rounded(np.float32([1 / 3, -1e20]), "bfloat16")
    assert (values.view("uint32") & 0xFFFF == 0).all()


@pytest.mark.slow  # its turns with a pretended worker above
def test_a_worker_is_stopped_between_its_turns_and_comes_back(tmp_path):
    it = case()
    worker = Worker("scipy", 1)
    try:
        with pytest.raises(Failed, match="AttributeError"):
            worker.ask("no_such_thing")
        save(it, tmp_path)
        result = compare(it, [worker], tmp_path, 2, 0.001, it.check())
        assert result["peers"]["scipy"]["calls"] >= 6
        pid = worker._process.pid
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T"
        os.kill(pid, signal.SIGKILL)
        result = compare(it, [worker], tmp_path, 2, 0.001, it.check())
        assert result["failed"] == {"scipy": "the process was ended by SIGKILL"}
        assert worker.ask("release") == {}
    finally:
        worker.close()


@pytest.mark.parametrize("op", ["spmm", "spmv", "sddmm"])
@pytest.mark.parametrize("library", ["scipy", "torch", "mkl"])
@pytest.mark.parametrize(
    "dtype, reduce, heads",
    [("float64", "sum", None), ("float32", "mean", None), ("float32", "max", None),
     ("float32", "sum", 2)],
)  # fmt: skip
def test_libraries_are_right_or_missing(library, op, dtype, reduce, heads):
    if op == "sddmm" and reduce != "sum":
        pytest.skip("sums alone")
    matrix = sp.random_array((30, 40), density=0.1, format="csr", dtype=dtype, rng=0)
    matrix = sp.csr_array((matrix.data - 0.5, *(x.astype("int32") for x in (
        matrix.indices, matrix.indptr))), shape=matrix.shape)  # fmt: skip
    case = make(op, matrix, 16, dtype, reduce, heads)
    reference = case.check()
    try:
        peer = libraries.PEERS[library](1)
    except (ImportError, libraries.Missing) as error:
        pytest.skip(str(error))
    try:
        calls = peer.prepare(case)
    except libraries.Missing as error:
        expected = {"heads": heads is not None, reduce: reduce != "sum", "SDDMM": op == "sddmm"}
        assert any(word in str(error) for word, fits in expected.items() if fits)
        return
    assert heads is None and (reduce == "sum" or library == "torch" and op == "spmm")
    for name, call in calls.items():
        assert reference.error(peer.to_numpy(call())) is None, name
    peer.release()


def cell(problem, seconds, peer, noise=0.0, threads=2, kind="graph", feat=32):
    def times(t):
        return {"min": t, "median": t, "noise": noise}

    return {
        "problem": problem, "op": "spmm", "feat": feat, "dtype": "float32", "threads": threads,
        "class": kind, "peers": {"sparsetir": times(seconds), "mkl": times(peer)}, "wrong": {},
        "failed": {},
    }  # fmt: skip


def test_judge():
    before = [cell(n, 1.0, 2.0) for n in "abc"] + [cell("noisy", 1.0, 2.0, 0.1), cell("d", 1, 2)]
    after = [cell("a", 1.04, 2.0), cell("b", 1.2, 2.0), cell("c", 0.8, 2.0),
             cell("noisy", 1.2, 2.0, 0.1), cell("e", 1, 2)]  # fmt: skip
    verdict = judge(before, after, least=0.05)
    name = "{}, spmm, d = 32, float32, 2 thread(s)".format
    assert [r[0] for r in verdict["slower"]] == [name("b")]
    assert [r[0] for r in verdict["faster"]] == [name("c")]
    assert [r[0] for r in verdict["same"]] == [name("a"), name("noisy")]
    assert (verdict["missing"], verdict["new"], verdict["broken"]) == ([name("d")], [name("e")], [])
    # The machine is half as fast now; what is not is slower or faster than that.
    slow = [cell(c["problem"], 2 * c["peers"]["sparsetir"]["min"], 4.0) for c in before[:3]]
    verdict = judge(before, [*slow[:2], cell("c", 1.0, 4.0)], least=0.05)
    assert verdict["drift"] == {2: 2.0} and len(verdict["same"]) == 2 and not verdict["slower"]
    assert verdict["faster"][0][3] == 0.5
    broken = cell("a", 1.0, 2.0)
    broken["peers"].pop("sparsetir")
    broken["wrong"] = {"sparsetir": "3 of 4", "mkl": "all"}
    verdict = judge(before[:1], [broken], least=0.05)
    assert verdict["missing"] == [name("a")]
    assert verdict["broken"] == [(name("a"), "wrong", "3 of 4")]


@pytest.mark.parametrize("seconds, status", [(1.01, None), (1.5, 1)])
def test_judge_of_a_run_with_another_version(tmp_path, capsys, seconds, status):
    held = cell("p", seconds, 2.0)
    held["peers"]["before"] = {"min": 1.0, "median": 1.0, "noise": 0.0}
    record = {"command": "run-spmm", "cpu": "x", "results": {"cells": [held, cell("q", 1.0, 2.0)]}}
    (tmp_path / "a").write_text(json.dumps(record))
    args = argparse.Namespace(before=tmp_path / "a", after=None, least=0.05)
    if status is None:
        run_judge(args)
    else:
        with pytest.raises(SystemExit) as caught:
            run_judge(args)
        assert caught.value.code == status
    printed = capsys.readouterr().out
    assert f"{int(status == 1)} slower" in printed
    assert f"{1 / seconds:.3f}" in printed.split("geometric mean")[1]


def test_summary():
    cells = [
        cell("a", 1.0, 4.0),
        cell("b", 1.0, 1.0, kind="pruned"),
        cell("c", 1.0, 8.0, threads=1),
    ]
    cells[0]["peers"]["before"] = {"min": 0.5, "median": 0.5}
    cells[1]["peers"]["torch"] = {"min": 0.25, "median": 0.5}
    means = {(s["threads"], s["peer"], s["class"]): s for s in summarise(cells)}
    mkl = means[2, "mkl", "all"]
    assert (mkl["cells"], mkl["geomean"], mkl["lowest"]) == (2, 2.0, 1.0)
    assert mkl["lowest_at"] == "b, d = 32"
    assert means[2, "mkl", "graph"]["geomean"] == pytest.approx(4.0)
    assert means[2, "best peer", "all"]["geomean"] == 1.0  # 4 and 0.25, without the version before
    assert means[2, "best peer", "pruned"]["geomean_of_medians"] == 0.5
    assert means[2, "before", "all"]["geomean"] == 0.5
    assert means[1, "mkl", "all"]["geomean"] == pytest.approx(8.0)
    assert (1, "mkl", "graph") not in means


@pytest.mark.parametrize("name", ["cora", "citeseer", "pubmed"])
def test_generated_graphs_have_the_sizes_of_the_paper(name):
    law, matrix = LAWS[name], generate(LAWS[name])
    assert matrix.shape == (law.nodes, law.nodes) and matrix.nnz == law.edges
    assert matrix.has_canonical_format and matrix.indices.dtype == np.int32
    pattern = sp.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), matrix.shape)
    assert (pattern != pattern.T).nnz == 0
    degree = np.sort(np.diff(matrix.indptr))
    # A heavy tail: a hundredth of the nodes holds a fifth of the edges or more.
    assert degree[-law.nodes // 100 :].sum() > 0.15 * law.edges
    assert degree[-1] <= law.nodes / 16 + 1 and np.median(degree) < law.edges / law.nodes
    again, other = generate(law), generate(law, seed=1)
    assert (again.indices == matrix.indices).all() and (again.data == matrix.data).all()
    assert not np.array_equal(other.indices, matrix.indices)


def test_what_the_command_line_refuses(capsys):
    cores = len(os.sched_getaffinity(0))
    assert thread_counts(["3", "one"]) == [3, 1]
    assert thread_counts(["all and one"]) == list(dict.fromkeys([cores, 1]))
    with pytest.raises(SystemExit, match="expected all, one or numbers, got 0"):
        thread_counts(["0"])
    with pytest.raises(SystemExit):
        parser().parse_args(["run", "--op", "x"])
    assert "--op: expected " in capsys.readouterr().err
    with pytest.raises(GraphError, match="synthetic:x: expected synthetic: and one of cora, "):
        matrix_of("synthetic:x")
    assert matrix_of("synthetic:cora").shape == (2708, 2708)
