"""Exported kernels in new processes: what they need comes with whatever loads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsetir
from computed_common import BLOCK_PTR, blocked, plain_arguments
from kernel_common import linker
from pairs import by_default
from runtime.exported_kernels import CASES
from schedule_common import opened
from sparsetir.schedules.templates.matrix_tiles import MatrixTiles
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.schedules.templates.sparse_results import Assembled
from sparsetir.sparse_ir.recipes.registry import RECIPES

pytestmark = linker
TARGET = {"kind": "llvm", "opt-level": 0}  # any CPU has all its features
# Taken by kernels for GPUs alone, which cannot be run here.
ON_GPUS = {"rows_of_blocks", "rows_of_positions", "shared_rows"}

# Each gives `run`, a function of a file and of what a caller gives, and of what its kernel takes.
LOADERS = {
    "sparsetir.runtime.load": """
import tvm, tvm.tirx.build as lowest
def refuse(*args, **options):
    raise AssertionError("compiling")
tvm.compile = tvm.tirx.build = refuse
for name in ("codegen_build", "split_host_device_mods", "build"):
    setattr(lowest, name, refuse)
import sparsetir
def run(path, name, given, passed):
    sparsetir.load(path)(**given)
    return given
""",
    "sparsetir.load as a module": """
from sparsetir.runtime.load import load
def run(path, name, given, passed):
    load(path)(**given)
    return given
""",
    "TVM's runtime": """
sys.modules["sparsetir"] = None
import tvm
def run(path, name, given, passed):
    taken = {k: tvm.runtime.tensor(v) if v.ndim else v.item() for k, v in passed.items()}
    tvm.runtime.load_module(path)[name](*taken.values())
    return {k: v.numpy() for k, v in taken.items() if k in given and passed[k].ndim}
""",
}
RUN_ALL = """
def read(path):
    return dict(np.load(path))
def plain(arrays):
    return {k: v if v.ndim else v.item() for k, v in arrays.items()}
failed = {}
for case, name in json.load(open("names.json")).items():
    try:
        given, passed, wanted = (read(f"{case}.{x}.npz") for x in ("given", "passed", "wanted"))
        found = run(f"{case}.so", name, plain(given), passed)
        for output, want in wanted.items():
            np.testing.assert_allclose(found[output], want, rtol=1e-4, atol=1e-5)
    except Exception as error:
        failed[case] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def run_anew(code: str, folder: Path) -> str:
    """The output of a new process that runs some code in a folder, without torch.

    TVM would import it, which takes seconds.
    """
    env = {**os.environ, "PYTHONPATH": str(Path(sparsetir.__file__).parents[1])}
    begin = "import json, sys\nimport numpy as np\nsys.modules['torch'] = None\n"
    command = [sys.executable, "-c", begin + code]
    done = subprocess.run(
        command, env=env, cwd=folder, timeout=300, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of kernels, of what they are called with, and of what the interpreter gives."""
    folder = tmp_path_factory.mktemp("kernels")
    names: dict[str, str] = {}
    recipes: set[Any] = set()
    for case, make in CASES.items():
        entry = make()
        kernel = sparsetir.build(entry.func, TARGET, schedule=entry.apply, config=entry.config)
        kernel.export(folder / f"{case}.so")
        names[case] = kernel.name
        recipes |= {how["recipe"] for how in kernel.computed.values()}
        args = {k: v for k, v in entry.arguments(kernel).items() if v is not None}
        computed = kernel.compute(args)
        passed = {**args, **computed, **kernel.of_values(args, computed)}
        np.savez(folder / f"{case}.given.npz", **args)
        taken = {name: passed[name] for name in kernel.signature.passed}
        np.savez(folder / f"{case}.passed.npz", **taken)
        sparsetir.interpret(entry.func, args)
        outputs = [kernel.signature.names[n] for n in kernel.signature.outputs]
        np.savez(folder / f"{case}.wanted.npz", **{name: args[name] for name in outputs})
    (folder / "names.json").write_text(json.dumps(names))
    assert RECIPES.keys() - recipes == ON_GPUS, "a recipe that no kernel here takes"
    return folder


@pytest.mark.parametrize("loader", by_default(LOADERS, "sparsetir.runtime.load", "TVM's runtime"))
@pytest.mark.slow
def test_loaded_and_run(exported: Path, loader: str) -> None:
    assert json.loads(run_anew(LOADERS[loader] + RUN_ALL, exported)) == {}


def test_every_template_for_cpus_is_here() -> None:
    """Except those of matrix tiles, which few CPUs have, and of assembled results."""
    here = {type(make().config) for make in CASES.values()}
    for_cpus = {
        kind for (kind, _), t in TEMPLATES.items()
        if not t.gpu and kind.__module__.startswith("sparsetir.")
    }  # fmt: skip
    assert for_cpus - here == {MatrixTiles, Assembled}


OWN = """
from sparsetir.sparse_ir.recipes.registry import recipe
@recipe(open=True)
def three_parts() -> int:
    return 3
"""
LOAD_OWN = """
from sparsetir.sparse_ir.script.parser import from_source
from_source(open("scheduled.txt").read())
from sparsetir.runtime.load import load
from sparsetir.sparse_ir.recipes.registry import RECIPES
recipes = sorted(RECIPES)
try:
    load("kernel.so")
except ValueError as error:
    refused = str(error)
import own
args = dict(np.load("given.npz"))
load("kernel.so")(**args)
print(json.dumps([recipes, refused, np.allclose(args["c"], np.load("wanted.npy"))]))
"""


def test_scheduled_text_and_recipes_of_users(tmp_path: Path) -> None:
    """Readers find what a program names; recipes of others where they are imported.

    And those that only kernels for GPUs take are there, too.
    """
    sch, _, (i, j, _) = opened()
    sch.sell_slices(i, j, 4)
    (tmp_path / "scheduled.txt").write_text(sch.func.script())
    (tmp_path / "own.py").write_text(OWN)
    ours = sorted(RECIPES)
    exec(OWN, {"__name__": "own"})
    try:
        computed = {"blocks": {"recipe": "three_parts"}, "block_ptr": BLOCK_PTR}
        kernel = sparsetir.build(blocked(computed=computed), TARGET)
        kernel.export(tmp_path / "kernel.so")
        args: dict[str, Any] = plain_arguments()
        np.savez(tmp_path / "given.npz", **args)
        kernel(**args)
    finally:
        del RECIPES["three_parts"]
    np.save(tmp_path / "wanted.npy", args["c"])
    recipes, refused, right = json.loads(run_anew(LOAD_OWN, tmp_path))
    assert recipes == ours and right
    message = (
        "load: argument 'path': 'kernel.so': computed parameter 'blocks' takes the recipe "
        "'three_parts', which this version does not have: import the module that registers it befo"
    )
    assert refused.startswith(message)
