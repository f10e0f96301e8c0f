"""Templates of a plug-in module are searched, and what is wrong with them ends no search."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from sparsetir.extras import WITHOUT_TORCH

LIMIT = 3  # seconds, for the one that hangs


@pytest.mark.slow  # each fault alone in test_measure.py, a search with workers in test_search.py
def test_faulty_templates_are_three_failures_of_a_search_that_ends(tmp_path):
    matrix = sp.random_array((60, 50), density=0.1, rng=np.random.default_rng(0), dtype="float32")
    scipy.io.mmwrite(tmp_path / "small.mtx", matrix)
    code = f"import runpy, sys; {WITHOUT_TORCH}; runpy.run_module('sparsetir', run_name='__main__')"
    command = [
        *(sys.executable, "-c", code, "tune", "spmm", "--graph", "small.mtx"),
        *("--feat", "16", "--threads", "1", "--trials", "5", "--modules", "tuning.faulty_plugin"),
        *("--time-limit", str(LIMIT), "--records", "r.sqlite", "--no-report"),
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert run["trials"] == 5 and run["counts"]["ok"] + run["counts"].get("pruned", 0) == 2
    crashed, hung, wrong = (run["failures"][number] for number in "123")
    assert crashed.startswith("crashed: ") and "SIGSEGV" in crashed
    assert hung.startswith("hung: ") and f"longer than {LIMIT}" in hung
    assert wrong.startswith("wrong: ")
    assert run["best"][0]["config"]["template"] in ("RowBlocks", "Decomposed")
