"""`python -m sparsetir.demo` runs, and its result is right; the graph it runs on."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from sparsetir.datasets import load_cora

STEPS = ["parse", "lower_sparse_iter", "default_schedule", "lower_sparse_buffer", "compile"]


@pytest.fixture(scope="module")
def shown():
    """What the demonstration prints, with TVM on two threads."""
    env = {**os.environ, "TVM_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "sparsetir.demo"]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert not run.stderr
    return run.stdout


@pytest.mark.parametrize("step", STEPS)
def test_each_step_has_time_and_size(shown, step):
    (line,) = re.findall(rf"^{step} +([\d.]+)   .*? +(\d+)$", shown, re.MULTILINE)
    assert float(line[0]) >= 0
    assert int(line[1]) > 10


@pytest.mark.parametrize("name", ["sparsetir, 2 threads", "sparsetir, 1 thread", "scipy, 1 thread"])
def test_each_run_has_times(shown, name):
    ((median, shortest),) = re.findall(rf"^{name} +([\d.]+) +([\d.]+)$", shown, re.MULTILINE)
    assert 0 < float(shortest) <= float(median)


def test_torch_has_a_line(shown):
    assert re.search(r"^torch\.sparse.*([\d.]+|torch is not installed)$", shown, re.MULTILINE)


def test_result_is_right(shown):
    (error,) = re.findall(r"^largest error.*: (\S+) \(ok\)$", shown, re.MULTILINE)
    assert float(error) <= 1e-5


def test_cora():
    graph = load_cora()
    assert graph.shape == (2708, 2708)
    assert graph.nnz == 10556
    assert graph.dtype == np.float32
    assert graph.indices.dtype == graph.indptr.dtype == np.int32
    assert graph.has_canonical_format
    assert (graph != graph.T).nnz == 0
