"""`python -m sparsetir.cli.demo` runs, and its results are right; the graph it runs on."""

import contextlib
import io
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from fake_measurer import install
from sparsetir.cli import demo
from sparsetir.data.datasets import load_cora

STEPS = ["parse", "lower_sparse_iter", "default_schedule", "lower_sparse_buffer", "compile"]
TRIALS = 2


@pytest.fixture(
    scope="module", params=["pretended", pytest.param("measured", marks=pytest.mark.slow)]
)
def shown(request, tmp_path_factory):
    """What the demonstration prints with a short search on one thread.

    By default nothing is measured: the tests in `tuning/` do.
    """
    if request.param == "pretended":
        return pretended()
    home = tmp_path_factory.mktemp("home")
    env = {**os.environ, "TVM_NUM_THREADS": "1", "HOME": str(home), "XDG_CACHE_HOME": str(home)}
    env.pop("SPARSETIR_RECORDS", None)
    program = f"from sparsetir.cli.demo import main; raise SystemExit(main(trials={TRIALS}))"
    run = subprocess.run([sys.executable, "-c", program], env=env, cwd=home, capture_output=True,
                         text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert not list(home.glob("**/*sparsetir*")) and not list(home.glob("*.html"))
    assert f"trial {TRIALS}/{TRIALS}, best " in run.stderr.splitlines()[-1]
    return run.stdout


def pretended():
    """The demonstration in this process, where measuring takes no time."""

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert demo.main(trials=TRIALS) == 0
    assert f"trial {TRIALS}/{TRIALS}, best " in err.getvalue().splitlines()[-1]
    return out.getvalue()


def test_what_is_shown(shown):
    """Time and size of each step, times of each row, trials, and a result that is right."""
    for step in STEPS:
        (line,) = re.findall(rf"^{step} +([\d.]+)   .*? +(\d+)$", shown, re.MULTILINE)
        assert float(line[0]) >= 0 and int(line[1]) > 10
    for name in ("1", "default"):
        assert re.search(rf"^{name} +[\d.,]+ [µm]s +[\d.]+ ", shown, re.MULTILINE)
    assert f"\n{TRIALS} trials: " in shown
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
