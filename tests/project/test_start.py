"""Lazy loading, the TVM pair that is checked first, and the import rules."""

import ast
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import grimp
import pytest

import sparsetir
from sparsetir import _versions
from sparsetir.extras import WITHOUT_TORCH, install_hint
from sparsetir.machine import assume, real_machine

FOLDER = str(Path(sparsetir.__file__).parents[1])
HEAVY = {"tvm", "tvm_ffi", "torch", "numpy", "scipy", "optuna", "matplotlib"}


def python(code):
    """The output of a process."""
    env = {**os.environ, "PYTHONPATH": FOLDER}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_help_loads_nothing_that_takes_time():
    python(f"""
import sys
from sparsetir.cli import main
for words in (["--help"], ["--version"], [], ["tune", "--help"]):
    sys.argv = ["sparsetir", *words]
    try: main()
    except SystemExit as stop: assert not stop.code
assert not {HEAVY!r} & set(sys.modules)
""")


def test_wrong_words_and_commands_without_torch_do_not_load_it():
    python(f"""
import sys
from sparsetir.cli import main
for words in ("lower no.py", "explain spam", "tune spmm", "explain C[i]=A[i,j]"):
    assert main(words.split()) == 2
assert not {HEAVY!r} & set(sys.modules)
assert main(["lower", "spmm"]) == 0
assert "tvm" in sys.modules and "torch" not in sys.modules
""")


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
@pytest.mark.default("sparsetir first")
def test_the_dialect_is_known_whatever_comes_first(code):
    python(f"""
import sys; sys.modules['torch'] = None  # which TVM would import, in seconds
class Behind:  # which looks up all modules
    asked = set()
    find_spec = lambda name, *_: Behind.asked.add(name)
sys.meta_path.insert(0, Behind)
{code}; assert sparsetir.dialect._Watch not in sys.meta_path
found = {{m.__spec__.name for m in sys.modules.values() if getattr(m, '__spec__', None)}}
assert {{n for n in found if n.startswith('tvm.')}} <= Behind.asked
""")


def test_a_worker_comes_without_torch(tmp_path):
    """A module of the user's may then import it: here another of its name, as it takes seconds."""
    (tmp_path / "torch.py").write_text("mine = True\n")
    python(
        f"import sys; {WITHOUT_TORCH}; import sparsetir.tuning.worker, sparsetir.extras\n"
        "assert 'tvm' in sys.modules and sys.modules['torch'] is None\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "sparsetir.extras.allow_torch(); import torch; assert torch.mine"
    )


def test_names_are_the_same_for_people_programs_and_type_checkers():
    tree = ast.parse(Path(sparsetir.__file__).read_text())
    (block,) = (x for x in tree.body if isinstance(x, ast.If))
    modules = {}
    for line in block.body:
        modules.update({name.name: line.module for name in line.names})
    packages = {name for name, module in modules.items() if module == "sparsetir"}
    assert packages == set(sparsetir._PACKAGES)
    names = {name: module for name, module in modules.items() if module != "sparsetir"}
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


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TVM = "0.27.0.post1"
NEEDS = "sparsetir 0.3.0 needs apache-tvm==0.27.0.post1 and apache-tvm-ffi==0.1.14.post1"
RUN = "run `pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1`"


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """Make the metadata say that these distributions, and no others, are installed."""
    versions = {name.replace("_", "-"): version for name, version in installed.items()}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


def test_installed_pair_passes():
    _versions.check()


def test_a_checkout_without_links_is_refused_and_windows_is_warned_of(tmp_path):
    (tmp_path / "sparse_ir").write_text("../../sparse_ir")
    with pytest.raises(ImportError, match="is a file, where a checkout has a symbolic link: clone"):
        _versions._check_system(tmp_path)
    windows = real_machine()._replace(system="win32")
    with assume(windows), pytest.warns(UserWarning, match="sparsetir is not tested on Windows"):
        _versions._check_system(tmp_path / "none")


@pytest.mark.parametrize(
    ("installed", "versions"),
    [
        ({"apache_tvm": TVM, "apache_tvm_ffi": "0.1.15.post2"}, "apache-tvm-ffi 0.1.15.post2"),
        ({"apache_tvm": "0.26.0", "apache_tvm_ffi": "0.1.14.post1"}, "apache-tvm 0.26.0"),
        ({"apache_tvm": "0.26", "apache_tvm_ffi": "0.1"}, "apache-tvm 0.26 and apache-tvm-ffi 0.1"),
        ({"apache_tvm": TVM}, "no apache-tvm-ffi"),
        ({"apache_tvm_ffi": "0.1.14.post1"}, "no apache-tvm"),
        ({}, "no apache-tvm and no apache-tvm-ffi"),
    ],
)
def test_wrong_pair_is_refused(monkeypatch, installed, versions):
    pretend(monkeypatch, **installed)
    with pytest.raises(ImportError) as error:
        _versions.check()
    assert str(error.value) == f"{NEEDS}, found {versions}: {RUN}"


def test_thread_defaults(monkeypatch):
    monkeypatch.delenv("TVM_BIND_THREADS", raising=False)
    monkeypatch.setenv("TVM_THREAD_POOL_SPIN_COUNT", "7")
    _versions.check()
    assert os.environ["TVM_BIND_THREADS"] == "0"
    assert os.environ["TVM_THREAD_POOL_SPIN_COUNT"] == "7"
    monkeypatch.delenv("TVM_BIND_THREADS")


def test_check_comes_first():
    """The check from its own file, without the package and TVM, is before TVM is loaded."""
    python(
        f"import runpy, sys; runpy.run_path({_versions.__file__!r})['check']()\n"
        "assert not {'tvm', 'tvm_ffi', 'numpy'} & set(sys.modules)"
    )
    printed = python("""
import sys
from importlib import metadata
metadata.version = lambda name: '0.0.1'
try: import sparsetir
except ImportError as error: print(error)
assert not {'tvm', 'tvm_ffi'} & set(sys.modules)
""")
    assert printed.startswith(f"{NEEDS}, found apache-tvm 0.0.1 and apache-tvm-ffi 0.0.1")


def test_pins_agree():
    """pyproject.toml, constraints.txt and the check name the same versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == _versions.VERSION
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    for name, version in _versions.REQUIRED.items():
        assert f"{name}=={version}" in project["dependencies"]
        assert f"{name}=={version}" in constraints


# The outside packages that each package of the core may import, beside the standard library.
CORE = {
    "sparsetir.sparse_ir": {"tvm", "tvm_ffi", "numpy"},
    "sparsetir.formats": {"tvm", "tvm_ffi", "numpy", "scipy"},
    "sparsetir.schedules": {"tvm", "tvm_ffi", "numpy", "scipy"},
    "sparsetir.extras": set(),
    "sparsetir.machine": set(),
    "sparsetir.reductions": set(),  # which `sparsetir --help` needs without TVM
}


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("sparsetir", include_external_packages=True, cache_dir=None)


def imports(graph, package):
    """Every import made in a package, as (importer, imported)."""
    modules = {package} | graph.find_descendants(package)
    return {(m, n) for m in modules for n in graph.find_modules_directly_imported_by(m)}


def within(module, package):
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", CORE)
def test_core_imports_only_what_it_may(graph, package):
    """The core imports no front end: any module outside of it, including new ones."""
    assert package in graph.modules  # through symbolic links in a source tree
    allowed = sys.stdlib_module_names | CORE[package]
    assert not {
        (importer, imported)
        for importer, imported in imports(graph, package)
        if (not any(within(imported, r) for r in CORE))
        and (within(imported, "sparsetir") or imported.split(".")[0] not in allowed)
    }
