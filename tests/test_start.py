"""What `import sparsetir` and the command line load, and when TVM and torch come."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparsetir
from sparsetir.extras import WITHOUT_TORCH, install_hint

FOLDER = str(Path(sparsetir.__file__).parents[1])
HEAVY = {"tvm", "tvm_ffi", "torch", "numpy", "scipy", "optuna", "matplotlib"}


def python(code):
    """What a process printed."""
    env = {**os.environ, "PYTHONPATH": FOLDER}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["tune", "--help"]])
def test_help_loads_nothing_that_takes_time(words):
    code = (
        f"import sys; sys.argv = ['sparsetir', *{words!r}]\n"
        "from sparsetir.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert python(code).splitlines()[-1] == "[]"


DIALECT = "from tvm.script import sparse_tir as T; assert T.sp_iter; import tvm, tvm.script.parser"


@pytest.mark.parametrize(
    "code",
    [
        f"import tvm, sparsetir; {DIALECT}",
        f"import sparsetir; sparsetir.plan; {DIALECT}; assert tvm.script.sparse_tir is T",
        f"{WITHOUT_TORCH}; {DIALECT}; assert tvm.tirx and sys.modules['torch'] is None",
    ],
    ids=["TVM first", "in use", "sparsetir first"],
)
def test_the_dialect_is_known_whatever_comes_first(code):
    python(
        "import sys; sys.modules['torch'] = None  # which TVM would import, in seconds\n"
        f"{code}; assert sparsetir.dialect._Watch not in sys.meta_path"
    )


def test_a_worker_comes_without_torch():
    """A module of the user's may then import it."""
    pytest.importorskip("torch")
    python(
        f"import sys; {WITHOUT_TORCH}; import sparsetir.tuning.worker, sparsetir.extras\n"
        "assert 'tvm' in sys.modules and sys.modules['torch'] is None\n"
        "sparsetir.extras.allow_torch(); import torch; assert torch.ones(1)"
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
    here = sparsetir.sparse_ir
    assert all(getattr(here, name) is getattr(sparsetir, name) for name in here._WHERE)
    for name in packages - {"distributed", "masks", "nn", "ops"}:
        assert getattr(sparsetir, name).__name__ == f"sparsetir.{name}"
    with pytest.raises(AttributeError, match="module 'sparsetir' has no attribute 'plam'"):
        sparsetir.plam


def test_without_torch_it_is_said_what_to_install():
    out = python("""
import sys; sys.modules['torch'] = None
for name in ("ops", "nn", "masks", "distributed", "graph"):
    try: __import__("sparsetir." + name)
    except ImportError as error: print(error)
""")
    message = (
        "sparsetir.ops, sparsetir.nn, sparsetir.masks, sparsetir.distributed, sparsetir.graph: "
        f"needs PyTorch, which is not installed: run `{install_hint('torch', 'torch')}`\n"
    )
    assert out == 5 * message
