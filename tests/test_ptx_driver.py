"""TVM's own CUDA runtime on the interpreter, in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tvm

from cuda_runner import requires_cuda_text


@requires_cuda_text
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(tvm.runtime.device("cuda", 0).exist, reason="there is a GPU")
def test_plans_and_kernels_on_the_device():
    script = Path(__file__).with_name("driver_checks.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
