"""The benchmarks run; their figures are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import sparsetir

ROOT = Path(__file__).parents[1]


def bench(*words, error=False):
    path = os.pathsep.join([str(Path(sparsetir.__file__).parents[1]), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "bench", *map(str, words)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert (done.returncode != 0) == error, done.stderr
    return done.stderr if error else done.stdout


def record(folder):
    (path,) = folder.glob("*.json")
    out = json.loads(path.read_text())
    assert {"date", "commit", "cpu", "threads", "versions"} <= set(out)
    assert str(ROOT) not in path.read_text()
    return out


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


def test_spmm(tmp_path):
    matrix = sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=0)
    sp.save_npz(tmp_path / "first.npz", sp.csr_matrix(matrix))
    scipy.io.mmwrite(tmp_path / "second.mtx", matrix)
    printed = bench("spmm", "--quick", "--threads", 1, "--feat", 8, 33, "--out", tmp_path / "out",
                    "--graph", tmp_path / "first.npz", tmp_path / "second.mtx")  # fmt: skip
    assert "1 thread(s)" in printed and "x scipy" in printed
    found = record(tmp_path / "out")
    assert found["threads"] == 1
    assert [(c["graph"], c["feat"]) for c in found["results"]] == [
        (g, f) for g in ("cora", "first", "second") for f in (8, 33)
    ]
    for cell in found["results"]:
        assert {"sparsetir", "sparsetir out=", "scipy"} <= set(cell["seconds"])
        assert cell["limit_seconds"] > 0


@pytest.mark.parametrize(
    "name, message", [("x.npz", "has no indices, indptr"), ("x.txt", "npz or mtx")]
)
def test_files_that_are_no_graphs(tmp_path, name, message):
    np.savez(tmp_path / "x.npz", shape=np.array([3, 3]))
    (tmp_path / "x.txt").write_text("")
    assert message in bench("spmm", "--quick", "--graph", tmp_path / name, error=True)
