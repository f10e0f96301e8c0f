"""What `import sparsetir` and the command line load, and when TVM and torch come."""

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import sparsetir
from sparsetir.extras import install_hint

FOLDER = str(Path(sparsetir.__file__).parents[1])
HEAVY = {"tvm", "tvm_ffi", "torch", "numpy", "scipy"}


def python(code, *words):
    """What a process printed, and the seconds of CPU time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, *(("-c", code) if code else ()), *words], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": FOLDER}, timeout=120,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    return run.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def seconds_of_tvm():
    """Of CPU time, for `import tvm` without sparsetir."""
    return python("import tvm")[1]


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["tune", "--help"]])
def test_help_loads_nothing_that_takes_time(words, seconds_of_tvm):
    code = (
        f"import sys; sys.argv = ['sparsetir', *{words!r}]\n"
        "from sparsetir.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    out, seconds = python(code)
    assert out.splitlines()[-1] == "[]"
    assert seconds < seconds_of_tvm / 4  # a tenth where nothing else runs


def test_import_loads_nothing_that_takes_time(seconds_of_tvm):
    out, seconds = python(f"import sys, sparsetir; print(sorted({HEAVY!r} & set(sys.modules)))")
    assert out == "[]\n" and seconds < seconds_of_tvm / 4


# After TVM came without torch, torch comes and meets kernels, as if it had been there first.
LATE = """
import sys, sparsetir
from tvm.script import sparse_tir as T
assert "tvm" in sys.modules and "torch" not in sys.modules
import tvm_ffi
assert tvm_ffi.core.torch is None
import numpy as np, scipy.sparse as sp
a = sp.random_array((30, 20), density=0.2, format="csr", dtype="float32", rng=0)
plan = sparsetir.plan("spmm", a, 4, threads=1)
assert "torch" not in sys.modules
import torch
assert tvm_ffi.core.torch is torch and torch.__spec__.loader is torch.__loader__
assert type(torch.__loader__).__module__.startswith(("importlib", "_frozen"))
assert tvm_ffi.use_torch_stream.__doc__.startswith("Create an FFI stream")
from sparsetir import ops
b = torch.rand(20, 4)
want = torch.from_numpy(a @ b.numpy())
assert torch.allclose(plan(b), want, atol=1e-5) and type(plan(b)) is torch.Tensor
assert torch.allclose(ops.spmm(sparsetir.SparseMatrix(a), b), want, atol=1e-5)
"""


def test_torch_may_come_after_tvm():
    pytest.importorskip("torch")
    python(LATE)


@pytest.mark.slow
def test_tvm_may_come_before():
    """Without a word of ours until then, with torch."""
    python(
        "import tvm, sys, sparsetir, sparsetir.planning.plan\n"
        "from tvm.script import sparse_tir as T\n"
        "assert T.sp_iter and tvm.script.sparse_tir is T\n"
        "assert callable(sparsetir.plan)\n"
        "import sparsetir.runtime.build, sparsetir.runtime.load\n"
        "assert all(map(callable, (sparsetir.build, sparsetir.load, sparsetir.lower)))\n"
    )


def test_names_are_the_same_for_people_programs_and_type_checkers():
    tree = ast.parse(Path(sparsetir.__file__).read_text())
    (block,) = (x for x in tree.body if isinstance(x, ast.If))
    told = {}
    for line in block.body:
        told.update({name.name: line.module for name in line.names})
    packages = {name for name, module in told.items() if module == "sparsetir"}
    assert packages == set(sparsetir._PACKAGES)
    names = {name: module for name, module in told.items() if module != "sparsetir"}
    assert names == sparsetir._WHERE and set(sparsetir.__all__) < set(names)
    assert {*sparsetir.__all__, *packages, "__version__"} <= set(dir(sparsetir))
    assert all(getattr(sparsetir, name).__name__ == name for name in names)
    for name in packages - {"distributed", "masks", "nn", "ops"}:
        assert getattr(sparsetir, name).__name__ == f"sparsetir.{name}"
    with pytest.raises(AttributeError, match="module 'sparsetir' has no attribute 'plam'"):
        sparsetir.plam


def test_without_torch_it_is_said_what_to_install():
    code = "import sys; sys.modules['torch'] = None\ntry: import sparsetir.{}\n"
    code += "except ImportError as error: print(error)"
    for name in ("ops", "nn", "masks", "distributed"):
        out, _ = python(code.format(name))
        assert out == (
            "sparsetir.ops, sparsetir.nn, sparsetir.masks, sparsetir.distributed: needs PyTorch, "
            f"which is not installed: run `{install_hint('torch', 'torch')}`\n"
        )


def test_hints_name_packages(monkeypatch):
    from importlib import metadata

    requires = ['a>=1; extra == "x"', 'b<2; extra == "y"', 'sparsetir[x]; extra == "y"', "numpy"]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    assert install_hint("y", "b") == "pip install 'b<2' 'a>=1'"

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert install_hint("y", "b") == "pip install 'b'"
