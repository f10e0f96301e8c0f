"""The pool of threads that kernels run on: torch's, TVM's or none; each case in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.pool_checks import CHECKS, SLOW

HERE = Path(__file__).parent
NAMES = [*CHECKS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
OPENMP = pytest.mark.skipif(sys.platform != "linux", reason="OpenMP's pool is used on Linux alone")


@OPENMP
@pytest.mark.parametrize("name", NAMES)
def test_pools(name: str) -> None:
    """Each check runs in a separate process, as torch and pools stay once they are loaded."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "TVM_NUM"))}
    environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(HERE.parents[1] / "python")}
    environment.pop("SPARSETIR_POOL", None)
    command = [sys.executable, "-W", "ignore", str(HERE / "pool_checks.py"), name]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-3000:]}"
